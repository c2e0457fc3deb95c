"""Shortcuts through moto: what it does anew for each request, done once, or not at all.

- It reads the whole object for each range that it answers. A client fetches a large object in parts of 8 MiB, so that
  it would read weights of 400 MB fifty times, 20 GB in all.
- It lists its own folders, and compares hundreds of patterns, to tell which service a host name is: a fifth of the time
  that a request takes.
"""

import functools
import re
import threading
from typing import Any

from moto.moto_server.werkzeug_app import DomainDispatcherApplication
from moto.s3.models import FakeKey
from moto.s3.responses import S3Response

_ONE_RANGE = re.compile(r"bytes=(\d+-\d*|-\d+)", re.ASCII)
"""moto cuts it out of what it was given. Of several it returns the whole object, as of what is no range."""

_asked = threading.local()

_whole_value, _set_value = FakeKey.value.fget, FakeKey.value.fset
_get_object, _key_response = S3Response.get_object, S3Response.key_response


def install() -> None:
    """Take them from now on. Call it before the server starts."""
    DomainDispatcherApplication.get_backend_for_host = functools.cache(DomainDispatcherApplication.get_backend_for_host)
    FakeKey.value = property(_value, _set_value)
    S3Response.get_object = _get_range_or_object
    S3Response.key_response = _answer_with_bytes


class _Content:
    """The bytes of an object, of which a slice is read when it is asked for."""

    def __init__(self, key: Any) -> None:
        self._key = key

    def __len__(self) -> int:
        size: int = self._key.contentsize
        return size

    def __getitem__(self, part: slice) -> bytes:
        begin, end, _ = part.indices(len(self))
        with self._key.lock:
            self._key._value_buffer.seek(begin)  # noqa: SLF001 - moto has no other way
            read: bytes = self._key._value_buffer.read(max(0, end - begin))  # noqa: SLF001 - likewise
            return read


def _value(key: Any) -> "bytes | _Content":
    if getattr(_asked, "for_range", False):
        return _Content(key)
    whole: bytes = _whole_value(key)
    return whole


def _get_range_or_object(response: Any) -> Any:
    _asked.for_range = _ONE_RANGE.fullmatch(response.headers.get("range", "")) is not None
    try:
        return _get_object(response)
    finally:
        _asked.for_range = False


def _answer_with_bytes(response: Any, *arguments: Any) -> Any:
    status, headers, content = _key_response(response, *arguments)
    return status, headers, content[:] if isinstance(content, _Content) else content
