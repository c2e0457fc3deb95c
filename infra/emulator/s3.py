"""S3: objects that outlive the server, and faster reads than moto's.

With `--keep DIR`, objects are also on disk, and creating a bucket again restores its objects. Each object has two files
in the folder of its bucket: one with its bytes, and a JSON file, named after a hash of its key, with everything else.
The server writes the bytes, then renames the JSON file into place, and only then answers the request. So every object
whose upload was confirmed survives a kill of the server. Earlier versions of objects, and anything outside S3, are not
kept. A bucket without a name in its template gets the same generated name again, because runs and receipts refer to it.

Three shortcuts make requests faster:

- moto reads the whole object for each range request. A client downloads a large object in ranges of 8 MiB, so moto
  would read weights of 400 MB fifty times, 20 GB in all.
- moto lists its folders and tries hundreds of patterns to find the service of a host name. That takes a fifth of each
  request.
- moto looks at every object of a bucket for each listing, which takes 0.3 s for 36,000 objects.
"""

import contextlib
import fcntl
import functools
import hashlib
import inspect
import json
import logging
import re
import threading
import uuid
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from moto.moto_server.werkzeug_app import DomainDispatcherApplication
from moto.s3.models import FakeBucket, FakeDeleteMarker, FakeKey, S3Backend
from moto.s3.responses import S3Response
from moto.s3.utils import _VersionedKeyStore

from infra.emulator.errors import ConfigurationError

logger = logging.getLogger(__name__)

_BUCKETS = "buckets"
_NAMES = "names.json"
_LOCK = "lock"
_ATTRIBUTES = ("_etag", "_storage_class", "encryption", "kms_key_id", "bucket_key_enabled", "checksum_algorithm")
_CHECKSUM = ("checksum_value", "checksum_type", "checksum_parts")

_kept: "KeptObjects | None" = None


def keep_objects(folder: Path) -> None:
    """Keep objects in `folder` from now on. Call it before the first bucket is created.

    Raises ConfigurationError if the folder cannot be written, or another server uses it.
    """
    global _kept  # noqa: PLW0603 - one server is one process
    _kept = KeptObjects(folder)
    for name in ("put_object", "delete_object", "put_object_tagging", "delete_object_tagging"):
        setattr(S3Backend, name, _noting_changes(getattr(S3Backend, name), _kept))
    S3Backend.create_bucket = _filling_buckets(S3Backend.create_bucket, _kept)


def write_changes() -> None:
    """Write the objects that this thread's request changed to disk. Raises OSError if that fails."""
    if _kept is not None:
        _kept.write_changes()


def kept_name(name: str, owner: str) -> str:
    """Return the name of the bucket of `owner` (a resource) on earlier servers. If there is none, keep `name`."""
    return name if _kept is None else _kept.kept_name(name, owner)


