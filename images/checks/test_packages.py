"""The Python packages of an image: they have the versions that were locked, fit together and can be imported."""

import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

IMPORT = """
import importlib, sys
from pathlib import Path

for name in sys.argv[1:]:
    importlib.import_module(name)
modules = [module for name, module in sys.modules.items() if name.partition(".")[0] == "torch"]
cached = [module.__cached__ for module in modules if isinstance(getattr(module, "__cached__", None), str)]
if missing := [path for path in cached if not Path(path).exists()]:
    sys.exit(f"{len(missing)} modules of PyTorch are not compiled: each container would do that before its first step")
"""


def installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "missing"


def fits(found: str, expected: str) -> bool:
    if expected.endswith(".*"):
        return found.startswith(expected[:-1])
    # A release says 2.6.0, and Habana's build is 2.6.0+hpu…
    return expected in (found, found.partition("+")[0])


def test_packages_have_the_versions_of_the_lock_and_of_the_release(facts: dict[str, Any]) -> None:
    found = {name: installed(name) for name in facts["versions"]}
    expected = facts["versions"]
    assert {name: found[name] for name in found if not fits(found[name], expected[name])} == {}


def test_packages_fit_together(facts: dict[str, Any]) -> None:
    command = [sys.executable, "-m", "pip", "check", "--disable-pip-version-check"]
    done = subprocess.run(command, cwd="/", capture_output=True, text=True, check=False)
    assert done.returncode == 0 or done.stdout.strip(), done.stderr
    # A base may hold more packages, with complaints of their own.
    ours = {*facts["versions"], "torch", "deepspeed"}
    complaints = done.stdout.splitlines() if done.returncode else []
    assert [line for line in complaints if line.split()[0].lower().replace("_", "-") in ours] == []


def test_what_a_job_imports_can_be_imported_and_is_compiled(facts: dict[str, Any]) -> None:
    """In one process, as in a job. What is not compiled stays so, as PYTHONDONTWRITEBYTECODE is set."""
    command = [sys.executable, "-c", IMPORT, *facts["modules"]]
    done = subprocess.run(command, cwd="/", env=os.environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
