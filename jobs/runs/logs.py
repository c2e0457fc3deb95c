"""Read a job's log lines from CloudWatch, and follow a job to its end through all attempts and nodes."""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from jobs.aws.connection import Aws
from jobs.aws.errors import error_code, is_refused_connection, is_transient
from jobs.core.errors import NotFoundError, TimedOutError
from jobs.core.locations import S3Location
from jobs.core.output import Progress, is_utilization_line
from jobs.core.queues import SPOT_WAITED_TOO_LONG, falls_back, on_demand_successor
from jobs.core.records import Receipt
from jobs.core.retries import MOVED_REASON
from jobs.core.run import run_prefix
from jobs.core.stage import DeployedStage
from jobs.runs.batch import describe, fallback_place, find_job, place_of
from jobs.runs.job import Job, LogStream
from jobs.runs.storage import read_receipt

if TYPE_CHECKING:
    from mypy_boto3_logs.client import CloudWatchLogsClient

_LAST_EVENTS = 100
"""Number of a log's last lines that are searched for a progress line."""

_MAX_EVENTS = 10_000
"""Maximum number of events in an answer of GetLogEvents."""

POLL_SECONDS = 4.0
"""Pause between polls. All followers share the account's request limits for DescribeJobs and GetLogEvents."""

POLL_SECONDS_EMULATOR = 0.5

FIRST_POLL_SECONDS_EMULATOR = 0.2
"""Pause between polls until the job's first line, because a person is waiting for it."""

PATIENCE_SECONDS = 600.0
"""Time for which throttling, service errors and network failures are retried; the job keeps running meanwhile."""

RECEIPT_SECONDS = 10.0
"""Time between reads of the receipt. A run writes it every half minute."""

RECEIPT_SECONDS_EMULATOR = 1.0

_QUIET_POLLS = 3
"""Polls without a new line after which an ended job's log is considered complete: CloudWatch delivers late."""

SUCCESSOR_SECONDS = 600.0
"""Time that a moved run may take to appear as its next job. A lost event is redelivered after minutes."""

SUCCESSOR_SECONDS_AFTER_RECLAIM = 60.0
"""The same time for a run whose last attempt was reclaimed. Not all such runs are moved."""


@dataclass(frozen=True, kw_only=True)
class LogLine:
    """One log line and its origin."""

    time: datetime
    attempt: int
    node: int | None
    """Index of the node, or None if the job has one node."""
    text: str
    of_sweep: bool = False
    """Whether the nodes are workers of a sweep."""


def newest_progress(aws: Aws, log_group: str, streams: Sequence[LogStream]) -> Progress | None:
    """Return the progress from the last lines of a job's newest attempt, or None if they show none."""
    newest = max((stream.attempt for stream in streams), default=0)
    for stream in streams:
        if stream.attempt != newest or stream.node not in (None, 0):
            continue
        try:
            page = _logs(aws, stream).get_log_events(
                logGroupName=stream.log_group or log_group,
                logStreamName=stream.name,
                startFromHead=False,
                limit=_LAST_EVENTS,
            )
        except Exception as error:
            if error_code(error) == "ResourceNotFoundException":  # no line has been logged yet
                return None
            raise
        parsed = (Progress.parse(event["message"]) for event in reversed(page["events"]))
        return next((progress for progress in parsed if progress is not None), None)
    return None


def _logs(aws: Aws, stream: LogStream) -> "CloudWatchLogsClient":
    return aws.in_region(stream.region).logs if stream.region else aws.logs


@dataclass
class LogReader:
    """Reads log streams and continues where the last call stopped."""

    aws: Aws
    log_group: str
    since: datetime | None = None
    _tokens: dict[str, str] = field(default_factory=dict, init=False)
    _lines: list[LogLine] = field(default_factory=list, init=False)

    def read(self, streams: Iterable[LogStream]) -> list[LogLine]:
        """Return the lines logged since the last call, ordered by attempt, with nodes interleaved by time.

        Utilization lines, which feed the stage's dashboard, are left out.
        If a call fails, the next call returns the lines it had read: no line is lost or repeated.
        """
        for stream in streams:
            self._read_stream(stream)
        lines = sorted(self._lines, key=lambda line: (line.attempt, line.time))
        self._lines.clear()
        return lines

    def read_last(self, streams: Iterable[LogStream], count: int) -> list[LogLine]:
        """Return the last `count` lines so far, ordered like those of `read`, which then continues after them."""
        lines: list[LogLine] = []
        for stream in streams:
            lines += self._last_lines(stream, count)
        lines.sort(key=lambda line: (line.attempt, line.time))
        return lines[max(0, len(lines) - count) :]

    def _read_stream(self, stream: LogStream) -> None:
        while True:
            token = self._tokens.get(stream.name)
            page = self._page(stream, token, from_head=True)
            if page is None:
                return
            self._lines.extend(_lines(page, stream))
            self._tokens[stream.name] = page["nextForwardToken"]
            # At the end of a stream CloudWatch returns the same token again. An empty page does not mean the end.
            if page["nextForwardToken"] == token:
                return

    def _last_lines(self, stream: LogStream, count: int) -> list[LogLine]:
        lines: list[LogLine] = []
        token = None
        while True:
            page = self._page(stream, token, from_head=False, limit=min(_MAX_EVENTS, count + _LAST_EVENTS))
            if page is None:
                return lines
            self._tokens.setdefault(stream.name, page["nextForwardToken"])
            lines = [*_lines(page, stream), *lines]
            if len(lines) >= count or page["nextBackwardToken"] == token:
                return lines
            token = page["nextBackwardToken"]

    def _page(self, stream: LogStream, token: str | None, *, from_head: bool, limit: int = _MAX_EVENTS) -> Any:
        """Return an answer of GetLogEvents; None if the stream does not exist yet."""
        try:
            return _logs(self.aws, stream).get_log_events(
                logGroupName=stream.log_group or self.log_group,
                logStreamName=stream.name,
                startFromHead=from_head,
                startTime=int(self.since.timestamp() * 1000) if self.since else 0,
                limit=limit,
                **({"nextToken": token} if token else {}),  # type: ignore[arg-type]
            )
        except Exception as error:
            # A stream is created with its first line, some seconds after the container started.
            if error_code(error) == "ResourceNotFoundException":
                return None
            raise


