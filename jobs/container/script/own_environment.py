"""Install a script's own virtual environment from a uv.lock or requirements, without the image's packages.

It may replace everything, including torch. Packages that our code needs in a rank (PLATFORM) are added if they are
missing. `trainyard` and `jobs` themselves are found through PYTHONPATH, as for every script.
"""

import contextlib
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

import jobs
from jobs.aws.s3 import sha256
from jobs.container.environment import MAIN_PACKAGES
from jobs.container.packages import (
    Environment,
    code_files,
    fingerprint,
    fingerprint_of,
    image_packages,
)
from jobs.core.errors import UsageError
from jobs.core.locations import S3Location
from jobs.core.words import counted
from jobs.spec.requirements import read_requirements

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

PLATFORM = ("boto3", "numpy", "pydantic", "tensorboard", "typing-extensions")
"""Packages that our code imports in a rank, besides torch and transformers."""

_IMPORTED = "import jobs.container.kinds.script, jobs.container.saving.resume, boto3"

_LOCAL = re.compile(r'^source = \{ (?:directory|editable|path) = "(?!\.")', re.MULTILINE)
"""Matches a package of a lock that is installed from the code, other than the project itself."""

SITE_PACKAGES = "lib/python*/site-packages"

OURS = "platform"
"""The environment's folder for packages that our own code needs."""

PYTHONS = "python"
"""The environment's folder for a Python that uv has downloaded."""


