"""Read the rows of a CSV, TSV or JSON-lines table, on the laptop and in the container.

Every bad row is reported with its place; nothing is guessed or skipped silently. jobs.data_checks.inputs and
jobs.container.data.tables download tables and read other formats.
"""

import codecs
import csv
import json
import re
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from io import BufferedIOBase
from typing import Any, NamedTuple

from jobs.core.errors import TrainyardError, UsageError, did_you_mean, raise_all
from jobs.core.labels import SINGLE_LABEL, LabelFormat, label_errors, stripped, text_error
from jobs.core.locations import DELIMITERS, HUB, table_suffix
from jobs.core.words import counted
from jobs.data_checks.table_text import UTF8, utf8_text
from jobs.spec.arguments import DEFAULT_FORMAT, TextFormat

MAX_NAMED = 10
"""Maximum number of bad rows to list per table. All bad rows are counted."""


class BadRows:
    """Collects the bad rows of all tables of a job."""

    def __init__(self, *, skip: bool = False, at_most: int = 0) -> None:
        """Skip bad rows if `skip` is set, but fail if there are more than `at_most`."""
        self.skip = skip
        self._at_most = at_most
        self._errors: dict[str, list[TrainyardError]] = {}
        self.counts: Counter[str] = Counter()
        """Number of bad rows by the location of their table."""
        self.duplicates = 0
        """Number of usable rows that were dropped because they repeat others."""
        self.warnings: list[str] = []
        """Warnings of likely mistakes in usable rows."""

    def add(self, location: str, error: TrainyardError, *, rows: int = 1) -> None:
        """Add bad rows, described by `error`. Raises UsageError if there are now more than may be skipped.

        `rows` is above 1 for a quoted field that never ends: the number of lines it spans.
        """
        self.counts[location] += rows
        errors = self._errors.setdefault(location, [])
        if len(errors) < MAX_NAMED:
            errors.append(error)
        if self.skip and self.counts.total() > self._at_most:
            raise UsageError(
                f"more bad rows than max_bad_rows allows ({self._at_most}); among them:\n"
                + "\n".join(self.named(location)),
                next_step="correct the table, or set max_bad_rows higher",
            )

    def named(self, location: str) -> list[str]:
        """Return one line for each of the table's first bad rows, and a last line with the number of the rest."""
        errors = self._errors.get(location, [])
        lines = [str(error.args[0]) for error in errors]
        more = self.counts[location] - len(errors)
        return [*lines, f"and {more} more"] if more > 0 else lines

    def next_step(self, location: str) -> str | None:
        """Return what to do about the bad rows of a table, or None if there is no advice."""
        return "; or ".join(_steps(self._errors.get(location, []))[:2]) or None

    def refuse(self) -> None:
        """Raise UsageError for all bad rows, unless they are skipped."""
        if self.skip or not self.counts:
            return
        errors = [error for table_errors in self._errors.values() for error in table_errors]
        steps = _steps(errors)
        if len(errors) == 1:
            errors[0].next_step = "; or ".join([*steps, "skip such rows with on_bad_rows: skip"])
            raise errors[0]
        raise UsageError(
            f"{self.counts.total()} bad rows:\n"
            + "\n".join(line for location in self._errors for line in self.named(location)),
            next_step="; or ".join([*steps[:2], "skip them with on_bad_rows: skip"]),
        )


def _steps(errors: Iterable[TrainyardError]) -> list[str]:
    return list(dict.fromkeys(error.next_step for error in errors if error.next_step))


ROW_TO_DOCUMENT = 4
"""Maximum size of a row as a multiple of the longest document: escapes and other columns take space too."""

_OTHER_DELIMITERS = (";", "\t", "|", ",")

_SEPARATOR = re.compile(rb'(?:\xef\xbb\xbf)?"?sep=(.)"?\s*')
"""The line before the header in which Excel reads the delimiter, and which it does not show."""

_ROW_NAMES = ("0", "1")
"""First names of rows, as R and pandas number them."""

_BLANK_BYTES = 1 << 10
"""Bytes in which a JSON array must begin."""

_BETWEEN = re.compile(r"[\s,]*")
"""What may be between the objects of a JSON array."""

csv.field_size_limit(1 << 30)  # the default of 128 KiB is too small for long documents


class At(NamedTuple):
    """A position in an input, between two rows or documents."""

    offset: int = 0
    """Bytes for a file that is read line by line; rows for a Parquet file or a hub data set."""
    line: int = 0
    """Number of lines, or rows, before the position."""


