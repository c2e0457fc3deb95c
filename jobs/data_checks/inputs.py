"""Check a job's inputs before it is submitted, so that mistakes cost nothing."""

import io
import json
import os
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from jobs.aws import s3 as object_store
from jobs.aws.connection import Aws
from jobs.aws.errors import error_code
from jobs.core.artifact import POINTER
from jobs.core.errors import NotFoundError, TrainyardError, UsageError
from jobs.core.images import releases
from jobs.core.labels import INVALID_CLASS_NEXT, Problem, one_class_error, unknown_classes
from jobs.core.locations import HUB, S3, S3Location, hub_suggestion, table_suffix
from jobs.core.run import MANIFEST
from jobs.core.stage import DeployedStage
from jobs.core.words import counted
from jobs.data_checks import model_files
from jobs.data_checks.conversations import conversations
from jobs.data_checks.hub import hub_model_errors, hub_repository_errors
from jobs.data_checks.table_rows import BadRows, TableRows, labelled_rows
from jobs.data_checks.table_summary import class_names
from jobs.spec.arguments import (
    ARTIFACT_FOLDER,
    CONFIGURATION_FOLDER,
    DOCUMENTS,
    FILE_OR_FOLDER,
    FILES_FOLDER,
    MODEL_FOLDER,
    TABLE,
    TOKENIZER_FOLDER,
    Arguments,
    Columns,
)
from jobs.spec.plan import with_s3_locations
from jobs.spec.spec import JobSpec
from jobs.spec.submit_job import Dependency

HEAD_BYTES = 4 << 20
"""Bytes read of a table, most of which are smaller. A longer one is checked up to its last complete line."""

_FOLDERS = (MODEL_FOLDER, CONFIGURATION_FOLDER, FILES_FOLDER, ARTIFACT_FOLDER, TOKENIZER_FOLDER)

_FILES = (TABLE, DOCUMENTS)

_CLASSES_BYTES = 16 << 20
"""Maximum size of training tables that are read whole to find their classes."""

_CONFIGURATION_BYTES = 16 << 20
"""Maximum size of a model's configuration file. A tokenizer's with all its added tokens has a few MB."""

_TOKENIZER_BYTES = 64 << 20
"""Maximum size of a tokenizer.json. One with 256,000 tokens has 33 MB."""


def check_inputs(
    aws: Aws,
    stage: DeployedStage,
    spec: JobSpec,
    *,
    dependencies: Sequence[Dependency] = (),
    check_contents: bool = True,
    note: Callable[[str], None] = lambda _: None,
) -> list[TrainyardError]:
    """Return all errors in the inputs of a spec's job. `note` gets what could not be checked, and why."""
    arguments = with_s3_locations(spec, stage)
    return input_errors(
        aws,
        arguments,
        pending={argument for run in dependencies for argument in run.arguments},
        emulated=stage.emulated,
        # The emulator runs jobs in the current environment, or in the CPU image.
        pytorch=None if stage.emulated else _pytorch_of(spec, stage),
        check_contents=check_contents,
        note=note,
    )


def _pytorch_of(spec: JobSpec, stage: DeployedStage) -> str | None:
    """Return the version of PyTorch in the job's image. None if this version of trainyard lacks the stage's release."""
    root = stage.row_of(accelerated=spec.kind.accelerated).image
    row = releases().get(stage.releases.get(root, ""))
    return row.pytorch if row is not None else None


