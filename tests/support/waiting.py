"""Waiting for what a service brings about in its own time."""

import time
from collections.abc import Callable
from typing import TypeVar

PATIENCE_SECONDS = 120
"""A busy machine takes long; a test that passes never waits for all of it."""

Seen = TypeVar("Seen")


def wait_until(look: Callable[[], Seen], wanted: Callable[[Seen], object]) -> Seen:
    """What `look` returns once it is as wanted."""
    since = time.monotonic()
    while not wanted(seen := look()):
        assert time.monotonic() < since + PATIENCE_SECONDS, f"after {PATIENCE_SECONDS} s still {seen}"
        pause(since)
    return seen


def pause(since: float) -> None:
    """Sleep until the next look of a wait that began at `since` of the monotonic clock.

    A look asks a service, and takes milliseconds of CPU on both sides. So who has waited for long looks seldom: a tenth
    of that time later.
    """
    time.sleep(min(0.5, max(0.03, (time.monotonic() - since) / 10)))
