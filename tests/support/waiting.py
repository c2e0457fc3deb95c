"""Wait for a service to reach a state."""

import time
from collections.abc import Callable
from typing import TypeVar

PATIENCE_SECONDS = 120
"""Longest wait, for a busy machine. A test that passes never waits this long."""

Seen = TypeVar("Seen")


def wait_until(look: Callable[[], Seen], wanted: Callable[[Seen], object]) -> Seen:
    """Call `look` until its result satisfies `wanted`, and return that result."""
    since = time.monotonic()
    while not wanted(seen := look()):
        assert time.monotonic() < since + PATIENCE_SECONDS, f"after {PATIENCE_SECONDS} s still {seen}"
        pause(since)
    return seen


def pause(since: float) -> None:
    """Sleep before the next look of a wait that began at `since` (monotonic clock): a tenth of the time waited so far.

    Each look costs milliseconds of CPU on both sides, so a long wait looks seldom.
    """
    time.sleep(min(0.5, max(0.03, (time.monotonic() - since) / 10)))