def input_errors(
    aws: Aws,
    arguments: Arguments,
    *,
    pending: Collection[str] = (),
    emulated: bool,
    pytorch: str | None = None,
    check_contents: bool = True,
    note: Callable[[str], None] = lambda _: None,
) -> list[TrainyardError]:
    """Return all errors in a job's inputs, whose locations are resolved.

    Checks the first rows of tables, the file names and configuration of models, and the hub's metadata. Skips
    `pending`, the arguments that unfinished runs will write. `pytorch` is the version that the job runs with, or
    None if it is unknown. Without `check_contents`, only checks that inputs exist. `note` receives what could not be
    checked, and why.
    """
    found: list[TrainyardError] = []
    for argument, location, what in arguments.sources():
        if argument in pending:
            continue
        try:
            if not location.startswith(HUB):
                _check_place(aws, arguments, argument, location, what, emulated=emulated)
        except TrainyardError as error:
            found.append(error)
            continue
        errors: list[TrainyardError] = []
        try:
            if check_contents:
                errors.extend(_content_errors(aws, arguments, argument, location, what, pytorch=pytorch, note=note))
        except TrainyardError as error:
            errors.append(error)
        for each in errors:
            each.args = (f"arguments.{argument}: {each.args[0]}",)
        found += errors
    if check_contents and not found:
        found += _class_errors(aws, arguments, pending)
    return found


def _class_errors(aws: Aws, arguments: Arguments, pending: Collection[str]) -> Iterator[TrainyardError]:
    """Yield an error for each argument that names a class which the training data lacks.

    Data on the hub, data that does not exist yet, and large tables are checked by the job instead, when it starts.
    """
    named = arguments.named_classes()
    tables = {argument: place for argument, place, _ in arguments.sources() if argument.startswith("train_data")}
    columns = next((arguments.columns(argument) for argument in tables), None)
    if columns is None or not any(named.values()) or tables.keys() & pending:
        return
    if any(place.startswith(HUB) for place in tables.values()):
        return
    if sum(_size(aws, place) for place in tables.values()) > _CLASSES_BYTES:
        return
    try:
        classes = class_names(lambda: aws, list(tables.values()), columns)
    except TrainyardError as error:
        yield error
        return
    for unknown in unknown_classes(named, classes):
        unknown.args = (f"arguments.{unknown.args[0]}",)
        yield unknown


def _size(aws: Aws, location: str) -> int:
    if location.startswith(S3):
        return object_store.size(aws.s3, S3Location.parse(location))
    return Path(location).stat().st_size


def _content_errors(
    aws: Aws,
    arguments: Arguments,
    argument: str,
    location: str,
    what: str,
    *,
    pytorch: str | None,
    note: Callable[[str], None],
) -> Iterator[TrainyardError]:
    """Yield the errors in the content of an input, or raise one."""
    columns = arguments.columns(argument)
    max_length, classifies = arguments.longest_sequence, arguments.classifies
    if location.startswith(HUB):
        if what == MODEL_FOLDER:
            yield from hub_model_errors(
                location, max_length=max_length, pytorch=pytorch, classifies=classifies, note=note
            )
        else:
            in_models = what in (CONFIGURATION_FOLDER, TOKENIZER_FOLDER, FILE_OR_FOLDER)
            yield from hub_repository_errors(location, "model" if in_models else "dataset", note=note)
    elif what == MODEL_FOLDER:
        names, contents, weights = _model(aws, location)
        yield from model_files.model_errors(
            location,
            names,
            contents,
            max_length=max_length,
            pytorch=pytorch,
            classifies=classifies,
            weights=weights,
        )
    elif columns is not None:
        if columns.labels.problem is None:
            columns = replace(columns, labels=replace(columns.labels, problem=_problem_of_model(aws, arguments)))
        yield from table_errors(aws, location, columns, note)
    elif arguments.has_conversations(argument):
        first = head(aws, location)
        conversations(io.BytesIO(first.content), location, is_whole=first.is_whole)


def _problem_of_model(aws: Aws, arguments: Arguments) -> Problem | None:
    """Return what the job's model predicts, or None if that is unknown: it is on the hub, damaged or does not exist."""
    location = next(location for _, location, what in arguments.sources() if what == MODEL_FOLDER)
    try:
        contents = {} if location.startswith(HUB) else _model(aws, location)[1]
        return model_files.problem_of(model_files.configuration_of(contents[model_files.CONFIGURATION], location))
    except (TrainyardError, LookupError, OSError):
        return None  # reported with the model


