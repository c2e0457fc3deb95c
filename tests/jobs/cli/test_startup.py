"""Help is fast because it loads only a few modules."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

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
    assert end.code == 0
with open(report, "w") as file:
    json.dump({"modules": sorted({name.split(".")[0] for name in sys.modules}), "started": started}, file)
"""
NEVER = {"torch", "transformers", "datasets", "aws_cdk", "jsii", "moto", "infra", "boto3", "botocore", "docker", "yaml"}


@pytest.mark.parametrize(
    ("arguments", "also_never"),
    [
        (["--help"], {"pydantic", "rich"}),
        # typer itself validates the global options with pydantic.
        ([], set()),
        (["submit", "--help"], {"rich"}),
    ],
)
def test_help_does_not_load_heavy_modules(
    tmp_path: Path, clean_environment: dict[str, str], arguments: list[str], also_never: set[str]
) -> None:
    report = tmp_path / "report.json"
    probe = [sys.executable, "-c", PROBE, str(report), *arguments]
    subprocess.run(probe, env=clean_environment, check=True, capture_output=True)
    found = json.loads(report.read_text())
    assert not (NEVER | also_never) & set(found["modules"])
    assert found["started"] == []
