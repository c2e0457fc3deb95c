"""A script's own environment: made once from a lock or requirements, kept on S3, without the image's packages."""

import importlib.metadata
import logging
import os
import platform
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from jobs.container.packages import CACHE_VARIABLE
from jobs.container.script.own_environment import OwnEnvironment
from jobs.core.errors import UsageError
from jobs.core.locations import S3Location
from tests.support.container.launching import Run
from tests.support.container.scripts import script_flags, uv_settings, write_files

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

PROJECT = '[project]\nname = "mine"\nversion = "1"\nrequires-python = ">=3.10"\ndependencies = ["packaging=={}"]\n'

TRAINS = """
import importlib.util, os, sys, time
import of_src, packaging, trainyard

print(f"packaging {packaging.__version__} in {os.path.relpath(sys.prefix, os.environ['TRAINYARD_SCRATCH'])}")
print(f"of the image: {[name for name in ('torch', 'transformers') if importlib.util.find_spec(name)]}")
folder = os.environ["TRAINYARD_CHECKPOINTS"]
print("begun before:", os.path.exists(f"{folder}/step-1"), flush=True)
if not os.path.exists(f"{folder}/step-1"):
    open(f"{folder}/step-1.tmp", "w").close()
    os.rename(f"{folder}/step-1.tmp", f"{folder}/step-1")
    time.sleep(600)
trainyard.result(packaging=packaging.__version__)
(trainyard.output() / "done").touch()
"""


def project(folder: Path, version: str = "24.0") -> Path:
    """Write the code of a script with a lock."""
    write_files(folder, {"pyproject.toml": PROJECT.format(version), "train.py": TRAINS, "src/of_src.py": ""})
    lock = [sys.executable, "-m", "uv", "lock", "--quiet", "--system-certs", "--python", sys.executable]
    subprocess.run(lock, cwd=folder, env={**os.environ, **uv_settings()}, check=True)
    return folder


def test_a_script_runs_and_resumes_in_the_environment_of_its_lock(run: Run, s3: "S3Client", tmp_path: Path) -> None:
    assert importlib.metadata.version("packaging") != "24.0"
    flags = script_flags(s3, project(tmp_path / "code"), "train.py", environment="uv.lock")
    first = run.start(*flags, kind="script", attempt=1, **uv_settings())
    first.wait_for_line("checkpoint: step-1 (number 1)")
    assert "packaging 24.0 in packages" in first.output
    assert "of the image: []" in first.output
    assert any(line.startswith("packages: 1 package of uv.lock in ") for line in first.lines)
    first.process.send_signal(signal.SIGTERM)
    assert first.wait() == 75, first.output
    run.wait_until_gone()

    second = run.attempt(*flags, kind="script", attempt=2, **uv_settings())
    assert any(line.startswith("packages: uv.lock restored from S3 in ") for line in second.lines)
    assert "begun before: True" in second.output
    assert "packaging 24.0 in packages" in second.output
    assert "output/done" in run.keys("output")
    assert run.recorded_attempt(2).ran_with == {"python": platform.python_version()}, "it has no torch"


def own(s3: "S3Client", folder: Path, code: Path, source: str = "uv.lock", python: str | None = None) -> OwnEnvironment:
    run = S3Location("runs", f"{code.parent.name}/a-run/")
    folder.mkdir()
    return OwnEnvironment(s3, run, folder / "packages", code=code, source=source, python=python)


def test_another_lock_is_another_environment_and_equal_ones_are_linked(
    s3: "S3Client", tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for name, value in uv_settings().items():
        monkeypatch.setenv(name, value)
    cache = subprocess.run([sys.executable, "-m", "uv", "cache", "dir"], capture_output=True, text=True, check=True)
    monkeypatch.setenv(CACHE_VARIABLE, cache.stdout.strip())

    def made(place: str, version: str) -> str:
        environment = own(s3, tmp_path / place, project(tmp_path / "code", version))
        variables = environment.make(wheels=None, installs=True)
        file = "import packaging; print(packaging.__version__, packaging.__file__)"
        shown = subprocess.run(
            [environment.python, "-c", file], env=variables, capture_output=True, text=True, check=True
        )
        found, at = shown.stdout.split()
        assert Path(at).is_relative_to(tmp_path / place)
        assert Path(at).stat().st_nlink > 1, "it is a copy"
        return found

    assert [made("one", "24.0"), made("two", "24.0"), made("three", "24.1")] == ["24.0", "24.0", "24.1"]
    assert [line.split(" in ")[0] for line in caplog.messages] == [
        "packages: 1 package of uv.lock",
        "packages: uv.lock linked from this instance's cache",
        "packages: 1 package of uv.lock",
    ]


def test_requirements_are_an_own_environment_in_a_python_that_uv_finds(
    s3: "S3Client", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in uv_settings().items():
        monkeypatch.setenv(name, value)
    code = write_files(tmp_path / "code", {"r.txt": "packaging==24.0\npydantic<2\n"})
    with pytest.raises(
        UsageError, match=r"r.txt: the platform's code fails in this environment: .*pydantic"
    ) as refused:
        own(s3, tmp_path / "one", code, "r.txt", "3.11").make(wheels=None, installs=True)
    assert "\nNext: add versions near those of the image: boto3==" in str(refused.value)
    with pytest.raises(UsageError, match=r"^arguments.python: the image has no Python 3.99, and uv cannot fetch it: "):
        own(s3, tmp_path / "two", code, "r.txt", "3.99").make(wheels=None, installs=True)
    write_files(code, {"r.txt": "packaging==24.0\nno-such-package-of-ours==7\n"})
    with pytest.raises(UsageError, match=r"^the environment of r.txt cannot be installed: .*no-such-package-of-ours"):
        own(s3, tmp_path / "three", code, "r.txt").make(wheels=None, installs=True)
