"""A script's packages and inputs before its start: packages that conflict, and a slow download."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from jobs.container.script import inputs
from tests.jobs.container.test_packages import wheel
from tests.support.container.launching import Run
from tests.support.container.scripts import script_flags, write_files

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client


def put_wheels(s3: "S3Client", folder: Path, place: str, **needs: str) -> str:
    for name, needed in needs.items():
        wheel(folder, name, needs=needed)
    for path in folder.iterdir():
        s3.put_object(Bucket="data", Key=f"{place}/{path.name}", Body=path.read_bytes())
    return f"s3://data/{place}"


def test_unsatisfiable_requirements_end_the_attempt_early(run: Run, s3: "S3Client", tmp_path: Path) -> None:
    wheels = put_wheels(s3, tmp_path / "wheels", f"{tmp_path.name}/wheels", greedy="pydantic>=99")
    code = write_files(tmp_path / "code", {"train.py": "print('a rank runs')\n", "r.txt": "greedy\n"})
    flags = script_flags(s3, code, "train.py", requirements="r.txt", wheelhouse=wheels)
    failed = run.attempt(*flags, kind="script", expect=1)
    assert failed.lines[-1].startswith("error: r.txt cannot be installed on top of the image's packages: ")
    assert "pydantic" in failed.lines[-1]
    assert ". Next: " in failed.lines[-1]
    assert "a rank runs" not in failed.output
    assert "Traceback" not in failed.output


def test_a_slow_download_logs_its_progress(
    s3: "S3Client", tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="trainyard")
    monkeypatch.setattr(inputs, "PROGRESS_SECONDS", 0.0)
    for name in ("a", "b"):
        s3.put_object(Bucket="data", Key=f"{tmp_path.name}/{name}", Body=b"x" * 1_000_000)
    found = inputs.fetch(s3, "texts", f"s3://data/{tmp_path.name}", tmp_path)
    assert sorted(path.name for path in found.iterdir()) == ["a", "b"]
    assert "input texts: 2 MB of 2 MB downloaded" in caplog.messages
