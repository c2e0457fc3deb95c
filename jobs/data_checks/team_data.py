"""Upload, list and delete a team's files in the stage's data bucket.

Each upload carries the SHA-256 of its bytes, which S3 verifies.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jobs.aws import s3 as object_store
from jobs.aws.connection import Aws
from jobs.aws.s3 import sha256
from jobs.core.artifact import content_fingerprint
from jobs.core.errors import NotFoundError, UsageError, did_you_mean
from jobs.core.locations import DATA, S3Location, stays_below
from jobs.core.stage import SHARED_PREFIX, DeployedStage

HASH = "trainyard-sha256"
"""The metadata key of an object's content hash."""


@dataclass(frozen=True)
class Entry:
    """A file or folder in a team's data."""

    location: str
    files: int
    size: int
    fingerprint: str


def place_of(stage: DeployedStage, location: str) -> S3Location:
    """Return the S3 location of `data://team/name`. Raises UsageError if it is not a valid location of a team."""
    team, _, name = location.removeprefix(DATA).partition("/")
    if not location.startswith(DATA) or not team or (name and not stays_below(name.rstrip("/"))):
        raise UsageError(f"'{location}' is not a data location", next_step=f"use {DATA}TEAM/NAME")
    known = (*stage.teams, SHARED_PREFIX)
    if team not in known:
        raise NotFoundError(f"{location}: team '{team}' not found in stage '{stage.name}'{did_you_mean(team, known)}")
    return S3Location(stage.data_bucket, f"{team}/{name}")


def files_of(source: Path, place: S3Location) -> dict[Path, S3Location]:
    """Return the target of each file of `source`, a file or a folder. Raises NotFoundError if there are no files."""
    if source.is_file():
        return {source: place / source.name if place.key.endswith("/") else place}
    names = object_store.files_below(source) if source.is_dir() else []
    if not names:
        what = "has no files" if source.is_dir() else "does not exist"
        raise NotFoundError(f"{source} {what}", next_step="check the path")
    return {source / name: place / name for name in names}


def put(aws: Aws, source: Path, place: S3Location, *, sent: Callable[[int], None]) -> bool:
    """Upload a file unless S3 has it, and return whether it was uploaded. `sent` gets the size of each stored part."""
    hashed, size = sha256(source), source.stat().st_size
    if _is_uploaded(aws, place, size, hashed):
        sent(size)
        return False
    arguments: dict[str, Any] = {"ChecksumAlgorithm": "SHA256", "Metadata": {HASH: hashed}}
    aws.s3.upload_file(str(source), place.bucket, place.key, ExtraArgs=arguments, Callback=sent)
    return True


def _is_uploaded(aws: Aws, place: S3Location, size: int, hashed: str) -> bool:
    try:
        found = aws.s3.head_object(Bucket=place.bucket, Key=place.key)
    except Exception as error:
        if object_store.is_missing(aws.s3, place, error):
            return False
        raise
    return found["ContentLength"] == size and found["Metadata"].get(HASH) == hashed


def entry(aws: Aws, stage: DeployedStage, place: S3Location) -> Entry:
    """Return the file or folder at a location. Raises NotFoundError if there is none."""
    found = object_store.identity(aws.s3, S3Location(place.bucket, place.key.rstrip("/")))
    files = [found] if "etag" in found and not isinstance(found["etag"], dict) else list(found.values())
    location = DATA + str(place).removeprefix(f"s3://{stage.data_bucket}/")
    return Entry(location, len(files), sum(file["bytes"] for file in files), content_fingerprint(found))


def entries(aws: Aws, stage: DeployedStage, place: S3Location) -> Iterator[Entry]:
    """Yield the files and folders in a folder, or the file itself. Raises NotFoundError if there is nothing."""
    folder = place.key.rstrip("/") + "/"
    if not place.key.endswith("/") and object_store.exists(aws.s3, place):
        yield entry(aws, stage, place)
        return
    pages = aws.s3.get_paginator("list_objects_v2").paginate(Bucket=place.bucket, Prefix=folder, Delimiter="/")
    keys = [
        key
        for page in pages
        for key in [
            *(item["Prefix"] for item in page.get("CommonPrefixes", [])),
            *(item["Key"] for item in page.get("Contents", []) if item["Key"] != folder),
        ]
    ]
    if not keys:
        raise NotFoundError(f"{DATA}{folder} is empty", next_step=f"trainyard data put SOURCE {DATA}{folder}NAME")
    for key in sorted(keys):
        yield entry(aws, stage, S3Location(place.bucket, key))


def remove(aws: Aws, place: S3Location) -> None:
    """Delete a file, or all files in a folder."""
    folder = S3Location(place.bucket, place.key.rstrip("/"))
    names = list(object_store.sizes(aws.s3, folder))
    object_store.delete_all(aws.s3, folder, names)
    if not place.key.endswith("/"):
        aws.s3.delete_object(Bucket=place.bucket, Key=place.key)
