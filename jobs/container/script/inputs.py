"""Download a script's inputs and its code to a node, and check the code against its fingerprint."""

import logging
import shutil
import threading
import time
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from jobs.aws import s3 as object_store
from jobs.container.data.sources import hub_folder
from jobs.core.errors import NotFoundError, UsageError
from jobs.core.locations import HUB, S3, S3Location, refuse_unresolved
from jobs.core.words import counted, size
from jobs.spec.code import fingerprint_of, read_archive, write_file

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client


log = logging.getLogger("trainyard")

PROGRESS_SECONDS = 30.0
"""Interval between two log lines about an input that is being downloaded."""


def fetch(s3: "S3Client", name: str, location: str, folder: Path) -> Path:
    """Download an input, and return its path on this node. Raises NotFoundError if it does not exist."""
    refuse_unresolved(location)
    started = time.monotonic()
    if location.startswith(HUB):
        found = hub_folder(location, "model")
    elif location.startswith(S3):
        found = _from_s3(s3, name, location, folder)
    else:
        found = Path(location)
        if not found.exists():
            raise NotFoundError(f"inputs.{name}: {location} does not exist", next_step="check the path")
        return found
    log.info("input %s: %s, %s in %.1f s", name, location, size(_bytes(found)), time.monotonic() - started)
    return found


def _from_s3(s3: "S3Client", name: str, location: str, folder: Path) -> Path:
    place = S3Location.parse(location.rstrip("/"))
    sizes = {item["Key"]: item["Size"] for item in object_store.listing(s3, place, prefix=place.key)}
    below = [key.removeprefix(f"{place.key}/") for key in sizes if key.startswith(f"{place.key}/")]
    names = [key for key in below if key and not key.endswith("/")]
    target = folder / name
    if place.key in sizes and not location.endswith("/"):
        log.info("input %s: %s, %s to download", name, location, size(sizes[place.key]))
        _check_room(name, location, sizes[place.key], folder)
        path = target / PurePosixPath(place.key).name
        object_store.download(s3, place, path, on_bytes=_Progress(name, sizes[place.key]))
        return path
    if not names:
        raise NotFoundError(f"inputs.{name}: {location} does not exist", next_step=f"aws s3 ls {location}")
    total = sum(sizes[f"{place.key}/{key}"] for key in names)
    log.info("input %s: %s, %s, %s to download", name, location, counted(len(names), "file"), size(total))
    _check_room(name, location, total, folder)
    object_store.download_all(s3, place, names, target, on_bytes=_Progress(name, total))
    return target


class _Progress:
    """Logs at an interval how much of an input has been downloaded."""

    def __init__(self, name: str, total_bytes: int) -> None:
        self._name, self._total_bytes = name, total_bytes
        self._bytes = 0
        self._logged_at = time.monotonic()
        self._lock = threading.Lock()

    def __call__(self, more_bytes: int) -> None:
        with self._lock:
            self._bytes += more_bytes
            if time.monotonic() - self._logged_at < PROGRESS_SECONDS:
                return
            self._logged_at = time.monotonic()
        log.info("input %s: %s of %s downloaded", self._name, size(self._bytes), size(self._total_bytes))


def _check_room(name: str, location: str, size_bytes: int, folder: Path) -> None:
    """Raise UsageError if an input does not fit on the disk, before hours are spent downloading part of it."""
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if size_bytes > free:
        raise UsageError(
            f"inputs.{name}: {location} is {size_bytes / 1e9:.1f} GB; this node's disk has {free / 1e9:.1f} GB free",
            next_step=f"set streamed_inputs: [{name}], or use an instance with a larger volume",
        )


def _bytes(path: Path) -> int:
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return sum(file.stat().st_size for file in files)


def unpack(s3: "S3Client", location: str, folder: Path) -> int:
    """Unpack the code at `location` into `folder`. Returns the number of files.

    Raises NotFoundError if there is none, UsageError if it does not match the fingerprint in its name.
    """
    expected = fingerprint_of(location)
    content = object_store.read(s3, S3Location.parse(location))
    if content is None:
        raise NotFoundError(f"the code of this run is missing: {location}", next_step="submit the spec again")
    files = read_archive(content, location=location, fingerprint=expected)
    for file, data in files:
        write_file(file, data, folder)
    return len(files)
