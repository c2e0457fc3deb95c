"""Read what runs recorded: everything about one run for its report, and the speed of past runs for estimates."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from jobs.aws import s3 as object_store
from jobs.aws.connection import Aws
from jobs.core.errors import TrainyardError, UsageError
from jobs.core.instance_types import INSTANCE_TYPES
from jobs.core.locations import S3Location
from jobs.core.records import Attempt, Inputs, Receipt, Record, read_json_lines, read_receipt, read_record
from jobs.core.run import (
    CLASSES,
    DATA,
    GENERATIONS,
    INPUTS,
    METRICS,
    RECEIPT,
    SPEC,
    UTILIZATION,
    checkpoint_step,
    is_run_id,
)
from jobs.core.stage import DeployedStage
from jobs.core.words import counted, printable
from jobs.data_checks.classes import ClassReport
from jobs.data_checks.data_summary import DataSummary
from jobs.money.estimate import Measurement, model_name
from jobs.money.phases import ended_at
from jobs.money.prices import stored
from jobs.runs import storage
from jobs.runs.recorded_run import Checkpoint, RecordedRun, metrics_line, texts_line, timed_line
from jobs.runs.storage import StoredRun, decoded_spec, in_parallel, stored_runs
from jobs.spec.code import CODE_RECORD, CodeRecord
from jobs.spec.recipe import hpu_trainer
from jobs.spec.spec import JobSpec, parse_spec

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client
log = logging.getLogger("trainyard")

_READERS = 8
"""Files of a run that are read at the same time."""

NEWEST_RUNS = 300
"""Number of newest runs that are searched for measurements."""


class Listed(NamedTuple):
    """A file's size and modification time."""

    size_bytes: int
    changed_at: datetime


class RunFiles(Protocol):
    """The files of one run, by their names in the run's folder."""

    def read(self, name: str) -> bytes | None:
        """Return a file's content, or None if there is no such file."""
        ...

    def listed(self, below: str = "") -> Mapping[str, Listed]:
        """Return the files whose names begin with `below`."""
        ...

    def place(self, name: str) -> str:
        """Return a file's location, for messages."""
        ...


@dataclass(frozen=True)
class StoredFiles:
    """Files on S3. Threads may share an instance, because its client is already created."""

    s3: "S3Client"
    location: S3Location

    def read(self, name: str) -> bytes | None:
        return object_store.read_once(self.s3, self.location / name)

    def listed(self, below: str = "") -> Mapping[str, Listed]:
        found = object_store.listing(self.s3, self.location, prefix=self.location.key + below)
        return {
            item["Key"].removeprefix(self.location.key): Listed(item["Size"], item["LastModified"]) for item in found
        }

    def place(self, name: str) -> str:
        return str(self.location / name)


@dataclass(frozen=True)
class FetchedFiles:
    """Files in a folder on this machine, filled by `trainyard fetch`."""

    folder: Path

    def read(self, name: str) -> bytes | None:
        path = self.folder / name
        return path.read_bytes() if path.is_file() else None

    def listed(self, below: str = "") -> Mapping[str, Listed]:
        root = self.folder / below
        found = {path: path.stat() for path in root.rglob("*") if path.is_file()}
        return {
            path.relative_to(self.folder).as_posix(): Listed(
                status.st_size, datetime.fromtimestamp(status.st_mtime).astimezone()
            )
            for path, status in found.items()
        }

    def place(self, name: str) -> str:
        return str(self.folder / name)


def read_run(aws: Aws, run: StoredRun) -> RecordedRun:
    """Read everything that a run has recorded, except files that are missing or that this release cannot read."""
    files = StoredFiles(aws.s3, run.location)  # creates the client once, in this thread
    recorded = _recorded(files, run_id=run.run_id, team=run.team, location=str(run.location))
    if recorded.receipt is None:
        return recorded
    kept = stored(*object_store.billed_sizes(aws.s3, run.location))
    return replace(recorded, receipt=recorded.receipt.model_copy(update={"stored": kept}))


def read_fetched_run(folder: Path) -> RecordedRun:
    """Read everything that a run has recorded from a folder filled by `trainyard fetch`, without AWS.

    The size and cost of the run's files on S3 are then unknown. Raises UsageError if the folder is not a fetched run.
    """
    files = FetchedFiles(folder)
    receipt = read_receipt(files.read(RECEIPT), place=files.place(RECEIPT))
    run_id = next((name for name in (folder.absolute().name, receipt.run_id if receipt else "") if is_run_id(name)), "")
    if not run_id or (receipt is None and files.read(SPEC) is None):
        raise UsageError(
            f"{folder} is not the folder of a fetched run: it has no {RECEIPT} of a run",
            next_step="trainyard fetch RUN, which downloads into runs/RUN",
        )
    team = receipt.team if receipt else ""
    return _recorded(files, run_id=run_id, team=team, location=str(folder))


