"""Represent any AWS Batch job in one shape: a single node, a multi-node parallel job, or an array of Spot nodes.

For an array job, attempts, exit codes, log streams and most of the state come from its children.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from itertools import chain, zip_longest
from typing import Any

from jobs.core.errors import INTERRUPTED_EXIT_CODE
from jobs.core.queues import SPOT_WAITED_TOO_LONG, falls_back
from jobs.core.records import Receipt
from jobs.core.retries import (
    DUPLICATE_REASON,
    EXITED_REASON,
    HOME_TAG,
    MOVED_REASON,
    MOVED_TAG,
    RECLAIM_REASON,
    RESUMED_TAG,
    is_reclaim,
)
from jobs.money.receipt import with_end
from jobs.spec.submit_job import SCHEDULING_PRIORITY, SUBMITTER_TAG
from jobs.spec.sweep import NO_POINT_LEFT_REASON, SWEEP_TAG

CANCELLED = "CANCELLED"
"""The state of a job that a person stopped. Batch itself reports FAILED."""
UNSUCCESSFUL = ("FAILED", CANCELLED)
ENDED = ("SUCCEEDED", *UNSUCCESSFUL)
STATES = ("SUBMITTED", "PENDING", "RUNNABLE", "STARTING", "RUNNING", *ENDED)
_ENDED_BY_THE_PLATFORM = (MOVED_REASON, DUPLICATE_REASON, SPOT_WAITED_TOO_LONG)
"""Reason prefixes of jobs that the platform terminated without ending the run."""
_TIMED_OUT = "Job attempt duration exceeded timeout"
"""Batch's reason for a timed-out attempt."""


@dataclass(frozen=True, kw_only=True)
class LogStream:
    """The log stream of one node in one attempt."""

    name: str
    attempt: int
    node: int | None
    """Index of the node, or None if the job has one node."""
    of_sweep: bool = False
    """Whether the nodes are workers of a sweep, each of which runs points independently."""
    region: str | None = None
    """Region of the log, if the job has moved to another one; otherwise None."""
    log_group: str | None = None
    """The log group there."""


@dataclass(frozen=True, kw_only=True)
class JobAttempt:
    """One start of a job by Batch, for any type of job definition."""

    number: int
    started_at: datetime | None
    stopped_at: datetime | None
    exit_code: int | None
    reason: str
    """Why it ended, as reported by Batch or the container; empty while it runs."""
    log_stream: str | None


