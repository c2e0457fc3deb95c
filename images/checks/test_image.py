"""Check an image as a job would use it: configuration, Python packages, the launcher, and ranks that train."""

import os
import re
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import pytest

INTERRUPTED = 75
"""The exit code after which Batch retries the job (jobs/core/errors.py)."""

STOP_SECONDS = 20
"""Time limit for a shutdown, of the 30 s that AWS gives a container after SIGTERM."""

START_SECONDS = 120


def test_sigterm_interrupts_a_launcher_that_waits_for_s3(facts: dict[str, Any]) -> None:
    if facts["instance_type"] is None:
        pytest.skip("no instance type uses this image")
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts a connection and never answers
        launcher = subprocess.Popen(
            [
                *(sys.executable, "-m", "jobs.container.launch", f"--instance-type={facts['instance_type']}"),
                *("--nproc-per-node=1", "finetune-classification"),
                *("--model=s3://bucket/model", "--train-data=s3://bucket/train.jsonl"),
            ],
            cwd="/",
            env={
                **os.environ,
                "TRAINYARD_RUN_URI": "s3://bucket/team/run/",
                "TRAINYARD_ACCELERATOR": "cpu",
                "AWS_ENDPOINT_URL": f"http://127.0.0.1:{silent.getsockname()[1]}",
                "AWS_ACCESS_KEY_ID": "test",
                "AWS_SECRET_ACCESS_KEY": "test",
                "AWS_DEFAULT_REGION": "us-east-1",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        connection = accept(silent, launcher)
        assert connection, launcher.communicate()[0]
        launcher.terminate()
        output, _ = launcher.communicate(timeout=STOP_SECONDS)
        connection.close()
    assert launcher.returncode == INTERRUPTED, output
    assert "interrupted" in output


def accept(server: socket.socket, process: "subprocess.Popen[str]") -> socket.socket | None:
    """Wait until the process connects, and return the connection, or None if the process ended first."""
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until and process.poll() is None:
        if select.select([server], [], [], 1)[0]:
            return server.accept()[0]
    process.kill()
    return None


def test_two_ranks_train_over_gloo(train: Callable[[str], str]) -> None:
    assert train("cpu").startswith("2 ranks over gloo on cpu: loss ")


IMPORT = """
import importlib, sys
from pathlib import Path

for name in sys.argv[1:]:
    importlib.import_module(name)
modules = [module for name, module in sys.modules.items() if name.partition(".")[0] == "torch"]
cached = [module.__cached__ for module in modules if isinstance(getattr(module, "__cached__", None), str)]
if missing := [path for path in cached if not Path(path).exists()]:
    sys.exit(f"{len(missing)} modules of PyTorch are not compiled: each container would compile them at its start")
"""


def installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "missing"


def fits(found: str, expected: str) -> bool:
    if expected.endswith(".*"):
        return found.startswith(expected[:-1])
    # Release rows have 2.6.0, Habana's build is 2.6.0+hpu…
    return expected in (found, found.partition("+")[0])


def test_packages_have_the_locked_versions(facts: dict[str, Any]) -> None:
    found = {name: installed(name) for name in facts["versions"]}
    expected = facts["versions"]
    assert {name: found[name] for name in found if not fits(found[name], expected[name])} == {}


def test_packages_are_compatible(facts: dict[str, Any]) -> None:
    command = [sys.executable, "-m", "pip", "check", "--disable-pip-version-check"]
    done = subprocess.run(command, cwd="/", capture_output=True, text=True, check=False)
    assert done.returncode == 0 or done.stdout.strip(), done.stderr
    # A base may have more packages, which may conflict.
    ours = {*facts["versions"], "torch", "deepspeed"}
    complaints = done.stdout.splitlines() if done.returncode else []
    assert [line for line in complaints if line.split()[0].lower().replace("_", "-") in ours] == []


def test_modules_of_jobs_can_be_imported_and_are_compiled(facts: dict[str, Any]) -> None:
    """Import all modules in one process, as a job does. PYTHONDONTWRITEBYTECODE prevents compilation."""
    command = [sys.executable, "-c", IMPORT, *facts["modules"]]
    done = subprocess.run(command, cwd="/", env=os.environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


SECRET = re.compile(
    r"(\b\w*(?:TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|API_?KEY|ACCESS_KEY|PRIVATE_KEY)\w*)=\S+", re.IGNORECASE
)
PASSWORD_IN_URL = re.compile(r"://[^/@\s:]+:[^/@\s]+@")


def test_labels_match_the_release_and_revision(facts: dict[str, Any]) -> None:
    labels = facts["labels"]
    assert {name: labels["found"].get(name) for name in labels["expected"]} == labels["expected"]


def test_container_runs_as_the_dockerfiles_user(facts: dict[str, Any]) -> None:
    assert (os.getuid(), os.getgid()) == (facts["user"], facts["user"])


def test_no_variable_or_build_step_looks_like_a_secret(facts: dict[str, Any]) -> None:
    texts = [*facts["environment"], *facts["history"]]
    found = [name for text in texts for name in SECRET.findall(text)]  # only names, because this is printed
    found += ["a password in a URL" for text in texts if PASSWORD_IN_URL.search(text)]
    assert found == []


def test_command_is_the_launchers_help_and_entrypoint_is_empty(facts: dict[str, Any]) -> None:
    assert not facts["entrypoint"], "a job definition has the whole command"
    done = subprocess.run(facts["command"], cwd="/", capture_output=True, text=True, check=False)
    assert "jobs.container.launch" in done.stdout, done.stderr
    assert "job kinds" in done.stdout
