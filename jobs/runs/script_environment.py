"""Check a script's own environment before it is submitted."""

import os
import re
import subprocess
import sys
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from jobs.core.errors import UsageError
from jobs.core.stage import DeployedStage
from jobs.spec.code import Pack

if TYPE_CHECKING:
    from jobs.spec.kinds.script import Script


def check_environment(arguments: "Script", stage: DeployedStage, pack: Pack | None) -> None:
    """Raise UsageError if a script cannot have its own environment in this stage, or if its lock is out of date.

    `pack` is the code, or None if it is already on S3 and was checked.
    """
    if stage.instance_type.accelerator == "hpu" and not stage.emulated:
        raise UsageError(
            f"arguments.environment: stage '{stage.name}' has HPUs, which only work with the torch and "
            "habana-torch-plugin of the image, and a separate environment has none of the image's packages",
            next_step="remove 'environment' and add packages to the image's with 'requirements', or submit to a stage "
            "with GPUs or CPUs",
        )
    if pack is None or arguments.lock is None:
        return
    from packaging.specifiers import SpecifierSet

    folder = PurePosixPath(arguments.lock).parent
    project = str(folder / "pyproject.toml")
    if project not in {file.name for file in pack.files}:
        raise UsageError(
            f"arguments.environment: {arguments.lock} needs a pyproject.toml beside it, and {pack.folder} has no file "
            f"'{project}'" + (" among the packed files" if (pack.folder / project).exists() else ""),
            next_step="uv init, uv add your packages, and uv lock; or set requirements and environment: own",
        )
    place = pack.folder / folder
    allowed = re.search(r'^requires-python = "(.*)"$', (pack.folder / arguments.lock).read_text(), re.MULTILINE)
    versions = SpecifierSet(allowed[1] if allowed else "")
    python = arguments.python
    if python is not None and not (versions.contains(python) or versions.contains(f"{python}.99")):
        raise UsageError(
            f"arguments.python: {arguments.lock} is for Python {versions}, not {python}",
            next_step="change requires-python in pyproject.toml and run uv lock, or choose an allowed version",
        )
    checked = subprocess.run(
        [sys.executable, "-m", "uv", "lock", "--check", "--system-certs", "--no-python-downloads", "--quiet"],
        cwd=place,
        env={**os.environ, "PYTHONSAFEPATH": "1"},  # the folder may have a module with the name of a standard one
        capture_output=True,
        text=True,
        check=False,
    )
    words = " ".join(checked.stderr.split()).removeprefix("error: ")
    if checked.returncode:
        is_old = "needs to be updated" in words
        raise UsageError(
            f"arguments.environment: {pack.folder / arguments.lock} "
            + (f"is out of date: {project} has changed since" if is_old else f"cannot be checked by uv: {words}"),
            next_step=f"uv lock --project {place}, then submit again",
        )
