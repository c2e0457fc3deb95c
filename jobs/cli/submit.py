"""`trainyard submit SPEC`: check, plan, ask, submit exactly once, follow.

The runs of a file with several specs are followed one after the other, in its order.
"""

import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from enum import Enum
from pathlib import Path
from typing import Any, TextIO

from jobs.aws.connection import Aws
from jobs.cli import tables
from jobs.cli.live import LiveView, detaching
from jobs.cli.spec_file import read_specs
from jobs.client.batch import SUBMIT_DELAYS_SECONDS, cause_of_failure, read_stage, terminate_id
from jobs.client.batch import submit as submit_job
from jobs.client.follow import follow
from jobs.client.inputs import check_inputs
from jobs.client.job import Job
from jobs.client.logs import LogReader
from jobs.client.references import resolve
from jobs.client.storage import delete_spec, put_spec, read_receipt
from jobs.contract.display import printable
from jobs.contract.errors import (
    Detached,
    JobFailedError,
    MaybeSubmittedError,
    TimedOutError,
    TrainyardError,
    UsageError,
)
from jobs.contract.locations import S3Location
from jobs.contract.plan import Plan, plan
from jobs.contract.records import Receipt
from jobs.contract.retries import is_reclaim
from jobs.contract.run import new_run_id
from jobs.contract.spec import JobSpec
from jobs.contract.stage import DeployedStage


class How(Enum):
    """The choice of what `submit` does once the plan stands."""

    DRY_RUN = "dry-run"
    FOLLOW = "follow"
    WAIT = "wait"
    DETACH = "detach"


def submit(
    aws: Aws, stage_name: str, spec_path: Path, overrides: Sequence[str], *, how: How, yes: bool, output: str
) -> None:
    """Run `trainyard submit`. Raises the error whose exit code tells how it ended: the first run's that failed."""
    specs = read_specs(spec_path, overrides)
    stage = read_stage(aws, stage_name)
    plans = plan_runs(aws, stage, specs)
    several = len(plans) > 1
    _show(plans, embedded=stage.embedded)
    if how is How.DRY_RUN:
        requests = [planned.request for planned in plans]
        tables.print_json(requests if several else requests[0])
        return
    if not yes and not stage.embedded:
        confirm(plans)
    job_ids = send_all(aws, plans, say=output == "table")
    finish(aws, stage, plans, job_ids, how=how, output=output)


def finish(
    aws: Aws, stage: DeployedStage, plans: Sequence[Plan], job_ids: Mapping[str, str], *, how: How, output: str
) -> None:
    """Watch what was submitted as `how` says, show what it came to, and raise the failure of the first that failed."""
    several = len(plans) > 1
    ended: list[Job] = []
    results: list[dict[str, Any]] = []
    for number, planned in enumerate(plans, start=1):
        job_id = job_ids[planned.run_id]
        if how is How.DETACH:
            results.append({**tables.plan_json(planned), "job_id": job_id})
            continue
        if several:
            tables.stderr().print(f"[{number}/{len(plans)}] {planned.run_id}")
        log_to = sys.stderr if output == "json" else sys.stdout
        job, receipt = watch(
            aws, stage, planned.run_id, planned.run_location, job_id, show_log=how is How.FOLLOW, log_to=log_to
        )
        ended.append(job)
        shown = {"job": tables.job_json(job), "receipt": receipt.model_dump(mode="json") if receipt else None}
        results.append({**tables.plan_json(planned), **shown})
        if output == "table" and receipt:
            tables.show(tables.receipt_table(receipt, location=str(planned.run_location)), on=tables.stdout())
    if output == "json":
        tables.print_json(results if several else results[0])
    elif several and ended:
        tables.show(tables.jobs_table(ended), on=tables.stderr())
    for job in ended:
        raise_failure(job, cause=cause_of_failure(aws, stage, job))


def _show(plans: Sequence[Plan], *, embedded: bool) -> None:
    if len(plans) == 1:
        tables.show(tables.plan_table(plans[0], embedded=embedded), on=tables.stderr())
        return
    tables.show(tables.plans_table(plans, embedded=embedded), on=tables.stderr())
    for planned in plans:
        for note in planned.notes:
            tables.stderr().print(f"{planned.spec.name}: {note}")


def plan_runs(aws: Aws, stage: DeployedStage, specs: Sequence[JobSpec]) -> list[Plan]:
    """A plan for each, in their order; what one reads of another's run need not be there yet.

    Raises what `plan_run` raises, with the name of the spec where there are several.
    """
    plans: list[Plan] = []
    for number, spec in enumerate(specs, start=1):
        try:
            plans.append(plan_run(aws, stage, spec, earlier=plans, later=[other.name for other in specs[number:]]))
        except TrainyardError as error:  # noqa: PERF203 - the first one ends it
            if len(specs) > 1:
                error.args = (f"{spec.name}: {error.args[0]}",)
            raise
    return plans


