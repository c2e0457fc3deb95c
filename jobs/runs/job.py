"""Jobs as Batch describes them, in one shape: of one node, of several that start together, of several on Spot.

The last are the children of an array job: attempts, exit codes and log streams are theirs, and so is most of the state.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from itertools import chain, zip_longest
from typing import Any

from jobs.core.errors import INTERRUPTED_EXIT_CODE
from jobs.core.queues import SPOT_WAITED_TOO_LONG
from jobs.core.records import Receipt
from jobs.core.retries import DUPLICATE_REASON, EXITED_REASON, MOVED_REASON, MOVED_TAG, RECLAIM_REASON, RESUMED_TAG
from jobs.money.receipt import with_end
from jobs.spec.sweep import NO_POINT_LEFT_REASON, SWEEP_TAG

CANCELLED = "CANCELLED"
"""The state of a job that somebody ended on purpose. Batch itself calls it FAILED."""
UNSUCCESSFUL = ("FAILED", CANCELLED)
ENDED = ("SUCCEEDED", *UNSUCCESSFUL)
STATES = ("SUBMITTED", "PENDING", "RUNNABLE", "STARTING", "RUNNING", *ENDED)
_ENDED_BY_THE_PLATFORM = (MOVED_REASON, DUPLICATE_REASON, SPOT_WAITED_TOO_LONG)
"""Beginnings of the reasons of jobs that were terminated, but not because anybody wanted the run to end."""
_TIMED_OUT = "Job attempt duration exceeded timeout"
"""Batch's own words."""


@dataclass(frozen=True, kw_only=True)
class LogStream:
    """The log stream of one node in one attempt."""

    name: str
    attempt: int
    node: int | None
    """Index of the node; None: the job has one node."""
    of_sweep: bool = False
    """The nodes are workers of a sweep, each of which runs points by itself."""


@dataclass(frozen=True, kw_only=True)
class JobAttempt:
    """One start of a job by Batch, in whichever shape its definition made Batch report it."""

    number: int
    started_at: datetime | None
    stopped_at: datetime | None
    exit_code: int | None
    reason: str
    """Why it ended: Batch's words, or the container's; empty while it runs."""
    log_stream: str | None


@dataclass(frozen=True, kw_only=True)
class Job:
    """One job, with all that Batch knows of its run."""

    id: str
    run_id: str
    state: str
    """SUBMITTED, PENDING, RUNNABLE, STARTING, RUNNING, SUCCEEDED, FAILED or CANCELLED."""
    reason: str
    queue: str
    """The queue's name in the stage: spot, …"""
    team: str
    kind: str
    moved: str
    """Why the run goes on as this job after another one: "after 3 reclaims"; empty where it is the first."""
    created_at: datetime
    started_at: datetime | None
    stopped_at: datetime | None
    attempts: tuple[JobAttempt, ...]
    """The one that runs is among them."""
    max_attempts: int
    log_streams: tuple[LogStream, ...]
    """All log streams, in the order of attempts, then nodes."""
    depends_on: tuple[str, ...] = ()
    """Ids of the jobs that have to succeed before it starts."""
    resumed: str = ""
    """Id of the job that ended before `trainyard resume` went on with the run; empty where nobody did."""
    points: int = 0
    """Of a sweep: how many points the job has to run. 0: it is no sweep."""
    nodes: Mapping[str, int] = field(default_factory=dict)
    """How many nodes are in each state, the least advanced first, where Batch starts each for itself on Spot. Empty
    where there is one node, or where all start together. Those of a sweep are its workers."""
    ending: bool = False
    """Its end was asked for, and has not come yet: what runs may still save."""

    @property
    def ended(self) -> bool:
        return self.state in ENDED

    @property
    def nodes_text(self) -> str:
        """Return `1 of 2 nodes`, or `workers` of a sweep, where only some run; empty for all else."""
        some = 0 < self.nodes.get("RUNNING", 0) < sum(self.nodes.values())
        what = "workers" if self.points else "nodes"
        return f"{self.nodes['RUNNING']} of {sum(self.nodes.values())} {what}" if some and not self.ended else ""

    @property
    def has_waiting_nodes(self) -> bool:
        """Return whether some of its nodes have yet to start; of those that have ended nothing keeps any."""
        return any(count and state not in ("RUNNING", *ENDED) for state, count in self.nodes.items())

    @property
    def origin(self) -> str:
        """Return how the job came to go on with its run; empty where it is the first."""
        if self.moved:
            return f"moved to On-Demand {self.moved}"
        return "resumed" if self.resumed else ""

    def with_end(self, receipt: Receipt) -> Receipt:
        """Return the receipt of the job's run, with the end that Batch knows of if its newest attempt wrote none."""
        if not self.ended or self.stopped_at is None:
            return receipt
        return with_end(receipt, job_id=self.id, stopped_at=self.stopped_at)

    @property
    def timed_out(self) -> bool:
        reasons = (self.reason, *(attempt.reason for attempt in self.attempts[-1:]))
        return self.state == "FAILED" and any(_TIMED_OUT in reason for reason in reasons)

    @property
    def attempt(self) -> int:
        """Return the number of the attempt that runs, ran last, or is waited for."""
        waiting = not self.ended and all(attempt.stopped_at for attempt in self.attempts)
        return max(1, len(self.attempts) + (1 if waiting else 0))

    def ended_by(self, receipt: Receipt | None) -> str:
        """Return what the job's last attempt itself said of its end, of which Batch knows only the exit code.

        Of a timeout and of a cancellation it is Batch that knows: the attempt got no more than a SIGTERM.
        """
        if self.state == CANCELLED:
            return self.reason
        last = receipt.attempts[-1] if receipt else None
        ours = self.state == "FAILED" and last is not None and last.job_id == self.id
        said = (last.reason or "") if ours and last is not None else ""
        return "; ".join(filter(None, ("its timeout_hours were over" if self.timed_out else "", said)))


