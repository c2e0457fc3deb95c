"""The command line as users run it, in a folder and with an environment of its own."""

import os
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import yaml

from tests.support.jobs import in_process
from tests.support.jobs.submitting import SPEC

Trainyard = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def clean_environment(tmp_path: Path) -> dict[str, str]:
    """An environment without anything that tells of an AWS: no settings, no credentials, an empty home."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "TRAINYARD_"))}
    home = tmp_path / "home"
    home.mkdir()
    return {**kept, "HOME": str(home), "AWS_EC2_METADATA_DISABLED": "true"}


@pytest.fixture
def trainyard(tmp_path: Path, clean_environment: dict[str, str]) -> Trainyard:
    """Runs `trainyard ARGUMENTS…` to its end in an empty folder; `environment` adds to the clean one."""

    def run(
        *arguments: str | Path,
        environment: Mapping[str, str] | None = None,
        stdin: str = "",
    ) -> subprocess.CompletedProcess[str]:
        environment = {**clean_environment, **(environment or {})}
        return in_process.run([*map(str, arguments)], folder=tmp_path, environment=environment, stdin=stdin)

    return run


@pytest.fixture
def aws_trainyard(trainyard: Trainyard, deployed_environment: Mapping[str, str]) -> Trainyard:
    """`trainyard`, pointed at the embedded AWS."""
    return lambda *arguments: trainyard(*arguments, environment=deployed_environment)


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    """A spec whose inputs pass for good, though a row of its data is bad: a job of it fails in seconds."""
    path = tmp_path / "probe.yaml"
    path.write_text(yaml.safe_dump(SPEC))
    return path
