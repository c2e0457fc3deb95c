"""Write an SPDX document of an image, with the version, licence and origin of every Debian and Python package.

    trainyard images sbom cpu          writes .trainyard/sbom/cpu-<release>-<revision>.spdx.json
    trainyard images sbom laptop       the Python environment of this machine's trainyard

Syft scans the image in the Docker engine, so the document lists what is installed rather than what was requested. It is
a separate step because it reads the whole image.
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
"""On the command line, this machine's Python environment, which is not an image."""

_SCAN_SECONDS = 1800
"""Time limit of a scan. It is enough for Habana's large image."""


def syft() -> Path:
    """Return the path of syft. Raises ConfigurationError if it is not installed."""
    folders = (str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath))
    found = shutil.which("syft", path=os.pathsep.join(folders))
    if found is None:
        raise ConfigurationError(
            "syft, which lists the packages of an image, is not installed",
            next_step="python -m pip install 'trainyard[sbom]', or put syft on PATH",
        )
    return Path(found)


def write(source: str, *, name: str, tag: str, folder: Path) -> Path:
    """Write the document of `source`, in syft's notation (`docker:<image>`, `dir:<folder>`), and return its path.

    The document is named `trainyard/<name>`, version `tag`. It replaces an older document once it is complete. Raises
    TrainyardError if syft cannot read the source, and ConfigurationError if the disk is full.
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
            # Do not check for updates. List packages only: their files would make the document twenty times as long.
            env={**os.environ, "SYFT_CHECK_FOR_APP_UPDATE": "false", "SYFT_FILE_METADATA_SELECTION": "none"},
            cwd=ROOT,  # syft would read a .syft.yaml in the working directory
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
                next_step="check that the Docker engine answers ('docker version') and has the image"
                if source.startswith("docker:")
                else None,
            )
        return part.replace(path)
    finally:
        part.unlink(missing_ok=True)
