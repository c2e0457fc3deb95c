"""Make something expensive and read-only once per test run: one process makes it, the others wait."""

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest


def made_once(tmp_path_factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """Return the folder `name`, which `make` fills in the first process of the test run that needs it.

    If `make` raises, the next process that needs the folder tries again.
    """
    base = tmp_path_factory.getbasetemp()
    # In a process of pytest-xdist, this is a subfolder of the whole run's folder.
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder, is_made = shared / f"made-once-{name}", shared / f"made-once-{name}.done"
    with (shared / f"made-once-{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not is_made.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            make(folder)
            is_made.touch()
    return folder
