"""The use of the accelerators in the log, sampled by a tool on PATH. A failing tool does not affect the job."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from jobs.container.launcher import utilization
from jobs.container.launcher.utilization import Cpus, NodeUse, Utilization
from jobs.core.output import is_utilization_line
from tests.support.waiting import wait_until

SOON_SECONDS = 0.01

Tool = Callable[..., Path]


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tool:
    """Puts a shell script on PATH that appends the arguments of each call to the returned file."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    asked = tmp_path / "asked"
    asked.touch()

    def put(name: str, script: str) -> Path:
        path = tmp_path / name
        path.write_text(f'#!/bin/sh\necho "$*" >>{asked}\n{script}\n')
        path.chmod(0o755)
        return asked

    return put


@pytest.mark.parametrize(
    ("accelerator", "name", "wanted_query"),
    [("hpu", "hl-smi", "-Q utilization.aip,"), ("cuda", "nvidia-smi", "--query-gpu=utilization.gpu,")],
)
def test_the_tool_of_the_accelerator_is_run_repeatedly(
    *, accelerator: str, name: str, wanted_query: str, tool: Tool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "trainyard")
    asked = tool(name, "echo '97 %, 512 MiB, 32768 MiB'; echo '3 %, 512 MiB, 32768 MiB'")
    with Utilization(accelerator, node=1, interval_seconds=SOON_SECONDS):
        wait_until(lambda: len(caplog.messages), lambda count: count >= 2)
    first = caplog.messages[0]
    assert json.loads(first) == {
        "accelerator_utilization_percent": 50.0,
        "accelerator_memory_percent": 1.6,
        "accelerators": 2,
        "node": 1,
    }
    assert is_utilization_line(first)
    assert asked.read_text().startswith(wanted_query)


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("exit 1", "exit code 1: it printed nothing"),
        ("echo 'no driver'; exit 9", "exit code 9: no driver"),
        ("echo 'no devices'", "'no devices' is not a number"),
        ("echo '1,2'", "it listed no accelerators"),
        ("echo '5, 1, 0'", "it listed no accelerators"),
        ("exec sleep 600", "Command .* timed out after 0.3 seconds"),
    ],
)
def test_a_failing_tool_is_run_once_and_its_output_logged(
    script: str, words: str, tool: Tool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if "sleep" in script:
        monkeypatch.setattr(utilization, "TOOL_TIMEOUT_SECONDS", 0.3)
    asked = tool("hl-smi", script)
    with Utilization("hpu", node=0, interval_seconds=SOON_SECONDS) as log:
        wait_until(log._thread.is_alive, lambda is_alive: not is_alive)
    assert len(asked.read_text().splitlines()) == 1
    assert log.newest is None
    [warned] = caplog.messages
    expected = f"warning: hl-smi failed: {words}; idle cards are no longer detected"
    assert re.fullmatch(expected, warned)


def test_without_a_tool_no_thread_is_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with Utilization("cuda", node=0, interval_seconds=SOON_SECONDS) as log:
        assert not log._thread.is_alive()
    assert log.record(working_since=None) is None


def test_the_record_covers_all_nodes_and_idle_time_in_training(tool: Tool) -> None:
    tool("nvidia-smi", "echo '0, 512, 1024'; echo '0, 0, 1024'")
    log = Utilization("cuda", node=0, interval_seconds=SOON_SECONDS)
    log.other_nodes = lambda: [NodeUse(utilization_percent=90.0, memory_percent=75.0, idle_seconds=0.0)]
    with log:
        wait_until(log.lines, lambda lines: len(lines) >= 3)
        assert log.idle_seconds() == 0.0  # the other node is busy
        log.other_nodes = tuple
        wait_until(log.idle_seconds, lambda seconds: seconds > 0)
    record = log.record(working_since=None)
    assert record is not None
    assert log.lines()[0]["accelerator_utilization_percent"] == 45.0
    assert log.lines()[0]["accelerator_memory_percent"] == 50.0
    # Each sample covers a sixth of the interval
    assert [line["idle_seconds"] for line in log.lines()[:3]] == [0.002, 0.01, 0.01]
    assert record.idle_seconds == pytest.approx(sum(line["idle_seconds"] for line in log.lines()), abs=0.1)
    since_then = log.record(working_since=datetime.now(timezone.utc) + timedelta(hours=1))
    assert since_then is not None
    assert since_then.idle_seconds == 0


def test_cpu_use_counts_only_processes_of_the_job(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cpus = Cpus()
    time.sleep(0.5)
    idle = cpus.sample()
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        time.sleep(0.5)
        working = cpus.sample()
        busy.kill()
    assert (idle.is_busy, working.is_busy) == (False, True)
    assert 0 <= idle.utilization_percent < working.utilization_percent <= 100
    assert 0 < working.memory_percent <= 100

    caplog.set_level("INFO", "trainyard")
    with Utilization("cpu", node=0, interval_seconds=SOON_SECONDS) as log:
        wait_until(lambda: log.record(working_since=None), bool)
    assert caplog.messages == []  # the metric is for cards only
