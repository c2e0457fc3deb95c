"""`trainyard cancel RUN`: stop a run in any state."""

from typing import Annotated

import typer

from jobs.cli.options import Run, Yes


def cancel(
    ctx: typer.Context,
    run: Run,
    reason: Annotated[str, typer.Option(help="Reason to record with the job, next to your name. Default: none.")] = "",
    yes: Yes = False,
) -> None:
    """Stop a run in any state.

    A running job gets SIGTERM; its newest complete checkpoint is kept. Asks for confirmation if RUN is 'latest',
    because someone may have submitted another run in the meantime.
    """
    from jobs.cli import tables
    from jobs.cli.sweep_state import refuse_point
    from jobs.cli.terminal import ask
    from jobs.core.errors import UsageError
    from jobs.core.run import is_latest
    from jobs.runs import batch, storage
    from jobs.runs.cancel import cancel_job

    aws = ctx.obj.aws()
    stage = batch.read_stage(aws, ctx.obj.stage)
    found = storage.find_run(aws, stage, run)
    refuse_point(aws, found, "cancel")
    job = batch.job_of(aws, stage, found.run_id)
    console = tables.stderr()
    if is_latest(run) and not job.ended and not yes:
        unasked = UsageError(
            f"nothing was cancelled: 'latest' is {job.run_id}, and confirming it needs a terminal",
            next_step=f"trainyard cancel {job.run_id}, or add --yes",
        )
        ask(f"Cancel {job.run_id}, submitted {tables.moment(job.created_at)}?", unasked=unasked)
    if not cancel_job(aws, stage, job, reason=reason):
        console.print(f"{job.run_id} has already ended: {job.state}")
        return
    console.print(f"{job.run_id} ({job.state}) is being stopped")
    console.print(f"next: trainyard status {job.run_id}", soft_wrap=True)
