"""A document as it is handed from those who read files to those who make a corpus of them, and its pieces."""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from jobs.contract.errors import TrainyardError, UsageError, did_you_mean

RECORD_TO_DOCUMENT = 4
"""How many times the longest document a row of a table may be long: its escapes and other columns need room."""


class At(NamedTuple):
    """A place in an input, between two documents."""

    offset: int = 0
    """Bytes of a file that is read line by line; rows of a Parquet file or a hub data set."""
    line: int = 0
    """Lines, or rows, before it."""


class Broken(NamedTuple):
    """What stands where a document should be, and is no text: its place, and why."""

    reason: str


class Read(NamedTuple):
    """One document, or a piece of one that is too long."""

    content: str | Broken
    after: At
    goes_on: bool = False
    """The next one is a piece of the same document."""


def split(content: bytes, at_most_bytes: int) -> Iterator[bytes]:
    """The pieces of a document, cut at whitespace; within a word only where a piece would have no whitespace."""
    while len(content) > at_most_bytes:
        place = cut(content, at_most_bytes)
        yield content[:place]
        content = content[place:]
    yield content


def cut(content: bytes, at_most_bytes: int) -> int:
    """Where to cut content that is too long: never inside a character."""
    head = content[:at_most_bytes]
    space = max(head.rfind(b" "), head.rfind(b"\n"), head.rfind(b"\t"), head.rfind(b"\r"))
    if space > 0:
        return space + 1
    place = at_most_bytes
    while place > at_most_bytes - 4 and content[place] & 0xC0 == 0x80:  # a byte that continues a character
        place -= 1
    return place


def as_text(value: Any, column: str, place: str) -> str | Broken:
    """A cell as text; none at all is an empty one."""
    if value is None:
        return ""
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError as error:
            return Broken(_not_utf8(place, error))
    if not isinstance(value, str):
        raise UsageError(f"{place}: '{column}' is not text but {value!r:.80}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        return Broken(f"{place}: no UTF-8 (half of a surrogate pair, or a broken byte, at position {error.start + 1})")
    return value


def decoded(content: bytes, location: str, number: int) -> str | Broken:
    """What a line, or several from that one on, say."""
    try:
        return content.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        return Broken(_not_utf8(f"{location}, line {number}", error))


def _not_utf8(place: str, error: UnicodeDecodeError) -> str:
    return f"{place}: not UTF-8 (byte 0x{error.object[error.start]:02x} at position {error.start + 1})"


def too_long(place: str, limit_bytes: int) -> TrainyardError:
    return UsageError(
        f"{place}: longer than {limit_bytes} bytes, {RECORD_TO_DOCUMENT} times max_document_bytes",
        next_step="set max_document_bytes higher, or split the document",
    )


def is_longer(value: Any, limit_bytes: int) -> bool:
    """Whether a cell's text takes more bytes; it is encoded only where its characters leave that open."""
    if isinstance(value, str) and len(value) <= limit_bytes < 4 * len(value):
        value = value.encode("utf-8", "surrogatepass")
    return isinstance(value, str | bytes) and len(value) > limit_bytes


def no_column(place: str, column: str, present: Iterable[str]) -> TrainyardError:
    return UsageError(
        f"{place}: no column '{column}'{did_you_mean(column, present)}",
        next_step="name each input's column in text_columns",
    )
