r"""Read the documents of a corpus's inputs, and the files of a corpus: UTF-8 documents that each end with a NUL.

An artifact of kind `corpus` has one pair of files for each shard: `train-00000.txt`, `held-out-00000.txt`, …. NUL ends
a document because no text needs it, so `data.split(b"\0")` finds the documents without parsing. NULs within documents
are removed, as in BERT's own cleaning.

An input is a text file with a document on each line or in each paragraph, or a table with a column of documents.
Reading can start anywhere in an input. Nothing is skipped silently: a broken document is returned as `Broken` with its
location, and the caller refuses or counts it.
"""

import hashlib
import io
import logging
import mmap
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jobs.aws import s3 as object_store
from jobs.container.data import artifacts
from jobs.container.data.sources import data_set_commit, is_on_hub, open_stream
from jobs.container.data.tables import TableReader
from jobs.core.errors import UsageError
from jobs.core.locations import COMPRESSED, S3, TEXT, S3Location, hub_parts, table_suffix
from jobs.data_checks.table_rows import At, Broken, decoded, invalid_text, unit
from jobs.data_checks.table_text import utf8_text
from jobs.spec.arguments import DEFAULT_FORMAT, TextFormat
from jobs.spec.kinds.prepare_corpus import COLUMNS_NEXT

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client


log = logging.getLogger("trainyard")

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
    """Return the sorted shard numbers of a corpus's files."""
    prefix, suffix = f"{TRAIN}-", ".txt"
    return sorted(
        int(name[len(prefix) : -len(suffix)]) for name in names if name.startswith(prefix) and name.endswith(suffix)
    )


def blocks(path: Path, about_bytes: int) -> Iterator[bytes]:
    """Yield a file's documents in blocks of about this size. A longer document is a separate block.

    A block does not include the NUL that ends its last document: `block.split(END)` yields its documents.
    """
    partial: list[bytes] = []
    with path.open("rb") as stream:
        while read := stream.read(about_bytes):
            end = read.rfind(END)
            if end < 0:
                partial.append(read)
                continue
            yield b"".join([*partial, read[:end]])
            partial = [read[end + len(END) :]]


def documents(path: Path) -> Iterator[bytes]:
    """Yield a file's documents. Only a block, or one longer document, is in memory at once."""
    for block in blocks(path, _BLOCK_BYTES):
        yield from block.split(END)


def batches(documents: Iterable[bytes], *, at_most_bytes: int) -> Iterator[list[str]]:
    """Group documents into lists of at most this size. A longer document gets a separate list."""
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
    """Draw each document with a probability of `fraction`. The same seed draws the same documents.

    Stops before the document that would exceed `at_most_bytes`, unless it is the first.
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
    """Return the position of each document's NUL."""
    found = []
    for start in range(0, len(content), _BLOCK_BYTES):
        block = np.frombuffer(content[start : start + _BLOCK_BYTES], dtype=np.uint8)
        found.append(np.flatnonzero(block == 0) + start)
    ends: list[int] = np.concatenate(found).tolist()
    return ends


def document_hash(document: bytes) -> int:
    """Return a 64-bit hash of a document's content."""
    return int.from_bytes(hashlib.blake2b(document, digest_size=8).digest(), "little")


def is_held_out(hashed: int, fraction: float) -> bool:
    """Return whether a document is held out, which depends only on its content.

    Its position and the rest of the corpus do not matter, and equal documents are always in the same split.
    """
    return hashed / _HASH_RANGE < fraction


class Read(NamedTuple):
    """One document, or a piece of a document that is too long."""

    content: str | Broken
    after: At
    continues: bool = False
    """True if the next item is another piece of this document."""


