"""What a run has written of itself, read from its files at once: for its report, and for what it cost."""

import logging
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from jobs.aws.connection import Aws
from jobs.core.errors import UsageError
from jobs.core.locations import S3Location
from jobs.core.records import Inputs, Record, read_json_lines, read_receipt, read_record
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
from jobs.core.words import printable
from jobs.data_checks.classes import ClassReport
from jobs.data_checks.data_summary import DataSummary
from jobs.money.prices import stored
from jobs.runs.recorded_run import Checkpoint, RecordedRun, metrics_line, texts_line, timed_line
from jobs.runs.run_files import FetchedFiles, Listed, RunFiles, StoredFiles
from jobs.runs.storage import StoredRun, decoded_spec
from jobs.spec.code import CODE_RECORD, CodeRecord
from jobs.spec.spec import JobSpec, parse_spec

log = logging.getLogger("trainyard")

_READERS = 8
"""Files of a run that are asked for at once."""


def read_run(aws: Aws, run: StoredRun) -> RecordedRun:
    """Read all that the run has left. What is not there, or cannot be read by this release, is left out."""
    files = StoredFiles(aws.s3, run.location)  # a client is made once, in this thread
    recorded, listed = _recorded(files, run_id=run.run_id, team=run.team, location=str(run.location))
    if recorded.receipt is None:
        return recorded
    kept = stored({name: each.size_bytes for name, each in listed.items()})
    return replace(recorded, receipt=recorded.receipt.model_copy(update={"stored": kept}))


def read_fetched_run(folder: Path) -> RecordedRun:
    """Read the same from a folder that `trainyard fetch` has filled, without AWS.

    Raises UsageError if the folder is none. What S3 keeps of the run, and what that costs, is not known.
    """
    files = FetchedFiles(folder)
    receipt = read_receipt(files.read(RECEIPT), place=files.place(RECEIPT))
    run_id = next((name for name in (folder.absolute().name, receipt.run_id if receipt else "") if is_run_id(name)), "")
    if not run_id or (receipt is None and files.read(SPEC) is None):
        raise UsageError(
            f"{folder} is no folder of a fetched run: it has no {RECEIPT} of one",
            next_step="trainyard fetch RUN, into runs/RUN",
        )
    team = receipt.team if receipt else ""
    return _recorded(files, run_id=run_id, team=team, location=str(folder))[0]


def _recorded(files: RunFiles, *, run_id: str, team: str, location: str) -> tuple[RecordedRun, Mapping[str, Listed]]:
    """Return a run by its files, and the list of those."""
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
    ), listed.result()


def read_classes(aws: Aws, run: S3Location) -> ClassReport | None:
    """Read how well a classifier found each class; None where the run has not said, or is no classification."""
    return _record(StoredFiles(aws.s3, run), CLASSES, ClassReport)


def read_spec(aws: Aws, run: S3Location) -> JobSpec | None:
    """Read the spec of a run; None where there is none, or none that this release reads."""
    return _spec(_spec_text(StoredFiles(aws.s3, run)), origin=str(run / SPEC))


def _spec_text(files: RunFiles) -> str:
    """Return the text of a run's spec; an empty one where there is none, or, with a warning, none that is a text."""
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
    """Return the minutes of all attempts, each of which has a file of its own."""
    found: list[dict[str, Any]] = []
    for name in files.listed(UTILIZATION):
        found += read_json_lines(files.read(name), place=files.place(name), accept=timed_line)
    return sorted(found, key=lambda line: line["time"])


def _checkpoints(files: Mapping[str, Listed]) -> list[Checkpoint]:
    found = [(checkpoint_step(name), listed.changed_at) for name, listed in files.items()]
    return sorted((Checkpoint(step=step, at=at) for step, at in found if step is not None), key=lambda each: each.step)
