"""One reader of tables, row by row: JSON lines, CSV, TSV, Parquet, and data sets of the Hugging Face hub.

Labelled examples and the documents of a corpus are both read here, from wherever in a table a reader wants to go on.
Each way in which a table can be bad has an error that names the place in it; nothing is guessed, and nothing is left
out silently.
"""

import csv
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from io import BufferedReader
from itertools import count, islice
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple

from jobs.contract.errors import NotFoundError, TrainyardError, UsageError, did_you_mean
from jobs.contract.locations import DELIMITERS, hub_parts, table_suffix
from jobs.train.data.sources import is_on_hub, open_stream

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

ROW_TO_DOCUMENT = 4
"""How many times the longest document a row may be long: its escapes and other columns need room."""

_STREAMED_ROWS = 256
"""Rows of a streamed Parquet file that are in memory at once, at most; fewer where they are long."""

_HELD_ROWS = 10000
"""Rows that are converted at once of a table that is to be in memory anyway; one by one takes much longer."""

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


Row = tuple[Sequence[Any] | Broken, int, int]
"""The values of a row, in the order in which its columns were asked for, and the offset and line of its end (see At).

There are millions of them: a class of its own for each would take a tenth of the time that reading takes.
"""


@dataclass(frozen=True, kw_only=True)
class TableReader:
    """Reads some columns of one table."""

    location: str
    columns: Sequence[str]
    columns_are_named_by: str
    """The arguments that a user corrects where a column is missing."""
    s3: Callable[[], "S3Client"]
    streamed: bool = False
    """The table may be larger than memory and disk. A data set of the hub is then read without downloading it first,
    and text that is not UTF-8 is handed out as Broken; otherwise it is refused."""
    max_document_bytes: int | None = None
    """Rows may be ROW_TO_DOCUMENT times as long; None: they may be of any length."""

    def rows(self, start: At = BEGINNING) -> Iterator[Row]:
        """Read the rows from `start` on.

        Raises UsageError where the input is not what its name says, or has a row that is too long, and NotFoundError
        where there is none.
        """
        if is_on_hub(self.location):
            return _hub_rows(self, start)
        suffix = table_suffix(self.location)
        if suffix == ".parquet":
            return _parquet_rows(self, start)
        return _delimited_rows(self, start) if suffix in DELIMITERS else _json_rows(self, start)

    @cached_property
    def unit(self) -> str:
        """What `At.line` counts: `line` or `row`."""
        return unit(self.location)

    def place(self, line: int) -> str:
        """Name the row that ends in this line, for an error."""
        return f"{self.location}, {self.unit} {line}"

    def class_names(self, column: str) -> Sequence[str] | None:
        """Return the names of a column's numbers, where the data set brings them."""
        if not is_on_hub(self.location):
            return None
        import datasets

        feature = self.data_set.features[column]
        return list(feature.names) if isinstance(feature, datasets.ClassLabel) else None

    @cached_property
    def max_row_bytes(self) -> int | None:
        return None if self.max_document_bytes is None else ROW_TO_DOCUMENT * self.max_document_bytes

    @cached_property
    def data_set(self) -> Any:
        """The data set of the hub, as `datasets` opens it."""
        return _load_data_set(self.location, streaming=self.streamed)

    def check_columns(self, present: Collection[str], place: str) -> None:
        """Raise UsageError where one of the columns is missing."""
        for column in self.columns:
            if column not in present:
                raise self.no_column(column, present, place)

    def no_column(self, column: str, present: Iterable[str], place: str) -> TrainyardError:
        return UsageError(
            f"{place}: no column '{column}'{did_you_mean(column, present)}", next_step=self.columns_are_named_by
        )

    def broken(self, error: UnicodeDecodeError, line: int) -> Broken:
        """Return what is handed out for a line that is not UTF-8. Raises UsageError unless the table is streamed."""
        reason = not_utf8(f"{self.location}, line {line}", error)
        if self.streamed:
            return Broken(reason)
        name = PurePosixPath(self.location).name
        raise UsageError(reason, next_step=f"iconv -f LATIN1 -t UTF-8 {name}, if that is its encoding")

    def too_long(self, line: int) -> TrainyardError:
        return UsageError(
            f"{self.place(line)}: longer than {self.max_row_bytes} bytes, {ROW_TO_DOCUMENT} times max_document_bytes",
            next_step="set max_document_bytes higher, or split the document",
        )


def unit(location: str) -> str:
    """Return what the rows of a table are counted in: `line` or `row`."""
    return "row" if is_on_hub(location) or table_suffix(location) == ".parquet" else "line"


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