def part_ids(detail: Mapping[str, Any]) -> list[str]:
    """Return the ids of a job's nodes or children, for which DescribeJobs has to be asked besides."""
    nodes = detail.get("nodeProperties", {}).get("numNodes", 0)
    children = _children(detail)
    job_id = detail["jobId"]
    return [f"{job_id}#{index}" for index in range(nodes)] + [f"{job_id}:{index}" for index in range(children)]


def job_from(detail: Mapping[str, Any], parts: Sequence[Mapping[str, Any]], *, queue_names: Mapping[str, str]) -> Job:
    """Make a Job of what DescribeJobs says of it, and of its nodes or children.

    `queue_names`: what the stage calls Batch's queues.
    """
    physical_queue = detail["jobQueue"].rsplit("/", 1)[-1]
    tags = detail.get("tags", {})
    points = int(tags.get(SWEEP_TAG, 0))
    gang = [part for part in parts if not _is_needless(part)] if _children(detail) else []
    by_node = {int(re.split("[#:]", part["jobId"])[-1]): _attempts(part) for part in parts}
    # The workers of a sweep start and end each for itself: of attempts of them all nobody can speak.
    attempts = () if points else _attempts_of_gang(list(by_node.values())) if gang else _attempts(detail)
    started = list(chain.from_iterable(by_node.values()))
    streams = chain.from_iterable(
        _streams(of_node, node=node, of_sweep=points > 0) for node, of_node in by_node.items()
    )
    states = [part["status"] for part in gang]
    state = CANCELLED if _is_cancelled(detail) else _state_of_gang(detail["status"], states)
    return Job(
        id=detail["jobId"],
        run_id=detail["jobName"],
        state=state,
        # Batch gives a success a reason like a failure's.
        reason="" if state == "SUCCEEDED" else _reason_of_gang(detail, gang),
        queue=queue_names.get(physical_queue, physical_queue),
        team=tags.get("trainyard:team", ""),
        kind=tags.get("trainyard:job", ""),
        moved=tags.get(MOVED_TAG, ""),
        resumed=tags.get(RESUMED_TAG, ""),
        created_at=_required_time(detail["createdAt"]),
        points=points,
        started_at=_earliest(started) if gang else _time(detail.get("startedAt")),
        stopped_at=_time(detail.get("stoppedAt")),
        attempts=attempts,
        max_attempts=detail.get("retryStrategy", {}).get("attempts", 1),
        depends_on=tuple(item["jobId"] for item in detail.get("dependsOn", []) if "jobId" in item),
        log_streams=tuple(
            sorted(
                streams if parts else _streams(_attempts(detail), node=None),
                key=lambda stream: (stream.attempt, stream.node or 0),
            )
        ),
        nodes={state: states.count(state) for state in STATES if state in states},
        ending=detail["status"] not in ENDED and _was_ended_by_someone(detail),
    )