@dataclass(frozen=True, kw_only=True)
class Job:
    """One job, with everything that Batch reports about it."""

    id: str
    run_id: str
    state: str
    """SUBMITTED, PENDING, RUNNABLE, STARTING, RUNNING, SUCCEEDED, FAILED or CANCELLED."""
    reason: str
    queue: str
    """The queue's name in the stage, such as `spot`."""
    team: str
    kind: str
    moved: str
    """Why the run was moved to this job, such as "after 3 reclaims"; empty if it was not moved."""
    created_at: datetime
    started_at: datetime | None
    stopped_at: datetime | None
    attempts: tuple[JobAttempt, ...]
    """Includes the running attempt."""
    max_attempts: int
    log_streams: tuple[LogStream, ...]
    """All log streams, ordered by attempt, then node."""
    priority: int = 0
    """Its spec's priority among the team's waiting runs."""
    submitter: str = ""
    """Identity in AWS that submitted or resumed it, such as `assumed-role/research/alice`; empty if unknown."""
    depends_on: tuple[str, ...] = ()
    """Ids of the jobs that must succeed before this one starts."""
    resumed: str = ""
    """Id of the job that ended before `trainyard resume` continued the run; empty if the run was not resumed."""
    home: str = ""
    """The run's stage, if the job has moved to another stage; otherwise empty."""
    stage: str = ""
    """The stage that it runs in."""
    region: str = ""
    points: int = 0
    """Number of points that a sweep's job has to run. 0 if the job is not a sweep."""
    nodes: Mapping[str, int] = field(default_factory=dict)
    """Number of nodes in each state, the least advanced state first, if Batch starts each node separately on Spot.
    A sweep's nodes are its workers. Empty for a single node and for nodes that start together."""
    ending: bool = False
    """Whether termination was requested but is not complete; the running container may still save."""

    @property
    def ended(self) -> bool:
        return self.state in ENDED

    @property
    def place(self) -> str:
        """Return the queue, and the stage if it is not the run's own."""
        return f"{self.queue} of stage {self.stage} ({self.region})" if self.home else self.queue

    @property
    def lacked_capacity(self) -> bool:
        """Return whether the job failed by a reclaim or for lack of Spot capacity, or was ended to move."""
        by_reclaim = is_reclaim(self.reason, self.attempts[-1].exit_code if self.attempts else None)
        return self.state == "FAILED" and (self.reason.startswith((MOVED_REASON, SPOT_WAITED_TOO_LONG)) or by_reclaim)

    @property
    def nodes_text(self) -> str:
        """Return `1 of 2 nodes` (for a sweep, `workers`) if only some are running, else an empty string."""
        some = 0 < self.nodes.get("RUNNING", 0) < sum(self.nodes.values())
        what = "workers" if self.points else "nodes"
        return f"{self.nodes['RUNNING']} of {sum(self.nodes.values())} {what}" if some and not self.ended else ""

    @property
    def has_waiting_nodes(self) -> bool:
        """Return whether some of the nodes have yet to start."""
        return any(count and state not in ("RUNNING", *ENDED) for state, count in self.nodes.items())

    @property
    def origin(self) -> str:
        """Return how this job came to continue the run; empty for a run's first job."""
        if self.moved and self.home and falls_back(self.queue):
            return f"moved to stage {self.stage} ({self.region}) {self.moved}"
        if self.moved:
            return f"moved to On-Demand {self.moved}"
        return "resumed" if self.resumed else ""

    def with_end(self, receipt: Receipt) -> Receipt:
        """Return the run's receipt, with Batch's end time if the newest attempt recorded none."""
        if not self.ended or self.stopped_at is None:
            return receipt
        return with_end(receipt, job_id=self.id, stopped_at=self.stopped_at)

    @property
    def timed_out(self) -> bool:
        reasons = (self.reason, *(attempt.reason for attempt in self.attempts[-1:]))
        return self.state == "FAILED" and any(_TIMED_OUT in reason for reason in reasons)

    @property
    def attempt(self) -> int:
        """Return the number of the attempt that is running, ran last, or will start next."""
        waiting = not self.ended and all(attempt.stopped_at for attempt in self.attempts)
        return max(1, len(self.attempts) + (1 if waiting else 0))

    def ended_by(self, receipt: Receipt | None) -> str:
        """Return the reason that the job's last attempt recorded; Batch has only the exit code.

        For a timeout and a cancellation only Batch has the reason, because the attempt only got a SIGTERM.
        """
        if self.state == CANCELLED:
            return self.reason
        last = receipt.attempts[-1] if receipt else None
        recorded = last.reason if last and self.state == "FAILED" and last.job_id == self.id else ""
        return "; ".join(filter(None, ("it exceeded its timeout_hours" if self.timed_out else "", recorded)))


def part_ids(detail: Mapping[str, Any]) -> list[str]:
    """Return the ids of a job's nodes or children, which need a separate DescribeJobs call."""
    nodes = detail.get("nodeProperties", {}).get("numNodes", 0)
    children = _children(detail)
    job_id = detail["jobId"]
    return [f"{job_id}#{index}" for index in range(nodes)] + [f"{job_id}:{index}" for index in range(children)]


