"""The demo as a newcomer runs it, interrupted at each of its stages: no process may stay behind."""

import os
import signal
from pathlib import Path

import psutil
import pytest

from tests.jobs.cli.terminal import TRAINYARD, Terminal

MARK = "TRAINYARD_TEST_DEMO"
"""A variable that every process the demo starts inherits, however far it moves from its parent."""


def started_by_demo(mark: str) -> list[str]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.cmdline()))
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


@pytest.mark.parametrize(
    ("moment", "ending"),
    [
        pytest.param("start an embedded AWS", signal.SIGINT, id="while the server starts"),
        pytest.param("deploy stage 'dev'", signal.SIGINT, id="while the CDK CLI deploys"),
        pytest.param("put real data", signal.SIGTERM, id="while data is staged"),
        pytest.param("[RUNNING]", signal.SIGINT, id="while the job starts"),
        pytest.param("attempt 1 ━", signal.SIGINT, id="while ranks train"),
    ],
)
def test_interrupted_it_leaves_no_process_behind(
    tmp_path: Path, clean_environment: dict[str, str], moment: str, ending: signal.Signals
) -> None:
    mark = f"{os.getpid()}-{tmp_path.name}"
    with Terminal([TRAINYARD, "demo"], environment={**clean_environment, MARK: mark}, folder=tmp_path) as terminal:
        terminal.wait_until_shown(moment, timeout_seconds=180)
        assert started_by_demo(mark)
        terminal.process.send_signal(ending)
        assert terminal.wait(timeout_seconds=60) == 130
    assert "interrupted; what the demo had started is stopped" in terminal.shown
    assert started_by_demo(mark) == []
    assert not list((tmp_path / ".trainyard").glob("*.json"))
