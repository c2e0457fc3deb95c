"""Follows a job to its end: its states, its attempts and its log lines, as they happen."""

import time
from collections.abc import Callable

from jobs.aws import Aws, is_refused_connection, is_transient
from jobs.batch import Job, describe
from jobs.errors import NotFoundError
from jobs.logs import LogLine, LogReader
from jobs.stage import DeployedStage

POLL_SECONDS = 4.0
"""Between looks. DescribeJobs and GetLogEvents are throttled by account: many followers share them."""

POLL_SECONDS_EMBEDDED = 0.5

PATIENCE_SECONDS = 600.0
"""How long throttling, service faults and a broken line are waited out; the job goes on meanwhile."""

_QUIET_LOOKS = 3
"""Looks without a new line after which an ended job's log counts as complete: CloudWatch delivers late."""


def follow(
    aws: Aws, stage: DeployedStage, job_id: str, *, reader: LogReader, show: Callable[[Job | LogLine], None]
) -> Job:
    """Call `show` with the job whenever its state or attempt changed, and with each new line; returns the ended job.

    Raises NotFoundError where Batch forgets the job, and what the line itself raises once patience runs out.
    """
    pause = POLL_SECONDS_EMBEDDED if aws.embedded else POLL_SECONDS
    patient_until = time.monotonic() + PATIENCE_SECONDS
    shown: tuple[str, int] | None = None
    quiet = 0
    while True:
        try:
            found = describe(aws, stage, [job_id])
            lines = reader.read(found[0].log_streams) if found else []
        except Exception as error:
            # A refused connection on loopback is an embedded AWS that was stopped, and every job with it.
            gone = aws.embedded and is_refused_connection(error)
            if gone or not is_transient(error) or time.monotonic() > patient_until:
                raise
            time.sleep(pause)
            continue
        patient_until = time.monotonic() + PATIENCE_SECONDS
        if not found:
            raise NotFoundError(f"AWS Batch does not know job {job_id} any more", next_step="trainyard receipt RUN")
        job = found[0]
        if not job.ended and (job.state, job.attempt) != shown:
            shown = (job.state, job.attempt)
            show(job)
        for line in lines:
            show(line)
        quiet = 0 if lines else quiet + 1
        if job.ended and quiet >= (1 if aws.embedded else _QUIET_LOOKS):
            show(job)
            return job
        time.sleep(pause)
