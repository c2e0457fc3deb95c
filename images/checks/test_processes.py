"""What runs in an image: the launcher, and ranks that train."""

import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

INTERRUPTED = 75
"""The exit code after which Batch starts the job again (jobs/core/errors.py)."""

STOP_SECONDS = 20
"""Seconds that a stop may take, of the 30 that AWS leaves a container after SIGTERM."""

START_SECONDS = 120


def test_sigterm_ends_a_launcher_that_waits_for_s3_as_interrupted(facts: dict[str, Any]) -> None:
    if facts["instance_type"] is None:
        pytest.skip("no row of jobs/core/instance_types.json runs this image")
    with socket.create_server(("127.0.0.1", 0)) as silent:  # it takes a connection and never answers
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
    """Wait until the process connects, and return the connection. None if it ended before."""
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until and process.poll() is None:
        if select.select([server], [], [], 1)[0]:
            return server.accept()[0]
    process.kill()
    return None


def test_two_ranks_train_together_over_gloo(train: Callable[[str], str]) -> None:
    assert train("cpu").startswith("2 ranks over gloo on cpu: loss ")