BEGINNING = At()


class Broken(NamedTuple):
    """Stands for text that is not UTF-8, with its position and the reason."""

    reason: str


class JoinedLines(NamedTuple):
    """Lines that quotes join into one row, although each could be a row because the quotes may belong to the text."""

    first: int
    last: int
    rows: Sequence[Sequence[str]]
    """For each line, the values of the table's columns if quotes are read as text."""


QUOTES_NEXT = (
    'quote each text that contains quotes and double the quotes in it (""), set quotes_are_text: true if no quotes '
    "enclose texts, or save the table as JSON lines"
)

JSON_NEXT = "write one JSON object in each line, or one array of objects"

ENCODING_NEXT = "set encoding: cp1252, or the encoding in which the text reads right"

_UTF8_NEXT = "save the file as UTF-8"
"""For files of scripts, which have no key `encoding`."""

_LIKELY_ENCODINGS = ("cp1252", "mac-roman")
"""Encodings of spreadsheet programs on Windows and older Macs. Neither can be told from the bytes alone."""

Row = tuple[Sequence[Any] | Broken, int, int]
"""The values of a row, in the order of the requested columns, and the offset and line of its end (see At).

A plain tuple, because tables have millions of rows and a class would add a tenth to the reading time.
"""


@dataclass(frozen=True, kw_only=True)
class TableRows:
    """Reads some columns of one table."""

    location: str
    columns: Sequence[str]
    missing_next: str
    """Next step if a column is missing."""
    streamed: bool = False
    """The table may be larger than memory and disk. Hub data sets are then read without downloading them first, and
    text that is not UTF-8 is returned as Broken instead of raising an error."""
    max_document_bytes: int | None = None
    """Rows may be up to ROW_TO_DOCUMENT times as long. None disables the limit."""
    bad: BadRows | None = None
    """Collects bad rows, which are then not returned. If it is None, the first bad row is an error."""
    format: TextFormat = DEFAULT_FORMAT
    """How text is decoded, divided into columns and cleaned."""
    is_head: bool = False
    """The stream is only the beginning of the file: its last row may be incomplete, and is left out."""
    invalid: list[TrainyardError] = field(default_factory=list)
    """Errors of lines that are not in the expected encoding."""
    non_ascii: list[int] = field(default_factory=list)
    """The first line that has other characters than ASCII's, in the expected encoding."""
    whole_rows: bool = False
    """Return each line of JSON as a dict, which is its only value, whatever the file's name. Needs no `columns`."""
    joined: list[JoinedLines] = field(default_factory=list)
    """Joined lines of a CSV or TSV file found so far; for a streamed table only the first."""

    def rows_of_text(self, stream: BufferedIOBase, start: At = BEGINNING) -> Iterator[Row]:
        """Read the rows of a CSV, TSV or JSON file, depending on its name, beginning at `start`.

        Raises UsageError if the file has another format or encoding, or a row that is too long.
        """
        text = utf8_text(stream, self.location, self.format.encoding, is_head=self.is_head, has_key=not self.whole_rows)
        others: list[TrainyardError] = []
        try:
            is_delimited = table_suffix(self.location) in DELIMITERS and not self.whole_rows
            yield from (_delimited_rows if is_delimited else _json_rows)(self, text, start)
        except UsageError as error:
            if self.bad is None:
                raise
            if not self.invalid:  # the error may be in the header, and the encoding wrong further down
                deque(_json_lines(self, text, BEGINNING), maxlen=0)
            if not self.invalid:
                raise
            others.append(error)
        if others or (self.invalid and not self.non_ascii):
            # The whole file has another encoding. To skip its lines would leave out whatever is not ASCII.
            first, more = self.invalid[0], len(self.invalid) - 1
            and_more = f", and {counted(more, 'more such line')}" if more else ""
            raise_all([UsageError(f"{first.args[0]}{and_more}", next_step=first.next_step), *others])
        for line_error in self.invalid:
            self.refuse(line_error)

    @property
    def encoding_next(self) -> str:
        """The next step for text in another encoding."""
        return _UTF8_NEXT if self.whole_rows else ENCODING_NEXT

    def cleaned(self, values: Sequence[Any]) -> Sequence[Any]:
        """Return the values of a row, without blanks around texts if the format says so."""
        if not self.format.strip:
            return values
        return [stripped(value) if isinstance(value, str) else value for value in values]

    @cached_property
    def unit(self) -> str:
        """The unit of `At.line`: `line` or `row`."""
        return unit(self.location)

    def place(self, line: int) -> str:
        """Return the name of the row that ends on this line, for an error."""
        return f"{self.location}, {self.unit} {line}"

    @cached_property
    def max_row_bytes(self) -> int | None:
        return None if self.max_document_bytes is None else ROW_TO_DOCUMENT * self.max_document_bytes

    def check_columns(self, present: Collection[str], line: int | None = None) -> None:
        """Raise UsageError if a column is missing."""
        for column in self.columns:
            if column not in present:
                raise self.no_column(column, present, line)

    def no_column(self, column: str, present: Iterable[str], line: int | None = None) -> TrainyardError:
        """Return the error for a column that a line lacks or, without a line, the header or the schema."""
        suffix = "" if self.location.startswith(HUB) else table_suffix(self.location)
        place = self.place(line) if line else f"{self.location}, {'header' if suffix in DELIMITERS else 'schema'}"
        return UsageError(f"{place}: no column '{column}'{did_you_mean(column, present)}", next_step=self.missing_next)

    def refuse(self, error: TrainyardError, *, rows: int = 1) -> None:
        """Add a bad row, or raise `error` if bad rows are not collected."""
        if self.bad is None:
            raise error from None
        self.bad.add(self.location, error, rows=rows)

    def refuse_joined(self, labels: Sequence[Any] = (), lines: Sequence[int] = ()) -> set[int]:
        """Reject rows that certainly contain other rows, and warn of rows that may contain some.

        A row certainly contains others if each of its lines has one of the table's labels: then the text of one row
        includes the label of another.

        `labels` are the values of the last column in all rows read, `lines` the lines on which those rows end.
        Returns the indices of unusable rows. Raises UsageError if bad rows are not collected.
        """
        if not self.joined:
            return set()
        known = set(labels)
        merged = {one.last: one for one in self.joined if known.issuperset(row[-1] for row in one.rows)}
        for one in merged.values():
            values = f"'{self.columns[-1]}' ('{one.rows[0][-1]}', '{one.rows[-1][-1]}')"
            reason = f"quotes join it with line {one.first} into one row, although each line has a {values}"
            self.refuse(UsageError(f"{self.place(one.last)}: {reason}", next_step=QUOTES_NEXT))
        unsure = [one for one in self.joined if one.last not in merged]
        if unsure and self.bad is not None:
            self.bad.warnings.append(self.joined_warning(unsure))
        return {row for row, line in enumerate(lines) if line in merged}

    def joined_warning(self, joined: Sequence[JoinedLines]) -> str:
        """Return a warning about rows that may contain other rows."""
        first, more = joined[0], len(joined) - 1
        and_more = f" (and {more} more such rows)" if more else ""
        return (
            f"{self.location}: quotes join lines {first.first} to {first.last} into one row, although each could be a "
            f"row{and_more}; if the quotes belong to the text, {QUOTES_NEXT}"
        )

    def broken(self, error: UnicodeDecodeError, line: int) -> Broken | None:
        """Return the value for a line in another encoding, or None if the line was added to `invalid`."""
        reason = invalid_text(f"{self.location}, line {line}", error, self.format.encoding)
        if self.streamed:
            return Broken(reason)
        self.invalid.append(UsageError(reason, next_step=self.encoding_next))
        if self.bad is None:
            raise self.invalid[0] from None
        return None

    def too_long(self, line: int) -> TrainyardError:
        return UsageError(
            f"{self.place(line)}: longer than {self.max_row_bytes} bytes, {ROW_TO_DOCUMENT} times max_document_bytes",
            next_step="set max_document_bytes higher, or split the document",
        )


