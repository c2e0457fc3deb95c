"""Python's search for what can be freed, which took a twelfth of the CPU time of tests."""

import gc

OBJECTS = 20_000
"""What is made before the youngest are searched; Python's own default is 700 (gc.get_threshold)."""


def seldom_collect() -> None:
    """Search seldom in this process, and in those that are forked from it: it lives for minutes, and has the memory."""
    gc.set_threshold(OBJECTS, 20, 20)