def _check_place(aws: Aws, arguments: Arguments, argument: str, location: str, what: str, *, emulated: bool) -> None:
    """Raise NotFoundError if an input does not exist, UsageError if the job's container could not reach it."""
    if location.startswith(S3):
        if what == TOKENIZER_FOLDER and object_store.exists(aws.s3, S3Location.parse(location) / model_files.TOKENIZER):
            return
        if what in (ARTIFACT_FOLDER, TOKENIZER_FOLDER):
            _check_artifact(aws, argument, location, what, arguments.artifact_kind(argument))
        else:
            _check_object(aws, argument, location, what)
        return
    path = Path(location)
    if not path.exists():
        # Paths in specs were made absolute; undo that to suggest a name on the hub.
        suggestion = hub_suggestion(os.path.relpath(location)) if what == MODEL_FOLDER else ""
        raise NotFoundError(
            f"arguments.{argument}: {what} was expected at {location}, but nothing is there{suggestion}",
            next_step="correct the path, which is relative to the working directory, or begin it with hf://, s3:// or "
            "data:// if it is elsewhere",
        )
    if not emulated:
        raise UsageError(
            f"arguments.{argument}: {location} is on this machine, where the job's container cannot read it",
            next_step=f"trainyard data put {location} data://TEAM/{path.name}, and use that location in the spec",
        )
    if what in (_FILES if path.is_dir() else _FOLDERS):
        raise _other_form(argument, location, what, is_folder=path.is_dir())
    if not (path.is_dir() or path.is_file()):
        raise UsageError(
            f"arguments.{argument}: {what} was expected at {location}, which is a pipe or a device, not a file or a "
            "folder",
            next_step="name a file",
        )


def _other_form(argument: str, location: str, what: str, *, is_folder: bool) -> TrainyardError:
    return UsageError(
        f"arguments.{argument}: {what} was expected at {location}, which is a {'folder' if is_folder else 'file'}",
        next_step="name one file in it" if is_folder else "name the folder that contains it",
    )


def _check_object(aws: Aws, argument: str, location: str, what: str) -> None:
    place = S3Location.parse(location)
    folder = place.key.rstrip("/") + "/" if place.key else ""
    has_configuration = what in (MODEL_FOLDER, CONFIGURATION_FOLDER)
    wanted = folder + "config.json" if has_configuration else place.key
    if what != FILES_FOLDER and object_store.exists(aws.s3, S3Location(place.bucket, wanted)):
        return
    below = _has_files(aws, place.bucket, folder)
    if below and what in _FILES:
        raise _other_form(argument, location, what, is_folder=True)
    if has_configuration and below:
        raise NotFoundError(
            f"arguments.{argument}: {location} has files but no config.json, so it is not {what}",
            next_step="upload what save_pretrained() wrote, or correct the location",
        )
    if not below and what in _FOLDERS and object_store.exists(aws.s3, place):
        raise _other_form(argument, location, what, is_folder=False)
    if not below:
        raise NotFoundError(
            f"arguments.{argument}: {what} was expected at {location}, but nothing is there",
            next_step="trainyard data put SOURCE data://TEAM/NAME, or correct the location",
        )


def _check_artifact(aws: Aws, argument: str, location: str, what: str, wanted: str | None) -> None:
    place = S3Location.parse(location)
    text = _record(aws, place)
    if text is None:
        others = f", nor {model_files.TOKENIZER}" if what == TOKENIZER_FOLDER else ""
        raise NotFoundError(
            f"arguments.{argument}: {what} was expected at {location}, but it has neither {POINTER} nor "
            f"{MANIFEST}{others}",
            next_step="name a run that produces it, or its location",
        )
    try:
        kind = json.loads(text)["kind"]
    except (ValueError, LookupError, TypeError):
        return  # the job reports damaged records
    if wanted not in (None, kind):
        raise UsageError(f"arguments.{argument}: {location} is a '{kind}', not a '{wanted}'")


