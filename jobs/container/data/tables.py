"""Read tables row by row: JSON lines, CSV, TSV, Parquet, and data sets of the Hugging Face hub.

These readers serve both labelled examples and the documents of a corpus, and can start anywhere in a table.
jobs.data_checks.table_rows parses text formats, on a laptop as well as in a job.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count, islice
from typing import TYPE_CHECKING, Any

from jobs.container.data.sources import is_on_hub, open_stream
from jobs.core.errors import NotFoundError, UsageError
from jobs.core.labels import names_in_parquet
from jobs.core.locations import hub_parts, table_suffix
from jobs.data_checks.table_rows import BEGINNING, At, Row, TableRows, column_values

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

_STREAMED_ROWS = 256
"""Maximum rows of a streamed Parquet file in memory at once. If they are long, there are fewer."""

_HELD_ROWS = 10000
"""Rows to convert at once if the whole table will be in memory anyway. Single rows take much longer."""


@dataclass(frozen=True, kw_only=True)
class TableReader(TableRows):
    """Reads the given columns of one table."""

    s3: Callable[[], "S3Client"]

    def rows(self, start: At = BEGINNING) -> Iterator[Row]:
        """Read the rows from `start` on.

        Raises UsageError if the content does not match the table's suffix or if a row is too long, and NotFoundError if
        the table does not exist.
        """
        if is_on_hub(self.location):
            return _hub_rows(self, start)
        return (_parquet_rows if table_suffix(self.location) == ".parquet" else _rows_of_file)(self, start)

    def class_names(self, column: str) -> Sequence[str] | None:
        """Return the names of a column's numbers, or None if the table has no names. Raises what `rows` raises."""
        if not is_on_hub(self.location):
            return _names_in_parquet(self, column) if table_suffix(self.location) == ".parquet" else None
        import datasets

        feature = self.data_set.features[column]
        feature = getattr(feature, "feature", feature)  # of a list
        return list(feature.names) if isinstance(feature, datasets.ClassLabel) else None

    @cached_property
    def data_set(self) -> Any:
        """The hub's data set, opened with `datasets`."""
        return _load_data_set(self.location, streaming=self.streamed)


def _rows_of_file(table: TableReader, start: At) -> Iterator[Row]:
    with open_stream(table.location, s3=table.s3) as stream:
        yield from table.rows_of_text(stream, start)


def _parquet_rows(table: TableReader, start: At) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    row = 0
    try:
        with open_stream(table.location, s3=table.s3) as stream, pq.ParquetFile(stream) as file:
            table.check_columns(file.schema_arrow.names)
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
    except MemoryError:  # Arrow's MemoryError is also an ArrowException
        raise
    except (pa.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0] + (f" (after row {row})" if row else "")
        raise UsageError(f"{table.location} cannot be read as Parquet: {reason}") from None


def _names_in_parquet(table: TableReader, column: str) -> list[str] | None:
    import pyarrow.parquet as pq

    with open_stream(table.location, s3=table.s3) as stream:
        return names_in_parquet(pq.read_schema(stream), column)


def _cells(batch: Any, table: TableReader) -> list[Iterable[Any]]:
    """Return the values of each column. Invalid UTF-8 raises an error, or stays bytes if the table is streamed.

    Arrow itself does not validate UTF-8.
    """
    import pyarrow as pa

    columns = [batch.column(name) for name in table.columns]
    if not table.streamed:
        pa.Table.from_arrays(columns, list(table.columns)).validate(full=True)
        return [column_values(column) for column in columns]
    texts = (pa.string(), pa.large_string())
    columns = [column.cast(pa.large_binary()) if column.type in texts else column for column in columns]
    # Convert one row at a time; otherwise all of them would be in memory twice.
    return [(cell.as_py() for cell in column) for column in columns]


def _rows_at_once(group: Any, table: TableReader) -> int:
    """Return how many rows of a row group to read at once: together they are about as large as one row may be."""
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
        table.check_columns(table.data_set.column_names)
    try:
        for values, row, _ in _numbered(table, _hub_values(table, start), start.offset + 1):
            yield values, row, row
    except (ValueError, OSError, RuntimeError, DatasetsError) as error:
        raise UsageError(f"{table.location} cannot be read after row {row}: {error}") from error


def _hub_values(table: TableReader, start: At) -> Iterator[Sequence[Any]]:
    content = table.data_set.skip(start.offset) if start.offset else table.data_set
    if table.streamed:
        for number, row in enumerate(content, start=start.offset + 1):
            table.check_columns(row, number)
            yield [row[column] for column in table.columns]
        return
    for batch in content.select_columns(list(table.columns)).iter(_HELD_ROWS):
        yield from zip(*(batch[column] for column in table.columns), strict=True)


def _numbered(table: TableReader, rows: Iterable[Sequence[Any]], first: int) -> Iterator[Row]:
    """Number the rows, starting with `first`. Raises UsageError for a cell that exceeds the limit of a row."""
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
    """Open a data set of the hub. Raises NotFoundError if it does not exist, and UsageError if it cannot be loaded."""
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
            trust_remote_code=False,  # older releases run the data set's own code by default
        )
    except DatasetNotFoundError as error:
        raise NotFoundError(
            f"{location}: {error}", next_step="check the name; a gated data set needs HF_TOKEN"
        ) from None
    except (ValueError, OSError, RuntimeError, DatasetsError) as error:  # RuntimeError: a script, not data
        raise UsageError(f"{location} cannot be loaded: {error}") from error


def _is_longer(value: Any, limit_bytes: int) -> bool:
    """Return whether a cell's text exceeds the limit, encoding it only if its number of characters is inconclusive."""
    if isinstance(value, str) and len(value) <= limit_bytes < 4 * len(value):
        value = value.encode("utf-8", "surrogatepass")
    return isinstance(value, str | bytes) and len(value) > limit_bytes