@dataclass(frozen=True, kw_only=True)
class Input:
    """One input of a corpus."""

    location: str
    column: str
    """Column with the text; not used for .txt files."""
    paragraphs: bool
    """Whether an empty line ends a document of a .txt file. Otherwise each line is a document."""
    max_document_bytes: int
    s3: Callable[[], "S3Client"]
    text_format: TextFormat = DEFAULT_FORMAT

    def read(self, start: At) -> Iterator[Read]:
        """Read the documents from `start` on.

        Raises UsageError if the content does not match the file's suffix or if a document does not fit into memory,
        and NotFoundError if the input does not exist.
        """
        after = start
        try:
            for document in self._documents(start):
                after = document.after
                yield document
        except MemoryError:
            raise UsageError(
                f"{self.location}: the document after {unit(self.location)} {after.line} does not fit into memory",
                next_step="split the document, or use an instance type with more memory",
            ) from None

    def _documents(self, start: At) -> Iterator[Read]:
        if is_on_hub(self.location) or table_suffix(self.location) != TEXT:
            return self._of_table(start)
        return self._paragraphs(start) if self.paragraphs else self._lines(start)

    def _of_table(self, start: At) -> Iterator[Read]:
        table = TableReader(
            location=self.location,
            columns=[self.column],
            missing_next=COLUMNS_NEXT,
            s3=self.s3,
            streamed=True,
            max_document_bytes=self.max_document_bytes,
            format=self.text_format,
        )
        for values, offset, line in table.rows(start):
            content = values if isinstance(values, Broken) else _as_text(values[0], self.column, table.place(line))
            yield Read(content, At(offset, line))
        if table.joined:
            log.warning("warning: %s", table.joined_warning(table.joined))

    def _lines(self, start: At) -> Iterator[Read]:
        with open_stream(self.location, s3=self.s3) as file:
            stream = self._text(file)
            for piece, line, after, continues in _pieces(stream, start, self.max_document_bytes):
                yield Read(decoded(piece, self.location, line, self.text_format.encoding), after, continues)

    def _paragraphs(self, start: At) -> Iterator[Read]:
        """Yield the text between empty lines. Only about one document is in memory at once."""
        kept: list[bytes] = []
        first, before = 0, start
        with open_stream(self.location, s3=self.s3) as file:
            stream = self._text(file)
            for piece, line, after, _ in _pieces(stream, start, self.max_document_bytes):
                empty = not piece.strip()
                too_long = sum(map(len, kept)) + len(piece) > self.max_document_bytes
                if kept and (empty or too_long):
                    content = decoded(b"".join(kept), self.location, first, self.text_format.encoding)
                    yield Read(content, after if empty else before, continues=not empty)
                    kept = []
                if not empty:
                    first = first if kept else line
                    kept.append(piece)
                before = after
        if kept:
            yield Read(decoded(b"".join(kept), self.location, first, self.text_format.encoding), before)

    def _text(self, file: io.BufferedIOBase) -> io.BufferedIOBase:
        return utf8_text(file, self.location, self.text_format.encoding)

    def size(self) -> int | None:
        """Return the input's size in units of `At.offset`, or None if it is unknown."""
        if unit(self.location) == "row" or self.location.lower().endswith(COMPRESSED):
            return None
        if not self.location.startswith(S3):
            return Path(self.location).stat().st_size
        return object_store.size(self.s3(), S3Location.parse(self.location))


def input_identity(location: str, *, s3: Callable[[], "S3Client"]) -> Any:
    """Return a value that identifies an input's content. Raises NotFoundError if the input does not exist."""
    if not is_on_hub(location):
        return artifacts.identity_of(location, s3=s3)
    name, options = hub_parts(location)
    if Path(name).is_dir():  # `datasets` prefers a local folder to the hub's data set of that name
        return {**options, "files": artifacts.identity_of(name, s3=s3)}
    return {**options, "data_set": name, "commit": data_set_commit(location)}


def split(content: bytes, at_most_bytes: int) -> Iterator[bytes]:
    """Cut a document into pieces at whitespace, or within a word if a piece would have no whitespace."""
    while len(content) > at_most_bytes:
        place = _cut(content, at_most_bytes)
        yield content[:place]
        content = content[place:]
    yield content


def _cut(content: bytes, at_most_bytes: int) -> int:
    """Return where to cut content that is too long, never inside a character."""
    head = content[:at_most_bytes]
    space = max(head.rfind(b" "), head.rfind(b"\n"), head.rfind(b"\t"), head.rfind(b"\r"))
    if space > 0:
        return space + 1
    place = at_most_bytes
    while place > at_most_bytes - 4 and content[place] & 0xC0 == 0x80:  # a byte that continues a character
        place -= 1
    return place


def _pieces(stream: io.BufferedIOBase, start: At, limit: int) -> Iterator[tuple[bytes, int, At, bool]]:
    """Yield lines, in pieces if they are longer than `limit`.

    Yields the content, the line's number, the position after it, and whether the line continues.
    """
    stream.seek(start.offset)
    offset, line = start
    while piece := stream.readline(limit + 1):
        ended = piece.endswith(b"\n")
        continues = not ended and len(piece) > limit
        if continues:
            place = _cut(piece, limit)
            stream.seek(place - len(piece), io.SEEK_CUR)
            piece = piece[:place]
        offset += len(piece)
        yield piece, line + 1, At(offset, line + ended), continues
        line += ended


def _as_text(value: Any, column: str, place: str) -> str | Broken:
    """Return a cell as text. A missing value is an empty text."""
    if value is None:
        return ""
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError as error:
            return Broken(invalid_text(place, error))
    if not isinstance(value, str):
        raise UsageError(f"{place}: '{column}' is not text but {value!r:.80}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        return Broken(f"{place}: not UTF-8 (half of a surrogate pair, or a broken byte, at position {error.start + 1})")
    return value
