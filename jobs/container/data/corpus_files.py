r"""Files of a corpus: documents as UTF-8, each followed by one NUL.

An artifact of kind `corpus` holds `train-00000.txt`, `held-out-00000.txt`, …: one pair of files for each shard. NUL
ends a document because no text needs it (documents lose those they have, as BERT's own cleaning does), so that a
reader finds the ends without parsing anything: `data.split(b"\0")`.
"""

import hashlib
import mmap
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

KIND = "corpus"
VERSION = 1
END = b"\0"

TRAIN = "train"
HELD_OUT = "held-out"
SPLITS = (TRAIN, HELD_OUT)

_BLOCK_BYTES = 1 << 20
_HASH_RANGE = float(1 << 64)


def file_name(part: str, shard: int) -> str:
    return f"{part}-{shard:05}.txt"


def shards(names: Iterable[str]) -> list[int]:
    """List the numbers of the shards to which files of these names belong."""
    prefix, suffix = f"{TRAIN}-", ".txt"
    return sorted(
        int(name[len(prefix) : -len(suffix)]) for name in names if name.startswith(prefix) and name.endswith(suffix)
    )


def blocks(path: Path, about_bytes: int) -> Iterator[bytes]:
    """Read all documents of a file, in blocks of about so many bytes, a longer document alone in one.

    A block is without the NUL that ends its last document: `block.split(END)` gives its documents.
    """
    begun: list[bytes] = []
    with path.open("rb") as stream:
        while read := stream.read(about_bytes):
            end = read.rfind(END)
            if end < 0:
                begun.append(read)
                continue
            yield b"".join([*begun, read[:end]])
            begun = [read[end + len(END) :]]


def documents(path: Path) -> Iterator[bytes]:
    """Read all documents of a file, of which a block is in memory at once, and whatever one document takes."""
    for block in blocks(path, _BLOCK_BYTES):
        yield from block.split(END)


def batches(documents: Iterable[bytes], *, at_most_bytes: int) -> Iterator[list[str]]:
    """Group documents into lists of at most so many bytes, a longer document alone in one."""
    batch: list[str] = []
    size = 0
    for document in documents:
        if batch and size + len(document) > at_most_bytes:
            yield batch
            batch, size = [], 0
        batch.append(document.decode())
        size += len(document)
    if batch:
        yield batch


def sample(path: Path, fraction: float, *, seed: list[int], at_most_bytes: int | None = None) -> Iterator[bytes]:
    """Draw documents one by one with a probability of `fraction`; the same ones for the same seed.

    Stops before the document with which they would have more than `at_most_bytes`, unless it is the first.
    """
    if not path.stat().st_size:
        return
    with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
        ends = _ends(content)
        drawn = np.flatnonzero(np.random.default_rng(seed).random(len(ends)) < fraction)
        taken = 0
        for number in drawn.tolist():
            document = content[ends[number - 1] + 1 if number else 0 : ends[number]]
            taken += len(document)
            if at_most_bytes is not None and taken > at_most_bytes and taken > len(document):
                return
            yield document


def _ends(content: mmap.mmap) -> "list[int]":
    """Return where each document's NUL is."""
    found = []
    for start in range(0, len(content), _BLOCK_BYTES):
        block = np.frombuffer(content[start : start + _BLOCK_BYTES], dtype=np.uint8)
        found.append(np.flatnonzero(block == 0) + start)
    ends: list[int] = np.concatenate(found).tolist()
    return ends


def document_hash(document: bytes) -> int:
    """Return 64 bits that stand for a document's content."""
    return int.from_bytes(hashlib.blake2b(document, digest_size=8).digest(), "little")


def is_held_out(hashed: int, fraction: float) -> bool:
    """Return whether a document is held out, which its content alone decides.

    So neither its place nor the rest of the corpus matters, and equal documents are never on both sides.
    """
    return hashed / _HASH_RANGE < fraction
