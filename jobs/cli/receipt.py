"""`trainyard receipt RUN`: the result of a run, and what all its attempts used and cost."""

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from jobs.cli.options import Output, RunOrFolder, folder_of

if TYPE_CHECKING:
    from jobs.spec.code import CodeRecord


def receipt(ctx: typer.Context, run: RunOrFolder, output: Output = "table") -> None:
    """Show the result of a run and the cost of all its attempts."""
    from jobs.aws import s3 as object_store
    from jobs.cli import tables
    from jobs.cli.sweep_state import refuse_sweep
    from jobs.core.errors import NotFoundError
    from jobs.money.prices import stored
    from jobs.runs import batch, storage
    from jobs.runs.code_archive import read_code_record
    from jobs.runs.job import CANCELLED
    from jobs.runs.run_records import read_classes
    from jobs.runs.sweeps import STOPPED_EARLY

    if (folder := folder_of(run)) is not None:
        _show_fetched(folder, output=output)
        return
    aws = ctx.obj.aws()
    stage = batch.read_stage(aws, ctx.obj.stage)
    found_run = storage.find_run(aws, stage, run)
    found = storage.read_receipt(aws, found_run.location)
    if found is None:
        refuse_sweep(aws, stage, found_run, what="receipt", command="receipt")
        raise NotFoundError(
            f"{found_run.run_id} has no receipt: it has not started training, or failed before it did",
            next_step=f"trainyard status {found_run.run_id}",
        )
    jobs = batch.find_jobs(aws, stage, found_run.run_id) if found.state != "succeeded" else []
    if jobs:
        found = jobs[-1].with_end(found)
    found = found.model_copy(update={"stored": stored(*object_store.billed_sizes(aws.s3, found_run.location))})
    if output == "json":
        tables.print_json(found.model_dump(mode="json"))
        return
    ended_by = jobs[-1].ended_by(found) if jobs else found.attempts[-1].reason
    state = STOPPED_EARLY if found.stopped_early else found.state
    state = "cancelled" if jobs and jobs[-1].state == CANCELLED else state
    code = read_code_record(aws, found_run.location)
    table = tables.receipt_table(
        found,
        state=state,
        location=str(found_run.location),
        ended_by=ended_by or "",
        code=_code_text(code) if code else "",
        emulated=stage.emulated,
    )
    tables.show_result(table, read_classes(aws, found_run.location), on=tables.stdout())


def _show_fetched(folder: Path, *, output: str) -> None:
    """Show the receipt of a fetched run from its own files, which do not record how Batch ended it."""
    from jobs.cli import tables
    from jobs.core.errors import NotFoundError
    from jobs.core.instance_types import instance_type
    from jobs.runs.run_records import read_fetched_run
    from jobs.runs.sweeps import STOPPED_EARLY

    recorded = read_fetched_run(folder)
    found = recorded.receipt
    if found is None:
        raise NotFoundError(
            f"{folder} has no readable receipt: its run had not started training, or failed before it did",
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
        # Only an emulator runs a job on accelerators that its instance type does not have.
        emulated=instance_type(last.instance_type).accelerator != last.accelerator,
    )
    tables.show_result(table, recorded.classes, on=tables.stdout())


def _code_text(record: "CodeRecord") -> str:
    from jobs.core.words import counted

    commit = f"commit {record.commit}{' with changes' if record.dirty else ''}" if record.commit else "not committed"
    return f"{counted(record.files, 'file')} of {record.folder}, {commit}; download: trainyard fetch RUN --code"