def job_from(detail: Mapping[str, Any], parts: Sequence[Mapping[str, Any]], *, queue_names: Mapping[str, str]) -> Job:
    """Build a Job from the DescribeJobs details of a job and of its nodes or children.

    `queue_names` maps the names of Batch's queues to the stage's names.
    """
    physical_queue = detail["jobQueue"].rsplit("/", 1)[-1]
    tags = detail.get("tags", {})
    points = int(tags.get(SWEEP_TAG, 0))
    children = [part for part in parts if not _is_unused_worker(part)] if _children(detail) else []
    by_node = {int(re.split("[#:]", part["jobId"])[-1]): _attempts(part) for part in parts}
    # A sweep's workers start and end independently, so a combined list of attempts would be meaningless.
    attempts = () if points else _combined_attempts(list(by_node.values())) if children else _attempts(detail)
    started = list(chain.from_iterable(by_node.values()))
    streams = chain.from_iterable(
        _streams(of_node, node=node, of_sweep=points > 0) for node, of_node in by_node.items()
    )
    states = [part["status"] for part in children]
    state = CANCELLED if _is_cancelled(detail) else _array_state(detail["status"], states)
    return Job(
        id=detail["jobId"],
        run_id=detail["jobName"],
        state=state,
        # Batch gives successful jobs a reason too, worded like a failure's.
        reason="" if state == "SUCCEEDED" else _array_reason(detail, children),
        queue=queue_names.get(physical_queue, physical_queue),
        team=tags.get("trainyard:team", ""),
        kind=tags.get("trainyard:job", ""),
        moved=tags.get(MOVED_TAG, ""),
        resumed=tags.get(RESUMED_TAG, ""),
        home=tags.get(HOME_TAG, "").partition("/")[0],
        stage=tags.get("trainyard:stage", ""),
        region=detail["jobQueue"].split(":")[3] if detail["jobQueue"].startswith("arn:") else "",
        created_at=_required_time(detail["createdAt"]),
        points=points,
        started_at=_earliest(started) if children else _time(detail.get("startedAt")),
        stopped_at=_time(detail.get("stoppedAt")),
        attempts=attempts,
        max_attempts=detail.get("retryStrategy", {}).get("attempts", 1),
        priority=detail.get("schedulingPriority", SCHEDULING_PRIORITY) - SCHEDULING_PRIORITY,
        submitter=tags.get(SUBMITTER_TAG, ""),
        depends_on=tuple(item["jobId"] for item in detail.get("dependsOn", []) if "jobId" in item),
        log_streams=tuple(
            sorted(
                streams if parts else _streams(_attempts(detail), node=None),
                key=lambda stream: (stream.attempt, stream.node or 0),
            )
        ),
        nodes={state: states.count(state) for state in STATES if state in states},
        ending=detail["status"] not in ENDED and _was_terminated(detail),
    )


def _is_cancelled(detail: Mapping[str, Any]) -> bool:
    return (
        detail["status"] == "FAILED"
        and _was_terminated(detail)
        and not str(detail.get("statusReason", "")).startswith(_ENDED_BY_THE_PLATFORM)
    )


def _is_unused_worker(child: Mapping[str, Any]) -> bool:
    """Return whether a sweep's worker was cancelled before it started because no point was left for it."""
    return child["status"] == "FAILED" and child.get("statusReason") == NO_POINT_LEFT_REASON


def _was_terminated(detail: Mapping[str, Any]) -> bool:
    """Return whether TerminateJob or CancelJob ended the job, according to its JobDetail."""
    return bool(detail.get("isTerminated") or detail.get("isCancelled"))


def _children(detail: Mapping[str, Any]) -> int:
    """Return the number of children of an array job's parent; 0 for all other jobs."""
    array = detail.get("arrayProperties", {})
    return 0 if "index" in array else int(array.get("size", 0))


def _array_state(status: str, states: Sequence[str]) -> str:
    """Return the state of several nodes on Spot; Batch reports PENDING until they all end.

    RUNNING if any node is running, else the state of the least advanced node.
    """
    alive = [state for state in STATES if state in states and state not in ENDED]
    if status == "FAILED" and states and all(state == "SUCCEEDED" for state in states):
        return "SUCCEEDED"  # only unused workers were cancelled, for which Batch fails the parent
    if status in ENDED or not alive:
        return status
    return "RUNNING" if "RUNNING" in alive else alive[0]


