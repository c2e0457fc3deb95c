"""Fixtures that run the command line like a user, in an empty folder and a clean environment."""

import os
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import yaml

from jobs.aws.connection import Aws
from tests.support.jobs import in_process
from tests.support.jobs.submitting import SPEC

Trainyard = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def clean_environment(tmp_path: Path) -> dict[str, str]:
    """Return an environment without AWS settings and credentials, and with an empty home."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "TRAINYARD_"))}
    home = tmp_path / "home"
    home.mkdir()
    return {**kept, "HOME": str(home), "AWS_EC2_METADATA_DISABLED": "true"}


@pytest.fixture
def trainyard(tmp_path: Path, clean_environment: dict[str, str]) -> Trainyard:
    """Return a function that runs `trainyard ARGUMENTS…` in an empty folder. `environment` extends the clean one."""

    def run(
        *arguments: str | Path,
        environment: Mapping[str, str] | None = None,
        stdin: str = "",
    ) -> subprocess.CompletedProcess[str]:
        environment = {**clean_environment, **(environment or {})}
        return in_process.run([*map(str, arguments)], folder=tmp_path, environment=environment, stdin=stdin)

    return run


@pytest.fixture
def aws_environment(
    emulated: Aws, clean_environment: dict[str, str], deployed_environment: Mapping[str, str]
) -> dict[str, str]:
    """Return the complete environment of a program that is connected to the emulator."""
    return {**clean_environment, **deployed_environment}


@pytest.fixture
def aws_trainyard(trainyard: Trainyard, aws_environment: dict[str, str]) -> Trainyard:
    """Return a function that runs `trainyard` connected to the emulator. `expect` checks the exit code."""

    def run(
        *arguments: str | Path, expect: int | None = None, environment: Mapping[str, str] | None = None, stdin: str = ""
    ) -> subprocess.CompletedProcess[str]:
        done = trainyard(*arguments, environment={**aws_environment, **(environment or {})}, stdin=stdin)
        assert expect in (None, done.returncode), done.stdout + done.stderr
        assert "Traceback" not in done.stderr
        return done

    return run


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    """Return a spec that passes all checks, although a row of its data is bad: its job fails within seconds."""
    path = tmp_path / "probe.yaml"
    path.write_text(yaml.safe_dump(SPEC))
    return path
