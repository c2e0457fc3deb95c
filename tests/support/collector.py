"""Run Python's garbage collector less often: it took a twelfth of the tests' CPU time."""

import gc

OBJECTS = 20_000
"""New objects before a collection of the youngest generation. Python's default: 700 (gc.get_threshold)."""


def seldom_collect() -> None:
    """Collect seldom in this process and its forks: they live for minutes and have enough memory."""
    gc.set_threshold(OBJECTS, 20, 20)
