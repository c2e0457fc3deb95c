"""A file, here or on S3, as a stream of bytes that starts anywhere and holds a few megabytes of it in memory."""

import io
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jobs.aws import s3 as object_store
from jobs.contract.errors import NotFoundError, TrainyardError
from jobs.contract.locations import S3, S3Location

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

BLOCK_BYTES = 8 << 20
"""What one request to S3 reads."""


def open_stream(location: str, *, s3: Callable[[], "S3Client"]) -> io.BufferedReader:
    """A seekable stream. Raises NotFoundError where nothing is there."""
    if location.startswith(S3):
        return io.BufferedReader(_S3Object(s3(), S3Location.parse(location)), buffer_size=1 << 20)
    try:
        return Path(location).open("rb")
    except FileNotFoundError:
        raise NotFoundError(f"{location} does not exist", next_step="check the path") from None


class _S3Object(io.RawIOBase):
    """Reads block by block; the next one is under way while this one is used."""

    def __init__(self, s3: "S3Client", place: S3Location) -> None:
        self._s3 = s3
        self._place = place
        self._size = object_store.size(s3, place)
        self._position = 0
        self._block_number = -1
        self._block = memoryview(b"")
        self._ahead: tuple[int, Future[bytes]] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="read-ahead")

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = max(0, start + offset)
        return self._position

    def readinto(self, target: Any) -> int:
        if self._position >= self._size:
            return 0
        number, offset = divmod(self._position, BLOCK_BYTES)
        if number != self._block_number:
            self._block, self._block_number = memoryview(self._take(number)), number
        part = self._block[offset : offset + len(target)]
        target[: len(part)] = part
        self._position += len(part)
        return len(part)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
        super().close()

    def _take(self, number: int) -> bytes:
        sequential = number == self._block_number + 1
        if self._ahead is not None and self._ahead[0] == number:
            block = self._ahead[1].result()
        else:
            block = self._fetch(number)
        self._ahead = None
        if sequential and (number + 1) * BLOCK_BYTES < self._size:
            self._ahead = (number + 1, self._thread.submit(self._fetch, number + 1))
        return block

    def _fetch(self, number: int) -> bytes:
        start = number * BLOCK_BYTES
        end = min(start + BLOCK_BYTES, self._size)

        def work() -> bytes:
            answer = self._s3.get_object(
                Bucket=self._place.bucket, Key=self._place.key, Range=f"bytes={start}-{end - 1}"
            )
            block = answer["Body"].read()
            if len(block) != end - start:
                raise TrainyardError(f"{self._place} has changed while it was read")
            return block

        return object_store.patiently(f"read {self._place}", work)
