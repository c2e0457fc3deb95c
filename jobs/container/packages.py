"""Install the packages of a script or a tracker with uv, once for all jobs that need the same packages.

    s3://<run bucket>/<team>/environments/<fingerprint>.tar   what uv has installed

The main node installs and uploads the packages. The other nodes and every later attempt download them. If a job's
scratch folder is on the instance's own disks, uv's cache is next to it, and uv installs hard links to the cache.

`Environment` adds packages to the image's without changing those: uv treats them as installed, with their versions as
constraints. A script's own environment (jobs.container.script.own_environment) has none of the image's packages.
"""

import hashlib
import importlib.metadata
import json
import logging
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from jobs.aws import s3 as object_store
from jobs.aws.s3 import sha256
from jobs.core.errors import TrainyardError, UsageError
from jobs.core.instance_types import SCRATCH
from jobs.core.locations import S3Location
from jobs.core.run import CACHE_TAG
from jobs.spec.requirements import Requirements, read_requirements

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

log = logging.getLogger("trainyard")

ENVIRONMENTS = "environments/"
"""The folder of a team's environments, next to its runs."""

INSTALL_SECONDS = 1800.0

CACHE_VARIABLE = "UV_CACHE_DIR"

_POLL_SECONDS = 2.0

_SHOWN_LINES = 12
"""Number of uv's last lines that an error shows."""


def image_packages() -> dict[str, str]:
    """Return the version of every package of the image."""
    return {name: distribution.version for name, distribution in _image_distributions().items()}


def _image_distributions() -> dict[str, importlib.metadata.Distribution]:
    found: dict[str, importlib.metadata.Distribution] = {}
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata["Name"]
        if name:
            found.setdefault(canonicalize_name(name), distribution)
    return dict(sorted(found.items()))


def _is_version(text: str) -> bool:
    """Return whether uv accepts a version. Some Ubuntu packages in Habana's image have invalid versions."""
    try:
        Version(text)
    except InvalidVersion:
        return False
    return True


def fingerprint(
    code: Path, requirements: Requirements, packages: Mapping[str, str], wheels: Mapping[str, str], **more: object
) -> str:
    """Return the SHA-256 of everything that an environment is installed from, in hex.

    `wheels` maps the available wheels to their hashes. If a requirement is a folder of the code, all files of the code
    count, because its installation may use any of them.
    """
    paths = {path for _, path in requirements.paths}
    if any((code / path).is_dir() for path in paths):
        paths = set(code_files(code))
    content = {
        "requirements": [line.text for line in requirements.lines],
        "constraints": [line.text for line in requirements.constraints],
        "files": {path: sha256(code / path) for path in sorted(paths)},
        "image": dict(packages),
        "wheels": dict(wheels),
        "python": platform.python_version(),
        **more,
    }
    return fingerprint_of(content)


def fingerprint_of(content: Mapping[str, object]) -> str:
    """Return the SHA-256 of an environment's content for this machine, in hex."""
    machine = {"machine": platform.machine(), "libc": platform.libc_ver()}
    return hashlib.sha256(json.dumps({**content, **machine}, sort_keys=True).encode()).hexdigest()


def code_files(code: Path) -> list[str]:
    return sorted(path.relative_to(code).as_posix() for path in code.rglob("*") if path.is_file())


