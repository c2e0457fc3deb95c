"""Files on S3: one client with retries, and whole folders moved by several threads.

AWS_ENDPOINT_URL and the rest of boto3's own settings count, so that the same code talks to the emulator.
"""

import contextlib
import hashlib
import logging
import random
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, TypeVar
from urllib.parse import urlencode

from jobs.aws.errors import error_code, explain, is_denied, is_loopback, is_refused_connection, is_transient
from jobs.core.errors import NotFoundError, TrainyardError, UsageError
from jobs.core.locations import S3Location, stays_below

if TYPE_CHECKING:
    from boto3.s3.transfer import TransferConfig
    from mypy_boto3_s3.client import S3Client
    from mypy_boto3_s3.type_defs import ObjectTypeDef


class HashingStream:
    """A stream that is read on and never back, as boto3 sends one part by part: each byte is read once for both."""

    def __init__(self, stream: BinaryIO) -> None:
        self.bytes = 0
        """How many were read."""
        self._stream = stream
        self._digest = hashlib.sha256()

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()

    def read(self, size: int = -1) -> bytes:
        block = self._stream.read(size)
        self._digest.update(block)
        self.bytes += len(block)
        return block


def sha256(path: Path) -> str:
    """Return the hash of a file."""
    with path.open("rb") as stream:
        hashing = HashingStream(stream)
        while hashing.read(1 << 22):
            pass
    return hashing.sha256


log = logging.getLogger("trainyard")

THREADS = 8
"""Files moved at once; a single stream would leave most of an instance's network idle."""

PARTS = 4
"""Parts of one large file moved at once."""

_MOST_PARTS = 10_000
"""Of one object (Amazon S3 User Guide, "Amazon S3 multipart upload limits")."""

_MOST_KEY_BYTES = 1024
"""Of the name of an object (Amazon S3 User Guide, "Naming Amazon S3 objects")."""

RETRIES = 10
"""Tries of one request by botocore, whose pauses add up to a quarter of a minute at errors, to one at throttling. All
requests of a client share some dozens of further tries, which the parts of large files use up within a second or two
when S3 fails altogether."""

RETRY_SECONDS = 600.0
"""How long an operation is started over after all its tries have failed: an S3 outage of minutes ends no job."""

_LONGEST_PAUSE_SECONDS = 30.0

DENIED_TRIES = 3
"""Tries of a request that is denied, within some seconds: while credentials or policies change, S3 denies what it
allows before and after. What is denied each time is not to be had."""

_MISSING = frozenset({"404", "NoSuchKey", "NotFound"})

Tag = tuple[str, str]
"""Key and value of an S3 object tag."""

Item = TypeVar("Item")
Result = TypeVar("Result")


def connect() -> "S3Client":
    """Return a client; it is thread-safe, and cheap enough (0.1 s) to be made once a process."""
    import boto3
    from botocore.config import Config

    config = Config(
        retries={"mode": "standard", "total_max_attempts": RETRIES},
        connect_timeout=10,
        read_timeout=60,
        max_pool_connections=THREADS * (PARTS + 1),
    )
    with explained("connect to S3"):
        return boto3.client("s3", config=config)


@contextlib.contextmanager
def explained(what: str) -> Iterator[None]:
    """Turn boto3's exceptions into TrainyardErrors that say `what` could not be done, and why."""
    try:
        yield
    except TrainyardError:
        raise
    except Exception as error:
        reason = explain(error)
        if reason is None:
            raise
        raise type(reason)(
            f"cannot {what}: {reason.args[0]}",
            next_step="check that the bucket exists and that the job's role may use it",
        ) from error


def with_retries(what: str, work: Callable[[], Result]) -> Result:
    """Return the result of `work`, which is begun again where S3 or the line to it fails, for RETRY_SECONDS, and
    where S3 denies it, DENIED_TRIES times in all.

    An error that stays is `explained`.
    """
    until = time.monotonic() + RETRY_SECONDS
    pause = 1.0
    denials = 0
    while True:
        try:
            with explained(what):
                return work()
        except TrainyardError as error:
            left = until - time.monotonic()
            denied = is_denied(error.__cause__)
            denials += denied
            may_pass = denials < DENIED_TRIES if denied else _may_pass(error.__cause__)
            if not may_pass or left < pause:
                raise
            again = "trying once more" if denied else f"trying again for {left:.0f} s"
            log.warning("warning: %s; %s", str(error.args[0]).splitlines()[0], again)
        time.sleep(pause * random.uniform(0.5, 1))  # noqa: S311 - that threads do not all come back at once
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)


def read(s3: "S3Client", location: S3Location) -> bytes | None:
    """Return the object, or None where there is none."""
    return with_retries(f"read {location}", lambda: read_once(s3, location))


def read_once(s3: "S3Client", location: S3Location) -> bytes | None:
    """Do the same as `read`, but raise what boto3 raises as soon as botocore has used up its own tries."""
    try:
        return s3.get_object(Bucket=location.bucket, Key=location.key)["Body"].read()
    except s3.exceptions.ClientError as error:
        if is_missing(s3, location, error):
            return None
        raise


