"""Runs a command on a separate terminal, like a user at a keyboard."""

import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

TRAINYARD = Path(sys.executable).with_name("trainyard")
"""The installed console script."""


class Terminal:
    """Runs a command on a pseudo-terminal with 120 columns, reads its output and types input."""

    def __init__(self, command: Sequence[str | Path], *, environment: Mapping[str, str], folder: Path) -> None:
        self._ours, theirs = pty.openpty()
        self.shown = ""
        try:
            self.process = subprocess.Popen(
                [str(part) for part in command],
                stdin=theirs,
                stdout=theirs,
                stderr=theirs,
                cwd=folder,
                env={**environment, "TERM": "xterm-256color", "COLUMNS": "120", "LINES": "40"},
                start_new_session=True,
            )
        finally:
            os.close(theirs)

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._ours)

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def wait_until_shown(self, text: str, *, timeout_seconds: float = 120) -> None:
        give_up_at = time.monotonic() + timeout_seconds
        while text not in self.shown:
            if not self._read(give_up_at):
                raise AssertionError(f"ended or timed out without showing {text!r}; it showed:\n{self.shown}")

    def wait(self, *, timeout_seconds: float = 120) -> int:
        """Read to the end and return the exit code."""
        give_up_at = time.monotonic() + timeout_seconds
        while self._read(give_up_at):
            pass
        return self.process.wait(max(0.1, give_up_at - time.monotonic()))

    def _read(self, give_up_at: float) -> bool:
        readable, _, _ = select.select([self._ours], [], [], max(0.0, give_up_at - time.monotonic()))
        if not readable:
            return False
        try:
            chunk = os.read(self._ours, 65536)
        except OSError:  # on Linux: the other end was closed
            return False
        self.shown += chunk.decode(errors="replace")
        return bool(chunk)