def _lines(page: Any, stream: LogStream) -> list[LogLine]:
    return [
        LogLine(
            time=datetime.fromtimestamp(event["timestamp"] / 1000, timezone.utc),
            attempt=stream.attempt,
            node=stream.node,
            text=event["message"],
            of_sweep=stream.of_sweep,
        )
        for event in page["events"]
        if not is_utilization_line(event["message"])
    ]


def follow(
    aws: Aws,
    stage: DeployedStage,
    job_id: str,
    *,
    reader: LogReader,
    show: Callable[[Job | LogLine | Receipt], None],
    timeout_seconds: float | None = None,
) -> Job:
    """Follow a job until it ends, pass all changes to `show`, and return the ended job.

    `show` gets the job whenever its state or attempt changes, each new log line, and every few seconds the receipt of a
    running job. If the run continues as another job, that job is followed.
    Raises NotFoundError if Batch has forgotten the job, the connection's error if it lasts PATIENCE_SECONDS, and
    TimedOutError after `timeout_seconds`.
    """
    give_up_at = math.inf if timeout_seconds is None else time.monotonic() + timeout_seconds
    pause = POLL_SECONDS_EMULATOR if aws.emulated else POLL_SECONDS
    patient_until = time.monotonic() + PATIENCE_SECONDS
    successor_until: float | None = None
    shown: tuple[str, str, int, str] | None = None
    quiet = 0
    has_lines = False
    receipt_due = 0.0
    at = aws, stage
    while True:
        try:
            found = describe(*at, [job_id])
            if not found and stage.fallback and at[1] is stage:
                at = fallback_place(aws, stage.fallback)
                found = describe(*at, [job_id])
            lines = reader.read(found[0].log_streams) if found else []
            may_continue = bool(found) and may_have_successor(stage, found[0])
            run = find_job(aws, stage, found[0].run_id) if may_continue else None
        except Exception as error:
            # A refused connection on loopback means that the emulator was stopped, and all of its jobs with it.
            gone = aws.emulated and is_refused_connection(error)
            if gone or not is_transient(error) or time.monotonic() > patient_until:
                raise
            time.sleep(pause)
            continue
        patient_until = time.monotonic() + PATIENCE_SECONDS
        if time.monotonic() > give_up_at and not (found and found[0].ended):
            raise TimedOutError(
                f"the job has not ended within {timeout_seconds:g} s; it continues", next_step="trainyard status RUN"
            )
        if not found:
            raise NotFoundError(f"AWS Batch has forgotten job {job_id}", next_step="trainyard receipt RUN")
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
            receipt_due = time.monotonic() + (RECEIPT_SECONDS_EMULATOR if aws.emulated else RECEIPT_SECONDS)
            receipt = _receipt(aws, stage, job)
            if receipt is not None:
                show(receipt)
        if job.ended and quiet >= (1 if aws.emulated else _QUIET_POLLS):
            if run is not None and run.id != job.id:
                job_id, quiet, successor_until, at = run.id, 0, None, place_of(aws, stage, run)
                continue
            successor_until = successor_until or time.monotonic() + SUCCESSOR_SECONDS
            if not may_continue or time.monotonic() > successor_until:
                show(job)
                return job
        time.sleep(pause if has_lines or not aws.emulated else FIRST_POLL_SECONDS_EMULATOR)


def _receipt(aws: Aws, stage: DeployedStage, job: Job) -> Receipt | None:
    """Return the run's receipt, or None if it cannot be read now; following works without it."""
    try:
        return read_receipt(aws, S3Location(stage.run_bucket, run_prefix(job.team, job.run_id)))
    except Exception:  # noqa: BLE001 - denied, late, or from another release: a later poll may succeed
        return None


def may_have_successor(stage: DeployedStage, job: Job) -> bool:
    """Return whether a failed job's run may still continue as another job, On-Demand or in the fallback stage.

    `stage` is the run's own stage.
    """
    on_demand = on_demand_successor(job.queue)
    # Whether the fallback stage has such a queue is not known here.
    may_move = on_demand in stage.queues or (bool(job.home) and on_demand is not None)
    may_fall_back = stage.fallback is not None and falls_back(job.queue) and not job.nodes and not job.home
    if job.points or not job.lacked_capacity or not (may_move or may_fall_back):
        return False
    expected = job.reason.startswith((MOVED_REASON, SPOT_WAITED_TOO_LONG))
    wait_seconds = SUCCESSOR_SECONDS if expected else SUCCESSOR_SECONDS_AFTER_RECLAIM
    # Batch may report no end time for a job that ended while it was waiting.
    return job.stopped_at is None or (datetime.now(timezone.utc) - job.stopped_at).total_seconds() < wait_seconds
