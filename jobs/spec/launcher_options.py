"""Options of the launcher in a job's container, which a plan writes as flags, and its two environment variables.

The launcher (jobs.container.launch) takes these options, the job's kind, and the flags of that kind's own arguments, or
the name of a file that holds them.
"""

from typing import Annotated, Any

from pydantic import Field, PlainSerializer

from jobs.core.queues import Capacity
from jobs.money.budget import Budget
from jobs.spec.arguments import Strict
from jobs.spec.flags import Switch, to_flags
from jobs.spec.halving import Comparison
from jobs.spec.health import Health

RUN_URI_VARIABLE = "TRAINYARD_RUN_URI"
ACCELERATOR_VARIABLE = "TRAINYARD_ACCELERATOR"

GANG_WAIT_SECONDS = 900.0
"""The nodes of a gang wait so long for all of them; then as few train as may."""

START_TIMEOUT_SECONDS = 900.0
"""Nodes that AWS Batch starts together wait so long for each other, unless their spec says otherwise: EC2 may start
them minutes apart."""

HANG_TIMEOUT_SECONDS = 120.0
"""An attempt that trains has hung when it made no step for so long, unless its spec says otherwise."""

STOP_IF_IDLE_MINUTES = 30.0
"""A run whose cards have done nothing for so long ends, unless its spec says otherwise: what a rank prepares before the
first step, and what it saves after the last, keeps cards waiting for some minutes."""


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