class KeptObjects:
    """A folder of kept objects. Only one server can use it at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._changed = threading.local()
        self._commits = threading.Lock()
        try:
            (folder / _BUCKETS).mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = (folder / _LOCK).open("w")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigurationError(
                f"{folder} is used by another emulator",
                next_step="stop that emulator, or use another folder: --keep DIR",
            ) from None
        except OSError as error:
            raise ConfigurationError(
                f"{folder} cannot be used to keep objects: {error.strerror}", next_step="use another folder: --keep DIR"
            ) from None

    def note(self, backend: Any, bucket: str, key: str) -> None:
        changed = getattr(self._changed, "keys", None)
        if changed is None:
            changed = self._changed.keys = {}
        changed[bucket, key] = backend

    def write_changes(self) -> None:
        changed = getattr(self._changed, "keys", {})
        while changed:
            (bucket, key), backend = changed.popitem()
            self._write(backend, bucket, key)

    def _write(self, backend: Any, bucket_name: str, key_name: str) -> None:
        folder = self._folder / _BUCKETS / bucket_name
        record = folder / f"{hashlib.sha256(key_name.encode()).hexdigest()}.json"
        found = _newest(backend, bucket_name, key_name)
        body = folder / f"{record.stem}.{uuid.uuid4().hex}"
        if found is not None:
            folder.mkdir(exist_ok=True)
            body.write_bytes(found.value)
        with self._commits:
            # If two requests write the same object, the last one here writes its final state.
            if _newest(backend, bucket_name, key_name) is not found:
                body.unlink(missing_ok=True)
                return
            before = _body_of(record)
            if found is None:
                record.unlink(missing_ok=True)
            else:
                temporary = record.with_suffix(".part")
                temporary.write_text(json.dumps({"body": body.name, **_attributes_of(backend, found)}))
                temporary.replace(record)
            if before is not None:
                (folder / before).unlink(missing_ok=True)

    def fill(self, backend: Any, bucket: Any) -> None:
        """Fill a new bucket with the objects kept under its name."""
        folder = self._folder / _BUCKETS / bucket.name
        known = set()
        for record in folder.glob("*.json"):
            try:
                described = json.loads(record.read_text())
                key = _restored(backend, bucket.name, described, (folder / described["body"]).read_bytes())
            except (OSError, ValueError, KeyError) as error:
                logger.warning("%s cannot be read, so its object is missing: %s", record, error)
                continue
            bucket.keys.setlist(key.name, [key])
            known |= {record.name, described["body"]}
        for path in folder.glob("*"):
            if path.suffix != ".json" and path.name not in known:
                path.unlink()  # left by an upload that was never confirmed

    def kept_name(self, name: str, owner: str) -> str:
        path = self._folder / _NAMES
        with self._commits:
            names = json.loads(path.read_text()) if path.exists() else {}
            before = names.get(owner)
            if before is not None and not any(before in backend.buckets for backend in _backends()):
                return str(before)
            temporary = path.with_suffix(".part")
            temporary.write_text(json.dumps({**names, owner: name}, indent=1))
            temporary.replace(path)
        return name


def _backends() -> list[Any]:
    from moto.s3.models import s3_backends  # noqa: PLC0415 - created by the first request

    return [backend for account in s3_backends.values() for backend in account.values()]


def _noting_changes(method: Callable[..., Any], kept: KeptObjects) -> Callable[..., Any]:
    """Wrap a method of the backend so that it notes which object it changes."""
    signature = inspect.signature(method)

    def change(backend: Any, *positional: Any, **named: Any) -> Any:
        answer = method(backend, *positional, **named)
        given = signature.bind(backend, *positional, **named).arguments
        if "key" in given:
            kept.note(backend, given["key"].bucket_name, given["key"].name)
        else:
            kept.note(backend, given["bucket_name"], given["key_name"])
        return answer

    return change


def _filling_buckets(create_bucket: Callable[..., Any], kept: KeptObjects) -> Callable[..., Any]:
    def create(backend: Any, *positional: Any, **named: Any) -> Any:
        bucket = create_bucket(backend, *positional, **named)
        kept.fill(backend, bucket)
        return bucket

    return create


def _newest(backend: Any, bucket_name: str, key_name: str) -> Any:
    """Return the newest version of an object, or None if it is missing or deleted."""
    bucket = backend.buckets.get(bucket_name)
    key = bucket.keys.get(key_name) if bucket is not None else None
    return None if key is None or isinstance(key, FakeDeleteMarker) else key


def _body_of(record: Path) -> str | None:
    with contextlib.suppress(OSError, ValueError, KeyError):
        return str(json.loads(record.read_text())["body"])
    return None


def _attributes_of(backend: Any, key: Any) -> dict[str, Any]:
    key.etag  # noqa: B018 - computes it
    return {
        "key": key.name,
        "last_modified": key.last_modified.isoformat(),
        "metadata": dict(key.metadata),
        "tags": backend.tagger.get_tag_dict_for_resource(key.arn),
        **{name: getattr(key, name) for name in (*_ATTRIBUTES, *_CHECKSUM)},
    }


def _restored(backend: Any, bucket_name: str, described: dict[str, Any], body: bytes) -> Any:
    key = FakeKey(
        name=described["key"],
        value=body,
        account_id=backend.account_id,
        region_name=backend.region_name,
        bucket_name=bucket_name,
    )
    for name in (*_ATTRIBUTES, *_CHECKSUM):
        setattr(key, name, described[name])
    key.last_modified = datetime.fromisoformat(described["last_modified"])
    key.set_metadata(described["metadata"])
    if described["tags"]:
        backend.tagger.tag_resource(key.arn, backend.tagger.convert_dict_to_tags_input(described["tags"]))
    return key


_ONE_RANGE = re.compile(r"bytes=(\d+-\d*|-\d+)", re.ASCII)
"""A single range, which moto cuts out of the object. For several or invalid ranges, moto returns the whole object."""

_request = threading.local()

_whole_value, _set_value = FakeKey.value.fget, FakeKey.value.fset
_get_object, _key_response = S3Response.get_object, S3Response.key_response
_list_objects = S3Backend.list_objects


def install() -> None:
    """Install the shortcuts. Call it before the server starts."""
    DomainDispatcherApplication.get_backend_for_host = functools.cache(DomainDispatcherApplication.get_backend_for_host)
    FakeKey.value = property(_value, _set_value)
    S3Response.get_object = _get_range_or_object
    S3Response.key_response = _answer_with_bytes
    S3Backend.list_objects = _list_fewer_objects
    _VersionedKeyStore.item_size = _stored_bytes


def _stored_bytes(keys: Any) -> int:
    """Return the size of all versions for CloudWatch's BucketSizeBytes; moto returns that of Python's objects."""
    return sum(getattr(version, "size", 0) for _, versions in keys.iterlists() for version in versions)


def _list_fewer_objects(
    backend: Any, bucket: Any, prefix: str | None, delimiter: str | None, *options: Any, **named: Any
) -> Any:
    """List like moto, but show it only the objects with the prefix, and one of each folder below it."""
    if type(bucket) is FakeBucket:
        start = prefix or ""
        names = [name for name in list(bucket.keys) if name.startswith(start)]
        if delimiter:
            names = [*{name[len(start) :].partition(delimiter)[:2]: name for name in names}.values()]
        bucket = SimpleNamespace(keys={name: key for name in names if (key := bucket.keys.get(name)) is not None})
    return _list_objects(backend, bucket, prefix, delimiter, *options, **named)


class _Content:
    """Reads only the requested slice of an object's bytes."""

    def __init__(self, key: Any) -> None:
        self._key = key

    def __len__(self) -> int:
        size: int = self._key.contentsize
        return size

    def __getitem__(self, part: slice) -> bytes:
        begin, end, _ = part.indices(len(self))
        with self._key.lock:
            self._key._value_buffer.seek(begin)  # noqa: SLF001 - moto has no public way
            read: bytes = self._key._value_buffer.read(max(0, end - begin))  # noqa: SLF001 - likewise
            return read


def _value(key: Any) -> "bytes | _Content":
    if getattr(_request, "for_range", False):
        return _Content(key)
    whole: bytes = _whole_value(key)
    return whole


def _get_range_or_object(response: Any) -> Any:
    _request.for_range = _ONE_RANGE.fullmatch(response.headers.get("range", "")) is not None
    try:
        return _get_object(response)
    finally:
        _request.for_range = False


def _answer_with_bytes(response: Any, *arguments: Any) -> Any:
    status, headers, content = _key_response(response, *arguments)
    return status, headers, content[:] if isinstance(content, _Content) else content