def _array_reason(detail: Mapping[str, Any], children: Sequence[Mapping[str, Any]]) -> str:
    """Return the reason of the node that decided how the job ended.

    For the parent Batch reports only that a child failed, unless the job was terminated.
    """
    failed = [child for child in children if child["status"] == "FAILED"]
    if detail["status"] == "FAILED" and failed and not _was_terminated(detail):
        detail = min(failed, key=lambda child: min(map(_rank, _attempts(child)[-1:]), default=_LAST))
    return str(detail.get("statusReason", ""))


def _combined_attempts(of_nodes: Sequence[Sequence[JobAttempt]]) -> tuple[JobAttempt, ...]:
    """Combine the nodes' first attempts into one, then their second attempts, and so on.

    Each combined attempt has the exit code and reason of the node that decided its end.
    """
    together = []
    for each in zip_longest(*of_nodes):
        attempts = [attempt for attempt in each if attempt is not None]
        runs = any(attempt.stopped_at is None for attempt in attempts)
        decisive = min(attempts, key=_rank)
        together.append(
            replace(
                decisive,
                started_at=_earliest(attempts),
                stopped_at=None if runs else max(filter(None, (attempt.stopped_at for attempt in attempts))),
                exit_code=None if runs else decisive.exit_code,
                reason="" if runs else decisive.reason,
            )
        )
    return tuple(together)


def _earliest(attempts: Iterable[JobAttempt]) -> datetime | None:
    return min(filter(None, (attempt.started_at for attempt in attempts)), default=None)


_LAST = (9, datetime.max.replace(tzinfo=timezone.utc))


def _rank(attempt: JobAttempt) -> tuple[int, datetime]:
    """Return a sort key that puts the node that best explains the end first.

    The order is: an error of the job itself, a reclaim, an exit because other nodes left; then by time.
    """
    if attempt.exit_code not in (None, 0, INTERRUPTED_EXIT_CODE):
        kind = 0
    elif attempt.reason.startswith(RECLAIM_REASON):
        kind = 1
    else:
        kind = 3 if attempt.exit_code == 0 else 2
    return kind, attempt.stopped_at or _LAST[1]


def _attempts(detail: Mapping[str, Any]) -> tuple[JobAttempt, ...]:
    """Return the finished attempts and the running one, whose log stream Batch reports outside the list."""
    attempts = [
        _attempt(number, {**item, "statusReason": item.get("statusReason", "")})
        for number, item in enumerate(detail.get("attempts", []), start=1)
    ]
    if detail["status"] in ("STARTING", "RUNNING"):
        current = {**detail, **detail.get("ecsProperties", {}), "statusReason": "", "stoppedAt": None}
        running = _attempt(len(attempts) + 1, current)
        if running.log_stream and running.log_stream not in {attempt.log_stream for attempt in attempts}:
            attempts.append(running)
    return tuple(attempts)


def _attempt(number: int, item: Mapping[str, Any]) -> JobAttempt:
    """Read one attempt of a job, which has one container in one task."""
    in_tasks = chain.from_iterable(task.get("containers", []) for task in item.get("taskProperties", []))
    container: Mapping[str, Any] = next(iter(in_tasks), {})
    exit_code = container.get("exitCode")
    reasons = [item.get("statusReason", ""), container.get("reason", "")]
    if exit_code == 0 and EXITED_REASON in reasons:
        reasons.remove(EXITED_REASON)  # Batch reports this for every container that exits; here it exited with 0
    return JobAttempt(
        number=number,
        started_at=_time(item.get("startedAt")),
        stopped_at=_time(item.get("stoppedAt")),
        exit_code=exit_code,
        reason="; ".join(dict.fromkeys(reason for reason in reasons if reason)),
        log_stream=container.get("logStreamName"),
    )


def _streams(attempts: Iterable[JobAttempt], *, node: int | None, of_sweep: bool = False) -> Iterator[LogStream]:
    return (
        LogStream(name=attempt.log_stream, attempt=attempt.number, node=node, of_sweep=of_sweep)
        for attempt in attempts
        if attempt.log_stream
    )


def _time(milliseconds: int | None) -> datetime | None:
    return _required_time(milliseconds) if milliseconds else None


def _required_time(milliseconds: int) -> datetime:
    return datetime.fromtimestamp(milliseconds / 1000, timezone.utc)
