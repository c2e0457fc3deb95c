"""Files on S3: reading, writing and listing with retries, and copying whole folders in several threads.

boto3's settings apply, including AWS_ENDPOINT_URL, so that the same code works with the emulator.
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
    """A stream that hashes the bytes read from it, so that an upload reads each byte only once. It cannot seek."""

    def __init__(self, stream: BinaryIO) -> None:
        self.bytes = 0
        """Number of bytes read."""
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
    """Return the SHA-256 of a file in hex."""
    with path.open("rb") as stream:
        hashing = HashingStream(stream)
        while hashing.read(1 << 22):
            pass
    return hashing.sha256


log = logging.getLogger("trainyard")

THREADS = 8
"""Files copied at once; a single stream would leave most of an instance's network bandwidth unused."""

PARTS = 4
"""Parts of one large file copied at once."""

_MAX_PARTS = 10_000
"""Maximum parts of an object (Amazon S3 User Guide, "Amazon S3 multipart upload limits")."""

_MAX_KEY_BYTES = 1024
"""Maximum bytes of an object's key (Amazon S3 User Guide, "Naming Amazon S3 objects")."""

RETRIES = 10
"""Attempts of one request by botocore, with pauses of about 15 s in total for errors and a minute for throttling. All
requests of a client share a few dozen retries, which the parts of large files use up within two seconds if S3 fails
completely."""

RETRY_SECONDS = 600.0
"""Time during which an operation is repeated after botocore's retries failed, so that an S3 outage of minutes ends no
job."""

_MAX_PAUSE_SECONDS = 30.0

DENIED_TRIES = 3
"""Attempts of a request that S3 denies, within a few seconds: while credentials or policies change, S3 may briefly deny
permitted requests."""

_MISSING = frozenset({"404", "NoSuchKey", "NotFound"})

Tag = tuple[str, str]
"""Key and value of an S3 object tag."""

Item = TypeVar("Item")
Result = TypeVar("Result")


def connect() -> "S3Client":
    """Return a thread-safe client. Creating one takes 0.1 s, so one per process is enough."""
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
    """Turn boto3's exceptions into TrainyardErrors: `cannot {what}`, with the reason."""
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
    """Return the result of `work`, repeating it if S3 or the network fails or S3 denies the request.

    Failures are retried for RETRY_SECONDS, denied requests DENIED_TRIES times in total. The last error is `explained`.
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
            may_succeed = denials < DENIED_TRIES if denied else _may_succeed(error.__cause__)
            if not may_succeed or left < pause:
                raise
            again = "trying once more" if denied else f"trying again for {left:.0f} s"
            log.warning("warning: %s; %s", str(error.args[0]).splitlines()[0], again)
        time.sleep(pause * random.uniform(0.5, 1))  # noqa: S311 - jitter, so that threads do not retry in step
        pause = min(2 * pause, _MAX_PAUSE_SECONDS)


def read(s3: "S3Client", location: S3Location) -> bytes | None:
    """Return the object's content, or None if it does not exist."""
    return with_retries(f"read {location}", lambda: read_once(s3, location))


def read_once(s3: "S3Client", location: S3Location) -> bytes | None:
    """Read an object like `read`, but raise boto3's error once botocore's own retries have failed."""
    try:
        return s3.get_object(Bucket=location.bucket, Key=location.key)["Body"].read()
    except s3.exceptions.ClientError as error:
        if is_missing(s3, location, error):
            return None
        raise


def read_range(s3: "S3Client", location: S3Location, start: int, stop: int) -> bytes:
    """Return the object's bytes from `start` up to, but not including, `stop`."""
    if start >= stop:
        return b""
    answer = s3.get_object(Bucket=location.bucket, Key=location.key, Range=f"bytes={start}-{stop - 1}")
    return answer["Body"].read()