def column_values(column: Any) -> list[Any]:
    """Return the values of an Arrow column. UTF-8 bytes become text, because Hive and old Spark write text as bytes."""
    values: list[Any] = column.to_pylist()
    return [_text_of(value) for value in values] if "binary" in str(column.type) else values


def _text_of(value: Any) -> Any:
    try:
        return value.decode() if isinstance(value, bytes) else value
    except UnicodeDecodeError:
        return value


def unit(location: str) -> str:
    """Return the unit in which a table's rows are counted: `line` or `row`."""
    return "row" if location.startswith(HUB) or table_suffix(location) == ".parquet" else "line"


def decoded(content: bytes, location: str, line: int, encoding: str = UTF8) -> str | Broken:
    """Decode one line, or several lines that begin with it. `encoding` is that of the file before `utf8_text`."""
    try:
        return content.decode(_encoding(line))
    except UnicodeDecodeError as error:
        return Broken(invalid_text(f"{location}, line {line}", error, encoding))


def invalid_text(place: str, error: UnicodeDecodeError, encoding: str = UTF8) -> str:
    """Return an error for bytes that are not in the expected encoding, with the word in likely encodings."""
    position = len(error.object[: error.start].decode()) + 1
    found = f"byte 0x{error.object[error.start]:02x} at position {position}"
    if encoding != UTF8:  # the other bytes of the line are converted already
        return f"{place}: not {encoding} ({found})"
    words = []
    for name in _LIKELY_ENCODINGS:
        with suppress(UnicodeDecodeError):
            before, after = error.object[: error.start].decode(name), error.object[error.start :].decode(name)
            word = re.findall(r"[^\s,;]*$", before)[0][-20:] + re.findall(r"^[^\s,;]*", after)[0][:20]
            words.append(f"{word!r} in {name}")
    return f"{place}: not UTF-8 ({found}{': ' if words else ''}{', '.join(words)})"


