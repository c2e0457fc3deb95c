"""The errors of jobs that have failed."""

from jobs.core.errors import JobFailedError, TimedOutError
from jobs.core.records import Receipt
from jobs.core.retries import EXITED_REASON, is_reclaim
from jobs.runs.job import CANCELLED, UNSUCCESSFUL, Job


def raise_failure(job: Job, *, cause: Job | None = None, receipt: Receipt | None = None) -> None:
    """Raise JobFailedError or TimedOutError if the job failed.

    `cause`: the other job whose failure kept this one from starting. `receipt`: has the job's own reason, while Batch
    has only the exit code.
    """
    if job.state not in UNSUCCESSFUL:
        return
    if cause is not None and cause.id != job.id:
        how = "was cancelled" if cause.state == CANCELLED else "failed"
        raise JobFailedError(
            f"{job.run_id} was not started: {cause.run_id}, which it waited for, {how}",
            next_step=f"trainyard logs {cause.run_id}",
        )
    if job.state == CANCELLED:
        raise JobFailedError(f"{job.run_id} was ended: {job.reason}", next_step=f"trainyard resume {job.run_id}")
    last = job.attempts[-1] if job.attempts else None
    exit_code = f" (exit code {last.exit_code})" if last and last.exit_code is not None else ""
    kind = TimedOutError if job.timed_out else JobFailedError
    reason = (last.reason if last else "") or job.reason
    # Resuming may finish an interrupted job; a job that failed by itself needs a look at its log.
    interrupted = job.timed_out or is_reclaim(reason, last.exit_code if last else None)
    longer = " --set timeout_hours=HOURS" if job.timed_out else ""
    described = recorded_reason(job, receipt) or f"{reason}{exit_code}"
    raise kind(
        f"{job.run_id} failed in attempt {job.attempt} of {job.max_attempts}: {described}",
        next_step=f"trainyard {'resume' if interrupted else 'logs'} {job.run_id}{longer}",
    )


def recorded_reason(job: Job, receipt: Receipt | None) -> str | None:
    """Return the reason that a failed job recorded in its receipt; None if Batch's reason is better."""
    if job.state != "FAILED" or job.points or receipt is None or not job.attempts:
        return None
    newest = receipt.attempts[-1]
    reason = job.attempts[-1].reason or job.reason
    return newest.reason if newest.job_id == job.id and reason == EXITED_REASON else None
