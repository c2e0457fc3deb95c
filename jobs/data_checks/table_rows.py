"""The rows of a table of text, JSON lines, CSV or TSV: one parser for the command line and the container.

Each way in which a table can be bad has an error that names the place in it; nothing is guessed, and nothing is left
out silently. What lies in other forms, and where it lies, is for jobs.data_checks.table_samples and
jobs.container.data.tables.
"""

import csv
import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from io import BufferedIOBase
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from jobs.core.errors import TrainyardError, UsageError, did_you_mean
from jobs.core.locations import DELIMITERS, HUB, table_suffix
from jobs.data_checks.bad_rows import BadRows

ROW_TO_DOCUMENT = 4
"""How many times the longest document a row may be long: its escapes and other columns need room."""

_OTHER_DELIMITERS = (";", "\t", "|", ",")

csv.field_size_limit(1 << 30)  # the module's own limit of 128 KiB a field refuses long documents


class At(NamedTuple):
    """A place in an input, between two rows or documents."""

    offset: int = 0
    """Bytes of a file that is read line by line; rows of a Parquet file or a hub data set."""
    line: int = 0
    """Lines, or rows, before it."""


BEGINNING = At()


class Broken(NamedTuple):
    """What stands where text should be that is not UTF-8: its place, and why."""

    reason: str


class JoinedLines(NamedTuple):
    """Lines that quotes make one row, although each would be a row by itself: the quotes may belong to the text."""

    first: int
    last: int
    rows: Sequence[Sequence[str]]
    """For each line, the values of the table's columns if quotes are text."""


QUOTES_NEXT = 'put each text that has quotes into quotes and double its own (""), or save the table as JSON lines'

Row = tuple[Sequence[Any] | Broken, int, int]
"""The values of a row, in the order in which its columns were asked for, and the offset and line of its end (see At).

There are millions of them: a class of its own for each would take a tenth of the time that reading takes.
"""


@dataclass(frozen=True, kw_only=True)
class TableRows:
    """Some columns of one table, and how its rows are read."""

    location: str
    columns: Sequence[str]
    columns_are_named_by: str
    """The arguments that a user corrects where a column is missing."""
    streamed: bool = False
    """The table may be larger than memory and disk. A data set of the hub is then read without downloading it first,
    and text that is not UTF-8 is handed out as Broken; otherwise it is refused."""
    max_document_bytes: int | None = None
    """Rows may be ROW_TO_DOCUMENT times as long; None: they may be of any length."""
    bad: BadRows | None = None
    """Takes note of rows that cannot be read, which are then not handed out; None: the first is an error."""
    joined: list[JoinedLines] = field(default_factory=list)
    """Those of a CSV or TSV file that were read by now; of a streamed table the first only."""

    def rows_of_text(self, stream: BufferedIOBase, start: At = BEGINNING) -> Iterator[Row]:
        """Read the rows of a CSV, TSV or JSON-lines file, as its name says, from `start` on.

        Raises UsageError where it is not what its name says, or has a row that is too long.
        """
        return (_delimited_rows if table_suffix(self.location) in DELIMITERS else _json_rows)(self, stream, start)

    @cached_property
    def unit(self) -> str:
        """What `At.line` counts: `line` or `row`."""
        return unit(self.location)

    def place(self, line: int) -> str:
        """Name the row that ends in this line, for an error."""
        return f"{self.location}, {self.unit} {line}"

    @cached_property
    def max_row_bytes(self) -> int | None:
        return None if self.max_document_bytes is None else ROW_TO_DOCUMENT * self.max_document_bytes

    def check_columns(self, present: Collection[str], place: str) -> None:
        """Raise UsageError where one of the columns is missing."""
        for column in self.columns:
            if column not in present:
                raise self.no_column(column, present, place)

    def no_column(self, column: str, present: Iterable[str], place: str) -> TrainyardError:
        return UsageError(
            f"{place}: no column '{column}'{did_you_mean(column, present)}", next_step=self.columns_are_named_by
        )

    def refuse(self, error: TrainyardError, *, rows: int = 1) -> None:
        """Note a bad row. Raises `error` where nobody takes note of them."""
        if self.bad is None:
            raise error from None
        self.bad.add(self.location, error, rows=rows)

    def refuse_joined(self, labels: Sequence[Any] = (), lines: Sequence[int] = ()) -> set[int]:
        """Note rows that have swallowed others, and warn of those that may have.

        It is certain if every line has a label of the table: then one row's class is in another's text.
        `labels`: those of all rows that were read, in the table's last column, and the `lines` in which the rows end.
        Returns the numbers of the rows that cannot be used. Raises UsageError if nobody takes note of them.
        """
        if not self.joined:
            return set()
        known = set(labels)
        swallowed = {one.last: one for one in self.joined if known.issuperset(row[-1] for row in one.rows)}
        for one in swallowed.values():
            own = f"'{self.columns[-1]}' of its own ('{one.rows[0][-1]}', '{one.rows[-1][-1]}')"
            reason = f"quotes join it with line {one.first} into one row, although each has a {own}"
            self.refuse(UsageError(f"{self.place(one.last)}: {reason}", next_step=QUOTES_NEXT))
        unsure = [one for one in self.joined if one.last not in swallowed]
        if unsure and self.bad is not None:
            self.bad.warnings.append(self.joined_warning(unsure))
        return {row for row, line in enumerate(lines) if line in swallowed}

    def joined_warning(self, joined: Sequence[JoinedLines]) -> str:
        """Return the warning of some rows that may have swallowed others."""
        first, more = joined[0], len(joined) - 1
        and_more = f", and so for {more} more" if more else ""
        return (
            f"{self.location}: quotes make lines {first.first} to {first.last} one row, and each would be one by "
            f"itself{and_more}; if the quotes belong to the text, {QUOTES_NEXT}"
        )

    def broken(self, error: UnicodeDecodeError, line: int) -> Broken | None:
        """Return what is handed out for a line that is not UTF-8; None where it is noted as bad."""
        reason = not_utf8(f"{self.location}, line {line}", error)
        if self.streamed:
            return Broken(reason)
        name = PurePosixPath(self.location).name
        # Excel's "Unicode text" begins with a mark of which neither byte can be UTF-8.
        wide = line == 1 and error.object[:2] in (b"\xff\xfe", b"\xfe\xff")
        step = f"iconv -f {'UTF-16' if wide else 'LATIN1'} -t UTF-8 {name}, if that is its encoding"
        if wide:
            raise UsageError(reason, next_step=step) from None
        self.refuse(UsageError(reason, next_step=step))
        return None

    def too_long(self, line: int) -> TrainyardError:
        return UsageError(
            f"{self.place(line)}: longer than {self.max_row_bytes} bytes, {ROW_TO_DOCUMENT} times max_document_bytes",
            next_step="set max_document_bytes higher, or split the document",
        )


