"""Where inputs come from: `hf://org/name?config=…&split=…`, `s3://bucket/key`, or a local path.

A table becomes columns in memory, a model a local folder. Each way in which an input can be bad has an error that names
the place in it; nothing is guessed, nothing is left out silently.
"""

import csv
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jobs.aws import s3 as object_store
from jobs.contract.errors import NotFoundError, TrainyardError, UsageError, did_you_mean
from jobs.contract.locations import DATA, DELIMITERS, HUB, RUN, S3, hub_parts, table_suffix
from jobs.contract.runs import S3Location

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

MODEL_TEXT = (".json", ".txt", ".model")
"""Configuration, vocabulary, merges, SentencePiece models."""

csv.field_size_limit(1 << 30)  # the module's own limit of 128 KiB a field refuses long documents


@dataclass(frozen=True, kw_only=True)
class Table:
    """Some columns of a table of examples, all in memory."""

    location: str
    columns: dict[str, list[Any]]
    lines: Sequence[int]
    """For each row, its line in the file (of a Parquet file or a hub data set: its row number, from 1)."""
    unit: str
    """What `lines` counts: `line` or `row`."""
    class_names: Sequence[str] | None = None
    """Names of the label column's numbers, where the data set brings them."""
    parts: Sequence["Table"] = ()
    """What it was put together from."""

    def __len__(self) -> int:
        return len(self.lines)

    def place(self, row: int) -> str:
        """Where a row is, for an error."""
        for part in self.parts:
            if row < len(part):
                return part.place(row)
            row -= len(part)
        return f"{self.location}, {self.unit} {self.lines[row]}"


def is_on_hub(location: str) -> bool:
    return location.startswith(HUB)


def read_table(location: str, columns: Sequence[str], *, s3: Callable[[], "S3Client"], scratch: Path) -> Table:
    """The named columns of the table at `location`; `s3` gives the client, `scratch` a folder for what is downloaded.

    Raises NotFoundError where nothing is there, UsageError where it cannot be read as such a table.
    """
    try:
        table = _table(location, columns, s3, scratch)
    except MemoryError:
        raise UsageError(
            f"{location} does not fit into memory",
            next_step="leave out what is not trained on, or take an instance type with more memory",
        ) from None
    if not len(table):
        raise UsageError(f"{location} holds no examples", next_step="check the file, or the step that wrote it")
    return table


def _table(location: str, columns: Sequence[str], s3: Callable[[], "S3Client"], scratch: Path) -> Table:
    if is_on_hub(location):
        return _from_hub(location, columns)
    path, suffix = _local_file(location, s3, scratch)
    if suffix == ".parquet":
        return _from_parquet(path, location, columns)
    if suffix in DELIMITERS:
        return _from_rows(location, columns, _delimited(path, location, DELIMITERS[suffix]))
    return _from_rows(location, columns, _json_lines(path, location))


def model_folder(location: str, *, s3: Callable[[], "S3Client"], scratch: Path) -> Path:
    """A local folder with the model at `location`, downloaded where it is not local.

    Raises NotFoundError where nothing is there, UsageError where it is no model.
    """
    if is_on_hub(location):
        folder = _model_from_hub(location)
    elif location.startswith(S3):
        source = S3Location.parse(location)
        names = list(object_store.sizes(s3(), source))
        if not names:
            raise NotFoundError(f"{location} does not exist: no object lies below it", next_step=_list_command(source))
        _check_model(names, location)
        folder = scratch / "model"
        object_store.download_all(s3(), source, _model_files(names), folder)
    else:
        _refuse_unresolved(location)
        folder = Path(location)
        if not folder.is_dir():
            raise NotFoundError(f"model folder {location} does not exist", next_step="check the path")
    _check_model([path.name for path in folder.iterdir()], location)
    _check_configuration(folder / "config.json", location)
    return folder


