"""`trainyard cancel`: stops a run, whatever its state."""

from jobs.aws.connection import Aws
from jobs.cli import tables
from jobs.cli.options import ask
from jobs.cli.sweep import refuse_point
from jobs.core.errors import TrainyardError, UsageError
from jobs.core.retries import CANCELLED_REASON
from jobs.core.run import is_latest
from jobs.runs import batch, storage
from jobs.runs.follow import may_go_on


def cancel(aws: Aws, stage_name: str, text: str, *, reason: str, yes: bool) -> None:
    """Run `trainyard cancel`. Raises UsageError where `latest` has to be confirmed and nobody can be asked."""
    stage = batch.read_stage(aws, stage_name)
    run = storage.find_run(aws, stage, text)
    refuse_point(aws, run, "cancel")
    job = batch.job_of(aws, stage, run.run_id)
    console = tables.stderr()
    if is_latest(text) and not job.ended and not yes:
        unasked = UsageError(
            f"nothing was cancelled: 'latest' is {job.run_id}, and there is no terminal to ask on whether it is meant",
            next_step=f"trainyard cancel {job.run_id}, or add --yes",
        )
        ask(f"Cancel {job.run_id}, submitted {tables.moment(job.created_at)}?", unasked=unasked)
    if may_go_on(stage, job):
        raise TrainyardError(
            f"{job.run_id} is between two jobs: what ran on Spot has ended, and may go on On-Demand",
            next_step=f"trainyard cancel {job.run_id}, again in a minute",
        )
    if job.ended:
        console.print(f"{job.run_id} had ended before: {job.state}")
        return
    batch.terminate(aws, job, reason=f"{CANCELLED_REASON} {aws.caller}{f': {reason}' if reason else ''}")
    console.print(f"{job.run_id} ({job.state}) is being stopped")
    console.print(f"next: trainyard status {job.run_id}", soft_wrap=True)
