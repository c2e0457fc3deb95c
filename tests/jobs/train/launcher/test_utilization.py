"""What the launcher logs of the accelerators' use, from a tool on PATH; and that a job never suffers from it."""

import json
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from jobs.contract.log_lines import is_utilization
from jobs.train.launcher import utilization
from jobs.train.launcher.utilization import UtilizationLog, read

SOON_SECONDS = 0.01
PATIENCE_SECONDS = 30

Tool = Callable[..., Path]


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tool:
    """Puts a shell script on PATH; each call leaves its arguments in `asked`."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    asked = tmp_path / "asked"
    asked.touch()

    def put(name: str, script: str) -> Path:
        path = tmp_path / name
        path.write_text(f'#!/bin/sh\necho "$*" >>{asked}\n{script}\n')
        path.chmod(0o755)
        return asked

    return put


def lines_of(log: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in log.records if record.name == "trainyard"]


def wait_until(look: Callable[[], object]) -> None:
    give_up_at = time.monotonic() + PATIENCE_SECONDS
    while not look():
        assert time.monotonic() < give_up_at
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("accelerator", "name", "output", "wanted_query"),
    [
        ("hpu", "hl-smi", "97 %, 512 MiB, 32768 MiB\n3 %, 512 MiB, 32768 MiB", "-Q utilization.aip,"),
        ("cuda", "nvidia-smi", "97 %, 512 MiB, 32768 MiB\n3 %, 512 MiB, 32768 MiB", "--query-gpu=utilization.gpu,"),
    ],
)
def test_the_tool_of_the_accelerator_is_asked_again_and_again(
    *, accelerator: str, name: str, output: str, wanted_query: str, tool: Tool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "trainyard")
    asked = tool(name, f"echo '{output}'")
    with UtilizationLog(accelerator, node=1, interval_seconds=SOON_SECONDS):
        wait_until(lambda: len(lines_of(caplog)) >= 2)
    first = lines_of(caplog)[0]
    assert json.loads(first) == {
        "accelerator_utilization_percent": 50.0,
        "accelerator_memory_percent": 1.6,
        "accelerators": 2,
        "node": 1,
    }
    assert is_utilization(first)
    assert asked.read_text().startswith(wanted_query)


@pytest.mark.parametrize("script", ["exit 1", "echo 'no devices'", "echo ''", "echo '1,2'", "echo '5, 1, 0'"])
def test_a_tool_that_fails_is_asked_once_and_says_nothing(
    script: str, tool: Tool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "trainyard")
    asked = tool("hl-smi", script)
    with UtilizationLog("hpu", node=0, interval_seconds=SOON_SECONDS) as log:
        wait_until(lambda: not log._thread.is_alive())
    assert len(asked.read_text().splitlines()) == 1
    assert lines_of(caplog) == []


def test_a_tool_that_hangs_does_not_hold_up_the_end_of_the_job(tool: Tool) -> None:
    asked = tool("hl-smi", "exec sleep 600")
    started = time.monotonic()
    with UtilizationLog("hpu", node=0, interval_seconds=SOON_SECONDS) as log:
        wait_until(lambda: asked.read_text() and log._asked)
    assert time.monotonic() - started < utilization.TOOL_TIMEOUT_SECONDS
    assert log._asked is not None
    assert log._asked.wait(PATIENCE_SECONDS) == -9


def test_a_tool_that_hangs_is_given_up(tool: Tool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(utilization, "TOOL_TIMEOUT_SECONDS", 0.1)
    tool("nvidia-smi", "exec sleep 600")
    with UtilizationLog("cuda", node=0, interval_seconds=SOON_SECONDS) as log:
        wait_until(lambda: not log._thread.is_alive())
    assert log._asked is not None
    assert log._asked.returncode == -9


def test_where_there_is_no_tool_nothing_is_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for accelerator in ("hpu", "cuda", "cpu"):
        with UtilizationLog(accelerator, node=0, interval_seconds=SOON_SECONDS) as log:
            assert not log._thread.is_alive()


def test_what_is_no_list_of_accelerators_is_refused() -> None:
    with pytest.raises(ValueError, match="no accelerators are listed"):
        read("\n", node=0)