def unit(location: str) -> str:
    """Return what the rows of a table are counted in: `line` or `row`."""
    return "row" if location.startswith(HUB) or table_suffix(location) == ".parquet" else "line"


def decoded(content: bytes, location: str, line: int) -> str | Broken:
    """Return what a line says, or several from that one on."""
    try:
        return content.decode(_encoding(line))
    except UnicodeDecodeError as error:
        return Broken(not_utf8(f"{location}, line {line}", error))


def not_utf8(place: str, error: UnicodeDecodeError) -> str:
    return f"{place}: not UTF-8 (byte 0x{error.object[error.start]:02x} at position {error.start + 1})"


def _encoding(line: int) -> str:
    return "utf-8-sig" if line == 1 else "utf-8"


def _lines(table: TableRows, stream: BufferedIOBase, start: At) -> Iterator[tuple[bytes, int, int]]:
    """Read whole lines, each with its end in the file and its number. Raises UsageError where one is too long."""
    stream.seek(start.offset)
    offset, number = start
    limit = table.max_row_bytes
    at_most = -1 if limit is None else limit + 1
    while content := stream.readline(at_most):
        number += 1
        offset += len(content)
        if limit is not None and len(content) > limit:
            raise table.too_long(number)
        yield content, offset, number


def _json_rows(table: TableRows, stream: BufferedIOBase, start: At) -> Iterator[Row]:
    is_first = start == BEGINNING
    for content, offset, line in _lines(table, stream, start):
        try:
            text = content.decode(_encoding(line))
        except UnicodeDecodeError as error:
            if broken := table.broken(error, line):
                yield broken, offset, line
            continue
        try:
            row = json.loads(text)
            values = [row[column] for column in table.columns]
        except (ValueError, RecursionError, KeyError, TypeError) as error:
            if text.strip():
                reason = _json_error(text, table, line, error)
                if is_first and isinstance(error, KeyError) and not (table.bad and table.bad.skip):
                    raise reason from None  # a column that the first row lacks is that of no row
                table.refuse(reason)
            continue
        is_first = False
        yield values, offset, line


def _json_error(text: str, table: TableRows, line: int, error: Exception) -> TrainyardError:
    """Return the error that says why the columns cannot be taken from a line."""
    place = table.place(line)
    if isinstance(error, json.JSONDecodeError):
        return UsageError(f"{place}: not JSON: {error.msg.removesuffix(' at')} at position {error.colno}")
    if isinstance(error, KeyError):
        return table.no_column(error.args[0], json.loads(text), place)
    if isinstance(error, TypeError):  # a list, a number
        return UsageError(f"{place}: not a JSON object but {text.strip()[:40]!r}")
    # A number of thousands of digits, brackets without end.
    return UsageError(f"{place}: JSON that Python cannot read: {error}")


