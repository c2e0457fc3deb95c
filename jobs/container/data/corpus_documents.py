"""Documents as they come out of the inputs of a corpus, one by one, from wherever a reader wants to go on.

An input is a text file, whose documents are lines or paragraphs, or a table, of which one column holds the documents.
Nothing is left out silently: what is broken is handed out as such, with its place, to be refused or counted.
"""

import io
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jobs.aws import s3 as object_store
from jobs.container.data import artifacts
from jobs.container.data.sources import data_set_commit, is_on_hub, open_stream
from jobs.container.data.tables import TableReader
from jobs.core.errors import UsageError
from jobs.core.locations import S3, TEXT, S3Location, hub_parts, table_suffix
from jobs.data_checks.table_rows import At, Broken, decoded, not_utf8, unit
from jobs.spec.kinds.prepare_corpus import COLUMNS_NEXT

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client


log = logging.getLogger("trainyard")


class Read(NamedTuple):
    """One document, or a piece of one that is too long."""

    content: str | Broken
    after: At
    goes_on: bool = False
    """The next one is a piece of the same document."""


@dataclass(frozen=True, kw_only=True)
class Input:
    """One input of a corpus."""

    location: str
    column: str
    """Column of the text; a .txt file has none."""
    paragraphs: bool
    """A document of a .txt file ends at an empty line, not at each line's end."""
    max_document_bytes: int
    s3: Callable[[], "S3Client"]

    def read(self, start: At) -> Iterator[Read]:
        """Read the documents from there on.

        Raises UsageError where the input is not what its name says, or holds a document that no memory may hold,
        NotFoundError where there is none.
        """
        after = start
        try:
            for document in self._documents(start):
                after = document.after
                yield document
        except MemoryError:
            raise UsageError(
                f"{self.location}: the document after {unit(self.location)} {after.line} does not fit into memory",
                next_step="split the document, or take an instance type with more memory",
            ) from None

    def _documents(self, start: At) -> Iterator[Read]:
        if is_on_hub(self.location) or table_suffix(self.location) != TEXT:
            return self._of_table(start)
        return self._paragraphs(start) if self.paragraphs else self._lines(start)

    def _of_table(self, start: At) -> Iterator[Read]:
        table = TableReader(
            location=self.location,
            columns=[self.column],
            columns_are_named_by=COLUMNS_NEXT,
            s3=self.s3,
            streamed=True,
            max_document_bytes=self.max_document_bytes,
        )
        for values, offset, line in table.rows(start):
            content = values if isinstance(values, Broken) else _as_text(values[0], self.column, table.place(line))
            yield Read(content, At(offset, line))
        if table.joined:
            log.warning("warning: %s", table.joined_warning(table.joined))

    def _lines(self, start: At) -> Iterator[Read]:
        with open_stream(self.location, s3=self.s3) as stream:
            for piece, line, after, goes_on in _pieces(stream, start, self.max_document_bytes):
                yield Read(decoded(piece, self.location, line), after, goes_on)

    def _paragraphs(self, start: At) -> Iterator[Read]:
        """Read what lies between empty lines; at most about one document is in memory."""
        kept: list[bytes] = []
        first, before = 0, start
        with open_stream(self.location, s3=self.s3) as stream:
            for piece, line, after, _ in _pieces(stream, start, self.max_document_bytes):
                empty = not piece.strip()
                too_long = sum(map(len, kept)) + len(piece) > self.max_document_bytes
                if kept and (empty or too_long):
                    content = decoded(b"".join(kept), self.location, first)
                    yield Read(content, after if empty else before, goes_on=not empty)
                    kept = []
                if not empty:
                    first = first if kept else line
                    kept.append(piece)
                before = after
        if kept:
            yield Read(decoded(b"".join(kept), self.location, first), before)

    def identity(self) -> Any:
        """Return what tells its content from any other. Raises NotFoundError where there is none."""
        if not is_on_hub(self.location):
            return artifacts.identity_of(self.location, s3=self.s3)
        name, options = hub_parts(self.location)
        if Path(name).is_dir():  # which `datasets` prefers to the hub's of that name
            return {**options, "files": artifacts.identity_of(name, s3=self.s3)}
        return {**options, "data_set": name, "commit": data_set_commit(self.location)}

    def size(self) -> int | None:
        """Return how far `At.offset` counts to its end; None where nobody knows."""
        if unit(self.location) == "row":
            return None
        if not self.location.startswith(S3):
            return Path(self.location).stat().st_size
        return object_store.size(self.s3(), S3Location.parse(self.location))


def split(content: bytes, at_most_bytes: int) -> Iterator[bytes]:
    """Cut a document into pieces at whitespace; within a word only where a piece would have no whitespace."""
    while len(content) > at_most_bytes:
        place = _cut(content, at_most_bytes)
        yield content[:place]
        content = content[place:]
    yield content


def _cut(content: bytes, at_most_bytes: int) -> int:
    """Return where to cut content that is too long: never inside a character."""
    head = content[:at_most_bytes]
    space = max(head.rfind(b" "), head.rfind(b"\n"), head.rfind(b"\t"), head.rfind(b"\r"))
    if space > 0:
        return space + 1
    place = at_most_bytes
    while place > at_most_bytes - 4 and content[place] & 0xC0 == 0x80:  # a byte that continues a character
        place -= 1
    return place


def _pieces(stream: io.BufferedReader, start: At, limit: int) -> Iterator[tuple[bytes, int, At, bool]]:
    """Read lines, those that are too long in pieces: content, number of the line, the place behind, and whether the
    line goes on.
    """
    stream.seek(start.offset)
    offset, line = start
    while piece := stream.readline(limit + 1):
        ended = piece.endswith(b"\n")
        goes_on = not ended and len(piece) > limit
        if goes_on:
            place = _cut(piece, limit)
            stream.seek(place - len(piece), io.SEEK_CUR)
            piece = piece[:place]
        offset += len(piece)
        yield piece, line + 1, At(offset, line + ended), goes_on
        line += ended


def _as_text(value: Any, column: str, place: str) -> str | Broken:
    """Return a cell as text; none at all is an empty one."""
    if value is None:
        return ""
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError as error:
            return Broken(not_utf8(place, error))
    if not isinstance(value, str):
        raise UsageError(f"{place}: '{column}' is not text but {value!r:.80}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        return Broken(f"{place}: no UTF-8 (half of a surrogate pair, or a broken byte, at position {error.start + 1})")
    return value
