"""Documents out of files: lines or paragraphs of text, and a column of JSON lines, CSV or Parquet.

All are streamed, and read from any place on that an earlier document came with.
"""

import csv
import io
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

from jobs.errors import UsageError
from jobs.locations import DELIMITERS, table_suffix
from jobs.train.document_pieces import At, Broken, Read, as_text, cut, decoded, no_column

if TYPE_CHECKING:
    from jobs.train.documents import Input

csv.field_size_limit(1 << 30)  # the module's own limit of 128 KiB a field refuses long documents

_BATCH_ROWS = 256

_RECORD_TO_DOCUMENT = 4
"""How many times the longest document a row of JSON or CSV may be long: its escapes and other columns need room."""


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
    limit = source.max_document_bytes * _RECORD_TO_DOCUMENT
    while content := stream.readline(limit + 1):
        number += 1
        offset += len(content)
        if len(content) > limit:
            raise UsageError(
                f"{source.location}, line {number}: longer than {limit} bytes, {_RECORD_TO_DOCUMENT} times "
                "max_document_bytes",
                next_step="set max_document_bytes higher, or split the document",
            )
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
        at = At()

        def text_lines(begin: At) -> Iterator[str]:
            nonlocal at
            for content, at in _lines(source, stream, begin):
                # What is no UTF-8 becomes lone surrogates, which are told when a document has them.
                yield content.decode("utf-8-sig" if at.line == 1 else "utf-8", "surrogateescape")

        delimiter = DELIMITERS[table_suffix(source.location)]
        try:
            header = next(csv.reader(text_lines(At()), delimiter=delimiter, strict=True), [])
            if source.column not in header:
                raise no_column(f"{source.location}, line 1", source.column, header)
            wanted = header.index(source.column)
            for fields in csv.reader(text_lines(max(start, at)), delimiter=delimiter, strict=True):
                place = f"{source.location}, line {at.line}"
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
                rows = file.metadata.row_group(group).num_rows
                if row + rows <= start.offset:
                    row += rows
                    continue
                for batch in file.iter_batches(_BATCH_ROWS, row_groups=[group], columns=[source.column]):
                    column = batch.column(0)
                    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
                        column = column.cast(pa.large_binary())  # Arrow itself does not look whether it is UTF-8
                    for value in column.to_pylist():
                        row += 1
                        if row > start.offset:
                            place = f"{source.location}, row {row}"
                            yield Read(as_text(value, source.column, place), At(row, row))
    except (pa.ArrowException, OSError) as error:
        raise UsageError(f"{source.location} cannot be read as Parquet: {str(error).splitlines()[0]}") from None