def _encoding(line: int) -> str:
    return "utf-8-sig" if line == 1 else "utf-8"


def _lines(table: TableRows, stream: BufferedIOBase, start: At) -> Iterator[tuple[bytes, int, int]]:
    """Read whole lines, each with its end offset and its number. Raises UsageError if one is too long."""
    stream.seek(start.offset)
    offset, number = start
    limit = table.max_row_bytes
    at_most = -1 if limit is None else limit + 1
    is_head = table.is_head
    while content := stream.readline(at_most):
        number += 1
        offset += len(content)
        if limit is not None and len(content) > limit:
            raise table.too_long(number)
        if is_head and not content.endswith(b"\n"):
            return
        yield content, offset, number


def _json_rows(table: TableRows, stream: BufferedIOBase, start: At) -> Iterator[Row]:
    is_first = start == BEGINNING
    stream.seek(0)
    is_array = stream.read(_BLANK_BYTES).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")
    for text, offset, line in (_array_items if is_array else _json_lines)(table, stream, start):
        if isinstance(text, Broken):
            yield text, offset, line
            continue
        try:
            row = json.loads(text)
            values = [{**row}] if table.whole_rows else [row[column] for column in table.columns]
        except (ValueError, RecursionError, KeyError, TypeError) as error:
            if text.strip():
                reason = _json_error(text, table, line, error)
                if is_first and isinstance(error, KeyError) and not (table.bad and table.bad.skip):
                    raise reason from None  # no row has a column that the first row lacks
                table.refuse(reason)
            continue
        is_first = False
        yield values, offset, line


def _json_lines(table: TableRows, stream: BufferedIOBase, start: At) -> Iterator[tuple[str | Broken, int, int]]:
    for content, offset, line in _lines(table, stream, start):
        text: str | Broken | None
        try:
            text = content.decode(_encoding(line))
            if not (table.non_ascii or content.isascii()):
                table.non_ascii.append(line)
        except UnicodeDecodeError as error:
            text = table.broken(error, line)
        if text is not None:
            yield text, offset, line


def _array_items(table: TableRows, stream: BufferedIOBase, start: At) -> Iterator[tuple[str | Broken, int, int]]:
    """Read the items of a file that is one JSON array. Offsets count characters; the whole text is in memory.

    Raises UsageError at the first item that is not JSON, because nothing shows where the next one begins.
    """
    stream.seek(0)
    content = stream.read()
    try:
        text = codecs.getincrementaldecoder("utf-8-sig")().decode(content, final=not table.is_head)
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UsageError(invalid_text(table.place(line), error), next_step=table.encoding_next) from None
    decoder = json.JSONDecoder()
    offset, line = start if start != BEGINNING else (text.index("[") + 1, text.count("\n", 0, text.index("[")) + 1)
    while True:
        end = _BETWEEN.match(text, offset).end()  # type: ignore[union-attr]
        line += text.count("\n", offset, end)
        if text[end : end + 1] == "]" and not text[end + 1 :].strip():
            return
        try:
            _, offset = decoder.raw_decode(text, end)
        except (ValueError, RecursionError) as error:
            if table.is_head:
                return
            reason = getattr(error, "msg", str(error)).removesuffix(" at")
            raise UsageError(
                f"{table.place(line)}: the JSON array cannot be read from here on: {reason}", next_step=JSON_NEXT
            ) from None
        if table.max_row_bytes is not None and offset - end > table.max_row_bytes:
            raise table.too_long(line)
        line += text.count("\n", end, offset)
        yield text[end:offset], offset, line


