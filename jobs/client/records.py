"""What a run has written of itself, read from its files at once: for its report, and for what it cost."""

import logging
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from jobs.aws import s3 as object_store
from jobs.aws.connection import Aws
from jobs.client.storage import StoredRun, read_spec_text, readable_receipt
from jobs.contract.classes import ClassReport
from jobs.contract.code import CODE_RECORD, CodeRecord
from jobs.contract.data_summary import DataSummary
from jobs.contract.display import printable
from jobs.contract.errors import UsageError
from jobs.contract.fill_ins import FillIns
from jobs.contract.locations import S3Location
from jobs.contract.prices import stored
from jobs.contract.record_reader import Record, read, read_lines
from jobs.contract.recorded_run import Checkpoint, RecordedRun, metrics_line, texts_line, timed_line
from jobs.contract.records import Inputs
from jobs.contract.run import (
    CLASSES,
    DATA,
    FILL_INS,
    GENERATIONS,
    INPUTS,
    METRICS,
    SPEC,
    UTILIZATION,
    checkpoint_step,
)
from jobs.contract.spec import JobSpec, parse_spec

if TYPE_CHECKING:
    from mypy_boto3_s3.type_defs import ObjectTypeDef

log = logging.getLogger("trainyard")

_READERS = 8
"""Files of a run that are asked for at once."""


def read_run(aws: Aws, run: StoredRun) -> RecordedRun:
    """Read all that the run has left. What is not there, or cannot be read by this release, is left out."""
    place, client = run.location, aws.s3  # a client is made once, in this thread
    with ThreadPoolExecutor(_READERS) as threads:
        text = threads.submit(_spec_text, aws, place)
        receipt = threads.submit(readable_receipt, aws, place)
        metrics = threads.submit(object_store.read_once, client, place / METRICS)
        classes = threads.submit(read_classes, aws, place)
        fill_ins = threads.submit(_record, aws, place / FILL_INS, FillIns)
        generations = threads.submit(object_store.read_once, client, place / GENERATIONS)
        data = threads.submit(_record, aws, place / DATA, DataSummary)
        inputs = threads.submit(_record, aws, place / INPUTS, Inputs)
        code = threads.submit(_record, aws, place / CODE_RECORD, CodeRecord)
        listed = threads.submit(object_store.listing, client, place, prefix=place.key)
        utilization = threads.submit(_utilization, aws, place)
    files = {item["Key"].removeprefix(place.key): item for item in listed.result()}
    bill = receipt.result()
    if bill is not None:
        bill = bill.model_copy(update={"stored": stored({name: item["Size"] for name, item in files.items()})})
    return RecordedRun(
        run_id=run.run_id,
        team=run.team,
        location=str(place),
        spec_text=text.result(),
        spec=_spec(text.result(), origin=str(place / SPEC)),
        receipt=bill,
        metrics=read_lines(metrics.result(), place=place / METRICS, accept=metrics_line),
        utilization=utilization.result(),
        checkpoints=_checkpoints(files),
        classes=classes.result(),
        fill_ins=fill_ins.result(),
        generations=read_lines(generations.result(), place=place / GENERATIONS, accept=texts_line),
        data=data.result(),
        inputs=inputs.result(),
        code=code.result(),
    )


def read_classes(aws: Aws, run: S3Location) -> ClassReport | None:
    """Read how well a classifier found each class; None where the run has not said, or is no classification."""
    return _record(aws, run / CLASSES, ClassReport)


def read_spec(aws: Aws, run: StoredRun) -> JobSpec | None:
    """Read the spec of a run; None where there is none, or none that this release reads."""
    return _spec(_spec_text(aws, run.location), origin=str(run.location / SPEC))


def _spec_text(aws: Aws, place: S3Location) -> str:
    """Return the text of a run's spec; an empty one where there is none, or, with a warning, none that is a text."""
    try:
        return read_spec_text(aws, place) or ""
    except UsageError as error:
        log.warning("warning: %s; it is left out", error.args[0])
        return ""


def _spec(text: str, *, origin: str) -> JobSpec | None:
    from jobs.client.spec_yaml import documents_of

    try:
        documents = documents_of(text, origin=origin)
        return parse_spec(documents[0].data, origin=origin) if documents else None
    except UsageError as error:
        log.warning("warning: %s; it is left out", printable(str(error.args[0]).splitlines()[0]))
        return None


def _record(aws: Aws, place: S3Location, model: type[Record]) -> Record | None:
    return read(model, object_store.read_once(aws.s3, place), place=place)


def _utilization(aws: Aws, place: S3Location) -> list[dict[str, Any]]:
    """Return the minutes of all attempts, each of which has a file of its own."""
    found: list[dict[str, Any]] = []
    for item in object_store.listing(aws.s3, place, prefix=(place / UTILIZATION).key):
        file = S3Location(place.bucket, item["Key"])
        found += read_lines(object_store.read_once(aws.s3, file), place=file, accept=timed_line)
    return sorted(found, key=lambda line: line["time"])


def _checkpoints(files: Mapping[str, "ObjectTypeDef"]) -> list[Checkpoint]:
    found = [(checkpoint_step(name), item["LastModified"]) for name, item in files.items()]
    return sorted((Checkpoint(step=step, at=at) for step, at in found if step is not None), key=lambda each: each.step)