def _has_files(aws: Aws, bucket: str, folder: str) -> bool:
    try:
        return bool(aws.s3.list_objects_v2(Bucket=bucket, Prefix=folder, MaxKeys=1).get("Contents"))
    except Exception as error:
        if error_code(error) == "NoSuchBucket":
            return False
        raise


def _record(aws: Aws, place: S3Location) -> bytes | None:
    """Return the manifest of the artifact at `place`, or the pointer to it, or None if there is neither."""
    try:
        return object_store.read_once(aws.s3, place / MANIFEST) or object_store.read_once(aws.s3, place / POINTER)
    except Exception as error:
        if error_code(error) == "NoSuchBucket":
            return None
        raise


def _model(aws: Aws, location: str) -> tuple[list[str], dict[str, bytes], dict[str, model_files.Beginning]]:
    """Return the names of a model's files, the content of its CHECKED_FILES, and the beginning of its weights."""
    if location.startswith(S3):
        place = S3Location.parse(location.rstrip("/"))
        sizes = object_store.sizes(aws.s3, place)
    else:
        sizes = {}
        for path in Path(location).iterdir():
            if path.is_file():
                sizes[path.name] = path.stat().st_size
            elif path.exists() and not path.is_dir():  # reading it would never end
                raise UsageError(f"{location}: its {path.name} is not a file but a pipe or a device")
    contents: dict[str, bytes] = {}
    for name in sizes.keys() & model_files.CHECKED_FILES:
        limit = _TOKENIZER_BYTES if name == model_files.TOKENIZER else _CONFIGURATION_BYTES
        if sizes[name] > limit:
            raise UsageError(
                f"{location}: its {name} has {sizes[name]:,} bytes; the limit is {limit:,}",
                next_step="save the model again",
            )
        if location.startswith(S3):
            content = object_store.read_once(aws.s3, place / name)
        else:
            try:
                content = (Path(location) / name).read_bytes()
            except OSError as error:
                raise unreadable(str(Path(location) / name), error) from None
        if content is not None:
            contents[name] = content
    weights = {
        name: model_files.beginning_of(sizes[name], partial(_read_range, aws, f"{location.rstrip('/')}/{name}"))
        for name in model_files.model_files(sizes)
        if model_files.is_weights(name)
    }
    return list(sizes), contents, weights


@dataclass(frozen=True)
class Part:
    """Some bytes from the start or end of a file."""

    content: bytes
    size: int
    """Size of the whole file, in bytes."""

    @property
    def is_whole(self) -> bool:
        return len(self.content) == self.size


def head(aws: Aws, location: str) -> Part:
    """Read the first HEAD_BYTES of a local file or S3 object.

    Raises UsageError if a local file cannot be read, or for a pointer of Git LFS.
    """
    try:
        size = _size(aws, location)
    except OSError as error:
        raise unreadable(location, error) from None
    content = _read_range(aws, location, 0, min(size, HEAD_BYTES) if location.startswith(S3) else HEAD_BYTES)
    if content.startswith(model_files.LFS_POINTER):
        raise model_files.lfs_pointer_error(location)
    return Part(content, size)


def unreadable(location: str, error: OSError) -> UsageError:
    return UsageError(f"{location} cannot be read: {error.strerror}", next_step="check its type and permissions")


