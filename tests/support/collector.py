"""Run Python's garbage collector less often: it took a twelfth of the tests' CPU time."""

import gc

OBJECTS = 20_000
"""New objects before a collection of the youngest generation. Python's default is 700 (gc.get_threshold)."""


def collect_rarely() -> None:
    """Collect less often in this process and its forks, which live for minutes and have enough memory."""
    gc.set_threshold(OBJECTS, 20, 20)