def _recorded(files: RunFiles, *, run_id: str, team: str, location: str) -> RecordedRun:
    with ThreadPoolExecutor(_READERS) as threads:
        text = threads.submit(_spec_text, files)
        receipt = threads.submit(lambda: read_receipt(files.read(RECEIPT), place=files.place(RECEIPT)))
        metrics = threads.submit(files.read, METRICS)
        classes = threads.submit(_record, files, CLASSES, ClassReport)
        generations = threads.submit(files.read, GENERATIONS)
        data = threads.submit(_record, files, DATA, DataSummary)
        inputs = threads.submit(_record, files, INPUTS, Inputs)
        code = threads.submit(_record, files, CODE_RECORD, CodeRecord)
        listed = threads.submit(files.listed)
        utilization = threads.submit(_utilization, files)
    return RecordedRun(
        run_id=run_id,
        team=team,
        location=location,
        spec_text=text.result(),
        spec=_spec(text.result(), origin=files.place(SPEC)),
        receipt=receipt.result(),
        metrics=read_json_lines(metrics.result(), place=files.place(METRICS), accept=metrics_line),
        utilization=utilization.result(),
        checkpoints=_checkpoints(listed.result()),
        classes=classes.result(),
        generations=read_json_lines(generations.result(), place=files.place(GENERATIONS), accept=texts_line),
        data=data.result(),
        inputs=inputs.result(),
        code=code.result(),
    )


def read_classes(aws: Aws, run: S3Location) -> ClassReport | None:
    """Read how well a classifier recognized each class, or return None if the run has recorded no classes."""
    return _record(StoredFiles(aws.s3, run), CLASSES, ClassReport)


def read_spec(aws: Aws, run: S3Location) -> JobSpec | None:
    """Read a run's spec, or return None if there is none or this release cannot read it."""
    return _spec(_spec_text(StoredFiles(aws.s3, run)), origin=str(run / SPEC))


def _spec_text(files: RunFiles) -> str:
    """Return the text of a run's spec. Empty if there is none or, with a warning, if it is not text."""
    try:
        content = files.read(SPEC)
        return "" if content is None else decoded_spec(content, place=files.place(SPEC))
    except UsageError as error:
        log.warning("warning: %s; it is left out", error.args[0])
        return ""


def _spec(text: str, *, origin: str) -> JobSpec | None:
    from jobs.spec.spec_yaml import parse_documents

    try:
        documents = parse_documents(text, origin=origin)
        return parse_spec(documents[0].data, origin=origin) if documents else None
    except UsageError as error:
        log.warning("warning: %s; it is left out", printable(str(error.args[0]).splitlines()[0]))
        return None


def _record(files: RunFiles, name: str, model: type[Record]) -> Record | None:
    return read_record(model, files.read(name), place=files.place(name))


def _utilization(files: RunFiles) -> list[dict[str, Any]]:
    """Return the utilization lines of all attempts, which have a file each, ordered by time."""
    found: list[dict[str, Any]] = []
    for name in files.listed(UTILIZATION):
        found += read_json_lines(files.read(name), place=files.place(name), accept=timed_line)
    return sorted(found, key=lambda line: line["time"])


def _checkpoints(files: Mapping[str, Listed]) -> list[Checkpoint]:
    found = [(checkpoint_step(name), listed.changed_at) for name, listed in files.items()]
    return sorted((Checkpoint(step=step, at=at) for step, at in found if step is not None), key=lambda each: each.step)


@dataclass(frozen=True, kw_only=True)
class PastRun:
    """A run that succeeded, with its spec and receipt."""

    run_id: str
    spec: JobSpec
    receipt: Receipt

    @property
    def last(self) -> Attempt:
        return self.receipt.attempts[-1]

    @property
    def place(self) -> str | None:
        """Return the instance type that the run used, or None if it ran on a stand-in machine."""
        row = INSTANCE_TYPES.get(self.last.instance_type)
        return row.name if row is not None and row.accelerator == self.last.accelerator else None


def past_runs(aws: Aws, stage: DeployedStage, *, job: str) -> list[PastRun]:
    """Return the newest successful runs of one kind of job, the newest first. Skips unreadable runs."""
    _ = aws.s3  # creates the client before threads share it
    newest = reversed(stored_runs(aws, stage)[-NEWEST_RUNS:])
    return [run for run in in_parallel(lambda run: _past_run(aws, run, job), newest) if run is not None]


def measurements(runs: Sequence[PastRun], spec: JobSpec, place: str | None) -> Iterator[Measurement]:
    """Yield the speed of the runs that trained the spec's model at `place`, on the same number of nodes."""
    arguments = spec.entrypoint_arguments()
    for run in runs:
        theirs, last = run.spec.entrypoint_arguments(), run.last
        speed = run.receipt.result.get("train_samples_per_second")
        if (
            run.place != place
            or not speed
            or last.training_started_at is None
            or last.nnodes != spec.resources.nnodes
            or model_name(theirs) != model_name(arguments)
            or theirs.longest_sequence != arguments.longest_sequence
            or (last.accelerator == "hpu" and hpu_trainer(theirs) != hpu_trainer(arguments))
        ):
            continue
        steps = last.last_step - last.start_step
        trained_seconds = steps * getattr(theirs, "global_batch_size", 1) / speed
        worked_seconds = (ended_at(last) - last.training_started_at).total_seconds()
        yield Measurement(
            name=run.run_id,
            samples_per_second=float(speed),
            start_seconds=(last.training_started_at - last.started_at).total_seconds(),
            rest_seconds=max(0.0, worked_seconds - trained_seconds),
            note=f"{last.nnodes} x {last.instance_type}"
            if place
            else f"{last.accelerator}, {counted(last.world_size, 'rank')}",
        )


def _past_run(aws: Aws, run: StoredRun, job: str) -> PastRun | None:
    try:
        receipt = storage.read_receipt(aws, run.location)
        if receipt is None or receipt.job != job or receipt.state != "succeeded":
            return None
        spec = read_spec(aws, run.location)
    except TrainyardError:  # written by another release
        return None
    return PastRun(run_id=run.run_id, spec=spec, receipt=receipt) if spec is not None else None