def _lines(table: TableReader, stream: BufferedReader, start: At) -> Iterator[tuple[bytes, int, int]]:
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


def _json_rows(table: TableReader, start: At) -> Iterator[Row]:
    with open_stream(table.location, s3=table.s3) as stream:
        for content, offset, line in _lines(table, stream, start):
            try:
                text = content.decode(_encoding(line))
            except UnicodeDecodeError as error:
                yield table.broken(error, line), offset, line
                continue
            try:
                row = json.loads(text)
                values = [row[column] for column in table.columns]
            except (ValueError, RecursionError, KeyError, TypeError) as error:
                if text.strip():
                    raise _json_error(text, table, line, error) from None
                continue
            yield values, offset, line


def _json_error(text: str, table: TableReader, line: int, error: Exception) -> TrainyardError:
    """Return the error that says why the columns cannot be taken from a line."""
    place = table.place(line)
    if isinstance(error, json.JSONDecodeError):
        return UsageError(f"{place}: not JSON: {error.msg} at position {error.colno}")
    if isinstance(error, KeyError):
        return table.no_column(error.args[0], json.loads(text), place)
    if isinstance(error, TypeError):  # a list, a number
        return UsageError(f"{place}: not a JSON object but {text.strip()[:40]!r}")
    # A number of thousands of digits, brackets without end.
    return UsageError(f"{place}: JSON that Python cannot read: {error}")


class _DelimitedLines:
    """The lines of a CSV or TSV file as its parser reads them, which takes several for a row that spans lines."""

    def __init__(self, table: TableReader, stream: BufferedReader) -> None:
        self._table = table
        self._stream = stream
        self.row_start = BEGINNING
        """Where the row begins that is being parsed."""
        self.at = BEGINNING
        """Behind the newest line."""

    def rows(self, start: At) -> "Iterator[list[str]]":
        delimiter = DELIMITERS[table_suffix(self._table.location)]
        return csv.reader(self._text_lines(start), delimiter=delimiter, strict=True)

    def _text_lines(self, start: At) -> Iterator[str]:
        limit = self._table.max_row_bytes
        for content, offset, line in _lines(self._table, self._stream, start):
            self.at = At(offset, line)
            if limit is not None and offset - self.row_start.offset > limit:  # a quoted field over many lines
                raise self._table.too_long(self.row_start.line + 1)
            try:
                yield content.decode(_encoding(line))
            except UnicodeDecodeError as error:
                self._table.broken(error, line)
                # What is no UTF-8 becomes lone surrogates, which are told when a document has them.
                yield content.decode(_encoding(line), "surrogateescape")


def _delimited_rows(table: TableReader, start: At) -> Iterator[Row]:
    with open_stream(table.location, s3=table.s3) as stream:
        lines = _DelimitedLines(table, stream)
        try:
            header = next(lines.rows(BEGINNING), [])
            # A table of examples that has no rows is empty, whatever its header says.
            wanted = _positions(table, header, 1) if table.streamed else None
            lines.row_start = max(start, lines.at)
            for fields in lines.rows(lines.row_start):
                lines.row_start = lines.at
                offset, line = lines.at
                if not fields:
                    continue
                if len(fields) != len(header):
                    raise UsageError(f"{table.place(line)}: {len(fields)} fields, but the header has {len(header)}")
                if wanted is None:
                    wanted = _positions(table, header, line)
                yield [fields[position] for position in wanted], offset, line
        except csv.Error as error:
            raise UsageError(f"{table.place(lines.at.line)}: {error}") from None


def _positions(table: TableReader, header: list[str], line: int) -> list[int]:
    """Return where the columns are. Raises UsageError where one is missing, or there are two of that name."""
    table.check_columns(header, table.place(line))
    for column in table.columns:
        if header.count(column) > 1:
            raise UsageError(
                f"{table.location}, line 1: two columns are called '{column}'", next_step="rename one of them"
            )
    return [header.index(column) for column in table.columns]


def _parquet_rows(table: TableReader, start: At) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    row = 0
    try:
        with open_stream(table.location, s3=table.s3) as stream, pq.ParquetFile(stream) as file:
            table.check_columns(file.schema_arrow.names, table.location)
            for number in range(file.num_row_groups):
                group = file.metadata.row_group(number)
                if row + group.num_rows <= start.offset:
                    row += group.num_rows
                    continue
                batches = file.iter_batches(_rows_at_once(group, table), row_groups=[number], columns=table.columns)
                for batch in batches:
                    skipped = max(0, start.offset - row)
                    values = islice(zip(*_cells(batch, table), strict=True), skipped, None)
                    yield from _numbered(table, values, row + skipped + 1)
                    row += batch.num_rows
    except MemoryError:  # some are an ArrowException too
        raise
    except (pa.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0] + (f" (after row {row})" if row else "")
        raise UsageError(f"{table.location} cannot be read as Parquet: {reason}") from None


