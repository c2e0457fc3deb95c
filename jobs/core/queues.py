"""The job queues: one row each, and all that the stacks and a plan derive from them.

Adding a queue is adding a row. A stage has those of them for which its settings allow capacity.
"""

import re
from dataclasses import dataclass
from typing import Literal

Capacity = Literal["spot", "on-demand"]


@dataclass(frozen=True, kw_only=True)
class Queue:
    """A job queue that a stage may have, by what its capacity is."""

    name: str
    accelerated: bool
    """True: on the stage's accelerator instances. False: on its CPU instances."""
    capacities: tuple[Capacity, ...]
    """Capacities in the order in which Batch tries them; the queue exists where the stage has the first. Spot stands
    alone where the settings say how long a job waits for it (spot_wait_hours)."""
    several_nodes: bool = False
    """True: instances side by side in one placement group. Batch runs jobs of several nodes On-Demand only."""
    priority: int = 1
    """The queue with the higher number gets instances first where several share them."""

    @property
    def capacity(self) -> Capacity:
        """Return the capacity that a job in it is priced at."""
        return self.capacities[0]


CAPACITY_NAMES: dict[Capacity, str] = {"spot": "Spot", "on-demand": "On-Demand"}
"""AWS's spelling of each capacity."""

SPOT_WAITED_TOO_LONG = "Canceled by JobStateTimeLimit action due to reason: CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY"
"""statusReason of a job that waited at the head of the Spot queue for longer than the stage allows: Batch's own words
(user guide, "Jobs stuck in RUNNABLE due to capacity"), which nobody can choose."""

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
        priority=10,  # what was reclaimed too often goes before what Spot has no room for
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
    """Return the name of a team's own queue: `spot` of team `research` is `spot@research`."""
    first, slash, pool = name.partition("/")
    return f"{first}@{team}{slash}{pool}"


def owner_of_queue(name: str) -> str | None:
    """Return the team whose own queue is called so; None for one that teams share."""
    return name.partition("/")[0].partition("@")[2] or None


def on_demand_successor(name: str) -> str | None:
    """Return the On-Demand queue that jobs of a Spot queue move to, of the same team and pool; None of other queues.

    Whether the stage has it, its settings say.
    """
    found = re.fullmatch(rf"{SPOT}(?P<rest>[@/].*)?", name)
    return f"{ON_DEMAND}{found['rest'] or ''}" if found else None
