"""Summarize whole tables of labelled examples on this machine, for `trainyard data show`."""

import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jobs.aws import s3 as object_store
from jobs.aws.connection import Aws
from jobs.core.errors import ConfigurationError, NotFoundError, UsageError
from jobs.core.labels import names_in_parquet, sorted_classes
from jobs.core.locations import S3, S3Location, table_suffix
from jobs.data_checks.data_summary import Cut, DataSummary, lengths_at_shares, summary
from jobs.data_checks.model_files import TOKENIZER
from jobs.data_checks.table_rows import BadRows, Broken, TableRows, column_values, labelled_rows
from jobs.spec.arguments import Columns

_BATCH = 10_000
"""Texts that are tokenized together; their tokens are in memory at the same time."""


@dataclass
class _Part:
    """The examples of one part of the data, training or held-out."""

    texts: list[tuple[str, ...]] = field(default_factory=list)
    labels: list[list[str]] = field(default_factory=list)
    """The classes of each text. A regression has none."""


@dataclass(frozen=True)
class Model:
    """The model whose tokenizer counts tokens."""

    location: str
    """The model's folder, local or on S3."""
    max_length: int
    """Number of tokens to which fine-tuning would cut a text."""


def summarize(
    aws: Callable[[], Aws],
    training: Sequence[str],
    held_out: Sequence[str],
    columns: Columns,
    model: Model | None = None,
) -> DataSummary:
    """Read all rows of the tables, local or on S3, and summarize the usable ones. Bad rows are counted and listed.

    With a `model`, the summary also has the lengths in tokens and the truncation. Raises NotFoundError if a file does
    not exist, UsageError if it is not a valid table or tokenizer.
    """
    bad = BadRows(skip=True, at_most=sys.maxsize)
    parts = [_Part(), _Part()]
    for part, locations in zip(parts, (training, held_out), strict=True):
        for location in locations:
            with tempfile.TemporaryDirectory() as folder:
                _read(part, location, _local_file(aws, location, Path(folder)), columns, bad)
    if not parts[0].labels:
        raise UsageError(
            "\n".join([f"{training[0]} has no examples", *bad.named(training[0])]),
            next_step=bad.next_step(training[0]) or "check the file",
        )
    names = sorted_classes(name for part in parts for classes in part.labels for name in classes)
    numbers = {name: number for number, name in enumerate(names)}
    found = summary(
        names, *((part.texts, [[numbers[name] for name in classes] for classes in part.labels]) for part in parts)
    )
    texts = [" ".join(text) for part in parts for text in part.texts]
    found.lengths = [
        lengths_at_shares("characters", map(len, texts)),
        lengths_at_shares("words", (len(text.split()) for text in texts)),
    ]
    if model is not None:
        with tempfile.TemporaryDirectory() as folder:
            tokens = _tokens(aws, model.location, [text for part in parts for text in part.texts], Path(folder))
        found.lengths.append(lengths_at_shares("tokens", tokens))
        cut = [length - model.max_length for length in tokens if length > model.max_length]
        found.cut = Cut(
            max_length=model.max_length, texts=len(cut), of_texts=len(tokens), tokens=sum(cut), of_tokens=sum(tokens)
        )
    found.problem = columns.labels.problem
    found.trained = False
    found.table_warnings = bad.warnings
    found.bad_rows = dict(bad.counts)
    for location in bad.counts:
        found.named_bad_rows += bad.named(location)
        if next_step := bad.next_step(location):
            found.named_bad_rows.append(f"next: {next_step}")
    return found


def class_names(aws: Callable[[], Aws], locations: Sequence[str], columns: Columns) -> list[str]:
    """Return the classes of the usable rows of tables, local or on S3. Raises what `summarize` raises."""
    part, bad = _Part(), BadRows(skip=True, at_most=sys.maxsize)
    for location in locations:
        with tempfile.TemporaryDirectory() as folder:
            _read(part, location, _local_file(aws, location, Path(folder)), columns, bad)
    return sorted_classes(name for names in part.labels for name in names)


def _tokens(aws: Callable[[], Aws], model: str, texts: Sequence[tuple[str, ...]], folder: Path) -> list[int]:
    """Return the number of tokens of each text or pair of texts, special tokens included."""
    location = f"{model.rstrip('/')}/{TOKENIZER}"
    path = _local_file(aws, location, folder)
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise ConfigurationError(
            f"{location}: counting tokens needs the tokenizers package, which is not installed",
            next_step="pip install tokenizers",
        ) from None
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # noqa: BLE001 - its Rust code raises plain Exception
        raise UsageError(f"{location} is not a tokenizer: {str(error).splitlines()[0]}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    inputs = [text if len(text) > 1 else text[0] for text in texts]
    batches = (inputs[start : start + _BATCH] for start in range(0, len(inputs), _BATCH))
    return [len(encoded.ids) for batch in batches for encoded in tokenizer.encode_batch(batch)]


def _local_file(aws: Callable[[], Aws], location: str, folder: Path) -> Path:
    """Return the path of the file at `location` on this machine, downloaded if it is on S3."""
    if not location.startswith(S3):
        path = Path(location)
        if not path.is_file():
            what = "is a folder, not a file" if path.is_dir() else "does not exist"
            raise NotFoundError(f"{location} {what}", next_step="check the path")
        return path
    target = folder / "table"
    object_store.download(aws().s3, S3Location.parse(location), target)
    return target


def _read(part: _Part, location: str, path: Path, columns: Columns, bad: BadRows) -> None:
    assert columns.label is not None  # noqa: S101 - these are labelled examples
    table = TableRows(
        location=location,
        columns=list(dict.fromkeys([*columns.texts, columns.label])),
        missing_next=columns.missing_next,
        bad=bad,
        format=columns.format,
    )
    rows = _rows(table, path, columns.label)
    for texts, label in labelled_rows(table, rows, columns.texts, columns.label, columns.labels):
        part.texts.append(texts)
        part.labels.append(columns.labels.classes(label))


def _rows(table: TableRows, path: Path, label: str) -> Iterator[tuple[Sequence[Any] | Broken, int]]:
    if table_suffix(table.location) == ".parquet":
        yield from _parquet_rows(table, path, label)
        return
    with path.open("rb") as stream:
        for values, _, line in table.rows_of_text(stream):
            yield values, line


def _parquet_rows(table: TableRows, path: Path, label: str) -> Iterator[tuple[Sequence[Any], int]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path)
        table.check_columns(file.schema_arrow.names)
        content = file.read(columns=list(table.columns))
    except (pa.ArrowException, OSError) as error:
        raise UsageError(f"{table.location} cannot be read as Parquet: {str(error).splitlines()[0]}") from None
    rows = {column: column_values(content.column(column)) for column in table.columns}
    if names := names_in_parquet(file.schema_arrow, label):
        rows[label] = [names[number] if number in range(len(names)) else number for number in rows[label]]
    yield from zip(zip(*(rows[column] for column in table.columns), strict=True), range(1, sys.maxsize), strict=False)
