"""Inputs of a job are looked at before it is submitted, and before anything is paid for."""

import json
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

from jobs.aws import s3 as object_store
from jobs.aws.connection import Aws
from jobs.aws.errors import error_code
from jobs.core.artifact import POINTER
from jobs.core.errors import NotFoundError, TrainyardError, UsageError
from jobs.core.images import pytorch_of
from jobs.core.locations import HUB, S3, S3Location, hub_suggestion
from jobs.core.run import MANIFEST
from jobs.core.stage import DeployedStage
from jobs.data_checks import hub, model_files, table_samples
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
)
from jobs.spec.plan import with_s3_locations
from jobs.spec.spec import JobSpec
from jobs.spec.submit_job import Dependency

_FOLDERS = (MODEL_FOLDER, CONFIGURATION_FOLDER, FILES_FOLDER, ARTIFACT_FOLDER, TOKENIZER_FOLDER)
_FILES = (TABLE, DOCUMENTS)

_CONFIGURATION_BYTES = 16 << 20
"""A tokenizer's configuration that lists all its added tokens has some MB; whatever is larger is none."""


def check_inputs(
    aws: Aws,
    stage: DeployedStage,
    spec: JobSpec,
    *,
    dependencies: Sequence[Dependency] = (),
    look_inside: bool = True,
    note: Callable[[str], None] = lambda _: None,
) -> list[TrainyardError]:
    """Return all that is wrong with what a job of the spec will read; `note` is told what could not be looked at."""
    return faults_of_inputs(
        aws,
        with_s3_locations(spec, stage),
        pending={argument for run in dependencies for argument in run.arguments},
        emulated=stage.emulated,
        # The emulator runs jobs in this very environment, or in the image for CPUs.
        pytorch=None if stage.emulated else pytorch_of(stage.row_of(accelerated=spec.kind.accelerated), stage.release),
        look_inside=look_inside,
        note=note,
    )


def faults_of_inputs(
    aws: Aws,
    arguments: Arguments,
    *,
    pending: Collection[str] = (),
    emulated: bool,
    pytorch: str | None = None,
    look_inside: bool = True,
    note: Callable[[str], None] = lambda _: None,
) -> list[TrainyardError]:
    """Return all that is wrong with what a job will read, whose locations are resolved.

    What a run writes that has not ended (`pending`, the names of such arguments) is not looked for. A file is told by
    its first rows, a model by its files' names and its configuration, what is on the hub by what the hub answers.
    `pytorch`: the version that the job runs with; None: nobody knows. `look_inside`: False looks only whether it is
    there. `note` is told what could not be looked at, and why.
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
        faults: list[TrainyardError] = []
        try:
            if look_inside:
                faults.extend(_inside(aws, arguments, argument, location, what, pytorch=pytorch, note=note))
        except TrainyardError as error:
            faults.append(error)
        for fault in faults:
            fault.args = (f"arguments.{argument}: {fault.args[0]}",)
        found += faults
    return found


def _inside(
    aws: Aws,
    arguments: Arguments,
    argument: str,
    location: str,
    what: str,
    *,
    pytorch: str | None,
    note: Callable[[str], None],
) -> Iterator[TrainyardError]:
    """Yield what is wrong with an input that is there."""
    columns = arguments.columns(argument)
    max_length, classifies = arguments.longest_sequence, arguments.classifies
    if location.startswith(HUB):
        if what == MODEL_FOLDER:
            yield from hub.model_faults(
                location, max_length=max_length, pytorch=pytorch, classifies=classifies, note=note
            )
        else:
            in_models = what in (CONFIGURATION_FOLDER, TOKENIZER_FOLDER, FILE_OR_FOLDER)
            yield from hub.repository_faults(location, "model" if in_models else "dataset", note=note)
    elif what == MODEL_FOLDER:
        names, contents = _model(aws, location)
        yield from model_files.faults(
            location, names, contents, max_length=max_length, pytorch=pytorch, classifies=classifies
        )
    elif columns is not None:
        yield from table_samples.faults(aws, location, columns, note)


def _check_place(aws: Aws, arguments: Arguments, argument: str, location: str, what: str, *, emulated: bool) -> None:
    """Raise NotFoundError where an input is missing, UsageError where the job's container could not reach it."""
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
        # Specs are read with their paths made absolute; what was written is what is left of the working directory.
        suggestion = hub_suggestion(os.path.relpath(location)) if what == MODEL_FOLDER else ""
        raise NotFoundError(
            f"arguments.{argument}: {what} was expected at {location}, where there is nothing{suggestion}",
            next_step="correct the path, which counts from the working directory, "
            "or begin it with hf://, s3:// or data:// where it lies elsewhere",
        )
    if not emulated:
        raise UsageError(
            f"arguments.{argument}: {location} lies on this machine, where the job's container cannot read it",
            next_step=f"trainyard data put {location} data://TEAM/{path.name}, and name that in the spec",
        )
    if what in (_FILES if path.is_dir() else _FOLDERS):
        raise _other_form(argument, location, what, is_folder=path.is_dir())
    if not (path.is_dir() or path.is_file()):
        raise UsageError(
            f"arguments.{argument}: {what} was expected at {location}, which is neither a file nor a folder but a pipe "
            "or a device",
            next_step="name a file",
        )


