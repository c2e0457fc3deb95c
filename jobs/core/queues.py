"""The job queues, one row each; the stacks and the plan derive everything from them.

To add a queue, add a row. A stage has the queues for which its settings allow capacity.
"""

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from jobs.core.instance_types import InstanceType

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

MAX_QUEUE_ENVIRONMENTS = 3
"""Maximum number of compute environments of a queue (API reference of CreateJobQueue, `computeEnvironmentOrder`)."""


def environments(types: Sequence[InstanceType]) -> list[tuple[InstanceType, ...]]:
    """Divide a pool's instance types, in their order, into compute environments.

    Neighbours with the same card share an environment, in which Batch picks the type by price and capacity.
    """
    by_card = itertools.groupby(types, key=lambda row: (row.card_model, row.card_memory_mib))
    return [tuple(rows) for _, rows in by_card]


def types_text(types: Sequence[InstanceType]) -> str:
    """Return instance types in the order in which Batch tries them: `g6e.xlarge, else g5.xlarge or g5.4xlarge`."""
    return ", else ".join(" or ".join(row.name for row in group) for group in environments(types))


def queues_of(types: Sequence[InstanceType]) -> list[tuple[Queue, tuple[InstanceType, ...]]]:
    """Return the queues that a pool of accelerator instances may have, with the types of their instances.

    A pool of several environments also has a Spot queue for each: `spot-<its first type>`.
    """
    groups = environments(types)
    found = [
        (queue, tuple(types[:1]) if queue.several_nodes else tuple(types))
        for queue in QUEUES.values()
        if queue.accelerated
    ]
    if len(groups) > 1:
        found += [
            (Queue(name=f"{SPOT}-{group[0].name}", accelerated=True, capacities=("spot",)), group) for group in groups
        ]
    return found


def team_queue_name(name: str, team: str) -> str:
    """Return the name of a team's queue: `spot` of team `research` is `spot@research`."""
    first, slash, pool = name.partition("/")
    return f"{first}@{team}{slash}{pool}"


def owner_of_queue(name: str) -> str | None:
    """Return the team that owns the queue, or None for a shared queue."""
    return name.partition("/")[0].partition("@")[2] or None


def falls_back(name: str) -> bool:
    """Return whether jobs of one node in a queue may move to a stage's fallback stage."""
    return re.fullmatch(rf"{SPOT}(@[^/]*)?", name) is not None


def on_demand_successor(name: str) -> str | None:
    """Return the On-Demand queue, of the same team and pool, that jobs of a Spot queue move to; None for other queues.

    The stage's settings determine whether that queue exists.
    """
    found = re.fullmatch(rf"{SPOT}(?P<rest>[@/].*)?", name)
    return f"{ON_DEMAND}{found['rest'] or ''}" if found else None