def plan_run(
    aws: Aws,
    stage: DeployedStage,
    spec: JobSpec,
    *,
    earlier: Sequence[Plan] = (),
    later: Sequence[str] = (),
) -> Plan:
    """A plan with a new run id, all of whose inputs exist, or will be written by the runs that it waits for."""
    run_id = new_run_id(spec.name, now=datetime.now(timezone.utc))
    resolved, awaited = resolve(aws, stage, spec, earlier=earlier, later=later)
    planned = plan(resolved, stage, run_id=run_id, awaited=awaited)
    check_inputs(aws, planned, embedded=stage.embedded)
    return planned


def send_all(aws: Aws, plans: Sequence[Plan], *, say: bool) -> dict[str, str]:
    """Submit the plans in their order; each's job id by its run id. Where one is refused, those before it are stopped.

    `say`: each run's id is printed once it is submitted. Raises what `send` raises.
    """
    job_ids: dict[str, str] = {}
    for planned in plans:
        try:
            job_ids[planned.run_id] = send(aws, planned.with_job_ids(job_ids))
        except (Exception, KeyboardInterrupt):
            for run_id, job_id in job_ids.items():
                _take_back(aws, run_id, job_id, because=planned.run_id)
            raise
        if say:
            print(planned.run_id, flush=True)
    return job_ids


def _take_back(aws: Aws, run_id: str, job_id: str, *, because: str) -> None:
    console = tables.stderr()
    try:
        terminate_id(aws, job_id, reason=f"{because}, submitted together with it, was not taken")
    except Exception as error:  # noqa: BLE001 - the user is told of what is left, and of the error that led here
        console.print(f"{run_id} was submitted and could not be stopped ({error}): trainyard cancel {run_id}")
    else:
        console.print(f"{run_id} was submitted before, and is being stopped")


def send(
    aws: Aws,
    planned: Plan,
    *,
    spec_before: str | None = None,
    delays_seconds: Sequence[float] = SUBMIT_DELAYS_SECONDS,
) -> str:
    """Submit a plan; its resolved spec lies with the run's files before the run exists. Returns the job's id.

    `spec_before`: of a run that is resumed, which gets it back where Batch refuses the job.
    """
    put_spec(aws, planned)
    try:
        return submit_job(aws, planned, delays_seconds=delays_seconds)
    except KeyboardInterrupt:
        raise Detached(
            f"interrupted while {planned.run_id} was being submitted: AWS Batch may have taken it",
            next_step=f"trainyard status {planned.run_id}",
        ) from None
    except MaybeSubmittedError:
        # The spec stays with what may be a run.
        raise
    except Exception:
        with suppress(Exception):
            if spec_before is None:
                delete_spec(aws, planned)
            else:
                put_spec(aws, planned, spec_before)
        raise


def watch(
    aws: Aws, stage: DeployedStage, run_id: str, location: S3Location, job_id: str, *, show_log: bool, log_to: TextIO
) -> tuple[Job, Receipt | None]:
    """Follow a job to its end, and return it and the receipt it wrote. Raises Detached on Ctrl-C."""
    with detaching(run_id), LiveView(show_log=show_log, log_to=log_to) as view:
        job = follow(aws, stage, job_id, reader=LogReader(aws, stage.log_group), show=view.show)
    if job.state == "FAILED" and not show_log:
        for line in view.tail:
            print(printable(line), file=sys.stderr)
    return job, read_receipt(aws, location)


def raise_failure(job: Job, *, cause: Job | None = None) -> None:
    """Raises JobFailedError, or TimedOutError, for a job that failed; nothing for one that succeeded.

    `cause`: the job whose failure kept this one from starting, where that is another.
    """
    if job.state != "FAILED":
        return
    if cause is not None and cause.id != job.id:
        raise JobFailedError(
            f"{job.run_id} was not started: {cause.run_id}, which it waited for, failed",
            next_step=f"trainyard logs {cause.run_id}",
        )
    last = job.attempts[-1] if job.attempts else None
    exit_code = f" (exit code {last.exit_code})" if last and last.exit_code is not None else ""
    kind = TimedOutError if job.timed_out else JobFailedError
    reason = (last.reason if last else "") or job.reason
    # What another start alone may finish; whose own fault it was should read the log.
    interrupted = job.timed_out or is_reclaim(reason, last.exit_code if last else None)
    longer = " --timeout-hours HOURS" if job.timed_out else ""
    raise kind(
        f"{job.run_id} failed in attempt {job.attempt} of {job.max_attempts}: {reason}{exit_code}",
        next_step=f"trainyard {'resume' if interrupted else 'logs'} {job.run_id}{longer}",
    )


def confirm(plans: Sequence[Plan], *, verb: str = "Submit") -> None:
    """Ask before money is spent. Raises UsageError where nobody can be asked, typer.Abort on a no."""
    import typer

    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise UsageError(
            "nothing was submitted: there is no terminal to ask on before money is spent",
            next_step="add --yes, or look first with --dry-run",
        )
    queues = " and ".join(dict.fromkeys(planned.queue for planned in plans))
    runs = f"{len(plans)} runs " if len(plans) > 1 else ""
    typer.confirm(f"{verb} {runs}to {queues}?", abort=True, err=True)
