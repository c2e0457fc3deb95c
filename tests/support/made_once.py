"""What takes long to make and what tests only read: one process of a run of the tests makes it, the others wait."""

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest


def made_once(tmp_path_factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """Return the folder `name` that `make` has filled, in whichever of the run's processes came first.

    Where that raises, the next one that asks tries again.
    """
    own = tmp_path_factory.getbasetemp()
    # Of each process of pytest-xdist, this is a folder in that of the whole run.
    everyones = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    folder, is_made = everyones / f"made-once-{name}", everyones / f"made-once-{name}.done"
    with (everyones / f"made-once-{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not is_made.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            make(folder)
            is_made.touch()
    return folder