def copy_folder(location: str, target: Path, *, s3: Callable[[], "S3Client"]) -> None:
    """All files of the folder at `location` into a local one. Raises NotFoundError where there is none."""
    _refuse_unresolved(location)
    if location.startswith(S3):
        source = S3Location.parse(location.rstrip("/"))
        names = list(object_store.sizes(s3(), source))
        if not names:
            raise NotFoundError(f"{location} does not exist: no object lies below it", next_step=_list_command(source))
        object_store.download_all(s3(), source, names, target)
    elif Path(location).is_dir():
        shutil.copytree(location, target, dirs_exist_ok=True)
    else:
        raise NotFoundError(f"folder {location} does not exist", next_step="check the path")


def _local_file(location: str, s3: Callable[[], "S3Client"], scratch: Path) -> tuple[Path, str]:
    _refuse_unresolved(location)
    suffix = table_suffix(location)
    if not location.startswith(S3):
        if not Path(location).is_file():
            raise NotFoundError(f"{location} does not exist", next_step="check the path")
        return Path(location), suffix
    source = S3Location.parse(location)
    path = scratch / "tables" / source.bucket / source.key
    object_store.download(s3(), source, path)
    return path, suffix


def _refuse_unresolved(location: str) -> None:
    if location.startswith((DATA, RUN)):
        what = "a place in a stage's data bucket" if location.startswith(DATA) else "what a run leaves"
        raise UsageError(
            f"{location} is {what}, which only `trainyard submit` can resolve",
            next_step="submit the job, or give an s3:// location",
        )


def _lines(path: Path, location: str) -> Iterator[tuple[int, str]]:
    with path.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            try:
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:  # noqa: PERF203 - the line number is the point
                raise UsageError(
                    f"{location}, line {number}: not UTF-8 (byte 0x{error.object[error.start]:02x} at position "
                    f"{error.start + 1})",
                    next_step=f"iconv -f LATIN1 -t UTF-8 {path.name}, if that is its encoding",
                ) from None


def _json_lines(path: Path, location: str) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in _lines(path, location):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise UsageError(f"{location}, line {number}: not JSON: {error.msg} at position {error.colno}") from None
        except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets without end
            raise UsageError(f"{location}, line {number}: JSON that Python cannot read: {error}") from None
        if not isinstance(row, dict):
            raise UsageError(f"{location}, line {number}: not a JSON object but {line.strip()[:40]!r}")
        yield number, row


def _delimited(path: Path, location: str, delimiter: str) -> Iterator[tuple[int, dict[str, Any]]]:
    reader = csv.reader((line for _, line in _lines(path, location)), delimiter=delimiter, strict=True)
    try:
        header = next(reader, [])
        for name in header:
            if name and header.count(name) > 1:
                raise UsageError(f"{location}, line 1: two columns are called '{name}'", next_step="rename one of them")
        for fields in reader:
            if not fields:
                continue
            if len(fields) != len(header):
                raise UsageError(
                    f"{location}, line {reader.line_num}: {len(fields)} fields, but the header has {len(header)}"
                )
            yield reader.line_num, dict(zip(header, fields, strict=True))
    except csv.Error as error:
        raise UsageError(f"{location}, line {reader.line_num}: {error}") from None


def _from_rows(location: str, columns: Sequence[str], rows: Iterable[tuple[int, dict[str, Any]]]) -> Table:
    kept: dict[str, list[Any]] = {column: [] for column in columns}
    lines = []
    for number, row in rows:
        for column, values in kept.items():
            if column not in row:
                raise _no_column(f"{location}, line {number}", column, row)
            values.append(row[column])
        lines.append(number)
    return Table(location=location, columns=kept, lines=lines, unit="line")


def _from_parquet(path: Path, location: str, columns: Sequence[str]) -> Table:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            for column in columns:
                if column not in file.schema_arrow.names:
                    raise _no_column(location, column, file.schema_arrow.names)
            content = file.read(columns=list(columns))
            content.validate(full=True)  # text that is not UTF-8, which is not looked at otherwise
            rows = file.metadata.num_rows
    except MemoryError:  # some are an ArrowException too
        raise
    except (pa.ArrowException, OSError) as error:
        raise UsageError(f"{location} cannot be read as Parquet: {str(error).splitlines()[0]}") from None
    return Table(location=location, columns=content.to_pydict(), lines=range(1, rows + 1), unit="row")


