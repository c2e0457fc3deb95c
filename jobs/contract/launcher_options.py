"""Options of the launcher in a job's container, which a plan writes as flags, and its two environment variables.

The launcher (jobs.train.launch) takes these options, the job's kind, and the flags of that kind's own arguments.
"""

from typing import Annotated

from pydantic import Field, PlainSerializer

from jobs.contract.arguments import Strict
from jobs.contract.budget import Budget
from jobs.contract.flags import Switch, to_flags
from jobs.contract.queues import Capacity

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


class LauncherOptions(Strict):
    """Options of the launcher, all but the kind of job and that kind's own arguments."""

    instance_type: str
    """EC2 instance type whose price the receipt counts."""
    nproc_per_node: int = Field(ge=1)
    """Ranks on this node."""
    capacity: Capacity | None = None
    """The price that the receipt and a budget count with: spot or on-demand. Default: unknown."""
    max_usd: float | None = None
    """Budget over all attempts of the run, in US dollars."""
    max_hours: float | None = None
    """Budget over all attempts of the run, in instance hours."""
    hang_timeout_seconds: Seconds = Field(default=HANG_TIMEOUT_SECONDS, ge=0)
    """An attempt that makes no step for so long ends, and is resumed; 0: never."""
    start_timeout_seconds: Seconds = Field(default=START_TIMEOUT_SECONDS, gt=0)
    """The nodes of a multi-node job wait so long for each other."""
    gang_min_nnodes: int | None = None
    """The children of the array job train together as a gang, on so many nodes at least."""
    gang_attempts: int | None = None
    """Batch starts each child of a gang so often; one that has used them up is not waited for. Default: unknown."""
    gang_wait_seconds: Seconds = GANG_WAIT_SECONDS
    """The nodes of a gang wait so long for those that lack."""
    allow_changes: Annotated[bool, Switch()] = False
    """Resumes a checkpoint though it was made with other arguments."""

    @property
    def budget(self) -> Budget:
        return Budget(max_usd=self.max_usd, max_hours=self.max_hours)

    def to_flags(self) -> list[str]:
        """Return the options that differ from the launcher's defaults as flags."""
        return to_flags(self, exclude_defaults=True)