def _other_form(argument: str, location: str, what: str, *, is_folder: bool) -> TrainyardError:
    return UsageError(
        f"arguments.{argument}: {what} was expected at {location}, which is a {'folder' if is_folder else 'file'}",
        next_step="name one file in it" if is_folder else "name the folder that it lies in",
    )


def _check_object(aws: Aws, argument: str, location: str, what: str) -> None:
    place = S3Location.parse(location)
    folder = place.key.rstrip("/") + "/" if place.key else ""
    has_configuration = what in (MODEL_FOLDER, CONFIGURATION_FOLDER)
    wanted = folder + "config.json" if has_configuration else place.key
    if what != FILES_FOLDER and object_store.exists(aws.s3, S3Location(place.bucket, wanted)):
        return
    below = _holds_files(aws, place.bucket, folder)
    if below and what in _FILES:
        raise _other_form(argument, location, what, is_folder=True)
    if has_configuration and below:
        raise NotFoundError(
            f"arguments.{argument}: {location} holds files but no config.json, so it is no {what.removeprefix('a ')}",
            next_step="upload what save_pretrained() wrote, or correct the location",
        )
    if not below and what in _FOLDERS and object_store.exists(aws.s3, place):
        raise _other_form(argument, location, what, is_folder=False)
    if not below:
        raise NotFoundError(
            f"arguments.{argument}: {what} was expected at {location}, where there is nothing",
            next_step="trainyard data put SOURCE data://TEAM/NAME, or correct the location",
        )


def _model(aws: Aws, location: str) -> tuple[list[str], dict[str, bytes]]:
    """Return the names of a model's files, and what is in those that its rules read."""
    if location.startswith(S3):
        place = S3Location.parse(location.rstrip("/"))
        sizes = object_store.sizes(aws.s3, place)
    else:
        sizes = {}
        for path in Path(location).iterdir():
            if path.is_file():
                sizes[path.name] = path.stat().st_size
            elif path.exists() and not path.is_dir():  # would be read for ever
                raise UsageError(f"{location}: its {path.name} is no file but a pipe or a device")
    contents: dict[str, bytes] = {}
    for name in sizes.keys() & model_files.READ_BEFORE:
        if sizes[name] > _CONFIGURATION_BYTES:
            raise UsageError(
                f"{location}: its {name} has {sizes[name]:,} bytes, and no more than {_CONFIGURATION_BYTES:,} are read",
                next_step="stage the model's folder again",
            )
        if location.startswith(S3):
            content = object_store.read_once(aws.s3, place / name)
        else:
            try:
                content = (Path(location) / name).read_bytes()
            except OSError as error:
                raise table_samples.unreadable(str(Path(location) / name), error) from None
        if content is not None:
            contents[name] = content
    return list(sizes), contents


def _check_artifact(aws: Aws, argument: str, location: str, what: str, wanted: str | None) -> None:
    place = S3Location.parse(location)
    text = _record(aws, place)
    if text is None:
        others = f", nor {model_files.TOKENIZER}" if what == TOKENIZER_FOLDER else ""
        raise NotFoundError(
            f"arguments.{argument}: {what} was expected at {location}, where there is neither {POINTER} nor "
            f"{MANIFEST}{others}",
            next_step="name a run that makes one, or where one lies",
        )
    try:
        kind = json.loads(text)["kind"]
    except (ValueError, LookupError, TypeError):
        return  # what it is instead, the job says
    if wanted not in (None, kind):
        raise UsageError(f"arguments.{argument}: {location} is a '{kind}', not a '{wanted}'")


def _holds_files(aws: Aws, bucket: str, folder: str) -> bool:
    try:
        return bool(aws.s3.list_objects_v2(Bucket=bucket, Prefix=folder, MaxKeys=1).get("Contents"))
    except Exception as error:
        if error_code(error) == "NoSuchBucket":
            return False
        raise


def _record(aws: Aws, place: S3Location) -> bytes | None:
    """Return the manifest of the artifact at `place`, or what points to it; None where there is neither."""
    try:
        return object_store.read_once(aws.s3, place / MANIFEST) or object_store.read_once(aws.s3, place / POINTER)
    except Exception as error:
        if error_code(error) == "NoSuchBucket":
            return None
        raise
