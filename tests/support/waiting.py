"""Wait for a service to reach a state."""

import time
from collections.abc import Callable
from typing import TypeVar

PATIENCE_SECONDS = 120
"""Timeout of a wait, for a busy machine. Tests that pass never wait this long."""

Seen = TypeVar("Seen")


def wait_until(look: Callable[[], Seen], wanted: Callable[[Seen], object]) -> Seen:
    """Call `look` until its result satisfies `wanted`, and return that result."""
    since = time.monotonic()
    while not wanted(seen := look()):
        assert time.monotonic() < since + PATIENCE_SECONDS, f"after {PATIENCE_SECONDS} s still {seen}"
        pause(since)
    return seen


def pause(since: float) -> None:
    """Sleep before the next check of a wait that began at `since` (monotonic clock), for a tenth of the time so far.

    Each check costs milliseconds of CPU on both sides, so a long wait checks rarely.
    """
    time.sleep(min(0.5, max(0.03, (time.monotonic() - since) / 10)))
