"""Requirements of a script or a tracker, installed on top of the image's packages: once for all that ask for the same.

    s3://<run bucket>/<team>/environments/<fingerprint>.tar   what pip has installed, and nothing of the image's own

The image's packages stay as they are: pip gets each of their versions as a constraint. The main node installs and
uploads; the others, and every later attempt, take what is there.
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
"""Folder of a team's environments, beside its runs."""

INSTALL_SECONDS = 1800.0

_POLL_SECONDS = 2.0

_TOLD_LINES = 12
"""So many of pip's last lines are told where it fails."""


def image_packages() -> dict[str, str]:
    """Return the version of every package that the image has."""
    found: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata["Name"]
        if name:
            found.setdefault(name.lower().replace("_", "-"), distribution.version)
    return dict(sorted(found.items()))


def fingerprint(code: Path, requirements: Requirements, packages: Mapping[str, str], wheels: Mapping[str, str]) -> str:
    """Return 64 digits that identify an environment by all that it is installed from.

    `wheels` are those it may come from, with hashes. An installed folder may use any file of the code, so all count.
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
    """The packages of one script beside the image's own, in a folder of this node."""

    def __init__(self, s3: "S3Client", run: S3Location, folder: Path, *, code: Path, requirements: str) -> None:
        """`requirements` is a file of the folder `code`."""
        self._s3 = s3
        self._folder = folder
        self._code = code
        self._name = requirements
        self._team = S3Location(run.bucket, run.key.partition("/")[0])

    def make(self, *, wheels: Path | None, installs: bool) -> dict[str, str]:
        """Return the variables with which a process finds the packages, once they are here.

        `wheels`: the only place that they come from. `installs`: False waits for another node to do it. Raises
        UsageError where the requirements cannot be met.
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
                    f"{place}, which has the packages of {self._name}, is damaged: {error}",
                    next_step=f"aws s3 rm {place}, then submit the spec again: they are installed again",
                ) from None
            log.info("packages: those of %s, made before, in %.1f s", self._name, time.monotonic() - started)
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
                raise TrainyardError(f"the main node has not installed {self._name} within {INSTALL_SECONDS:.0f} s")
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
            # Isolated: a module of the code may have the name of one of Python's own.
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
                next_step="pin its packages, so that pip need not try versions, or give a wheelhouse",
            ) from None
        if done.returncode:
            raise UsageError(
                f"{self._name} cannot be installed on top of the image's packages: {_told(done.stdout, image)}",
                next_step="ask for versions that fit those of the image (trainyard images list), or leave them open",
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


def _told(output: str, image: Path) -> str:
    """Return what pip says of its failure: its lines of errors, or its last ones, on one line."""
    text = output.replace(f" (from -c {image} ", " (the image's, ")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    told = [line for line in lines if line.startswith(("ERROR:", "The conflict", "The user requested"))]
    conflict = [line for line in lines if " depends on " in line or "(constraint)" in line]
    return "; ".join(dict.fromkeys([*told, *conflict])) or "; ".join(lines[-_TOLD_LINES:])


def _extract(packed: tarfile.TarFile, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if hasattr(tarfile, "data_filter"):
        packed.extractall(folder, filter="data")
    else:
        packed.extractall(folder)  # noqa: S202 - what this team's own jobs have packed, by an older Python
