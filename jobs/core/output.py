"""Standard output of every program here: if it is closed or full, the program ends with one sentence."""

import errno
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NoReturn

from jobs.core.errors import TrainyardError

_NEXT_STEP = "send it to a file on a disk with free space, to a pipe, or to /dev/null"

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def run_program(main: Callable[[], int | None]) -> NoReturn:
    """Exit with what `main` returns, or with an error's message on stderr and its exit code."""
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

    Raises TrainyardError at the start if standard output is closed, since the next file that is opened would be it, and
    later if it is full. Ends the process quietly if the reader of a pipe has gone.
    """
    _open_others()
    if sys.stdout is None:
        raise TrainyardError("standard output is closed", next_step=_NEXT_STEP)
    try:
        yield
        sys.stdout.flush()
    except OSError as error:
        # What fails by the name of a file has it here; writing to an open stream has none.
        if error.filename or error.errno not in (errno.EPIPE, *_FULL):
            raise
        # What is left of the output would fail again when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        if error.errno == errno.EPIPE:
            raise SystemExit(1) from None
        raise TrainyardError(f"the output cannot be written: {error.strerror}", next_step=_NEXT_STEP) from None


def _open_others() -> None:
    """Open what Python has as None because it was closed: printing to a closed stderr would print to stdout."""
    if sys.stdin is None:
        sys.stdin = open(os.devnull)  # noqa: PTH123, SIM115 - for the rest of the process
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: PTH123, SIM115 - as above


UTILIZATION_KEY = "accelerator_utilization_percent"
"""First key of the JSON line in which a node logs, once a minute, how busy its accelerators are."""

MEMORY_KEY = "accelerator_memory_percent"
"""Key of the memory that is in use on them, in the same line."""


LEFT = " left"
"""How the note of a line of progress ends that says how long the job still takes."""


def is_utilization(line: str) -> bool:
    """Return whether a line of a job's log is for CloudWatch's metric, not for people."""
    return line.startswith(f'{{"{UTILIZATION_KEY}"')


@dataclass(frozen=True)
class Progress:
    """One line of a job's log that says how far it is; the command line draws its bar from it."""

    step: int
    total_steps: int
    note: str = ""

    _LINE = re.compile(r"\[progress\] (?P<step>\d+)/(?P<total>\d+)(?: (?P<note>.*))?")

    @property
    def time_left(self) -> str:
        """The time that the job itself says is left, which it reckons by its last steps; empty where it says none."""
        last = self.note.rpartition(", ")[2]
        return last.removesuffix(LEFT) if last.endswith(LEFT) else ""

    def __str__(self) -> str:
        return f"[progress] {self.step}/{self.total_steps} {self.note}".rstrip()

    @classmethod
    def parse(cls, line: str) -> "Progress | None":
        """Return the progress that a line of the log tells; None where it tells none."""
        match = cls._LINE.search(line)
        return cls(int(match["step"]), int(match["total"]), match["note"] or "") if match else None
