"""The job queues, one row each; the stacks and the plan derive everything from them.

To add a queue, add a row. A stage has the queues for which its settings allow capacity.
"""

import re
from dataclasses import dataclass
from typing import Literal

Capacity = Literal["spot", "on-demand"]


@dataclass(frozen=True, kw_only=True)
class Queue:
    """A job queue that a stage may have."""

    name: str
    accelerated: bool
    """True for the stage's accelerator instances, False for its CPU instances."""
    capacities: tuple[Capacity, ...]
    """Capacities in the order in which Batch tries them. The queue exists if the stage has the first one. If the
    settings limit the wait for Spot (spot_wait_hours), the queue has Spot only."""
    several_nodes: bool = False
    """True for instances in one placement group. Batch runs multi-node jobs On-Demand only."""
    priority: int = 1
    """Of queues that share instances, the one with the highest number gets them first."""

    @property
    def capacity(self) -> Capacity:
        """Return the capacity whose price applies to jobs in this queue."""
        return self.capacities[0]


CAPACITY_NAMES: dict[Capacity, str] = {"spot": "Spot", "on-demand": "On-Demand"}
"""AWS's name of each capacity."""

SPOT_WAITED_TOO_LONG = "Canceled by JobStateTimeLimit action due to reason: CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY"
"""statusReason of a job that waited at the head of the Spot queue for longer than the stage allows. The text is Batch's
and cannot be changed (user guide, "Jobs stuck in RUNNABLE due to capacity")."""

SPOT = "spot"
ON_DEMAND = "on-demand"
MULTINODE = "multinode"
CPU_SPOT = "cpu-spot"

_ROWS = (
    Queue(
        name=SPOT,
        accelerated=True,
        capacities=("spot", "on-demand"),
    ),
    Queue(
        name=ON_DEMAND,
        accelerated=True,
        capacities=("on-demand",),
        priority=10,  # jobs moved here after repeated reclaims run before jobs for which Spot has no capacity
    ),
    Queue(
        name=MULTINODE,
        accelerated=True,
        capacities=("on-demand",),
        several_nodes=True,
    ),
    Queue(
        name=CPU_SPOT,
        accelerated=False,
        capacities=("spot",),
    ),
)

QUEUES = {row.name: row for row in _ROWS}


def team_queue_name(name: str, team: str) -> str:
    """Return the name of a team's queue: `spot` of team `research` is `spot@research`."""
    first, slash, pool = name.partition("/")
    return f"{first}@{team}{slash}{pool}"


def owner_of_queue(name: str) -> str | None:
    """Return the team that owns the queue, or None for a shared queue."""
    return name.partition("/")[0].partition("@")[2] or None


def on_demand_successor(name: str) -> str | None:
    """Return the On-Demand queue, of the same team and pool, that jobs of a Spot queue move to; None for other queues.

    The stage's settings determine whether that queue exists.
    """
    found = re.fullmatch(rf"{SPOT}(?P<rest>[@/].*)?", name)
    return f"{ON_DEMAND}{found['rest'] or ''}" if found else None