def _cells(batch: Any, table: TableReader) -> list[Iterable[Any]]:
    """Return the values of each column. Text whose UTF-8 is not sound is refused, or bytes where the table is streamed.

    Arrow itself does not look whether it is.
    """
    import pyarrow as pa

    columns = [batch.column(name) for name in table.columns]
    if not table.streamed:
        pa.Table.from_arrays(columns, list(table.columns)).validate(full=True)
        return [column.to_pylist() for column in columns]
    texts = (pa.string(), pa.large_string())
    columns = [column.cast(pa.large_binary()) if column.type in texts else column for column in columns]
    # One row at a time: all of them would be in memory twice.
    return [(cell.as_py() for cell in column) for column in columns]


def _rows_at_once(group: Any, table: TableReader) -> int:
    """Return how many rows of a row group to read at once, so that they take about as much as the longest row may."""
    if table.max_row_bytes is None or not group.num_rows:
        return _HELD_ROWS
    columns = [group.column(number) for number in range(group.num_columns)]
    size: int = sum(
        column.total_uncompressed_size for column in columns if column.path_in_schema.split(".")[0] in table.columns
    )
    rows: int = table.max_row_bytes * group.num_rows // max(1, size)
    return min(_STREAMED_ROWS, max(1, rows))


def _hub_rows(table: TableReader, start: At) -> Iterator[Row]:
    from datasets.exceptions import DatasetsError

    row = start.offset
    if table.data_set.column_names is not None:
        table.check_columns(table.data_set.column_names, table.location)
    try:
        for values, row, _ in _numbered(table, _hub_values(table, start), start.offset + 1):
            yield values, row, row
    except (ValueError, OSError, RuntimeError, DatasetsError) as error:
        raise UsageError(f"{table.location} cannot be read after row {row}: {error}") from error


def _hub_values(table: TableReader, start: At) -> Iterator[Sequence[Any]]:
    content = table.data_set.skip(start.offset) if start.offset else table.data_set
    if table.streamed:
        for number, row in enumerate(content, start=start.offset + 1):
            table.check_columns(row, table.place(number))
            yield [row[column] for column in table.columns]
        return
    for batch in content.select_columns(list(table.columns)).iter(_HELD_ROWS):
        yield from zip(*(batch[column] for column in table.columns), strict=True)


def _numbered(table: TableReader, rows: Iterable[Sequence[Any]], first: int) -> Iterator[Row]:
    """Count rows from `first` on. Raises UsageError on one with a cell that is longer than a row may be."""
    limit = table.max_row_bytes
    if limit is None:
        yield from zip(rows, count(first), count(first))
        return
    for number, values in enumerate(rows, start=first):
        for value in values:
            if _is_longer(value, limit):
                raise table.too_long(number)
        yield values, number, number


def _load_data_set(location: str, *, streaming: bool) -> Any:
    """Open a data set of the hub. Raises NotFoundError where there is none, UsageError where it cannot be loaded."""
    import datasets
    from datasets.exceptions import DatasetNotFoundError, DatasetsError

    name, options = hub_parts(location)
    datasets.disable_progress_bars()
    try:
        return datasets.load_dataset(
            name,
            options.get("config"),
            split=options.get("split", "train"),
            revision=options.get("revision"),
            streaming=streaming,
            trust_remote_code=False,  # the default of older releases is to run the data set's own code
        )
    except DatasetNotFoundError as error:
        raise NotFoundError(f"{location}: {error}", next_step="check the name; a gated one needs HF_TOKEN") from None
    except (ValueError, OSError, RuntimeError, DatasetsError) as error:  # RuntimeError: it is a script, not data
        raise UsageError(f"{location} cannot be loaded: {error}") from error


def _is_longer(value: Any, limit_bytes: int) -> bool:
    """Return whether a cell's text takes more bytes; it is encoded only where its characters leave that open."""
    if isinstance(value, str) and len(value) <= limit_bytes < 4 * len(value):
        value = value.encode("utf-8", "surrogatepass")
    return isinstance(value, str | bytes) and len(value) > limit_bytes