def _from_hub(location: str, columns: Sequence[str]) -> Table:
    import datasets
    from datasets.exceptions import DatasetNotFoundError, DatasetsError

    name, options = hub_parts(location)
    datasets.disable_progress_bars()
    try:
        content = datasets.load_dataset(
            name, options.get("config"), split=options.get("split", "train"), revision=options.get("revision")
        )
    except DatasetNotFoundError as error:
        raise NotFoundError(f"{location}: {error}", next_step="check the name; a gated one needs HF_TOKEN") from None
    except (ValueError, OSError, RuntimeError, DatasetsError) as error:  # RuntimeError: it is a script, not data
        raise UsageError(f"{location} cannot be loaded: {error}") from error
    for column in columns:
        if column not in content.column_names:
            raise _no_column(location, column, content.column_names)
    label = content.features[columns[-1]]
    return Table(
        location=location,
        columns={column: content[column][:] for column in columns},
        lines=range(1, len(content) + 1),
        unit="row",
        class_names=label.names if isinstance(label, datasets.ClassLabel) else None,
    )


def _no_column(place: str, column: str, present: Iterable[str]) -> TrainyardError:
    return UsageError(
        f"{place}: no column '{column}'{did_you_mean(column, present)}",
        next_step="name the columns with text_column, text_pair_column and label_column",
    )


def _model_from_hub(location: str) -> Path:
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    name, options = hub_parts(location)
    revision = options.get("revision")
    try:
        names = [item.rfilename for item in HfApi().model_info(name, revision=revision).siblings or ()]
        _check_model(names, location)
        return Path(snapshot_download(name, revision=revision, allow_patterns=_model_files(names)))
    except HFValidationError as error:
        raise UsageError(f"{location}: {error}") from None
    except HfHubHTTPError as error:
        raise NotFoundError(
            f"{location}: {' '.join([line for line in str(error).splitlines() if line][:2])}",
            next_step="check the name; a private or gated model needs HF_TOKEN",
        ) from error
    except OSError as error:
        raise TrainyardError(f"{location}: the Hugging Face Hub could not be reached: {error}") from error


def _model_files(names: Iterable[str]) -> list[str]:
    """What `from_pretrained` reads: not the same weights twice, and not those of other frameworks."""
    top = [name for name in names if "/" not in name]
    weights = [name for name in top if name.endswith(".safetensors")] or [name for name in top if _is_pickle(name)]
    return [name for name in top if name.endswith(MODEL_TEXT)] + weights


def _check_model(names: Iterable[str], location: str) -> None:
    files = _model_files(names)
    weights = [name for name in files if not name.endswith(MODEL_TEXT)]
    vocabularies = [name for name in files if name.startswith(("tokenizer", "vocab", "spiece", "sentencepiece"))]
    for found, what in (
        (["config.json"] if "config.json" in files else [], "config.json"),
        (weights, "weights (model.safetensors or pytorch_model.bin)"),
        (vocabularies, "tokenizer (tokenizer.json or a vocabulary)"),
    ):
        if not found:
            there = ", ".join(sorted(names)[:8]) or "nothing"
            raise UsageError(
                f"{location} is no model: it has no {what}; there is {there}",
                next_step="name the folder that save_pretrained wrote, with its tokenizer",
            )


def _check_configuration(path: Path, location: str) -> None:
    """What transformers would tell with the error of a list's index, or with the names of all models it knows."""
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{location} is no model: its config.json is not JSON: {error}") from None
    if not isinstance(content, dict) or not isinstance(content.get("model_type"), str):
        raise UsageError(
            f"{location} is no model: its config.json has no model_type",
            next_step="name the folder that save_pretrained wrote, with its tokenizer",
        )


def _is_pickle(name: str) -> bool:
    return name.startswith("pytorch_model") and name.endswith(".bin")


def _list_command(location: S3Location) -> str:
    return f"aws s3 ls s3://{location.bucket}/{location.key.rpartition('/')[0]}"
