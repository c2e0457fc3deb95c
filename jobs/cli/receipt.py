"""`trainyard receipt`: what a run took over all its attempts, and what it brought."""

from pathlib import Path

from jobs.aws import s3 as object_store
from jobs.aws.connection import Aws
from jobs.cli import tables
from jobs.cli.options import folder_of
from jobs.cli.sweep import refuse_sweep
from jobs.core.errors import NotFoundError
from jobs.core.instance_types import instance_type
from jobs.core.words import counted
from jobs.money.prices import stored
from jobs.runs import batch, storage
from jobs.runs.code_archive import read_code_record
from jobs.runs.job import CANCELLED
from jobs.runs.read_records import read_classes, read_fetched_run
from jobs.runs.sweeps import STOPPED_EARLY
from jobs.spec.code import CodeRecord


def receipt(aws: Aws, stage_name: str, text: str, *, output: str) -> None:
    """Run `trainyard receipt`."""
    if (folder := folder_of(text)) is not None:
        _fetched(folder, output=output)
        return
    stage = batch.read_stage(aws, stage_name)
    run = storage.find_run(aws, stage, text)
    found = storage.read_receipt(aws, run.location)
    if found is None:
        refuse_sweep(aws, stage, run, what="a receipt", command="receipt")
        raise NotFoundError(
            f"{run.run_id} has written no receipt: it has not started training, or failed before",
            next_step=f"trainyard status {run.run_id}",
        )
    jobs = batch.find_jobs(aws, stage, run.run_id) if found.state != "succeeded" else []
    if jobs:
        found = jobs[-1].with_end(found)
    kept = stored(object_store.sizes(aws.s3, run.location))
    found = found.model_copy(update={"stored": kept})
    if output == "json":
        tables.print_json(found.model_dump(mode="json"))
    else:
        ended_by = jobs[-1].ended_by(found) if jobs else found.attempts[-1].reason
        state = STOPPED_EARLY if found.stopped_early else found.state
        state = "cancelled" if jobs and jobs[-1].state == CANCELLED else state
        code = read_code_record(aws, run.location)
        table = tables.receipt_table(
            found,
            state=state,
            location=str(run.location),
            ended_by=ended_by or "",
            code=_code_text(code) if code else "",
            emulated=stage.emulated,
        )
        tables.show_result(table, read_classes(aws, run.location), on=tables.stdout())


def _fetched(folder: Path, *, output: str) -> None:
    """Show the receipt of a fetched run, by what its own files say: how Batch ended it is not known here."""
    recorded = read_fetched_run(folder)
    found = recorded.receipt
    if found is None:
        raise NotFoundError(
            f"{folder} has no receipt that can be read: its run had not started training, or failed before",
            next_step=f"trainyard status {recorded.run_id}",
        )
    if output == "json":
        tables.print_json(found.model_dump(mode="json"))
        return
    last = found.attempts[-1]
    table = tables.receipt_table(
        found,
        state=STOPPED_EARLY if found.stopped_early else "",
        location=recorded.location,
        ended_by=last.reason or "",
        code=_code_text(recorded.code) if recorded.code else "",
        # Only an emulator runs a job on other accelerators than its instances have.
        emulated=instance_type(last.instance_type).accelerator != last.accelerator,
    )
    tables.show_result(table, recorded.classes, on=tables.stdout())


def _code_text(record: CodeRecord) -> str:
    commit = f"commit {record.commit}{' and changes' if record.dirty else ''}" if record.commit else "in no commit"
    return f"{counted(record.files, 'file')} of {record.folder}, {commit}; trainyard fetch --code gives it back"