def is_missing(s3: "S3Client", location: S3Location, error: Exception) -> bool:
    """Return whether S3's error response means that the requested object does not exist.

    S3 returns 404 only to callers who may list the whole bucket. Callers who may list only their team's prefix get 403
    both for missing keys and for another team's keys; listing the exact key distinguishes the two.
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
    """Write an object, with retries."""
    with_retries(
        f"write {location}",
        lambda: s3.put_object(Bucket=location.bucket, Key=location.key, Body=content, **_tagging(tag)),
    )


def create(s3: "S3Client", location: S3Location, content: bytes, *, tag: Tag | None = None) -> bool:
    """Write the object unless it exists. Of several concurrent writers, exactly one succeeds.

    Return whether the object now has this content.
    """

    def work() -> bool:
        try:
            s3.put_object(Bucket=location.bucket, Key=location.key, Body=content, IfNoneMatch="*", **_tagging(tag))
        except s3.exceptions.ClientError as error:
            # S3 returns the second code if two requests write at exactly the same time.
            if error_code(error) not in ("PreconditionFailed", "ConditionalRequestConflict"):
                raise
            return read_once(s3, location) == content  # equal if our first request succeeded but its response was lost
        return True

    return with_retries(f"write {location}", work)


def size(s3: "S3Client", location: S3Location) -> int:
    """Return the size of an object in bytes. Raises NotFoundError if it does not exist."""

    def work() -> int:
        try:
            return s3.head_object(Bucket=location.bucket, Key=location.key)["ContentLength"]
        except s3.exceptions.ClientError as error:
            if is_missing(s3, location, error):
                raise NotFoundError(f"{location} does not exist", next_step=f"aws s3 ls {_parent(location)}") from None
            raise

    return with_retries(f"read {location}", work)


def exists(s3: "S3Client", location: S3Location) -> bool:
    """Return whether an object of this exact name exists. Errors of boto3 are not translated."""
    try:
        s3.head_object(Bucket=location.bucket, Key=location.key)
    except s3.exceptions.ClientError as error:
        if is_missing(s3, location, error):
            return False
        raise
    return True


def sizes(s3: "S3Client", folder: S3Location) -> dict[str, int]:
    """Return the size in bytes of every object below the folder, by its name relative to the folder."""
    prefix = folder.key.rstrip("/") + "/" if folder.key else ""
    objects = listing(s3, folder, prefix=prefix)
    return {item["Key"][len(prefix) :]: item["Size"] for item in objects if not item["Key"].endswith("/")}


def billed_sizes(s3: "S3Client", folder: S3Location) -> tuple[dict[str, int], int | None]:
    """Return the sizes of a folder's objects by relative name, and the bytes of deleted and replaced versions.

    S3 bills for versions until a lifecycle rule deletes them. Their bytes are None if the caller may not list them.
    """
    pages = s3.get_paginator("list_object_versions")

    def work() -> tuple[dict[str, int], int] | None:
        try:
            found = [
                version
                for page in pages.paginate(Bucket=folder.bucket, Prefix=folder.key)
                for version in page.get("Versions", [])
            ]
        except s3.exceptions.ClientError as error:
            if is_denied(error):
                return None
            raise
        current = {item["Key"].removeprefix(folder.key): item["Size"] for item in found if item["IsLatest"]}
        return current, sum(item["Size"] for item in found if not item["IsLatest"])

    return with_retries(f"list {folder}", work) or (sizes(s3, folder), None)


def listing(s3: "S3Client", place: S3Location, *, prefix: str) -> list["ObjectTypeDef"]:
    """Return S3's entry for every object whose key starts with `prefix`."""
    pages = s3.get_paginator("list_objects_v2")

    def work() -> list["ObjectTypeDef"]:
        return [
            item for page in pages.paginate(Bucket=place.bucket, Prefix=prefix) for item in page.get("Contents", [])
        ]

    return with_retries(f"list {place}", work)


