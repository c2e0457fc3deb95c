"""Plans, submits and watches runs and prints their results, for `submit`, `resume`, `demo` and `acceptance`."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from rich.console import Console

from jobs.aws.connection import Aws
from jobs.cli import sweep, sweep_state, tables
from jobs.cli.list import ListedRun, show_runs
from jobs.cli.live import LiveView, detaching
from jobs.cli.options import Mode
from jobs.cli.terminal import ask, print_text
from jobs.core.errors import (
    UsageError,
)
from jobs.core.locations import S3Location
from jobs.core.records import Receipt
from jobs.core.stage import DeployedStage
from jobs.core.words import counted, log_text, printable_name
from jobs.runs.batch import cause_of_failure, terminate
from jobs.runs.failure import raise_failure, recorded_reason
from jobs.runs.job import UNSUCCESSFUL, Job
from jobs.runs.logs import LogReader, follow
from jobs.runs.run_records import read_classes
from jobs.runs.storage import find_run, readable_receipt
from jobs.runs.submit import send
from jobs.spec.plan import Plan


def show_plans(plans: Sequence[Plan], *, emulated: bool, on: Console | None = None) -> None:
    """Print the plans: a single plan with all details, several as a table. On stderr unless `on` is given."""
    on = on or tables.stderr()
    if len(plans) == 1:
        tables.show(tables.plan_table(plans[0], emulated=emulated), on=on)
        return
    tables.show(tables.plans_table(plans, emulated=emulated), on=on)
    for planned in plans:
        for note in planned.notes:
            on.print(f"{planned.spec.name}: {note}")


def show_dry_run(plans: Sequence[Plan], *, emulated: bool, output: str) -> None:
    """Print the plans and the files that would be uploaded, or with `-o json` the SubmitJob requests."""
    as_json = output == "json"
    on = tables.stderr() if as_json else tables.stdout()
    show_plans(plans, emulated=emulated, on=on)
    for planned in plans:
        files = sorted(planned.pack.files) if planned.pack else []
        width = max((len(f"{file.bytes:,}") for file in files), default=0)
        for file in files:
            on.print(f"code: {file.bytes:{width},} B  {printable_name(file.name)}", soft_wrap=True)
    if as_json:
        requests = [planned.request for planned in plans]
        tables.print_json(requests if len(plans) > 1 else requests[0])
    else:
        tables.stderr().print("dry run: nothing was submitted; -o json prints the SubmitJob request", soft_wrap=True)


def confirm(plans: Sequence[Plan], *, verb: str = "Submit") -> None:
    """Ask before spending money. Raises UsageError without a terminal, typer.Abort if the answer is no."""
    unasked = UsageError(
        "nothing was submitted: confirming the costs needs a terminal",
        next_step="add --yes, or check the plan first with --dry-run",
    )
    queues = " and ".join(dict.fromkeys(planned.queue for planned in plans))
    runs = f"{len(plans)} runs " if len(plans) > 1 else ""
    if len(plans) == 1 and plans[0].sweep is not None:
        runs = f"{counted(plans[0].sweep.points, 'point')} "
    ask(f"{verb} {runs}to queue {queues}?", unasked=unasked)


def send_all(aws: Aws, plans: Sequence[Plan], *, print_ids: bool) -> dict[str, str]:
    """Submit the plans in order and return each run's job id. If one is refused, the jobs before it are stopped.

    `print_ids` prints each run id on stdout once its job is submitted. Raises the errors of `send`.
    """
    job_ids: dict[str, str] = {}
    for planned in plans:
        try:
            job_ids[planned.run_id] = send(aws, planned.with_job_ids(job_ids), note=tables.stderr().print)
        except (Exception, KeyboardInterrupt):
            for run_id, job_id in job_ids.items():
                _stop_submitted(aws, run_id, job_id, refused=planned.run_id)
            raise
        if print_ids:
            print_text(planned.run_id)
    return job_ids


def _stop_submitted(aws: Aws, run_id: str, job_id: str, *, refused: str) -> None:
    console = tables.stderr()
    try:
        terminate(aws, job_id, reason=f"{refused}, submitted together with it, was refused")
    except Exception as error:  # noqa: BLE001 - the caller raises the original error
        console.print(f"{run_id} was already submitted and could not be stopped ({error}): trainyard cancel {run_id}")
    else:
        console.print(f"{run_id} was already submitted and is being stopped")


def finish(
    aws: Aws, stage: DeployedStage, plans: Sequence[Plan], job_ids: Mapping[str, str], *, mode: Mode, output: str
) -> None:
    """Watch the submitted runs, depending on `mode`, and print their results. Raises the first failed run's error."""
    several = len(plans) > 1
    ended: list[tuple[Job, Receipt | None]] = []
    sweeps: dict[str, sweep_state.SweepState] = {}
    results: list[dict[str, Any]] = []
    for number, planned in enumerate(plans, start=1):
        job_id = job_ids[planned.run_id]
        if mode is Mode.DETACH:
            results.append({**tables.plan_json(planned), "job_id": job_id})
            continue
        if several:
            tables.stderr().print(f"[{number}/{len(plans)}] {planned.run_id}")
        log_to = sys.stderr if output == "json" else sys.stdout
        job, receipt = watch(
            aws, stage, planned.run_id, planned.run_location, job_id, show_log=mode is Mode.FOLLOW, log_to=log_to
        )
        ended.append((job, receipt))
        result = {**tables.plan_json(planned), "job": tables.job_json(job)}
        state = sweep_state.read_state(aws, find_run(aws, stage, planned.run_id), job) if planned.sweep else None
        if state is not None:
            sweeps[planned.run_id] = state
            results.append({**result, "sweep": state.as_json()})
            if output == "table":
                sweep.show(state)
            continue
        classes = read_classes(aws, planned.run_location) if receipt and receipt.result else None
        result["receipt"] = receipt.model_dump(mode="json") if receipt else None
        result["classes"] = classes.model_dump(mode="json") if classes else None
        results.append(result)
        if output == "table" and receipt:
            table = tables.receipt_table(receipt, location=str(planned.run_location), emulated=stage.emulated)
            tables.show_result(table, classes, on=tables.stdout())
    if output == "json":
        tables.print_json(results if several else results[0])
    elif several and ended:
        show_runs([ListedRun(job=job, receipt=receipt) for job, receipt in ended], on=tables.stderr())
    for job, receipt in ended:
        if job.run_id in sweeps:
            sweep_state.raise_failure(sweeps[job.run_id], job)
        else:
            raise_failure(job, cause=cause_of_failure(aws, stage, job), receipt=receipt)


def watch(
    aws: Aws, stage: DeployedStage, run_id: str, location: S3Location, job_id: str, *, show_log: bool, log_to: TextIO
) -> tuple[Job, Receipt | None]:
    """Follow a job until it ends, and return it with its receipt. Raises Detached on Ctrl-C.

    If the job fails and its log was not shown, prints the log's last lines on stderr, without an error of the launcher
    that `raise_failure` reports.
    """
    live = LiveView(show_log=show_log, emulated=stage.emulated, log_to=log_to, hold_errors=True)
    with detaching(run_id), live as view:
        job = follow(aws, stage, job_id, reader=LogReader(aws, stage.log_group), show=view.show)
        receipt = readable_receipt(aws, location)
        reported = recorded_reason(job, receipt)
        if reported is not None:
            view.drop_error(reported)
    if job.state in UNSUCCESSFUL and not show_log:
        for line in view.tail:
            if line != f"error: {reported}":
                print_text(log_text(line), to=sys.stderr)
    return job, receipt
