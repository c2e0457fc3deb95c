"""What an image holds, as an SPDX document: every Debian and Python package with its version, licence and origin.

    trainyard images sbom cpu          writes .trainyard/sbom/cpu-<release>-<revision>.spdx.json
    trainyard images sbom laptop       of the Python environment that trainyard itself runs in

Syft reads it off the image that the Docker engine has, so the document tells what is inside rather than what was asked
for. It is a step of its own, since it reads all of the image.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from jobs.core.errors import ConfigurationError, TrainyardError
from jobs.core.git import ROOT
from jobs.images import engine

SUFFIX = ".spdx.json"

LAPTOP = "laptop"
"""What stands for this machine's Python environment on the command line: what jobs are submitted from, no image."""

_SCAN_SECONDS = 1800
"""For Habana's image, which is large."""


def syft() -> Path:
    """Return the path of syft. Raises ConfigurationError if it is not installed."""
    folders = (str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath))
    found = shutil.which("syft", path=os.pathsep.join(folders))
    if found is None:
        raise ConfigurationError(
            "syft, which reads what an image holds, is not installed",
            next_step="python -m pip install 'trainyard[sbom]', or another way to have syft on PATH",
        )
    return Path(found)


def write(source: str, *, name: str, tag: str, folder: Path) -> Path:
    """Write the document of a source, as syft calls it (`docker:<image>`, `dir:<folder>`), and return its path.

    It calls itself `trainyard/<name>`, of version `tag`. Raises TrainyardError if syft cannot read the source,
    ConfigurationError if the disk is full. An older document is replaced once the new one is whole.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{tag}{SUFFIX}"
    part = path.absolute().with_name(f".{path.name}.part")
    try:
        done = subprocess.run(
            [
                *(str(syft()), "scan", source, "--quiet", "--output", f"spdx-json={part}"),
                *("--source-name", f"trainyard/{name}", "--source-version", tag),
            ],
            # No call home; and packages only: a line for each of their files would make it twenty times as long.
            env={**os.environ, "SYFT_CHECK_FOR_APP_UPDATE": "false", "SYFT_FILE_METADATA_SELECTION": "none"},
            cwd=ROOT,  # syft reads a .syft.yaml of its working directory
            capture_output=True,
            text=True,
            timeout=_SCAN_SECONDS,
            check=False,
        )
        if done.returncode:
            reason = done.stderr.strip()
            if engine.is_disk_full(reason):
                raise engine.disk_full(reason)
            raise TrainyardError(
                f"syft cannot read {source} (exit code {done.returncode}): {reason}",
                next_step="see that the Docker engine answers ('docker version') and has the image"
                if source.startswith("docker:")
                else None,
            )
        return part.replace(path)
    finally:
        part.unlink(missing_ok=True)
