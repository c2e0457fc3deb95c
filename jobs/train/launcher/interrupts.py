"""SIGTERM and Ctrl-C in the launcher, before its ranks run and after: they end what it does, to be resumed."""

import contextlib
import os
import signal
from collections.abc import Iterator
from typing import Any

INTERRUPTS = (signal.SIGTERM, signal.SIGINT)


class Interrupted(BaseException):
    """SIGTERM (or Ctrl-C) arrived: the job is to be resumed.

    No Exception: botocore takes one that is raised while it waits for an answer for a broken line, and tries again.
    """


_arrived: list[str] = []
"""Names of the signals that came, or why this process sent one to itself."""

_own_reason: list[str] = []
"""Why it did."""


def end_self(reason: str) -> None:
    """SIGTERM to this process: it ends as before a reclaim, and says `reason` for it. From any thread."""
    _own_reason.append(reason)
    os.kill(os.getpid(), signal.SIGTERM)


def name(number: int) -> str:
    """What to call a signal that came."""
    return _own_reason[0] if number == signal.SIGTERM and _own_reason else signal.Signals(number).name


def raised() -> None:
    """From now on they raise Interrupted in the main thread."""
    for number in INTERRUPTS:
        signal.signal(number, _interrupt)


def ignored() -> None:
    for number in INTERRUPTS:
        signal.signal(number, signal.SIG_IGN)


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """An interrupt waits for the end of the block: modules, while imported, may swallow what is raised in them.

    One that was swallowed before the block is raised again at its end, so none is lost before the ranks start.
    """
    for number in INTERRUPTS:
        signal.signal(number, lambda number, _: _arrived.append(name(number)))
    try:
        yield
    finally:
        raised()
    if _arrived:
        raise Interrupted(_arrived[0])


def _interrupt(number: int, _: Any) -> None:
    _arrived.append(name(number))
    raise Interrupted(_arrived[0])
