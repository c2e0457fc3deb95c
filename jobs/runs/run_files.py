"""A run's files by their names, wherever they are: on S3, or in a folder that `trainyard fetch` has filled."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from jobs.aws import s3 as object_store
from jobs.core.locations import S3Location

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client


class Listed(NamedTuple):
    """A file's size and the time of its last change."""

    size_bytes: int
    changed_at: datetime


class RunFiles(Protocol):
    """The files of one run."""

    def read(self, name: str) -> bytes | None:
        """Return a file's content; None if there is none."""
        ...

    def listed(self, below: str = "") -> Mapping[str, Listed]:
        """Return the files whose names begin with `below`, by their names."""
        ...

    def place(self, name: str) -> str:
        """Return where a file is, for messages."""
        ...


@dataclass(frozen=True)
class StoredFiles:
    """Files on S3. Threads may share it: its client is made before."""

    s3: "S3Client"
    location: S3Location

    def read(self, name: str) -> bytes | None:
        return object_store.read_once(self.s3, self.location / name)

    def listed(self, below: str = "") -> Mapping[str, Listed]:
        found = object_store.listing(self.s3, self.location, prefix=self.location.key + below)
        return {
            item["Key"].removeprefix(self.location.key): Listed(item["Size"], item["LastModified"]) for item in found
        }

    def place(self, name: str) -> str:
        return str(self.location / name)


@dataclass(frozen=True)
class FetchedFiles:
    """Files in a folder of this machine."""

    folder: Path

    def read(self, name: str) -> bytes | None:
        path = self.folder / name
        return path.read_bytes() if path.is_file() else None

    def listed(self, below: str = "") -> Mapping[str, Listed]:
        root = self.folder / below
        found = {path: path.stat() for path in root.rglob("*") if path.is_file()}
        return {
            path.relative_to(self.folder).as_posix(): Listed(
                status.st_size, datetime.fromtimestamp(status.st_mtime).astimezone()
            )
            for path, status in found.items()
        }

    def place(self, name: str) -> str:
        return str(self.folder / name)