def _is_cancelled(detail: Mapping[str, Any]) -> bool:
    return (
        detail["status"] == "FAILED"
        and _was_ended_by_someone(detail)
        and not str(detail.get("statusReason", "")).startswith(_ENDED_BY_THE_PLATFORM)
    )


def _is_needless(child: Mapping[str, Any]) -> bool:
    """Return whether a worker of a sweep was cancelled before it started, since no point was left for it."""
    return child["status"] == "FAILED" and child.get("statusReason") == NO_POINT_LEFT_REASON


def _was_ended_by_someone(detail: Mapping[str, Any]) -> bool:
    """Return whether TerminateJob or CancelJob ended the job, as Batch's JobDetail says."""
    return bool(detail.get("isTerminated") or detail.get("isCancelled"))


def _children(detail: Mapping[str, Any]) -> int:
    """Return how many children the parent of an array job has; 0 for all other jobs."""
    array = detail.get("arrayProperties", {})
    return 0 if "index" in array else int(array.get("size", 0))


def _state_of_gang(status: str, states: Sequence[str]) -> str:
    """Return the state of several nodes on Spot, all of which Batch calls PENDING.

    They run as soon as one of them does; else they are where the least advanced is.
    """
    alive = [state for state in STATES if state in states and state not in ENDED]
    if status == "FAILED" and states and all(state == "SUCCEEDED" for state in states):
        return "SUCCEEDED"  # only workers that nothing was left for were cancelled, by which Batch fails their parent
    if status in ENDED or not alive:
        return status
    return "RUNNING" if "RUNNING" in alive else alive[0]


def _reason_of_gang(detail: Mapping[str, Any], children: Sequence[Mapping[str, Any]]) -> str:
    """Return the reason of the node that decided the end.

    Of the whole job Batch says only that a child failed, unless somebody ended it.
    """
    failed = [child for child in children if child["status"] == "FAILED"]
    if detail["status"] == "FAILED" and failed and not _was_ended_by_someone(detail):
        detail = min(failed, key=lambda child: min(map(_rank, _attempts(child)[-1:]), default=_LAST))
    return str(detail.get("statusReason", ""))


def _attempts_of_gang(of_nodes: Sequence[Sequence[JobAttempt]]) -> tuple[JobAttempt, ...]:
    """Return the first attempts of all nodes as one, then the second ones, and so on.

    Each ended as it did on the node that decided its end.
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
    """Return the rank of a node's end, the least for the one that says most of the end of all.

    First comes its own fault, then a reclaim, then that it left with others; and of those the earliest.
    """
    if attempt.exit_code not in (None, 0, INTERRUPTED_EXIT_CODE):
        kind = 0
    elif attempt.reason.startswith(RECLAIM_REASON):
        kind = 1
    else:
        kind = 3 if attempt.exit_code == 0 else 2
    return kind, attempt.stopped_at or _LAST[1]


def _attempts(detail: Mapping[str, Any]) -> tuple[JobAttempt, ...]:
    """Return the finished attempts, and the one that runs, whose log stream Batch keeps beside the list."""
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
    """Read an attempt of a job, whose one container is in its one task."""
    in_tasks = chain.from_iterable(task.get("containers", []) for task in item.get("taskProperties", []))
    container: Mapping[str, Any] = next(iter(in_tasks), {})
    exit_code = container.get("exitCode")
    reasons = [item.get("statusReason", ""), container.get("reason", "")]
    if exit_code == 0 and EXITED_REASON in reasons:
        reasons.remove(EXITED_REASON)  # Batch says that of every container that ended, this one by itself and well
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