def table_errors(
    aws: Aws, location: str, columns: Columns, note: Callable[[str], None] = lambda _: None
) -> Iterator[TrainyardError]:
    """Yield all errors in the first rows of a table. `note` gets warnings of likely mistakes.

    In Parquet files, whose rows are compressed, only the columns and the number of rows are checked.
    """
    first = head(aws, location)
    empty = UsageError(f"{location} has no examples", next_step="check the file, or the step that wrote it")
    if table_suffix(location) == ".parquet":
        yield from _parquet_errors(aws, location, first, columns, empty)
        return
    bad = BadRows(skip=columns.skip_at_most is not None, at_most=columns.skip_at_most or 0)
    table = TableRows(
        location=location,
        columns=list(dict.fromkeys([*columns.texts, *([columns.label] if columns.label is not None else [])])),
        missing_next=columns.missing_next,
        bad=bad,
        format=columns.format,
        is_head=not first.is_whole,
    )
    rows = ((values, line) for values, _, line in table.rows_of_text(io.BytesIO(first.content)))
    classes: set[str] = set()
    try:
        if columns.label is None:  # a corpus treats values that are not text as empty texts, and reports them
            count = sum(1 for _ in rows)
            table.refuse_joined()
        else:
            usable = labelled_rows(table, rows, columns.texts, columns.label, columns.labels)
            count, classes = len(usable), {name for _, label in usable for name in columns.labels.classes(label)}
        for warning in bad.warnings:
            note(f"warning: {warning}")
        if bad.skip and bad.counts:
            example = bad.named(location)[0]
            count_text = f"{'' if first.is_whole else 'at least '}{counted(bad.counts.total(), 'bad row')}"
            note(f"warning: the job will skip {count_text}, such as {example}")
        bad.refuse()
    except TrainyardError as error:
        yield error
        return
    if first.is_whole and not count:
        yield empty
    if first.is_whole and columns.trains and columns.labels.problem == "single-label" and len(classes) == 1:
        yield one_class_error(location, str(columns.label), [*classes])


def _parquet_errors(
    aws: Aws, location: str, first: Part, columns: Columns, empty: TrainyardError
) -> Iterator[TrainyardError]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        # A file ends with its metadata and, in the last eight bytes, their length; the rows need not be read.
        end = _tail(aws, location, first.size, 8)
        if end.endswith(b"PAR1"):
            end = _tail(aws, location, first.size, int.from_bytes(end[:4], "little") + 8)
        found = pq.read_metadata(io.BytesIO(first.content[:4] + end))
        schema, rows = found.schema.to_arrow_schema(), found.num_rows
    except (pa.ArrowException, OSError, ValueError) as error:
        yield UsageError(f"{location} cannot be read as Parquet: {str(error).splitlines()[0]}")
        return
    table = TableRows(location=location, columns=columns.texts, missing_next=columns.missing_next)
    no_value = _NO_CLASSES if columns.labels.problem in ("multi-label", None) else _NO_CLASS
    for column in (*columns.texts, *([columns.label] if columns.label is not None else [])):
        if column not in schema.names:
            yield table.no_column(column, schema.names)
        elif (no_value if column == columns.label else _NO_TEXT).match(kind := str(schema.field(column).type)):
            what, next_step = (
                ("a class", INVALID_CLASS_NEXT) if column == columns.label else ("text", "cast the column to text")
            )
            yield UsageError(f"{location}: '{column}' has the type {kind}, which is not {what}", next_step=next_step)
    if not rows:
        yield empty


_NO_CLASS = re.compile(r"(dictionary<values=)?(\w*list|struct|map|date|time|duration|\w*interval|null)")
_NO_CLASSES = re.compile(_NO_CLASS.pattern.replace(r"\w*list|", ""))
_NO_TEXT = re.compile(_NO_CLASS.pattern[:-1] + r"|u?int|\w*float|double|decimal|bool)")
"""Arrow types of columns that cannot be one class, lists of classes, or texts."""


def _tail(aws: Aws, location: str, size: int, length: int) -> bytes:
    return _read_range(aws, location, max(0, size - length), size)


def _read_range(aws: Aws, location: str, start: int, stop: int) -> bytes:
    """Return the bytes from `start` up to `stop`. Raises UsageError if a local file cannot be read."""
    if location.startswith(S3):
        return object_store.read_range(aws.s3, S3Location.parse(location), start, stop)
    try:
        with Path(location).open("rb") as file:
            file.seek(start)
            return file.read(stop - start)
    except OSError as error:
        raise unreadable(location, error) from None