class OwnEnvironment(Environment):
    """A virtual environment of one script, in a folder of this node."""

    def __init__(
        self, s3: "S3Client", run: S3Location, folder: Path, *, code: Path, source: str, python: str | None
    ) -> None:
        """`source` is the name of a uv.lock or of a requirements file in the folder `code`."""
        super().__init__(s3, run, folder, code=code, requirements=source)
        self._lock = code / source if Path(source).name == "uv.lock" else None
        self._requested_python = _requested_python(python, self._lock)

    @property
    def python(self) -> Path:
        """The interpreter of the environment."""
        return self._folder / "bin" / "python"

    def ran_with(self) -> dict[str, str]:
        """Return the versions of the environment's Python and main packages."""
        python = re.search(r"^version_info = (.*)$", (self._folder / "pyvenv.cfg").read_text(), re.MULTILINE)
        main = {name: version for name, version in self._installed().items() if name in MAIN_PACKAGES}
        return {"python": python[1] if python else "unknown", **main}

    def _fingerprint(self, wheels: Mapping[str, str]) -> str:
        requested = self._requested_python
        python = platform.python_version() if requested == sys.executable else requested
        if self._lock is None:
            requirements = read_requirements(self._code, self._name)
            return fingerprint(self._code, requirements, {}, wheels, python=python, platform=PLATFORM)
        local = code_files(self._code) if _LOCAL.search(self._lock.read_text()) else [self._name]
        files = {name: sha256(self._code / name) for name in local}
        return fingerprint_of({"files": files, "python": python, "platform": PLATFORM})

    def _restore(self, place: S3Location) -> str:
        """Install from the instance's cache if it has every package, otherwise from S3. Returns what was done."""
        if self._cached_mark is not None and self._cached_mark.exists():
            with contextlib.suppress(UsageError):
                self._install_all(None, UV_OFFLINE="1")
                return f"{self._name} linked from this instance's cache"
            shutil.rmtree(self._folder)
        done = super()._restore(place)
        self._make_python()
        return done

    def _install(self, wheels: Path | None) -> str:
        self._install_all(wheels)
        found = subprocess.run(
            [self.python, "-c", _IMPORTED],
            env={**os.environ, "PYTHONPATH": str(Path(jobs.__path__[0]).parent)},
            capture_output=True,
            text=True,
            check=False,
        )
        if found.returncode:
            error = (found.stderr.strip().splitlines() or [f"exit code {found.returncode}"])[-1]
            raise UsageError(
                f"{self._name}: the platform's code fails in this environment: {error}", next_step=_versions_that_fit()
            )
        if self._cached_mark is not None:
            self._cached_mark.mkdir(parents=True, exist_ok=True)
        return f"{counted(len(self._installed()), 'package')} of {self._name}"

    def _make_python(self) -> None:
        """Create the environment, or repair the links to its Python after it was unpacked."""
        requested = self._requested_python
        self._uv(
            *("venv", "--relocatable", "--allow-existing", "--no-project", "--python", requested, self._folder),
            problem=f"arguments.python: the image has no Python {requested}, and uv cannot fetch it",
            next_step=f"use the image's Python {platform.python_version()}, or let the job reach github.com",
            UV_PYTHON_INSTALL_DIR=str(self._folder / PYTHONS),
        )

    def _install_all(self, wheels: Path | None, **variables: str) -> None:
        """Install the script's packages, then those of PLATFORM that are missing."""
        self._make_python()
        problem = f"the environment of {self._name} cannot be installed"
        into = ("pip", "install", "--python", self.python)
        if self._lock is not None:
            self._uv(
                # The project itself is not installed, because the script's folder differs between runs.
                *("sync", "--frozen", "--no-default-groups", "--no-editable", "--no-install-project"),
                *("--python", self.python),  # overrides .python-version
                problem=problem,
                next_step="check on your machine: uv sync --frozen --no-default-groups",
                UV_PROJECT_ENVIRONMENT=str(self._folder),
                **variables,
            )
        else:
            next_step = "check on your machine: uv venv, then uv pip install -r"
            self._uv(*into, *self._requirements(wheels), problem=problem, next_step=f"{next_step} {self._name}")
        image, installed = image_packages(), self._installed()
        missing = [f"{name}<={image[name]}" if name in image else name for name in PLATFORM if name not in installed]
        if missing:
            # In a separate folder, after the script's packages in the search path: botocore, for instance, requires an
            # older python-dateutil than current locks have, but works with theirs.
            source: list[str | Path] = ["--no-index", "--find-links", wheels] if wheels else []
            self._uv(
                *(*into, "--target", self._folder / OURS, *source, *missing),
                problem=f"the packages that the platform adds to {self._name} cannot be installed",
                next_step=_versions_that_fit(),
                **variables,
            )
            for place in self._folder.glob(SITE_PACKAGES):
                (place / "trainyard.pth").write_text(f"../../../{OURS}\n")

    def _installed(self) -> dict[str, str]:
        paths = self._folder.glob(f"{SITE_PACKAGES}/*.dist-info")
        found = (path.name.removesuffix(".dist-info").split("-", 1) for path in paths)
        return {canonicalize_name(name): version for name, version in sorted(found)}

    @property
    def _cached_mark(self) -> Path | None:
        """A folder in uv's cache that exists if the cache has all packages of the lock.

        None without a cache or a lock, and for a Python that uv downloads, because the cache does not have it.
        """
        if self._cache is None or self._lock is None or self._requested_python != sys.executable:
            return None
        return Path(self._cache) / "trainyard" / self._digest

    def _variables(self) -> dict[str, str]:
        sources = self._lock.parent / "src" if self._lock is not None else None
        return {
            "PATH": str(self._folder / "bin"),
            "VIRTUAL_ENV": str(self._folder),
            "PYTHONPATH": str(sources) if sources is not None and sources.is_dir() else "",
        }


def _versions_that_fit() -> str:
    image = image_packages()
    return "add versions near those of the image: " + ", ".join(f"{name}=={image.get(name)}" for name in PLATFORM)


def _requested_python(python: str | None, lock: Path | None) -> str:
    """Return the Python to request from uv: the image's if it fits, otherwise a version or a range of versions."""
    if python is not None:
        return sys.executable if f"{platform.python_version()}.".startswith(f"{python}.") else python
    found = re.search(r'^requires-python = "(.*)"$', lock.read_text(), re.MULTILINE) if lock is not None else None
    fits = found is None or SpecifierSet(found[1]).contains(platform.python_version())
    return sys.executable if found is None or fits else found[1]
