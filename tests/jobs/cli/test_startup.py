"""What a command loads before it does anything: the reason why help answers at once."""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from jobs.aws.connection import Aws

# Runs the command as the console script does, and reports what it loaded and which processes it started.
PROBE = """
import json, sys
started = []
sys.addaudithook(lambda event, _: started.append(event) if event in (
    "subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.exec", "os.system") else None)
report, sys.argv = sys.argv[1], ["trainyard", *sys.argv[2:]]
from jobs.cli import main
try:
    main()
except SystemExit as end:
    code = end.code
with open(report, "w") as file:
    json.dump({"exit_code": code, "modules": sorted({name.split(".")[0] for name in sys.modules}),
               "jobs": sorted(name for name in sys.modules if name.startswith("jobs.")), "started": started}, file)
"""
NEVER = {"torch", "transformers", "datasets", "aws_cdk", "jsii", "moto", "infra"}


def probe(report: Path, environment: dict[str, str], *arguments: str) -> dict[str, Any]:
    subprocess.run(
        [sys.executable, "-c", PROBE, str(report), *arguments], env=environment, check=True, capture_output=True
    )
    found: dict[str, Any] = json.loads(report.read_text())
    return found


@pytest.mark.parametrize(
    ("arguments", "also_never"),
    [
        (["--help"], {"pydantic"}),
        (["--version"], {"pydantic"}),
        # typer itself checks the options before the command with pydantic.
        ([], set()),
        (["submit", "--help"], set()),
        (["local", "up", "--help"], set()),
        (["images", "build", "--help"], set()),
    ],
)
def test_help_loads_nothing_that_it_does_not_show(
    tmp_path: Path, clean_environment: dict[str, str], arguments: list[str], also_never: set[str]
) -> None:
    found = probe(tmp_path / "report.json", clean_environment, *arguments)
    assert found["exit_code"] == 0
    assert not {*NEVER, *also_never, "boto3", "botocore", "docker", "yaml"} & set(found["modules"])
    assert found["started"] == []


def test_a_dry_run_loads_no_torch_and_starts_no_process(
    *,
    tmp_path: Path,
    clean_environment: dict[str, str],
    deployed_environment: Mapping[str, str],
    embedded: Aws,
    spec: Path,
) -> None:
    environment = {**clean_environment, **deployed_environment}
    found = probe(tmp_path / "report.json", environment, "submit", str(spec), "--dry-run")
    assert found["exit_code"] == 0
    assert not NEVER & set(found["modules"])
    assert not [name for name in found["jobs"] if name.startswith("jobs.train")]
    assert found["started"] == []
