"""Read inputs by location: `hf://org/name?config=…&split=…`, `s3://bucket/key`, or a local path.

Files are read as streams that can start anywhere and keep a few megabytes in memory. Folders are copied.
"""

import contextlib
import io
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from jobs.aws import s3 as object_store
from jobs.container.versions import hub_unreachable
from jobs.core.errors import NotFoundError, TrainyardError, UsageError
from jobs.core.locations import HUB, S3, S3Location, hub_parts, refuse_unresolved

if TYPE_CHECKING:
    from huggingface_hub.errors import HfHubHTTPError
    from mypy_boto3_s3.client import S3Client

BLOCK_BYTES = 8 << 20
"""Bytes that one request to S3 reads."""


def is_on_hub(location: str) -> bool:
    return location.startswith(HUB)


def stay_offline(locations: Iterable[str]) -> None:
    """Keep transformers and datasets from querying the hub about local folders, which takes 24 s without a network.

    Does nothing if one of the locations is on the hub.
    """
    if not any(map(is_on_hub, locations)):
        os.environ["HF_HUB_OFFLINE"] = "1"


def open_stream(location: str, *, s3: Callable[[], "S3Client"]) -> io.BufferedReader:
    """Open the file at `location` as a seekable stream. Raises NotFoundError if it does not exist."""
    refuse_unresolved(location)
    if location.startswith(S3):
        return io.BufferedReader(_S3Object(s3(), S3Location.parse(location)), buffer_size=1 << 20)
    if not Path(location).is_file():
        raise NotFoundError(f"{location} does not exist", next_step="check the path")
    return Path(location).open("rb")


def copy_folder(location: str, target: Path, *, s3: Callable[[], "S3Client"]) -> None:
    """Copy all files of the folder at `location` into `target`. Raises NotFoundError if it does not exist."""
    refuse_unresolved(location)
    if location.startswith(S3):
        names = names_below(location, s3())
        object_store.download_all(s3(), S3Location.parse(location.rstrip("/")), names, target)
    elif Path(location).is_dir():
        shutil.copytree(location, target, dirs_exist_ok=True)
    else:
        raise NotFoundError(f"folder {location} does not exist", next_step="check the path")


def names_below(location: str, s3: "S3Client") -> list[str]:
    """List the files of a folder on S3 by their relative paths. Raises NotFoundError if it does not exist."""
    source = S3Location.parse(location.rstrip("/"))
    names = list(object_store.sizes(s3, source))
    if not names:
        raise NotFoundError(
            f"{location} does not exist: there is no object below it",
            next_step=f"aws s3 ls s3://{source.bucket}/{source.key.rpartition('/')[0]}",
        )
    return names


@contextlib.contextmanager
def hub_errors(location: str, what: str) -> Iterator[None]:
    """Convert errors of the Hugging Face Hub's client to ours. `what` names a resource that needs a token."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        yield
    except HFValidationError as error:
        raise UsageError(f"{location}: {error}", next_step="write it as hf://ORGANISATION/NAME") from None
    except HfHubHTTPError as error:
        raise NotFoundError(
            f"{location}: the hub answered {hub_answer(error)}", next_step=f"check the name; a {what} needs HF_TOKEN"
        ) from error
    except hub_unreachable() as error:
        raise TrainyardError(
            f"{location}: the Hugging Face Hub could not be reached: {_reason(error)}",
            next_step="check that the job's network reaches it, or use a copy on S3 or, on a laptop, in a local folder",
        ) from error


def hub_folder(location: str, sort: Literal["model", "dataset"], patterns: Sequence[str] | None = None) -> Path:
    """Download the hub's repository at `location`, or only files that match `patterns`, and return the local folder.

    Raises NotFoundError if there is no such repository, and TrainyardError if the hub cannot be reached.
    """
    from huggingface_hub import snapshot_download

    name, options = hub_parts(location)
    with hub_errors(location, f"private or gated {sort}"):
        return Path(
            snapshot_download(name, repo_type=sort, revision=options.get("revision"), allow_patterns=patterns)  # type: ignore[arg-type]
        )


def _reason(error: BaseException) -> str:
    """Return the innermost reason of a chain of network errors, because the outer ones only quote each other."""
    reason = error
    below = error.__cause__ or error.__context__
    while below is not None:
        reason = below if isinstance(below, OSError) else reason
        below = below.__cause__ or below.__context__
    return str(reason)


def data_set_commit(location: str) -> str:
    """Return the current commit of a data set on the hub, because its content may change.

    Raises NotFoundError if there is no such data set, and TrainyardError if the hub cannot be reached.
    """
    from huggingface_hub import HfApi

    name, options = hub_parts(location)
    with hub_errors(location, "gated data set"):
        return str(HfApi().dataset_info(name, revision=options.get("revision")).sha)


def hub_answer(error: "HfHubHTTPError") -> str:
    """Return the hub's HTTP status in words: `404 Not Found`."""
    if getattr(error, "response", None) is None:  # with the client of Gaudi's releases
        return "with an unreadable response"
    status = HTTPStatus(error.response.status_code)
    return f"{status.value} {status.phrase}"


class _S3Object(io.RawIOBase):
    """Reads an object block by block, and prefetches the next block meanwhile."""

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
                raise TrainyardError(f"{self._place} changed while it was being read")
            return block

        return object_store.with_retries(f"read {self._place}", work)
