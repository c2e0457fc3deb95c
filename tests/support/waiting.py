"""Waiting for what a service brings about in its own time."""

import time
from collections.abc import Callable
from typing import TypeVar

PATIENCE_SECONDS = 60

Seen = TypeVar("Seen")


def wait_until(look: Callable[[], Seen], wanted: Callable[[Seen], object]) -> Seen:
    """What `look` returns once it is as wanted."""
    give_up_at = time.monotonic() + PATIENCE_SECONDS
    while not wanted(seen := look()):
        assert time.monotonic() < give_up_at, f"after {PATIENCE_SECONDS} s still {seen}"
        time.sleep(0.05)
    return seen
