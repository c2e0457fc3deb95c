"""The job queues: one row each, and all that the stacks and a plan derive from them.

Adding a queue is adding a row. A stage has those of them for which its settings allow capacity.
"""

from dataclasses import dataclass
from typing import Literal

Capacity = Literal["spot", "on-demand"]


@dataclass(frozen=True, kw_only=True)
class Queue:
    """One row."""

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
    purpose: str
    """The jobs that it takes; completes "for …"."""

    @property
    def capacity(self) -> Capacity:
        """Return the capacity that a job in it is priced at."""
        return self.capacities[0]


MARKET: dict[Capacity, str] = {"spot": "Spot", "on-demand": "On-Demand"}
"""AWS's spelling of each capacity."""

SPOT_WAITED_TOO_LONG = "Canceled by JobStateTimeLimit action due to reason: CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY"
"""statusReason of a job that waited at the head of the Spot queue for longer than the stage allows: Batch's own words
(user guide, "Jobs stuck in RUNNABLE due to capacity"), which nobody can choose."""

GAUDI_SPOT = "gaudi-spot"
GAUDI_ON_DEMAND = "gaudi-on-demand"
GAUDI_MULTINODE = "gaudi-multinode"
CPU_SPOT = "cpu-spot"

_ROWS = (
    Queue(
        name=GAUDI_SPOT,
        accelerated=True,
        capacities=("spot", "on-demand"),
        purpose="jobs of one node, and of several that start one by one",
    ),
    Queue(
        name=GAUDI_ON_DEMAND,
        accelerated=True,
        capacities=("on-demand",),
        priority=10,  # what was reclaimed too often goes before what Spot has no room for
        purpose="jobs of one node that must not be interrupted, or were too often",
    ),
    Queue(
        name=GAUDI_MULTINODE,
        accelerated=True,
        capacities=("on-demand",),
        several_nodes=True,
        purpose="jobs of several nodes",
    ),
    Queue(
        name=CPU_SPOT,
        accelerated=False,
        capacities=("spot",),
        purpose="corpus and tokenizer work",
    ),
)

QUEUES = {row.name: row for row in _ROWS}
