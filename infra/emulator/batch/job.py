"""A job and its states.

    SUBMITTED ──► PENDING ──► RUNNABLE ──► STARTING ──► RUNNING ──► SUCCEEDED
        │            │            ▲           │            │
        └────────────┼──► ──► ──► │ ◄─────────┴────────────┤  another attempt
                     └──► ──► ──► FAILED ◄─── ◄─── ◄─── ◄──┘

A job without dependencies goes from SUBMITTED to RUNNABLE. The parent of an array is PENDING as soon as a child is
RUNNABLE, and then SUCCEEDED or FAILED. Source: AWS Batch user guide, "Job states" and "Array jobs".
"""

import time
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from infra.emulator.batch.submission import Submission


class Status(str, Enum):
    """Batch's job states, in order."""

    SUBMITTED = "SUBMITTED"
    PENDING = "PENDING"
    RUNNABLE = "RUNNABLE"
    STARTING = "STARTING"
    RUNNING = "RUNNING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"


FINAL = frozenset({Status.SUCCEEDED, Status.FAILED})
BEFORE_STARTING = frozenset({Status.SUBMITTED, Status.PENDING, Status.RUNNABLE})


@dataclass(frozen=True, kw_only=True)
class ArrayPosition:
    """The position of a child in its array job."""

    index: int
    size: int


def now_milliseconds() -> int:
    """Return the time as Batch does, in milliseconds since 1970."""
    return time.time_ns() // 1_000_000


@dataclass(kw_only=True)
class TaskRecord:
    """A task as DescribeJobs shows it. Times are milliseconds since 1970."""

    task_arn: str
    container_instance_arn: str
    instance_id: str
    exit_code: int | None = None
    reason: str | None = None
    """The container's reason: an error of the container runtime, usually absent."""
    log_stream_name: str | None = None
    started_at: int | None = None
    stopped_at: int | None = None
    status_reason: str | None = None

    @classmethod
    def on_new_instance(cls, prefix: str, cluster: str) -> "TaskRecord":
        """Return a task with random ids, on a new instance of an ECS cluster. `prefix` is the start of an ECS ARN."""
        return cls(
            task_arn=f"{prefix}:task/{cluster}/{uuid.uuid4().hex}",
            container_instance_arn=f"{prefix}:container-instance/{cluster}/{uuid.uuid4().hex}",
            instance_id=f"i-0{uuid.uuid4().hex[:16]}",
        )


class Job:
    """A single job, the parent or a child of an array, a multi-node job, or a node.

    Only change it under the scheduler's lock.
    """

    def __init__(
        self,
        job_id: str,
        submission: Submission,
        *,
        arn: str,
        sequence: int,
        on_change: "Callable[[Job], None]",
        parent: "Job | None" = None,
        array: ArrayPosition | None = None,
        node: int | None = None,
    ) -> None:
        """`sequence` orders jobs by submission. `array` is set for a child, and `node`, an index, for a node.

        `on_change` is called on every change of state, under the scheduler's lock.
        """
        self.id = job_id
        self.arn = arn
        self.submission = submission
        self.sequence = sequence
        self._on_change = on_change
        self.parent = parent
        self.array = array
        self.node = node
        self.children: list[Job] = []
        """Children, if this is the parent of an array."""
        self.unfinished_children = 0
        self.nodes: list[Job] = []
        """Nodes, in order, if this is a multi-node job."""
        self.status = Status.PENDING if array else Status.SUBMITTED
        self.status_reason: str | None = None
        self.created_at = now_milliseconds()
        self.started_at: int | None = None
        self.stopped_at: int | None = None
        self.attempts: list[TaskRecord] = []
        """Finished attempts."""
        self.current: TaskRecord | None = None
        """The starting or running attempt."""
        self.is_cancelled = False
        self.is_terminated = False
        self.outstanding: set[str] = set()
        """Ids of jobs that must succeed before this one starts."""
        self.cancel_reason: str | None = None
        """Why the job was cancelled. A PENDING job fails with this reason when its dependencies have ended, and the
        parent of an array when all its children have ended."""

    @property
    def ended(self) -> bool:
        return self.status in FINAL

    @property
    def last_task(self) -> TaskRecord | None:
        """Return the running attempt, or the last one, for the job's details."""
        return self.current or (self.attempts[-1] if self.attempts else None)

    @property
    def is_main_node(self) -> bool:
        return self.node == 0

    def enter(self, status: Status, reason: str | None = None) -> None:
        """Change the state, as in the diagram above."""
        self.status = status
        self.status_reason = reason
        if status is Status.RUNNING:
            self.started_at = now_milliseconds()
        elif status in FINAL:
            self.stopped_at = now_milliseconds()
        self._on_change(self)

    def restart(self) -> None:
        """Reset a node, because its job gets another attempt."""
        self.status = Status.RUNNABLE
        self.status_reason = None
        self.stopped_at = None
        self.current = None

    def status_summary(self) -> dict[str, int]:
        """Count the children of an array in each state."""
        counts = Counter(child.status for child in self.children)
        return {status.value: counts[status] for status in Status}
