"""A script's own environment: a virtual environment of a uv.lock or of requirements, without the image's packages.

It may replace everything, torch included. It also gets what our own code needs in a rank (PLATFORM), unless it has it.
`trainyard` and `jobs` themselves are found through PYTHONPATH, as for every script.
"""

import contextlib
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.specifiers import SpecifierSet

import jobs
from jobs.aws.s3 import sha256
from jobs.container.packages import (
    Environment,
    code_files,
    fingerprint,
    fingerprint_of,
    image_packages,
    package_name,
)
from jobs.core.errors import UsageError
from jobs.core.locations import S3Location
from jobs.spec.requirements import read_requirements

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

PLATFORM = ("boto3", "numpy", "pydantic", "tensorboard", "typing-extensions")
"""Packages that our code imports in a rank, besides torch and transformers."""

_IMPORTED = "import jobs.container.kinds.script, jobs.container.saving.resume, boto3"

_LOCAL = re.compile(r'^source = \{ (?:directory|editable|path) = "(?!\.")', re.MULTILINE)
"""A package of a lock that is installed from the code, other than the project itself."""

PYTHONS = "python"
"""The folder in the environment of a Python that uv has fetched."""


class OwnEnvironment(Environment):
    """A virtual environment of one script, in a folder of this node."""

    def __init__(
        self, s3: "S3Client", run: S3Location, folder: Path, *, code: Path, source: str, python: str | None
    ) -> None:
        """`source` is the name of a uv.lock or of a requirements file in the folder `code`."""
        super().__init__(s3, run, folder, code=code, requirements=source)
        self._lock = code / source if Path(source).name == "uv.lock" else None
        self._wanted = _wanted(python, self._lock)

    @property
    def python(self) -> Path:
        """The interpreter of the environment."""
        return self._folder / "bin" / "python"

    def _fingerprint(self, wheels: Mapping[str, str]) -> str:
        python = platform.python_version() if self._wanted == sys.executable else self._wanted
        if self._lock is None:
            requirements = read_requirements(self._code, self._name)
            return fingerprint(self._code, requirements, {}, wheels, python=python, platform=PLATFORM)
        local = code_files(self._code) if _LOCAL.search(self._lock.read_text()) else [self._name]
        files = {name: sha256(self._code / name) for name in local}
        return fingerprint_of({"files": files, "python": python, "platform": PLATFORM})

    def _restore(self, place: S3Location) -> str:
        """Install from the instance's cache if it has every package, otherwise from S3. Returns what was done."""
        if self._installed_mark is not None and self._installed_mark.exists():
            with contextlib.suppress(UsageError):
                self._install(None, UV_OFFLINE="1")
                return f"linked those of {self._name} from this instance's cache"
        done = super()._restore(place)
        self._make_python()
        return done

    def _install(self, wheels: Path | None, **variables: str) -> str:
        self._make_python()
        problem = f"the environment of {self._name} cannot be installed"
        next_step = f"make it on your machine first: uv {'sync' if self._lock else 'pip install -r'}"
        if self._lock is not None:
            self._uv(
                # The project itself is not installed: the script is found in its folder, which differs between runs.
                *("sync", "--frozen", "--no-default-groups", "--no-editable", "--no-install-project"),
                *("--python", self.python),  # whatever .python-version says
                problem=problem,
                next_step=next_step,
                UV_PROJECT_ENVIRONMENT=str(self._folder),
                **variables,
            )
        else:
            command = ("pip", "install", "--python", self.python)
            self._uv(*command, *self._requirements(wheels), problem=problem, next_step=next_step)
        count = len(self._installed())
        self._add_platform(wheels, **variables)
        if self._installed_mark is not None:
            self._installed_mark.mkdir(parents=True, exist_ok=True)
        return f"{count} of {self._name} in an environment of their own"

    def _make_python(self) -> None:
        """Make the environment, or repair the links to its Python after it was unpacked."""
        self._uv(
            *("venv", "--relocatable", "--allow-existing", "--no-project", "--python", self._wanted, self._folder),
            problem=f"arguments.python: the image has no Python {self._wanted}, and uv cannot fetch it",
            next_step=f"use the image's Python {platform.python_version()}, or let the job reach github.com",
            UV_PYTHON_INSTALL_DIR=str(self._folder / PYTHONS),
        )

    def _add_platform(self, wheels: Path | None, **variables: str) -> None:
        """Install what our own code needs and the environment lacks, and nothing newer than in the image."""
        installed, image = self._installed(), image_packages()
        missing = [f"{name}<={image[name]}" if name in image else name for name in PLATFORM if name not in installed]
        next_step = f"add {', '.join(PLATFORM)} to it, in versions that fit; the image has "
        next_step += ", ".join(f"{name} {image[name]}" for name in PLATFORM if name in image)
        if missing:
            fixed = self._written("fixed", (f"{name}=={version}" for name, version in installed.items()))
            source: list[str | Path] = ["--no-index", "--find-links", wheels] if wheels else []
            self._uv(
                *("pip", "install", "--python", self.python, "--constraint", fixed, *source, *missing),
                problem=f"the packages that the platform needs do not fit those of {self._name}",
                next_step=next_step,
                **variables,
            )
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
                f"{self._name}: the platform's code fails in this environment: {error}", next_step=next_step
            )

    def _installed(self) -> dict[str, str]:
        paths = self._folder.glob("lib/python*/site-packages/*.dist-info")
        found = (path.name.removesuffix(".dist-info").split("-", 1) for path in paths)
        return {package_name(name): version for name, version in sorted(found)}

    @property
    def _installed_mark(self) -> Path | None:
        """A folder in uv's cache that exists if the cache has all packages of the lock. None without such a cache."""
        return Path(self._cache) / "trainyard" / self._digest if self._cache and self._lock is not None else None

    def _variables(self) -> dict[str, str]:
        sources = self._lock.parent / "src" if self._lock is not None else None
        return {
            "PATH": str(self._folder / "bin"),
            "VIRTUAL_ENV": str(self._folder),
            "PYTHONPATH": str(sources) if sources is not None and sources.is_dir() else "",
        }


def _wanted(python: str | None, lock: Path | None) -> str:
    """Return the Python to ask uv for: the image's if it fits, otherwise a version or versions."""
    if python is not None:
        return sys.executable if f"{platform.python_version()}.".startswith(f"{python}.") else python
    found = re.search(r'^requires-python = "(.*)"$', lock.read_text(), re.MULTILINE) if lock is not None else None
    fits = found is None or SpecifierSet(found[1]).contains(platform.python_version())
    return sys.executable if found is None or fits else found[1]
