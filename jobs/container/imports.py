"""Imports of PyTorch and transformers, which take seconds, in four fifths of the time."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def imports_that_stay() -> Iterator[None]:
    """Import what stays until the process ends: nothing is searched for what could be freed, now or later.

    Python searches all objects each time that they have become a quarter more. In an import of the Trainer, which makes
    half a million that stay, that is a fifth of the CPU time; and where ranks are forked it would copy shared pages.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.freeze()
            gc.enable()