def read_range(s3: "S3Client", location: S3Location, start: int, stop: int) -> bytes:
    """Return the object's bytes from `start` up to `stop`."""
    if start >= stop:
        return b""
    answer = s3.get_object(Bucket=location.bucket, Key=location.key, Range=f"bytes={start}-{stop - 1}")
    return answer["Body"].read()


def is_missing(s3: "S3Client", location: S3Location, error: Exception) -> bool:
    """Return whether S3's answer to a request for an object means that there is no such object.

    S3 says 404 only to those who may list the whole bucket. Whoever may list one team's prefix only is told that a
    missing key is forbidden, and so is another team's; a listing of that very key tells the two apart.
    """
    if not is_denied(error):
        return error_code(error) in _MISSING
    try:
        listed = s3.list_objects_v2(Bucket=location.bucket, Prefix=location.key, MaxKeys=1).get("Contents", [])
    except s3.exceptions.ClientError as refusal:
        if is_denied(refusal):
            return False
        raise
    return all(item["Key"] != location.key for item in listed)


def write(s3: "S3Client", location: S3Location, content: bytes, *, tag: Tag | None = None) -> None:
    with_retries(
        f"write {location}",
        lambda: s3.put_object(Bucket=location.bucket, Key=location.key, Body=content, **_tagging(tag)),
    )


def create(s3: "S3Client", location: S3Location, content: bytes, *, tag: Tag | None = None) -> bool:
    """Write the object where there is none: of several that do, one succeeds, and all read what it wrote.

    Return whether what is there now is this content.
    """

    def work() -> bool:
        try:
            s3.put_object(Bucket=location.bucket, Key=location.key, Body=content, IfNoneMatch="*", **_tagging(tag))
        except s3.exceptions.ClientError as error:
            # The second: two wrote at the very same time.
            if error_code(error) not in ("PreconditionFailed", "ConditionalRequestConflict"):
                raise
            return read_once(s3, location) == content  # it is: a first try whose answer was lost
        return True

    return with_retries(f"write {location}", work)


def size(s3: "S3Client", location: S3Location) -> int:
    """Return the bytes of one object. Raises NotFoundError where there is none."""

    def work() -> int:
        try:
            return s3.head_object(Bucket=location.bucket, Key=location.key)["ContentLength"]
        except s3.exceptions.ClientError as error:
            if is_missing(s3, location, error):
                raise NotFoundError(f"{location} does not exist", next_step=f"aws s3 ls {_parent(location)}") from None
            raise

    return with_retries(f"read {location}", work)


def exists(s3: "S3Client", location: S3Location) -> bool:
    """Return whether there is an object of this very name; an error is raised as it comes."""
    try:
        s3.head_object(Bucket=location.bucket, Key=location.key)
    except s3.exceptions.ClientError as error:
        if is_missing(s3, location, error):
            return False
        raise
    return True


def sizes(s3: "S3Client", folder: S3Location) -> dict[str, int]:
    """Return the bytes of every object below the folder, by its name relative to it."""
    prefix = folder.key.rstrip("/") + "/" if folder.key else ""
    objects = listing(s3, folder, prefix=prefix)
    return {item["Key"][len(prefix) :]: item["Size"] for item in objects if not item["Key"].endswith("/")}


def listing(s3: "S3Client", place: S3Location, *, prefix: str) -> list["ObjectTypeDef"]:
    """Return S3's entry for every object whose key begins with `prefix`."""
    pages = s3.get_paginator("list_objects_v2")

    def work() -> list["ObjectTypeDef"]:
        return [
            item for page in pages.paginate(Bucket=place.bucket, Prefix=prefix) for item in page.get("Contents", [])
        ]

    return with_retries(f"list {place}", work)


def identity(s3: "S3Client", place: S3Location) -> dict[str, Any]:
    """Return size and ETag of an object, or of each one below a folder by its name: no content is read.

    Raises NotFoundError where nothing is there.
    """
    objects = {
        item["Key"]: {"bytes": item["Size"], "etag": item["ETag"].strip('"')}
        for item in listing(s3, place, prefix=place.key)
    }
    if place.key in objects and not place.key.endswith("/"):
        return dict(objects[place.key])
    folder = place.key.rstrip("/") + "/"
    below = {
        key.removeprefix(folder): found
        for key, found in objects.items()
        if key.startswith(folder) and not key.endswith("/")
    }
    if not below:
        raise NotFoundError(f"{place} does not exist", next_step=f"aws s3 ls {place}")
    return below


def download(
    s3: "S3Client", location: S3Location, target: Path, *, on_bytes: Callable[[int], None] | None = None
) -> None:
    """Download one object into a file. Raises NotFoundError where there is none.

    `on_bytes` is told the bytes of each part, in whatever thread it comes.
    """
    target.parent.mkdir(parents=True, exist_ok=True)

    def work() -> None:
        try:
            s3.download_file(location.bucket, location.key, str(target), Config=_transfer(), Callback=on_bytes)
        except s3.exceptions.ClientError as error:
            if is_missing(s3, location, error):
                raise NotFoundError(f"{location} does not exist", next_step=f"aws s3 ls {_parent(location)}") from None
            raise

    with_retries(f"read {location}", work)


