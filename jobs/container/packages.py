"""Packages of a script or a tracker, installed on top of the image's packages, once for all jobs that need the same.

    s3://<run bucket>/<team>/environments/<fingerprint>.tar   what pip has installed, without the image's packages

The image's packages do not change: pip gets each of their versions as a constraint. The main node installs and uploads
the packages. The other nodes and every later attempt download them.
"""

import hashlib
import importlib.metadata
import json
import logging
import platform
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from jobs.aws import s3 as object_store
from jobs.aws.s3 import sha256
from jobs.core.errors import TrainyardError, UsageError
from jobs.core.locations import S3Location
from jobs.core.run import CACHE_TAG
from jobs.spec.requirements import Requirements, read_requirements

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

log = logging.getLogger("trainyard")

ENVIRONMENTS = "environments/"
"""The folder of a team's environments, next to its runs."""

INSTALL_SECONDS = 1800.0

_POLL_SECONDS = 2.0

_SHOWN_LINES = 12
"""Number of pip's last lines that an error shows."""


def image_packages() -> dict[str, str]:
    """Return the version of every package of the image."""
    found: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata["Name"]
        if name:
            found.setdefault(name.lower().replace("_", "-"), distribution.version)
    return dict(sorted(found.items()))


def fingerprint(code: Path, requirements: Requirements, packages: Mapping[str, str], wheels: Mapping[str, str]) -> str:
    """Return the SHA-256 of everything that an environment is installed from, in hex.

    `wheels` maps the wheels it may be installed from to their hashes. If a requirement is a folder of the code, all
    files of the code count, because its installation may use any of them.
    """
    paths = {path for _, path in requirements.paths}
    if any((code / path).is_dir() for path in paths):
        paths = {path.relative_to(code).as_posix() for path in code.rglob("*") if path.is_file()}
    content = {
        "requirements": [line.text for line in requirements.lines],
        "constraints": [line.text for line in requirements.constraints],
        "files": {path: sha256(code / path) for path in sorted(paths)},
        "image": dict(packages),
        "wheels": dict(wheels),
        "python": platform.python_version(),
        "machine": platform.machine(),
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


class Environment:
    """The packages of one script or tracker in addition to the image's, in a folder of this node."""

    def __init__(self, s3: "S3Client", run: S3Location, folder: Path, *, code: Path, requirements: str) -> None:
        """`requirements` is the name of a file in the folder `code`."""
        self._s3 = s3
        self._folder = folder
        self._code = code
        self._name = requirements
        self._team = S3Location(run.bucket, run.key.partition("/")[0])

    def make(self, *, wheels: Path | None, installs: bool) -> dict[str, str]:
        """Install or download the packages. Returns the variables with which a process finds them.

        With `wheels`, they are installed from that folder only. With `installs=False`, another node installs them and
        this one waits. Raises UsageError if the requirements cannot be met.
        """
        requirements = read_requirements(self._code, self._name)
        packages = image_packages()
        digests = {path.name: sha256(path) for path in sorted(wheels.iterdir())} if wheels else {}
        place = self._team / f"{ENVIRONMENTS}{fingerprint(self._code, requirements, packages, digests)}.tar"
        archive = self._folder.with_suffix(".tar")
        started = time.monotonic()
        if self._is_there(place, wait=not installs):
            object_store.download(self._s3, place, archive)
            try:
                with tarfile.open(archive) as packed:
                    _extract(packed, self._folder)
            except (tarfile.TarError, EOFError, ValueError) as error:
                raise UsageError(
                    f"{place}, the archive of the packages of {self._name}, is damaged: {error}",
                    next_step=f"aws s3 rm {place}, then submit the spec again to reinstall them",
                ) from None
            log.info("packages: restored those of %s in %.1f s", self._name, time.monotonic() - started)
        else:
            self._install(requirements, packages, wheels)
            with tarfile.open(archive, "w") as packed:
                packed.add(self._folder, arcname=".")
            object_store.upload(self._s3, archive, place, tag=CACHE_TAG)
            names = sorted(path.name.split("-")[0] for path in self._folder.rglob("*.dist-info"))
            log.info("packages: %s in %.1f s", ", ".join(names) or "nothing new", time.monotonic() - started)
        archive.unlink()
        return self._variables()

    def _is_there(self, place: S3Location, *, wait: bool) -> bool:
        until = time.monotonic() + INSTALL_SECONDS
        while place.key not in {item["Key"] for item in object_store.listing(self._s3, place, prefix=place.key)}:
            if not wait:
                return False
            if time.monotonic() > until:
                raise TrainyardError(f"the main node did not install {self._name} within {INSTALL_SECONDS:.0f} s")
            time.sleep(_POLL_SECONDS)
        return True

    def _install(self, requirements: Requirements, packages: Mapping[str, str], wheels: Path | None) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True)
        image = self._written("image", (f"{name}=={version}" for name, version in packages.items()))
        constraints = self._written("constraints", (line.text for line in requirements.constraints))
        asked = self._written("requirements", (line.text for line in requirements.lines))
        source = ["--no-index", "--find-links", str(wheels)] if wheels else []
        command = [
            # Isolated, because a module of the code may have the name of a standard one.
            *(sys.executable, "-I", "-m", "pip", "install", "--prefix", str(self._folder)),
            *("--constraint", str(image), "--constraint", str(constraints), "--requirement", str(asked)),
            *("--no-compile", "--no-cache-dir", "--no-warn-script-location", "--disable-pip-version-check"),
            *("--progress-bar", "off", "--no-input", *source),
        ]
        try:
            done = subprocess.run(
                command,
                cwd=(self._code / self._name).parent,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=INSTALL_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise TrainyardError(
                f"{self._name} was not installed within {INSTALL_SECONDS:.0f} s",
                next_step="pin its packages, so that pip does not have to try versions, or set a wheelhouse",
            ) from None
        if done.returncode:
            raise UsageError(
                f"{self._name} cannot be installed on top of the image's packages: {_pip_errors(done.stdout, image)}",
                next_step="require versions that match the image's (trainyard images list), or leave them open",
            )

    def _written(self, suffix: str, lines: Iterable[str]) -> Path:
        path = self._folder.with_suffix(f".{suffix}")
        path.write_text("".join(f"{line}\n" for line in lines))
        return path

    def _variables(self) -> dict[str, str]:
        folders = sorted(
            str(path)
            for path in self._folder.glob("**/python*/*-packages")
            if path.name in ("site-packages", "dist-packages")
        )
        return {"PYTHONPATH": ":".join(folders), "PATH": str(self._folder / "bin")}


def _pip_errors(output: str, image: Path) -> str:
    """Return pip's error lines or, without any, its last lines, joined to one line."""
    text = output.replace(f" (from -c {image} ", " (the image's, ")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith(("ERROR:", "The conflict", "The user requested"))]
    conflict = [line for line in lines if " depends on " in line or "(constraint)" in line]
    return "; ".join(dict.fromkeys([*errors, *conflict])) or "; ".join(lines[-_SHOWN_LINES:])


def _extract(packed: tarfile.TarFile, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if hasattr(tarfile, "data_filter"):
        packed.extractall(folder, filter="data")
    else:
        packed.extractall(folder)  # noqa: S202 - packed by this team's own jobs; this Python has no filters