class Environment:
    """The packages of one script or tracker in addition to the image's, in a folder of this node."""

    def __init__(self, s3: "S3Client", run: S3Location, folder: Path, *, code: Path, requirements: str) -> None:
        """`requirements` is the name of a file in the folder `code`."""
        self._s3 = s3
        self._folder = folder
        self._code = code
        self._name = requirements
        self._team = S3Location(run.bucket, run.key.partition("/")[0])
        self._digest = ""
        on_disks = Path(SCRATCH) in folder.parents
        self._cache = os.environ.get(CACHE_VARIABLE) or (f"{SCRATCH}/trainyard-uv" if on_disks else None)

    def make(self, *, wheels: Path | None, installs: bool) -> dict[str, str]:
        """Install or download the packages. Returns the variables with which a process finds them.

        With `wheels`, uv installs from that folder only. With `installs=False`, this node waits until another has
        installed the packages. Raises UsageError if the requirements cannot be met.
        """
        self._digest = self._fingerprint(
            {path.name: sha256(path) for path in sorted(wheels.iterdir())} if wheels else {}
        )
        place = self._team / f"{ENVIRONMENTS}{self._digest}.tar"
        started = time.monotonic()
        if self._is_uploaded(place, wait=not installs):
            what = self._restore(place)
        else:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder.mkdir(parents=True)
            what = self._install(wheels)
            self._store(place)
        log.info("packages: %s in %.1f s", what, time.monotonic() - started)
        return self._variables()

    def _is_uploaded(self, place: S3Location, *, wait: bool) -> bool:
        until = time.monotonic() + INSTALL_SECONDS
        while place.key not in {item["Key"] for item in object_store.listing(self._s3, place, prefix=place.key)}:
            if not wait:
                return False
            if time.monotonic() > until:
                raise TrainyardError(f"the main node did not install {self._name} within {INSTALL_SECONDS:.0f} s")
            time.sleep(_POLL_SECONDS)
        return True

    def _restore(self, place: S3Location) -> str:
        """Download and unpack the packages. Returns what was done, for the log."""
        archive = self._folder.with_suffix(".tar")
        object_store.download(self._s3, place, archive)
        try:
            with tarfile.open(archive) as packed:
                _extract(packed, self._folder)
        except (tarfile.TarError, EOFError, ValueError) as error:
            raise UsageError(
                f"{place}, the archive of the packages of {self._name}, is damaged: {error}",
                next_step=f"aws s3 rm {place}, then submit the spec again to reinstall them",
            ) from None
        archive.unlink()
        return f"{self._name} restored from S3"

    def _store(self, place: S3Location) -> None:
        archive = self._folder.with_suffix(".tar")
        with tarfile.open(archive, "w") as packed:
            packed.add(self._folder, arcname=".", filter=_unless_absolute_link)
        object_store.upload(self._s3, archive, place, tag=CACHE_TAG)
        archive.unlink()

    def _fingerprint(self, wheels: Mapping[str, str]) -> str:
        return fingerprint(self._code, read_requirements(self._code, self._name), image_packages(), wheels)

    def _install(self, wheels: Path | None) -> str:
        """Install the packages with uv. Returns what was installed, for the log."""
        image = {name: found for name, found in _image_distributions().items() if _is_version(found.version)}
        pins = self._write_lines("image", (f"{name}=={found.version}" for name, found in image.items()))
        # uv looks for installed packages only in the prefix, and reads only their metadata.
        place = self._folder / f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
        stubs = [place / f"{name.replace('-', '_')}-{found.version}.dist-info" for name, found in image.items()]
        for path, found in zip(stubs, image.values(), strict=True):
            path.mkdir(parents=True)
            (path / "METADATA").write_text(found.read_text("METADATA") or found.read_text("PKG-INFO") or "")
            (path / "RECORD").touch()
        self._uv(
            *("pip", "install", "--python", sys.executable, "--prefix", self._folder, "--constraint", pins),
            *self._requirements(wheels),
            problem=f"{self._name} cannot be installed on top of the image's packages",
            next_step="require versions that match the image's (trainyard images list), or leave them open",
        )
        for path in stubs:
            shutil.rmtree(path)
        names = sorted(path.name.split("-")[0] for path in self._folder.rglob("*.dist-info"))
        return ", ".join(names) or "nothing new"

    def _requirements(self, wheels: Path | None) -> list[str | Path]:
        """Return uv's options for the requirements file and the files that it includes."""
        requirements = read_requirements(self._code, self._name)
        constraints = self._write_lines("constraints", (line.text for line in requirements.constraints))
        required = self._write_lines("requirements", (line.text for line in requirements.lines))
        source: list[str | Path] = ["--no-index", "--find-links", wheels] if wheels else []
        return ["--constraint", constraints, "--requirement", required, *source]

    def _uv(self, *arguments: str | Path, problem: str, next_step: str, **variables: str) -> None:
        """Run uv in the folder of the requirements. Raises UsageError if uv fails, TrainyardError at a timeout."""
        cache = {CACHE_VARIABLE: self._cache} if self._cache else {}
        try:
            done = subprocess.run(
                # Isolated, because a module of the code may have the name of a standard module.
                [sys.executable, "-I", "-m", "uv", *arguments, "--quiet", "--system-certs"],
                cwd=(self._code / self._name).parent,
                env={**os.environ, **cache, "UV_LINK_MODE": "hardlink", **variables},
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
                next_step="pin its packages, so that uv does not have to try versions, or set a wheelhouse",
            ) from None
        if done.returncode:
            raise UsageError(f"{problem}: {_uv_error(done.stdout)}", next_step=next_step)

    def _write_lines(self, suffix: str, lines: Iterable[str]) -> Path:
        path = self._folder.with_suffix(f".{suffix}")
        path.write_text("".join(f"{line}\n" for line in lines))
        return path

    def _variables(self) -> dict[str, str]:
        folders = sorted(str(path) for path in self._folder.glob("lib/python*/site-packages"))
        return {"PYTHONPATH": ":".join(folders), "PATH": str(self._folder / "bin")}


def _uv_error(output: str) -> str:
    """Return uv's last lines as one line: the error, then its causes."""
    lines = [line.strip() for line in output.splitlines()[-_SHOWN_LINES:]]
    return " ".join(filter(None, lines)).removeprefix("error: ").replace(" cause: ", ": ")


def _unless_absolute_link(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Leave out a link to this machine's Python, which another node creates itself."""
    return None if entry.issym() and entry.linkname.startswith("/") else entry


def _extract(packed: tarfile.TarFile, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if hasattr(tarfile, "data_filter"):
        packed.extractall(folder, filter="data")
    else:
        packed.extractall(folder)  # noqa: S202 - packed by this team's own jobs; this Python has no filters
