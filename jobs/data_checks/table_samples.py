"""The first rows of a table, read before a job is submitted: a few hundred kilobytes of it, wherever it lies."""

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from jobs.aws import s3 as object_store
from jobs.aws.connection import Aws
from jobs.core.errors import TrainyardError, UsageError
from jobs.core.locations import S3, S3Location, table_suffix
from jobs.data_checks.bad_rows import BadRows
from jobs.data_checks.labelled_rows import labelled_rows
from jobs.data_checks.table_rows import TableRows
from jobs.spec.arguments import Columns

HEAD_BYTES = 256 << 10
"""So much of a table is read; a longer one is looked at up to the last whole line in it."""


@dataclass(frozen=True)
class Part:
    """Some bytes at one end of a file."""

    content: bytes
    size: int
    """Bytes of the whole file."""

    @property
    def is_whole(self) -> bool:
        return len(self.content) == self.size


def head(aws: Aws, location: str) -> Part:
    """Read the first HEAD_BYTES of a file, here or on S3. Raises UsageError where one here cannot be read."""
    if not location.startswith(S3):
        try:
            with Path(location).open("rb") as file:
                content = file.read(HEAD_BYTES)
            return Part(content, Path(location).stat().st_size)
        except OSError as error:
            raise unreadable(location, error) from None
    size = object_store.size(aws.s3, S3Location.parse(location))
    return Part(object_store.read_range(aws.s3, S3Location.parse(location), 0, min(size, HEAD_BYTES)), size)


def unreadable(location: str, error: OSError) -> UsageError:
    return UsageError(f"{location} cannot be read: {error.strerror}", next_step="see whose file it is, and what kind")


def faults(
    aws: Aws, location: str, columns: Columns, note: Callable[[str], None] = lambda _: None
) -> Iterator[TrainyardError]:
    """Yield all that the first rows of a table show to be wrong with it; `note` is told what looks like a mistake.

    Of Parquet, whose rows are compressed, the columns and the number of rows are looked at.
    """
    first = head(aws, location)
    empty = UsageError(f"{location} holds no examples", next_step="check the file, or the step that wrote it")
    if table_suffix(location) == ".parquet":
        yield from _faults_of_parquet(aws, location, first, columns, empty)
        return
    content = first.content if first.is_whole else first.content[: first.content.rfind(b"\n") + 1]
    if not content and not first.is_whole:
        return  # a row that is longer than what is read
    bad = BadRows(skip=columns.skips, at_most=len(content))
    names = list(dict.fromkeys([*columns.texts, *([columns.label] if columns.label is not None else [])]))
    table = TableRows(location=location, columns=names, columns_are_named_by=columns.missing_next, bad=bad)
    rows = ((values, line) for values, _, line in table.rows_of_text(io.BytesIO(content)))
    try:
        if columns.label is None:  # a corpus takes what is not text for an empty text, and reports that
            count = sum(1 for _ in rows)
            table.refuse_joined()
        else:
            count = len(labelled_rows(table, rows, columns.texts, columns.label))
        for warning in bad.warnings:
            note(f"warning: {warning}")
        if not first.is_whole:
            # The quoted field of the last row may go on behind what was read.
            bad.forget(location, "unexpected end of data")
        bad.refuse()
    except TrainyardError as error:
        yield error
        return
    if not count and not bad.counts:
        yield empty


def _faults_of_parquet(
    aws: Aws, location: str, first: Part, columns: Columns, empty: TrainyardError
) -> Iterator[TrainyardError]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        # A file's metadata are its last bytes, and their length is in the last eight; the rows need not be read.
        end = _tail(aws, location, first.size, 8)
        if end.endswith(b"PAR1"):
            end = _tail(aws, location, first.size, int.from_bytes(end[:4], "little") + 8)
        found = pq.read_metadata(io.BytesIO(first.content[:4] + end))
        present, rows = found.schema.to_arrow_schema().names, found.num_rows
    except (pa.ArrowException, OSError, ValueError) as error:
        yield UsageError(f"{location} cannot be read as Parquet: {str(error).splitlines()[0]}")
        return
    table = TableRows(location=location, columns=columns.texts, columns_are_named_by=columns.missing_next)
    for column in (*columns.texts, *([columns.label] if columns.label is not None else [])):
        if column not in present:
            yield table.no_column(column, present, location)
    if not rows:
        yield empty


def _tail(aws: Aws, location: str, size: int, length: int) -> bytes:
    start = max(0, size - length)
    if location.startswith(S3):
        return object_store.read_range(aws.s3, S3Location.parse(location), start, size)
    with Path(location).open("rb") as file:
        file.seek(start)
        return file.read()
