"""Follows a job to its end: its states, its attempts and its log lines, as they happen."""

import time
from collections.abc import Callable
from datetime import datetime, timezone

from jobs.aws.connection import Aws
from jobs.aws.errors import is_refused_connection, is_transient
from jobs.core.errors import NotFoundError
from jobs.core.locations import S3Location
from jobs.core.queues import SPOT_WAITED_TOO_LONG, on_demand_successor
from jobs.core.records import Receipt
from jobs.core.retries import MOVED_REASON, is_reclaim
from jobs.core.run import run_prefix
from jobs.core.stage import DeployedStage
from jobs.runs.batch import describe, find_job
from jobs.runs.job import Job
from jobs.runs.logs import LogLine, LogReader
from jobs.runs.storage import read_receipt

POLL_SECONDS = 4.0
"""Pause between looks. DescribeJobs and GetLogEvents are throttled by account: many followers share them."""

POLL_SECONDS_EMULATOR = 0.5

FIRST_POLL_SECONDS_EMULATOR = 0.2
"""The same until the job's first line: whoever has just submitted it waits for that."""

PATIENCE_SECONDS = 600.0
"""For so long throttling, service faults and a broken line are waited out; the job goes on meanwhile."""

RECEIPT_SECONDS = 10.0
"""A run writes its receipt every half minute: it is read a little more often."""

RECEIPT_SECONDS_EMULATED = 1.0

_QUIET_LOOKS = 3
"""Looks without a new line after which an ended job's log counts as complete: CloudWatch delivers late."""


SUCCESSOR_SECONDS = 600.0
"""A run that was ended to go on elsewhere may take so long to appear there: a lost event comes again after minutes."""

SUCCESSOR_SECONDS_AFTER_RECLAIM = 60.0
"""The same time for a run whose last reclaim left it no attempt: not each such run is moved."""


def follow(
    aws: Aws, stage: DeployedStage, job_id: str, *, reader: LogReader, show: Callable[[Job | LogLine | Receipt], None]
) -> Job:
    """Call `show` with the job whenever its state or attempt changed, with each new line, and now and then with the
    receipt of a run that goes on; returns the ended job.

    Where the run goes on as another job, so does this. Raises NotFoundError where Batch forgets the job, and what the
    line itself raises once patience runs out.
    """
    pause = POLL_SECONDS_EMULATOR if aws.emulated else POLL_SECONDS
    patient_until = time.monotonic() + PATIENCE_SECONDS
    successor_until: float | None = None
    shown: tuple[str, str, int, str] | None = None
    quiet = 0
    has_lines = False
    receipt_due = 0.0
    while True:
        try:
            found = describe(aws, stage, [job_id])
            lines = reader.read(found[0].log_streams) if found else []
            goes_on = bool(found) and may_go_on(stage, found[0])
            run = find_job(aws, stage, found[0].run_id) if goes_on else None
        except Exception as error:
            # A refused connection on loopback is an emulator that was stopped, and every job with it.
            gone = aws.emulated and is_refused_connection(error)
            if gone or not is_transient(error) or time.monotonic() > patient_until:
                raise
            time.sleep(pause)
            continue
        patient_until = time.monotonic() + PATIENCE_SECONDS
        if not found:
            raise NotFoundError(f"AWS Batch does not know job {job_id} any more", next_step="trainyard receipt RUN")
        job = found[0]
        now = (job.id, job.state, job.attempt, job.nodes_text)
        if not job.ended and now != shown:
            shown = now
            show(job)
        for line in lines:
            show(line)
        quiet = 0 if lines else quiet + 1
        has_lines = has_lines or bool(lines)
        if job.state == "RUNNING" and time.monotonic() >= receipt_due:
            receipt_due = time.monotonic() + (RECEIPT_SECONDS_EMULATED if aws.emulated else RECEIPT_SECONDS)
            receipt = _receipt(aws, stage, job)
            if receipt is not None:
                show(receipt)
        if job.ended and quiet >= (1 if aws.emulated else _QUIET_LOOKS):
            if run is not None and run.id != job.id:
                job_id, quiet, successor_until = run.id, 0, None
                continue
            successor_until = successor_until or time.monotonic() + SUCCESSOR_SECONDS
            if not goes_on or time.monotonic() > successor_until:
                show(job)
                return job
        time.sleep(pause if has_lines or not aws.emulated else FIRST_POLL_SECONDS_EMULATOR)


def _receipt(aws: Aws, stage: DeployedStage, job: Job) -> Receipt | None:
    """Return the run's receipt, if it can be read just now: following needs none."""
    try:
        return read_receipt(aws, S3Location(stage.run_bucket, run_prefix(job.team, job.run_id)))
    except Exception:  # noqa: BLE001 - denied, late, or of another release: the next look may find it
        return None


def may_go_on(stage: DeployedStage, job: Job) -> bool:
    """Return whether the run of a job that failed may still appear as another job, On-Demand."""
    if job.state != "FAILED" or on_demand_successor(job.queue) not in stage.queues or job.points:
        return False
    if job.reason.startswith((MOVED_REASON, SPOT_WAITED_TOO_LONG)):
        wait_seconds = SUCCESSOR_SECONDS
    elif is_reclaim(job.reason, job.attempts[-1].exit_code if job.attempts else None):
        wait_seconds = SUCCESSOR_SECONDS_AFTER_RECLAIM
    else:
        return False
    # Batch need not say when a job ended that was waiting.
    return job.stopped_at is None or (datetime.now(timezone.utc) - job.stopped_at).total_seconds() < wait_seconds