def identity(s3: "S3Client", place: S3Location) -> dict[str, Any]:
    """Return size and ETag of an object, or of each object below a folder by name, without reading content.

    Raises NotFoundError if nothing exists there.
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
    """Download one object into a file. Raises NotFoundError if it does not exist.

    `on_bytes` is called with the number of bytes of each chunk, from several threads.
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
    """Download one object below the S3 folder to the same name below a local folder, and return the local path.

    Raises NotFoundError if the object does not exist, UsageError if its name leads out of the local folder.
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
    """Download the named objects below the S3 folder into a local folder.

    Raises UsageError, before anything is written, if a name leads out of the local folder.
    """
    paths = {name: path_below(target, folder, name) for name in names}
    in_threads(lambda name: download(s3, folder / name, paths[name], on_bytes=on_bytes), paths)


def path_below(target: Path, folder: S3Location, name: str) -> Path:
    """Return the path below `target` for an object below the S3 folder.

    Raises UsageError if the name leads out of `target`: permission to write keys must not allow writing any file.
    """
    if not stays_below(name):
        raise UsageError(f"{folder / name} would be written outside {target}")
    return target / name


def invalid_name_reason(location: S3Location) -> str | None:
    """Return why an object cannot have this name, or None if it can."""
    try:
        key = location.key.encode()
    except UnicodeEncodeError:
        return "its name is not UTF-8"
    if len(key) > _MAX_KEY_BYTES:
        return f"its name on S3 has {len(key)} bytes, more than {_MAX_KEY_BYTES}"
    return "its name contains a line break" if b"\n" in key else None


class Sent(NamedTuple):
    """Size and hash of an uploaded file, computed while it was read for the upload."""

    bytes: int
    sha256: str


def upload(s3: "S3Client", source: Path, location: S3Location, *, tag: Tag | None = None) -> Sent:
    """Upload one file, completely or not at all. Raises FileNotFoundError if the file no longer exists."""

    def work() -> Sent:
        with source.open("rb") as stream:
            hashing: Any = HashingStream(stream)  # not a full file object, but enough for boto3
            config = _transfer(source.stat().st_size)  # boto3 does not determine the size of a stream
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
    """Upload the named files of a local folder to the S3 folder, all with the tag, and wait until all are complete.

    `before_each` is called right before each upload and may raise an exception to prevent it.
    """

    def work(name: str) -> tuple[str, Sent]:
        before_each()
        return name, upload(s3, source / name, folder / name, tag=tag)

    return dict(in_threads(work, names))


def delete_all(s3: "S3Client", folder: S3Location, names: Iterable[str]) -> None:
    """Delete the named objects below the folder; missing objects are ignored."""

    def delete(name: str) -> None:
        with_retries(
            f"delete objects below {folder}",
            lambda: s3.delete_object(Bucket=folder.bucket, Key=(folder / name).key),
        )

    in_threads(delete, names)


def files_below(folder: Path) -> list[str]:
    """Return the relative names of all files in a local folder, sorted."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def in_threads(work: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """Run `work` on each item in several threads. Raises the first exception after all threads have ended."""
    with ThreadPoolExecutor(THREADS, thread_name_prefix="s3") as pool:
        return list(pool.map(work, items))


def _may_succeed(error: BaseException | None) -> bool:
    """Return whether an operation that failed with `error` may succeed if it is repeated."""
    from boto3.exceptions import RetriesExceededError

    if not isinstance(error, Exception):
        return False
    # A multipart upload was completed but the response was lost, so the retry found no upload to complete.
    if error_code(error) == "NoSuchUpload":
        return True
    if is_refused_connection(error) and is_loopback(str(getattr(error, "kwargs", {}).get("endpoint_url"))):
        return False  # the emulator is not running, so a retry cannot help
    return is_transient(error) or isinstance(error, RetriesExceededError)


def _tagging(tag: Tag | None) -> dict[str, Any]:
    """Return the request arguments that tag a written object."""
    return {"Tagging": urlencode([tag])} if tag else {}


def _transfer(size: int = 0) -> "TransferConfig":
    """Return the transfer settings for a file of `size` bytes: parts large enough to stay within S3's part limit."""
    from boto3.s3.transfer import TransferConfig

    config = TransferConfig(max_concurrency=PARTS, multipart_chunksize=max(8 << 20, -(-size // _MAX_PARTS)))
    config.max_in_memory_upload_chunks = PARTS  # TransferConfig() has no argument for this
    return config


def _parent(location: S3Location) -> str:
    return str(S3Location(location.bucket, location.key.rpartition("/")[0])).rstrip("/") + "/"
