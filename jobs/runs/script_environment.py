"""Check a script's own environment before it is submitted."""

import os
import re
import subprocess
import sys
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from jobs.core.errors import ConfigurationError, TimedOutError, UsageError
from jobs.core.stage import DeployedStage
from jobs.spec.code import Pack

if TYPE_CHECKING:
    from jobs.spec.kinds.script import Script

_CHECK_SECONDS = 300


def check_environment(arguments: "Script", stage: DeployedStage, pack: Pack | None) -> None:
    """Raise UsageError if a script cannot have its own environment in this stage, or if its lock is out of date.

    `pack` is the code, or None if it is already on S3 and was checked.
    """
    if stage.instance_type.accelerator == "hpu" and not stage.emulated:
        raise UsageError(
            f"arguments.environment: stage '{stage.name}' has HPUs, which only work with the torch and "
            "habana-torch-plugin of the image, and an own environment has none of the image's packages",
            next_step="remove 'environment' and add packages to the image's with 'requirements', or submit to a stage "
            "with GPUs or CPUs",
        )
    if pack is None or arguments.lock is None:
        return
    folder = PurePosixPath(arguments.lock).parent
    project = str(folder / "pyproject.toml")
    if project not in {file.name for file in pack.files}:
        raise UsageError(
            f"arguments.environment: {arguments.lock} needs a pyproject.toml beside it, and {pack.folder} has no file "
            f"'{project}'" + (" among the packed files" if (pack.folder / project).exists() else ""),
            next_step="uv init, uv add your packages, and uv lock; or set requirements and environment: own",
        )
    _check_python(arguments, pack)
    command = [sys.executable, "-m", "uv", "lock", "--check", "--system-certs", "--no-python-downloads", "--quiet"]
    try:
        checked = subprocess.run(
            command,
            cwd=pack.folder / folder,
            env={**os.environ, "PYTHONSAFEPATH": "1"},  # the folder may have a module with the name of a standard one
            capture_output=True,
            text=True,
            timeout=_CHECK_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise TimedOutError(
            f"arguments.environment: uv lock --check in {pack.folder / folder} took longer than {_CHECK_SECONDS} s",
            next_step="check that your package index answers",
        ) from None
    words = " ".join(checked.stderr.split())
    if "No module named uv" in words:
        raise ConfigurationError("uv is not installed, and only uv can check a lock", next_step="pip install uv")
    if "needs to be updated" in words:
        raise UsageError(
            f"arguments.environment: {pack.folder / arguments.lock} is out of date: {project} has changed since",
            next_step=f"uv lock --project {pack.folder / folder}, then submit again",
        )
    if checked.returncode:
        raise UsageError(
            f"arguments.environment: uv cannot check {pack.folder / arguments.lock}: {words.removeprefix('error: ')}",
            next_step=f"correct what 'uv lock --check' reports in {pack.folder / folder}",
        )


def _check_python(arguments: "Script", pack: Pack) -> None:
    """Raise UsageError if the lock does not allow the requested Python."""
    from packaging.specifiers import SpecifierSet

    assert arguments.lock is not None  # noqa: S101 - the caller has checked
    text = (pack.folder / arguments.lock).read_text()
    found = re.search(r'^requires-python = "(.*)"$', text, re.MULTILINE)
    if arguments.python is None or found is None:
        return
    allowed = SpecifierSet(found[1])
    if not any(allowed.contains(version) for version in (arguments.python, f"{arguments.python}.99")):
        raise UsageError(
            f"arguments.python: {arguments.lock} is for Python {found[1]}, not {arguments.python}",
            next_step="change requires-python in pyproject.toml and run uv lock, or choose an allowed version",
        )
