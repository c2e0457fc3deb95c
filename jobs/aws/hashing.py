"""Hash files, and what is read on its way elsewhere."""

import hashlib
from pathlib import Path
from typing import BinaryIO


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
