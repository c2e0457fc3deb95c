"""Standard output of every program here: if it is closed or full, the program ends with one sentence."""

import errno
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
