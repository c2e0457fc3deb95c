"""A job and its states.

    SUBMITTED ──► PENDING ──► RUNNABLE ──► STARTING ──► RUNNING ──► SUCCEEDED
        │            │            ▲           │            │
        └────────────┼──► ──► ──► │ ◄─────────┴────────────┤  another attempt
                     └──► ──► ──► FAILED ◄─── ◄─── ◄─── ◄──┘

A job without dependencies goes from SUBMITTED to RUNNABLE. An array job's parent is PENDING from the moment that one of
its children is RUNNABLE, and then SUCCEEDED or FAILED. Source: AWS Batch user guide, "Job states" and "Array jobs".
"""

import time
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from infra.emulator.batch.submission import Submission


class Status(str, Enum):
    """Batch's job states, in their order."""

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
    """The place of a child in its array job."""

    index: int
    size: int


@dataclass(frozen=True, kw_only=True)
class NodePosition:
    """The place of a node in its multi-node job."""

    index: int
    count: int


def now_milliseconds() -> int:
    """Milliseconds since 1970, as Batch gives times."""
    return time.time_ns() // 1_000_000


@dataclass(kw_only=True)
class TaskRecord:
    """What DescribeJobs shows of a task; times are milliseconds since 1970."""

    task_arn: str
    container_instance_arn: str
    instance_id: str
    exit_code: int | None = None
    reason: str | None = None
    """The container's: an error of the container runtime, mostly absent."""
    log_stream_name: str | None = None
    started_at: int | None = None
    stopped_at: int | None = None
    status_reason: str | None = None

    @classmethod
    def on_a_new_instance(cls, prefix: str, cluster: str) -> "TaskRecord":
        """Return a task on a new instance of an ECS cluster; `prefix` begins ARNs of ECS."""
        return cls(
            task_arn=f"{prefix}:task/{cluster}/{uuid.uuid4().hex}",
            container_instance_arn=f"{prefix}:container-instance/{cluster}/{uuid.uuid4().hex}",
            instance_id=f"i-0{uuid.uuid4().hex[:16]}",
        )


class Job:
    """One job: single, the parent or a child of an array, or a multi-node job or one of its nodes.

    Changed under the scheduler's lock only.
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
        """`sequence` orders jobs by their submission. Of `array` and `node` (an index) a child has one.

        `on_change` is called at each change of state, under the scheduler's lock.
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
        """The children, where this is the parent of an array."""
        self.unfinished_children = 0
        self.nodes: list[Job] = []
        """The nodes of a multi-node job, by their index."""
        self.status = Status.PENDING if array else Status.SUBMITTED
        self.status_reason: str | None = None
        self.created_at = now_milliseconds()
        self.started_at: int | None = None
        self.stopped_at: int | None = None
        self.attempts: list[TaskRecord] = []
        """The finished ones."""
        self.current: TaskRecord | None = None
        """The attempt that is starting or running."""
        self.is_cancelled = False
        self.is_terminated = False
        self.outstanding: set[str] = set()
        """Ids of jobs that must succeed first."""
        self.cancel_reason: str | None = None
        """Why it was asked to end: while PENDING, carried out when the dependencies are through; an array's parent ends
        with it when all its children have ended."""

    @property
    def ended(self) -> bool:
        return self.status in FINAL

    @property
    def last_task(self) -> TaskRecord | None:
        """Return what the job's details show: the attempt that runs, or the last one."""
        return self.current or (self.attempts[-1] if self.attempts else None)

    @property
    def node_position(self) -> NodePosition | None:
        if self.node is None:
            return None
        return NodePosition(index=self.node, count=self.submission.nodes or 1)

    @property
    def is_main_node(self) -> bool:
        return self.node == 0

    def enter(self, status: Status, reason: str | None = None) -> None:
        """Change the state, as the picture above shows."""
        self.status = status
        self.status_reason = reason
        if status is Status.RUNNING:
            self.started_at = now_milliseconds()
        elif status in FINAL:
            self.stopped_at = now_milliseconds()
        self._on_change(self)

    def restart(self) -> None:
        """Begin anew as a node whose job gets another attempt, whatever became of it in the last one."""
        self.status = Status.RUNNABLE
        self.status_reason = None
        self.stopped_at = None
        self.current = None

    def status_summary(self) -> dict[str, int]:
        """Count the children in each state; of an array's parent."""
        counts = Counter(child.status for child in self.children)
        return {status.value: counts[status] for status in Status}