def _json_error(text: str, table: TableRows, line: int, error: Exception) -> TrainyardError:
    """Return an error that explains why the columns could not be read from a line."""
    place = table.place(line)
    if isinstance(error, json.JSONDecodeError):
        reason = f"{place}: not JSON: {error.msg.removesuffix(' at')} at position {error.colno}"
        return UsageError(reason, next_step=JSON_NEXT)
    if isinstance(error, KeyError):
        return table.no_column(error.args[0], json.loads(text), line)
    if isinstance(error, TypeError):  # a list, a number
        return UsageError(f"{place}: not a JSON object but {text.strip()[:40]!r}", next_step=JSON_NEXT)
    # A number with thousands of digits, or unclosed brackets without end.
    return UsageError(f"{place}: JSON that Python cannot read: {error}")


class _DelimitedLines:
    """The lines of a CSV or TSV file as the parser reads them: one row may span several lines."""

    def __init__(self, table: TableRows, stream: BufferedIOBase) -> None:
        self._table = table
        self._stream = stream
        self.delimiter = table.format.delimiter or DELIMITERS[table_suffix(table.location)]
        self.row_start = BEGINNING
        """Start of the row that is being parsed."""
        self.at = BEGINNING
        """End of the newest line."""
        self.is_bad = False
        """Whether a line of the row was added to the bad rows."""
        self._row: list[str] = []
        """The lines of the row."""

    def header(self) -> list[str]:
        """Return the names of the columns; empty if there are none. A line `sep=;` before them sets the delimiter."""
        start = BEGINNING
        for content, offset, line in _lines(self._table, self._stream, BEGINNING):
            if found := _SEPARATOR.fullmatch(content):
                self.delimiter = self._table.format.delimiter or found[1].decode("latin-1")
                start = At(offset, line)
            break
        header: list[str] = next(filter(None, self._reader(start)), [])
        return [*self._table.cleaned(header)]

    def _reader(self, start: At) -> "Iterator[list[str]]":
        return csv.reader(
            self._text_lines(start),
            delimiter=self.delimiter,
            quoting=csv.QUOTE_NONE if self._table.format.quotes_are_text else csv.QUOTE_MINIMAL,
            strict=True,
        )

    def rows(self, start: At) -> "Iterator[list[str]]":
        """Read rows without the bad ones. Raises UsageError if bad rows are not collected."""
        reader = self._reader(start)
        while True:
            self.row_start, self.is_bad = max(start, self.at), False
            self._row.clear()
            try:
                fields = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                if self._table.is_head and str(error) == "unexpected end of data":
                    return
                reason = UsageError(f"{self._table.place(self.at.line)}: {error}", next_step=QUOTES_NEXT)
                lines = self.at.line - self.row_start.line
                if lines > 1:
                    reason.args = (f"{reason.args[0]} (the row begins in line {self.row_start.line + 1})",)
                self._table.refuse(reason, rows=lines)
                continue
            if not self.is_bad:
                yield fields

    def _text_lines(self, start: At) -> Iterator[str]:
        is_found = False
        limit = self._table.max_row_bytes
        for content, offset, line in _lines(self._table, self._stream, start):
            self.at = At(offset, line)
            if limit is not None and offset - self.row_start.offset > limit:  # a quoted field over many lines
                raise self._table.too_long(self.row_start.line + 1)
            try:
                text = content.decode(_encoding(line))
                if not (is_found or content.isascii()):
                    is_found = True
                    self._table.non_ascii.append(line)
            except UnicodeDecodeError as error:
                self.is_bad |= self._table.broken(error, line) is None
                # Invalid bytes become lone surrogates, which are reported when a document contains them.
                text = content.decode(_encoding(line), "surrogateescape")
            self._row.append(text)
            yield text

    def note_joined(self, positions: Sequence[int], fields: int) -> None:
        """Record the newest row's lines if each has as many fields as a row when quotes are read as text.

        In prose a comma is followed by a space; fields of a table do not begin with one.
        """
        if len(self._row) == 1 or fields == 1 or (self._table.streamed and self._table.joined):
            return
        rows = [line.rstrip("\r\n").split(self.delimiter) for line in self._row]
        if all(len(row) == fields and not any(field.startswith(" ") for field in row[1:]) for row in rows):
            values = [[row[position].strip('"') for position in positions] for row in rows]
            self._table.joined.append(JoinedLines(self.row_start.line + 1, self.at.line, values))

    def check_delimiter(self, header: list[str]) -> None:
        """Raise UsageError if a single-field header is not a column but would be several with another delimiter."""
        if len(header) != 1 or header[0] in self._table.columns:
            return
        other = max((each for each in _OTHER_DELIMITERS if each != self.delimiter), key=header[0].count)
        if other in header[0]:
            names = header[0].split(other)
            missing = {*self._table.columns} - {*names}
            columns = f"; {self._table.missing_next}; the columns are {', '.join(map(repr, names))}" if missing else ""
            shown = "tab" if other == "\t" else repr(other)
            raise UsageError(
                f"{self._table.location}, line 1: its columns are separated by {other!r}, not by {self.delimiter!r}",
                next_step=f"set delimiter: {shown}{columns}",
            )