class _DelimitedLines:
    """The lines of a CSV or TSV file as its parser reads them, which takes several for a row that spans lines."""

    def __init__(self, table: TableRows, stream: BufferedIOBase) -> None:
        self._table = table
        self._stream = stream
        self.row_start = BEGINNING
        """Where the row begins that is being parsed."""
        self.at = BEGINNING
        """Behind the newest line."""
        self.is_bad = False
        """True: a line of the row was noted as bad."""
        self._row: list[str] = []
        """Its lines."""

    def reader(self, start: At) -> "Iterator[list[str]]":
        delimiter = DELIMITERS[table_suffix(self._table.location)]
        return csv.reader(self._text_lines(start), delimiter=delimiter, strict=True)

    def rows(self, start: At) -> "Iterator[list[str]]":
        """Read rows; those that are noted as bad are left out. Raises UsageError where they are not noted."""
        reader = self.reader(start)
        while True:
            self.row_start, self.is_bad = max(start, self.at), False
            self._row.clear()
            try:
                fields = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                reason = UsageError(f"{self._table.place(self.at.line)}: {error}")
                taken = self.at.line - self.row_start.line
                if taken > 1:
                    reason.args = (f"{reason.args[0]} (the row begins in line {self.row_start.line + 1})",)
                self._table.refuse(reason, rows=taken)
                continue
            if not self.is_bad:
                yield fields

    def _text_lines(self, start: At) -> Iterator[str]:
        limit = self._table.max_row_bytes
        for content, offset, line in _lines(self._table, self._stream, start):
            self.at = At(offset, line)
            if limit is not None and offset - self.row_start.offset > limit:  # a quoted field over many lines
                raise self._table.too_long(self.row_start.line + 1)
            try:
                text = content.decode(_encoding(line))
            except UnicodeDecodeError as error:
                self.is_bad |= self._table.broken(error, line) is None
                # What is no UTF-8 becomes lone surrogates, which are told when a document has them.
                text = content.decode(_encoding(line), "surrogateescape")
            self._row.append(text)
            yield text

    def note_joined(self, positions: Sequence[int], fields: int) -> None:
        """Note the lines of the newest row if each has as many fields as a row when quotes are text.

        What follows a comma in prose begins with a blank, which the fields of a table do not.
        """
        if len(self._row) == 1 or fields == 1 or (self._table.streamed and self._table.joined):
            return
        rows = [line.rstrip("\r\n").split(DELIMITERS[table_suffix(self._table.location)]) for line in self._row]
        if all(len(row) == fields and not any(field.startswith(" ") for field in row[1:]) for row in rows):
            values = [[row[position].strip('"') for position in positions] for row in rows]
            self._table.joined.append(JoinedLines(self.row_start.line + 1, self.at.line, values))


def _delimited_rows(table: TableRows, stream: BufferedIOBase, start: At) -> Iterator[Row]:
    lines = _DelimitedLines(table, stream)
    try:
        header = next(lines.reader(BEGINNING), [])
    except csv.Error as error:
        stream.seek(0)
        _check_delimiter(table, [stream.readline().decode(errors="replace").strip()])
        raise UsageError(f"{table.place(lines.at.line)}: {error}") from None
    # A table of examples that has no rows is empty, whatever its header says.
    wanted = _positions(table, header, 1) if table.streamed else None
    for fields in lines.rows(max(start, lines.at)):
        offset, line = lines.at
        if not fields:
            continue
        if wanted is None:
            _check_delimiter(table, header)
        if len(fields) != len(header):
            table.refuse(UsageError(f"{table.place(line)}: {len(fields)} fields, but the header has {len(header)}"))
            continue
        if wanted is None:
            wanted = _positions(table, header, line)
        lines.note_joined(wanted, len(header))
        yield [fields[position] for position in wanted], offset, line


def _check_delimiter(table: TableRows, header: list[str]) -> None:
    """Raise UsageError where a header of one field is none of the columns, but several with another character."""
    fault = None if header and header[0] in table.columns else delimiter_fault(table.location, header)
    if fault is not None:
        raise fault


def delimiter_fault(location: str, header: list[str]) -> UsageError | None:
    """Return what is wrong with a header of one field that would be several with another character between them."""
    expected = DELIMITERS[table_suffix(location)]
    if len(header) != 1:
        return None
    other = max((character for character in _OTHER_DELIMITERS if character != expected), key=header[0].count)
    if other not in header[0]:
        return None
    rename = "; or name it .tsv" if other == "\t" else ""
    rewrite = f"csv.writer(sys.stdout, delimiter={expected!r}).writerows(csv.reader(sys.stdin, delimiter={other!r}))"
    return UsageError(
        f"{location}, line 1: its columns are parted by {other!r}, not by {expected!r} as its name says",
        next_step=f"save it with {expected!r} between the columns: "
        f'python3 -c "import csv, sys; {rewrite}" < FILE > NEW_FILE{rename}',
    )


def _positions(table: TableRows, header: list[str], line: int) -> list[int]:
    """Return where the columns are. Raises UsageError where one is missing, or there are two of that name."""
    table.check_columns(header, table.place(line))
    for column in table.columns:
        if header.count(column) > 1:
            raise UsageError(
                f"{table.location}, line 1: two columns are called '{column}'", next_step="rename one of them"
            )
    return [header.index(column) for column in table.columns]
