"""Create environments with the Python packages of an image's lock file, for tests that run jobs like that image.

Each is created once, by uv from the package index, in build/environments/. PyTorch and Python are those of the tests'
environment: the Gaudi image's PyTorch is in no package index, and older versions are gigabytes each. The lock's hashes
are ignored, because they are for the image's Python.
"""

import fcntl
import importlib.metadata
import os
import shutil
import subprocess
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from jobs.core.errors import TrainyardError
from jobs.core.images import image, release
from jobs.images.lock import IMAGES, ROOT, locked

RELEASE_VARIABLE = "TRAINYARD_TEST_RELEASE"
"""The row of images/releases.toml for the tests' jobs. Set by `make contract`."""

FOLDER = ROOT / "build" / "environments"

CONTENT = "content.txt"
"""The file in a complete environment that records its sources."""

INSTALL_SECONDS = 240


def chosen_release() -> str | None:
    """Return Gaudi's release for the tests.

    Without one, jobs run in the tests' own environment, and the HPU's branches with the default release.
    """
    return os.environ.get(RELEASE_VARIABLE)


def python_of(release_name: str | None) -> Path:
    """Return an interpreter with the packages of a release's image. Default: Gaudi's default release."""
    row = release(release_name)
    versions = locked(image(row.image), row)
    wanted = [f"{package}=={version}" for package, version in versions.items() if package != "torch"]
    wanted += [package for package in IMAGES[row.image].kept if "==" in package]
    lent = _lent_files(versions.keys())
    content = "\n".join([f"{sys.executable} {sys.version}", *wanted, *map(str, lent)])
    folder = FOLDER / f"{row.image}-{row.name}"
    python = folder / "bin" / "python"
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(
            lock, fcntl.LOCK_EX
        )  # a lock until it is closed, because another test process may need the same environment
        if not (folder / CONTENT).exists() or (folder / CONTENT).read_text() != content:
            shutil.rmtree(folder, ignore_errors=True)
            _uv("venv", "--python", sys.executable, str(folder))
            _uv("pip", "install", "--python", str(python), "--no-deps", "--only-binary=:all:", *wanted)
            [packages] = folder.glob("lib/python3*/site-packages")
            for file in lent:
                (packages / file.name).symlink_to(file)
            (folder / CONTENT).write_text(content)
    return python


def _lent_files(own: Collection[str]) -> list[Path]:
    """Return the files in site-packages of torch and its dependencies, without the image's `own` packages."""
    lent = [
        one
        for one in _with_dependencies("torch", set())
        if one.name == "torch" or canonicalize_name(one.name) not in own
    ]
    names = {(one, file.parts[0]) for one in lent for file in one.files or ()}
    return sorted({Path(str(one.locate_file(name))) for one, name in names if name not in ("..", "__pycache__")})


def _with_dependencies(name: str, seen: set[str]) -> Iterator[importlib.metadata.Distribution]:
    if canonicalize_name(name) in seen:
        return
    seen.add(canonicalize_name(name))
    distribution = importlib.metadata.distribution(name)
    yield distribution
    for requirement in map(Requirement, distribution.requires or ()):
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield from _with_dependencies(requirement.name, seen)


def _uv(*arguments: str) -> None:
    command = [sys.executable, "-m", "uv", *arguments, "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_SECONDS, check=False)
    if done.returncode:
        raise TrainyardError(
            f"uv {arguments[0]} failed (exit code {done.returncode}): {done.stderr.strip()}",
            next_step="check that the package index is reachable",
        )