def download_below(s3: "S3Client", folder: S3Location, name: str, target: Path) -> Path:
    """Download one object below the S3 folder to the same name below a local one, and return where it lies.

    Raises NotFoundError where there is none, UsageError where its name leads out of the local folder.
    """
    path = path_below(target, folder, name)
    download(s3, folder / name, path)
    return path


def download_all(
    s3: "S3Client",
    folder: S3Location,
    names: Iterable[str],
    target: Path,
    *,
    on_bytes: Callable[[int], None] | None = None,
) -> None:
    """Download the named objects below the S3 folder into a local one.

    Raises UsageError, before anything is written, where a name leads out of the local folder.
    """
    paths = {name: path_below(target, folder, name) for name in names}
    in_threads(lambda name: download(s3, folder / name, paths[name], on_bytes=on_bytes), paths)


def path_below(target: Path, folder: S3Location, name: str) -> Path:
    """Return where an object below the S3 folder is written below `target`: whoever may write keys may not write files.

    Raises UsageError where its name leads out of `target`.
    """
    if not stays_below(name):
        raise UsageError(f"{folder / name} would be written outside {target}")
    return target / name


def invalid_name_reason(location: S3Location) -> str | None:
    """Return why no object is written under this name; None if one can be."""
    try:
        key = location.key.encode()
    except UnicodeEncodeError:
        return "its name is not UTF-8"
    if len(key) > _MOST_KEY_BYTES:
        return f"its name has {len(key)} bytes on S3, which takes {_MOST_KEY_BYTES}"
    return "its name has a line break" if b"\n" in key else None


class Sent(NamedTuple):
    """What an upload has sent: size and hash of a file, which was read once."""

    bytes: int
    sha256: str


def upload(s3: "S3Client", source: Path, location: S3Location, *, tag: Tag | None = None) -> Sent:
    """Upload one file, whole or not at all. Raises FileNotFoundError where it is gone."""

    def work() -> Sent:
        with source.open("rb") as stream:
            hashing: Any = HashingStream(stream)  # no whole file, but what boto3 needs of one
            config = _transfer(source.stat().st_size)  # boto3 measures no stream
            s3.upload_fileobj(hashing, location.bucket, location.key, ExtraArgs=_tagging(tag), Config=config)
        return Sent(hashing.bytes, hashing.sha256)

    return with_retries(f"write {location}", work)


def upload_all(
    s3: "S3Client",
    source: Path,
    names: Iterable[str],
    folder: S3Location,
    *,
    tag: Tag | None = None,
    before_each: Callable[[], None] = lambda: None,
) -> dict[str, Sent]:
    """Upload the named files of a local folder below the S3 one, all with the tag, and wait until all are there.

    `before_each` is called right before each file, and may raise what keeps it from being written.
    """

    def work(name: str) -> tuple[str, Sent]:
        before_each()
        return name, upload(s3, source / name, folder / name, tag=tag)

    return dict(in_threads(work, names))


def delete_all(s3: "S3Client", folder: S3Location, names: Iterable[str]) -> None:
    """Delete the named objects below the folder; one that is not there is no error."""

    def delete(name: str) -> None:
        with_retries(
            f"remove objects below {folder}",
            lambda: s3.delete_object(Bucket=folder.bucket, Key=(folder / name).key),
        )

    in_threads(delete, names)


def files_below(folder: Path) -> list[str]:
    """Return the relative names of all files in a local folder, in a fixed order."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def in_threads(work: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """Do `work` on each item, several at once; the first exception is raised when all have ended."""
    with ThreadPoolExecutor(THREADS, thread_name_prefix="s3") as pool:
        return list(pool.map(work, items))


def _may_pass(error: BaseException | None) -> bool:
    """Return whether an operation that failed with `error` may well succeed when it is started over."""
    from boto3.exceptions import RetriesExceededError

    if not isinstance(error, Exception):
        return False
    # The end of a file's parts was taken and the answer lost: there is nothing left to end.
    if error_code(error) == "NoSuchUpload":
        return True
    if is_refused_connection(error) and is_loopback(str(getattr(error, "kwargs", {}).get("endpoint_url"))):
        return False  # nobody has started it, which no network mends
    return is_transient(error) or isinstance(error, RetriesExceededError)


def _tagging(tag: Tag | None) -> dict[str, Any]:
    """Return the arguments with which a request that writes an object gives it the tag."""
    return {"Tagging": urlencode([tag])} if tag else {}


def _transfer(size: int = 0) -> "TransferConfig":
    """Return how a file is moved; one of `size` bytes is sent in so many parts as S3 takes at most, or fewer."""
    from boto3.s3.transfer import TransferConfig

    config = TransferConfig(max_concurrency=PARTS, multipart_chunksize=max(8 << 20, -(-size // _MOST_PARTS)))
    config.max_in_memory_upload_chunks = PARTS  # boto3 has no argument for it
    return config


def _parent(location: S3Location) -> str:
    return str(S3Location(location.bucket, location.key.rpartition("/")[0])).rstrip("/") + "/"
