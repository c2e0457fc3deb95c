"""Options of the launcher in a job's container, which a plan writes as flags, and its two environment variables.

The launcher (jobs.container.launch) takes these options, the job's kind, and the flags of that kind's own arguments, or
the name of a file that holds them.
"""

from typing import Annotated, Any

from pydantic import Field, PlainSerializer

from jobs.core.instance_types import InstanceType
from jobs.core.queues import Capacity
from jobs.money.budget import Budget
from jobs.spec.arguments import Strict, Switch, to_flags
from jobs.spec.sweep import Comparison

HEALTH_SECONDS = 10.0
"""The check measures for so long on instances with accelerators, unless a spec says otherwise. The start of its
processes comes on top."""

MATMUL_FLOOR = 0.5
"""Share of a card's published peak below which it is not healthy: a large multiplication reaches more on a sound one,
and a card that is hot, or whose clock is held down, reaches less."""

LINK_FLOOR = 0.1
"""Share of the published speed of the links between a node's cards below which those are not healthy: what goes over
the host's memory instead stays below it."""

BAD_NODE_FILE = ".trainyard-bad-node"
"""Name of the file that a job leaves on its /scratch where its node failed the check: the host then shuts down
(infra/compute/boot/bad_node.sh)."""


class Health(Strict):
    """The check of each node before the first step."""

    seconds: float | None = Field(default=None, ge=0, le=600)
    """Seconds to measure multiplications and all-reduces; 0 disables it. Default: 10 on HPUs and GPUs, else 0."""
    min_teraflops: float | None = Field(default=None, ge=0)
    """Matrix multiplication of each card, at least, in TFLOP/s. Default: half of its published peak, or of the node's
    median card."""
    min_gigabytes_per_second: float | None = Field(default=None, ge=0)
    """Bus bandwidth of an all-reduce among the node's cards, at least, in GB/s. Default: a tenth of the links'
    published speed."""

    def seconds_on(self, accelerator: str, *, on_instance: bool) -> float:
        """Return the time to measure for; 0: there is no check."""
        if self.seconds is not None:
            return self.seconds
        return HEALTH_SECONDS if on_instance and accelerator != "cpu" else 0.0

    def with_floors_of(self, row: InstanceType, accelerator: str) -> "Health":
        """Return the check with what an instance type has to reach, where the spec does not say."""
        if accelerator != row.accelerator:
            return self  # a laptop stands in for the instance
        update: dict[str, float] = {}
        if self.min_teraflops is None and row.card_teraflops is not None:
            update["min_teraflops"] = MATMUL_FLOOR * row.card_teraflops
        if self.min_gigabytes_per_second is None and row.link_gigabytes_per_second is not None:
            update["min_gigabytes_per_second"] = LINK_FLOOR * row.link_gigabytes_per_second
        return self.model_copy(update=update)


RUN_URI_VARIABLE = "TRAINYARD_RUN_URI"
ACCELERATOR_VARIABLE = "TRAINYARD_ACCELERATOR"

GANG_WAIT_SECONDS = 900.0
"""The nodes of a gang wait so long for all of them; then as few train as may."""

START_TIMEOUT_SECONDS = 900.0
"""Nodes that AWS Batch starts together wait so long for each other, unless their spec says otherwise: EC2 may start
them minutes apart."""

HANG_TIMEOUT_SECONDS = 120.0
"""An attempt that trains has hung when it made no step for so long, unless its spec says otherwise."""


def _without_empty_fraction(seconds: float) -> int | float:
    return int(seconds) if seconds.is_integer() else seconds


Seconds = Annotated[float, PlainSerializer(_without_empty_fraction, when_used="json")]


class Limits(Strict):
    """Limits that the launcher holds a run to: a spec has them as keys, and the launcher as options."""

    max_usd: float | None = Field(default=None, gt=0)
    """Limit on the estimated cost of all attempts, in US dollars. The run saves and stops before it; `trainyard resume`
    continues it."""
    max_hours: float | None = Field(default=None, gt=0)
    """Limit on the instance hours of all attempts. A minute of four nodes counts four minutes."""
    hang_timeout_seconds: Seconds = Field(default=HANG_TIMEOUT_SECONDS, ge=0)
    """End the attempt if no step is made, or a node sends no heartbeat, for this many seconds. 0 disables it. The next
    attempt goes on. The start, saves and batches that are compiled have 15 minutes at least."""
    stop_if_idle_minutes: float | None = Field(default=None, ge=0)
    """Stop the run after this many minutes of idle cards, and log every rank's stack. 0 disables it. Default: 30 on
    accelerator instances. A notebook has idle_timeout_hours."""
    start_timeout_seconds: Seconds = Field(default=START_TIMEOUT_SECONDS, gt=0)
    """End the attempt if one of several On-Demand nodes is missing after this many seconds, and name it."""
    health: Health = Health()
    """Check of each node before the first step. A bad one ends the attempt, is named, and is shut down."""

    @property
    def budget(self) -> Budget:
        return Budget(max_usd=self.max_usd, max_hours=self.max_hours)

    def limits(self) -> dict[str, Any]:
        """Return the limits by their names, whatever else this has."""
        return {name: getattr(self, name) for name in Limits.model_fields}


class _Instance(Strict):
    """The instance that a launcher runs on."""

    instance_type: str
    """EC2 instance type whose price the receipt counts."""
    nproc_per_node: int = Field(ge=1)
    """Ranks on this node."""
    capacity: Capacity | None = None
    """The price that the receipt and a budget count with: spot or on-demand. Default: unknown."""
    spot_usd_per_hour: float | None = None
    """What EC2 says that an hour of one Spot instance costs, in US dollars. Default: the recorded price."""


class LauncherOptions(Limits, _Instance):  # the fields of the last base come first
    """Options of the launcher, all but the kind of job and that kind's own arguments."""

    gang_min_nnodes: int | None = None
    """The children of the array job train together as a gang, on so many nodes at least."""
    gang_attempts: int | None = None
    """Batch starts each child of a gang so often; one that has used them up is not waited for. Default: unknown."""
    gang_wait_seconds: Seconds = GANG_WAIT_SECONDS
    """The nodes of a gang wait so long for those that lack."""
    sweep_attempts: int | None = None
    """The container is a worker of a sweep: it runs one point after the other, and starts each so often at most."""
    sweep_timeout_seconds: Seconds | None = None
    """A point of a sweep that has run for so long in one start is ended, and has failed. Default: none is."""
    halving: Comparison | None = None
    """How a point of a sweep is compared with the others, and stopped where it is behind. Default: it is not."""
    arguments_file: str | None = None
    """Name of the file among the run's that holds the kind's own arguments, where they are too long for flags."""
    allow_changes: Annotated[bool, Switch()] = False
    """Resumes a checkpoint though it was made with other arguments."""

    def to_flags(self) -> list[str]:
        """Return the options that differ from the launcher's defaults as flags."""
        return to_flags(self, exclude_defaults=True)
