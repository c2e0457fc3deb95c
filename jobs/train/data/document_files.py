"""Documents out of files: lines or paragraphs of text, and a column of JSON lines, CSV or Parquet.

All are streamed, and read from any place on that an earlier document came with.
"""

import csv
import io
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from jobs.contract.errors import UsageError
from jobs.contract.locations import DELIMITERS, table_suffix
from jobs.train.data.document_pieces import At, Broken, Read, as_text, cut, decoded, is_longer, no_column, too_long

if TYPE_CHECKING:
    from jobs.train.data.documents import Input

csv.field_size_limit(1 << 30)  # the module's own limit of 128 KiB a field refuses long documents

_BATCH_ROWS = 256
"""At most; fewer where the rows of a Parquet file are long."""


def text_documents(source: "Input", start: At) -> Iterator[Read]:
    """Lines, or paragraphs, of a .txt file; at most about one document is in memory."""
    with source.open() as stream:
        if not source.paragraphs:
            for piece, number, after, goes_on in _pieces(stream, start, source.max_document_bytes):
                yield Read(decoded(piece, source.location, number), after, goes_on)
            return
        kept: list[bytes] = []
        first, before = 0, start
        for piece, number, after, _ in _pieces(stream, start, source.max_document_bytes):
            empty = not piece.strip()
            too_long = sum(map(len, kept)) + len(piece) > source.max_document_bytes
            if kept and (empty or too_long):
                yield Read(
                    decoded(b"".join(kept), source.location, first), after if empty else before, goes_on=not empty
                )
                kept = []
            if not empty:
                first = first if kept else number
                kept.append(piece)
            before = after
        if kept:
            yield Read(decoded(b"".join(kept), source.location, first), before)


def _pieces(stream: io.BufferedReader, start: At, limit: int) -> Iterator[tuple[bytes, int, At, bool]]:
    """Lines, those that are too long in pieces: content, number of its line, the place behind, whether it goes on."""
    stream.seek(start.offset)
    offset, line = start
    while piece := stream.readline(limit + 1):
        ended = piece.endswith(b"\n")
        goes_on = not ended and len(piece) > limit
        if goes_on:
            place = cut(piece, limit)
            stream.seek(place - len(piece), io.SEEK_CUR)
            piece = piece[:place]
        offset += len(piece)
        yield piece, line + 1, At(offset, line + ended), goes_on
        line += ended


def _lines(source: "Input", stream: io.BufferedReader, start: At) -> Iterator[tuple[bytes, At]]:
    """Whole lines, and the place behind each. Raises UsageError where one is too long to be held."""
    stream.seek(start.offset)
    offset, number = start
    limit = source.max_record_bytes
    while content := stream.readline(limit + 1):
        number += 1
        offset += len(content)
        if len(content) > limit:
            raise too_long(f"{source.location}, line {number}", limit)
        yield content, At(offset, number)


def json_rows(source: "Input", start: At) -> Iterator[Read]:
    with source.open() as stream:
        for content, after in _lines(source, stream, start):
            text = decoded(content, source.location, after.line)
            if isinstance(text, Broken):
                yield Read(text, after)
                continue
            if not text.strip():
                continue
            place = f"{source.location}, line {after.line}"
            try:
                row = json.loads(text)
            except (ValueError, RecursionError) as error:  # no JSON, or brackets without end
                raise UsageError(f"{place}: not JSON: {error}") from None
            if not isinstance(row, dict):
                raise UsageError(f"{place}: not a JSON object but {text.strip()[:40]!r}")
            if source.column not in row:
                raise no_column(place, source.column, row)
            yield Read(as_text(row[source.column], source.column, place), after)


def delimited_rows(source: "Input", start: At) -> Iterator[Read]:
    """Rows may span lines, so the place behind one is where the reader of lines stands when the row is whole."""
    with source.open() as stream:
        at, row_start = At(), At()

        def text_lines(begin: At) -> Iterator[str]:
            nonlocal at
            for content, at in _lines(source, stream, begin):
                if at.offset - row_start.offset > source.max_record_bytes:  # a quoted field that goes over many lines
                    raise too_long(f"{source.location}, line {row_start.line + 1}", source.max_record_bytes)
                # What is no UTF-8 becomes lone surrogates, which are told when a document has them.
                yield content.decode("utf-8-sig" if at.line == 1 else "utf-8", "surrogateescape")

        delimiter = DELIMITERS[table_suffix(source.location)]
        try:
            header = next(csv.reader(text_lines(At()), delimiter=delimiter, strict=True), [])
            if source.column not in header:
                raise no_column(f"{source.location}, line 1", source.column, header)
            wanted = header.index(source.column)
            row_start = max(start, at)
            for fields in csv.reader(text_lines(row_start), delimiter=delimiter, strict=True):
                place = f"{source.location}, line {at.line}"
                row_start = at
                if not fields:
                    continue
                if len(fields) != len(header):
                    raise UsageError(f"{place}: {len(fields)} fields, but the header has {len(header)}")
                yield Read(as_text(fields[wanted], source.column, place), at)
        except csv.Error as error:
            raise UsageError(f"{source.location}, line {at.line}: {error}") from None


def parquet_rows(source: "Input", start: At) -> Iterator[Read]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    row = 0
    try:
        with source.open() as stream, pq.ParquetFile(stream) as file:
            if source.column not in file.schema_arrow.names:
                raise no_column(source.location, source.column, file.schema_arrow.names)
            for group in range(file.num_row_groups):
                rows, batch_rows = _rows_of(file.metadata.row_group(group), source)
                if row + rows <= start.offset:
                    row += rows
                    continue
                for batch in file.iter_batches(batch_rows, row_groups=[group], columns=[source.column]):
                    column = batch.column(0)
                    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
                        column = column.cast(pa.large_binary())  # Arrow itself does not look whether it is UTF-8
                    for cell in column:  # one at a time: all of them would be in memory twice
                        row += 1
                        if row > start.offset:
                            place = f"{source.location}, row {row}"
                            value = cell.as_py()
                            if is_longer(value, source.max_record_bytes):
                                raise too_long(place, source.max_record_bytes)
                            yield Read(as_text(value, source.column, place), At(row, row))
    except MemoryError:  # some are an ArrowException too
        raise
    except (pa.ArrowException, OSError) as error:
        raise UsageError(f"{source.location} cannot be read as Parquet: {str(error).splitlines()[0]}") from None


def _rows_of(group: Any, source: "Input") -> tuple[int, int]:
    """How many a row group of a Parquet file has, and how many to read at once: about one of the longest rows."""
    columns = [group.column(number) for number in range(group.num_columns)]
    size = sum(
        column.total_uncompressed_size for column in columns if column.path_in_schema.split(".")[0] == source.column
    )
    if not group.num_rows:
        return 0, 1
    return group.num_rows, min(_BATCH_ROWS, max(1, source.max_record_bytes * group.num_rows // max(1, size)))
