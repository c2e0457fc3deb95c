"""The demo, interrupted: no process may survive."""

import os
import re
import signal
from contextlib import suppress
from pathlib import Path

import psutil

from tests.support.jobs.terminal import TRAINYARD, Terminal

MARK = "TRAINYARD_TEST_DEMO"
"""A variable that every process of the demo inherits, except its jobs."""


def started_by_demo(mark: str, endpoint: str) -> list[str]:
    """Return the command lines of the demo's processes: they inherited the mark, or are jobs of its emulator."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            environment = process.environ()
            ours = environment.get(MARK) == mark or environment.get("AWS_ENDPOINT_URL", "-") == endpoint
            if ours and process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.cmdline()))
    return found


def test_an_interrupted_demo_leaves_no_process_behind(tmp_path: Path, clean_environment: dict[str, str]) -> None:
    mark = f"{os.getpid()}-{tmp_path.name}"
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    environment = {**clean_environment, MARK: mark, "TMPDIR": str(temporary)}
    with Terminal([TRAINYARD, "demo"], environment=environment, folder=tmp_path) as terminal:
        terminal.wait_until_shown("held-out examples", timeout_seconds=180)
        descendants = psutil.Process(terminal.process.pid).children(recursive=True)
        terminal.process.send_signal(signal.SIGTERM)
        assert terminal.wait(timeout_seconds=60) == 130
    assert "interrupted; everything the demo started has been stopped" in terminal.shown
    answers_at = re.search(r"http://localhost:\d+", terminal.shown)
    assert started_by_demo(mark, answers_at[0] if answers_at else "") == []
    assert not [process for process in descendants if process.is_running()]
    assert not list((tmp_path / ".trainyard").glob("*.json"))
    assert list(temporary.iterdir()) == []
