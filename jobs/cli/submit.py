"""`trainyard submit SPEC`: check, plan, ask, submit exactly once, follow."""

import secrets
import sys
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime, timezone
from enum import Enum
from pathlib import Path
from typing import TextIO

from jobs.aws import Aws
from jobs.batch import SUBMIT_DELAYS_SECONDS, Job, read_stage
from jobs.batch import submit as submit_job
from jobs.cli import tables
from jobs.cli.live import LiveView, detaching
from jobs.cli.spec_file import read_spec
from jobs.errors import Detached, JobFailedError, MaybeSubmittedError, TimedOutError, UsageError
from jobs.follow import follow
from jobs.logs import LogReader
from jobs.plan import Plan, plan
from jobs.runs import Receipt, S3Location, new_run_id
from jobs.spec import JobSpec
from jobs.stage import DeployedStage
from jobs.storage import check_inputs, delete_spec, put_spec, read_receipt


class How(Enum):
    """What `submit` does once the plan stands."""

    DRY_RUN = "dry-run"
    FOLLOW = "follow"
    WAIT = "wait"
    DETACH = "detach"


def submit(
    aws: Aws, stage_name: str, spec_path: Path, overrides: Sequence[str], *, how: How, yes: bool, output: str
) -> None:
    """The command. Raises the error whose exit code tells how it ended."""
    spec = read_spec(spec_path, overrides)
    stage = read_stage(aws, stage_name)
    planned = plan_run(aws, stage, spec)
    tables.show(tables.plan_table(planned, embedded=stage.embedded), on=tables.stderr())
    if how is How.DRY_RUN:
        tables.print_json(planned.request)
        return
    if not yes and not stage.embedded:
        _confirm(planned)
    job_id = send(aws, planned)
    if output == "table":
        print(planned.run_id, flush=True)
    if how is How.DETACH:
        if output == "json":
            tables.print_json({**tables.plan_json(planned), "job_id": job_id})
        return
    log_to = sys.stderr if output == "json" else sys.stdout
    job, receipt = watch(
        aws, stage, planned.run_id, planned.run_location, job_id, show_log=how is How.FOLLOW, log_to=log_to
    )
    if output == "json":
        tables.print_json(
            {
                **tables.plan_json(planned),
                "job": tables.job_json(job),
                "receipt": receipt.model_dump(mode="json") if receipt else None,
            }
        )
    elif receipt:
        tables.show(tables.receipt_table(receipt, location=str(planned.run_location)), on=tables.stdout())
    raise_failure(job)


def plan_run(aws: Aws, stage: DeployedStage, spec: JobSpec) -> Plan:
    """A plan with a new run id, all of whose inputs exist."""
    run_id = new_run_id(spec.name, now=datetime.now(timezone.utc), unique=secrets.randbits(16))
    planned = plan(spec, stage, run_id=run_id)
    check_inputs(aws, planned, embedded=stage.embedded)
    return planned


def send(aws: Aws, planned: Plan, *, delays_seconds: Sequence[float] = SUBMIT_DELAYS_SECONDS) -> str:
    """Submit a plan; its resolved spec lies with the run's files before the run exists. Returns the job's id."""
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
            delete_spec(aws, planned)
        raise


def watch(
    aws: Aws, stage: DeployedStage, run_id: str, location: S3Location, job_id: str, *, show_log: bool, log_to: TextIO
) -> tuple[Job, Receipt | None]:
    """Follow a job to its end; returns it and the receipt it wrote. Raises Detached on Ctrl-C."""
    with detaching(run_id), LiveView(show_log=show_log, log_to=log_to) as view:
        job = follow(aws, stage, job_id, reader=LogReader(aws, stage.log_group), show=view.show)
    if job.state == "FAILED" and not show_log:
        for line in view.tail:
            print(line, file=sys.stderr)
    return job, read_receipt(aws, location)


def raise_failure(job: Job) -> None:
    """Raises JobFailedError, or TimedOutError, for a job that failed; nothing for one that succeeded."""
    if job.state != "FAILED":
        return
    last = job.attempts[-1] if job.attempts else None
    exit_code = f" (exit code {last.exit_code})" if last and last.exit_code is not None else ""
    kind = TimedOutError if job.timed_out else JobFailedError
    reason = (last.reason if last else "") or job.reason
    raise kind(
        f"{job.run_id} failed in attempt {job.attempt} of {job.max_attempts}: {reason}{exit_code}",
        next_step=f"trainyard logs {job.run_id}",
    )


def _confirm(planned: Plan) -> None:
    """Ask before money is spent. Raises UsageError where nobody can be asked, typer.Abort on a no."""
    import typer

    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise UsageError(
            "nothing was submitted: there is no terminal to ask on before money is spent",
            next_step="add --yes, or look first with --dry-run",
        )
    typer.confirm(f"Submit to {planned.queue}?", abort=True, err=True)