def _delimited_rows(table: TableRows, stream: BufferedIOBase, start: At) -> Iterator[Row]:
    lines = _DelimitedLines(table, stream)
    try:
        header = lines.header()
    except csv.Error as error:
        stream.seek(0)
        lines.check_delimiter([stream.readline().decode(errors="replace").strip()])
        raise UsageError(f"{table.place(lines.at.line)}: {error}") from None
    # A table of examples without rows is reported as empty, whatever its header.
    wanted = _positions(table, header) if table.streamed else None
    for fields in lines.rows(max(start, lines.at)):
        offset, line = lines.at
        if not fields:
            continue
        if wanted is None:
            lines.check_delimiter(header)
            if len(fields) == len(header) + 1 and fields[0] in _ROW_NAMES:  # R writes no name for the row names
                header = ["", *header]
        if len(fields) != len(header):
            reason = f"{table.place(line)}: {len(fields)} fields, but the header has {len(header)}"
            table.refuse(UsageError(reason, next_step=f"quote each text that contains {lines.delimiter!r}"))
            continue
        if wanted is None:
            wanted = _positions(table, header)
        lines.note_joined(wanted, len(header))
        yield [fields[position] for position in wanted], offset, line
    if wanted is None and table.invalid:  # also report errors of the header
        lines.check_delimiter(header)
        _positions(table, header)


def _positions(table: TableRows, header: list[str]) -> list[int]:
    """Return the positions of the columns. Raises UsageError if one is missing or occurs twice."""
    table.check_columns(header)
    for column in table.columns:
        if header.count(column) > 1:
            raise UsageError(
                f"{table.location}, header: two columns are named '{column}'", next_step="rename one of them"
            )
    return [header.index(column) for column in table.columns]


def labelled_rows(
    table: TableRows,
    rows: Iterable[tuple[Sequence[Any] | Broken, int]],
    texts: Sequence[str],
    label: str,
    labels_are: LabelFormat = SINGLE_LABEL,
) -> list[tuple[tuple[str, ...], Any]]:
    """Return the texts and the label of each usable row, and add the others to the table's bad rows.

    `rows` have the values of the table's columns and the line. Raises UsageError if bad rows are not collected.
    """
    found, lines = list[tuple[tuple[Any, ...], Any]](), list[int]()
    for values, line in rows:
        if not isinstance(values, Broken):
            by_column = dict(zip(table.columns, table.cleaned(values), strict=True))
            found.append((tuple(by_column[column] for column in texts), by_column[label]))
            lines.append(line)
    labels = [value for _, value in found]
    merged = table.refuse_joined(labels, lines)
    invalid = label_errors(label, labels, lambda number: f"{table.unit} {lines[number]}", labels_are)
    label_problems = {number: (reason, next_step) for number, reason, next_step in invalid}
    usable = []
    for number, row in enumerate(found):
        if number in merged:
            continue
        reason = _first_text_error(texts, row[0])
        problem = (reason, None) if reason else label_problems.get(number)
        if problem is None:
            usable.append(row)
        else:
            table.refuse(UsageError(f"{table.place(lines[number])}: {problem[0]}", next_step=problem[1]))
    return usable


def _first_text_error(columns: Sequence[str], texts: Sequence[Any]) -> str | None:
    errors = (
        f"'{column}' {reason}" for column, text in zip(columns, texts, strict=True) if (reason := text_error(text))
    )
    return next(errors, None)
