"""What programs write to standard output, and the log lines that machines read.

If standard output is closed or full, the program exits with a one-sentence error. A job's log has three kinds of lines
for machines: progress, how busy the accelerators are, and the last lines of a failed rank.
"""

import errno
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NoReturn

from jobs.core.errors import TrainyardError

_NEXT_STEP = "redirect it to a file on a disk with free space, to a pipe, or to /dev/null"

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def run_program(main: Callable[[], int | None]) -> NoReturn:
    """Exit with the code that `main` returns, or print the error to stderr and exit with its code."""
    try:
        with checked_output():
            code = main()
    except TrainyardError as error:
        sys.stderr.write(f"error: {error}\n")
        code = error.exit_code
    sys.exit(code)


@contextmanager
def checked_output() -> Iterator[None]:
    """Flush standard output at the end of the block.

    Raises TrainyardError at the start if standard output is closed, because the next opened file would take its place,
    and later if it is full. Exits without a message if the reader of a pipe has closed it.
    """
    _open_stdin_and_stderr()
    if sys.stdout is None:
        raise TrainyardError("standard output is closed", next_step=_NEXT_STEP)
    try:
        yield
        sys.stdout.flush()
    except OSError as error:
        # Errors about a named file have a filename; errors from writing to an open stream have none.
        if error.filename or error.errno not in (errno.EPIPE, *_FULL):
            raise
        # The interpreter flushes the rest of the output when it exits, which would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        if error.errno == errno.EPIPE:
            raise SystemExit(1) from None
        raise TrainyardError(f"cannot write to standard output: {error.strerror}", next_step=_NEXT_STEP) from None


def _open_stdin_and_stderr() -> None:
    """Open stdin and stderr on /dev/null if they are closed; otherwise text for stderr could go to stdout."""
    if sys.stdin is None:
        sys.stdin = open(os.devnull)  # noqa: PTH123, SIM115 - for the rest of the process
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: PTH123, SIM115 - as above


UTILIZATION_KEY = "accelerator_utilization_percent"
"""First key of the JSON line that each node logs once a minute: how busy its accelerators are."""

MEMORY_KEY = "accelerator_memory_percent"
"""Key in the same line: the share of accelerator memory in use."""

TIME_LEFT_SUFFIX = " left"
"""End of a progress note that contains the remaining time."""


def is_utilization_line(line: str) -> bool:
    """Return whether a log line feeds CloudWatch's metric and is not meant for people."""
    return line.startswith(f'{{"{UTILIZATION_KEY}"')


LAST_LINE = "rank {rank} of node {node} wrote last: {line}"
"""The launcher repeats each of a failed rank's last lines in this form."""


@dataclass(frozen=True)
class Progress:
    """One progress line of a job's log; the command line draws its progress bar from it."""

    step: int
    total_steps: int
    note: str = ""

    _LINE = re.compile(r"\[progress\] (?P<step>\d+)/(?P<total>\d+)(?: (?P<note>.*))?")

    @property
    def time_left(self) -> str:
        """Return the remaining time as logged by the job, estimated from its last steps; empty if the line has none."""
        last = self.note.rpartition(", ")[2]
        return last.removesuffix(TIME_LEFT_SUFFIX) if last.endswith(TIME_LEFT_SUFFIX) else ""

    def __str__(self) -> str:
        return f"[progress] {self.step}/{self.total_steps} {self.note}".rstrip()

    @classmethod
    def parse(cls, line: str) -> "Progress | None":
        """Return the progress in a log line, or None if the line has none."""
        match = cls._LINE.search(line)
        return cls(int(match["step"]), int(match["total"]), match["note"] or "") if match else None
