"""SIGTERM and Ctrl-C in the launcher, before its ranks run and after: they end what it does, to be resumed."""

import contextlib
import signal
from collections.abc import Iterator
from typing import Any

INTERRUPTS = (signal.SIGTERM, signal.SIGINT)


class Interrupted(BaseException):
    """SIGTERM (or Ctrl-C) arrived: the job is to be resumed.

    No Exception: botocore takes one that is raised while it waits for an answer for a broken line, and tries again.
    """


_arrived: list[str] = []
"""Names of the signals that came."""


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
        signal.signal(number, lambda number, _: _arrived.append(signal.Signals(number).name))
    try:
        yield
    finally:
        raised()
    if _arrived:
        raise Interrupted(_arrived[0])


def _interrupt(number: int, _: Any) -> None:
    _arrived.append(signal.Signals(number).name)
    raise Interrupted(_arrived[0])
