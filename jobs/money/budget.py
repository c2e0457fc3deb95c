"""The budget of a run over all its attempts (`max_usd` and `max_hours` of its spec), and the part used so far.

Hours are instance hours: one minute on four nodes counts as four minutes, even if the nodes wait for each other.
Dollars are these hours times the price of the attempt's capacity: the recorded price, or for Spot EC2's price at
submission. Both are estimates, without the cost of instance startup, storage and transfer.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from jobs.core.instance_types import InstanceType, instance_type
from jobs.core.queues import CAPACITY_NAMES, Capacity
from jobs.core.records import Attempt
from jobs.core.words import counted

SAVE_SECONDS = 120.0
"""Seconds before its budget ends at which a run saves and stops: as many as after a Spot notice."""

MIN_SECONDS = 300.0
"""Minimum seconds that a budget must pay for: startup, some training, and `SAVE_SECONDS`."""


@dataclass(frozen=True, kw_only=True)
class Spent:
    """Instance hours and dollars that attempts have used."""

    instance_hours: float = 0.0
    usd: float = 0.0


NOTHING_SPENT = Spent()


def usd_per_hour(row: InstanceType, capacity: Capacity | None, *, spot_usd_per_hour: float | None = None) -> float:
    """Return the price of one instance. If the capacity is unknown, that is the higher On-Demand price.

    `spot_usd_per_hour` is EC2's Spot price, or None to use the recorded price.
    """
    if capacity != "spot":
        return row.on_demand_usd_per_hour
    return row.spot_usd_per_hour if spot_usd_per_hour is None else spot_usd_per_hour


def attempt_usd_per_hour(attempt: Attempt, *, on: Capacity | None = None) -> float:
    """Return the price of one of an attempt's instances, for its own capacity or for the capacity `on`."""
    row = instance_type(attempt.instance_type)
    return usd_per_hour(row, on or attempt.capacity, spot_usd_per_hour=attempt.spot_usd_per_hour)


def duration_seconds(attempt: Attempt) -> float:
    """Return the duration of an attempt; never negative, even if its machine's clock was set back."""
    return max(0.0, ((attempt.finished_at or attempt.last_seen_at) - attempt.started_at).total_seconds())


def instance_hours(attempt: Attempt) -> float:
    """Return the instance hours of an attempt, including the time that its nodes waited for each other."""
    return (duration_seconds(attempt) * attempt.nnodes + attempt.waited_instance_seconds) / 3600


def spent(attempts: Iterable[Attempt], *, all_on: Capacity | None = None) -> Spent:
    """Add up attempts, each at the price of its instance type, for its own capacity or for `all_on`."""
    hours = usd = 0.0
    for attempt in attempts:
        used = instance_hours(attempt)
        hours += used
        usd += used * attempt_usd_per_hour(attempt, on=all_on)
    return Spent(instance_hours=hours, usd=usd)


@dataclass(frozen=True, kw_only=True)
class RemainingBudget:
    """How long a run may continue, and the limit that will end it."""

    seconds: float
    key: str
    """max_usd or max_hours, whichever is reached first."""
    limit: float


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Limits over all attempts of a run. None means no limit."""

    max_usd: float | None = None
    max_hours: float | None = None

    def left(self, so_far: Spent, *, usd_per_hour: float, nnodes: int) -> RemainingBudget | None:
        """Return the remaining budget, or None if there is no limit. `usd_per_hour` is the price of one instance."""
        limits = []
        if self.max_usd is not None:
            hours = (self.max_usd - so_far.usd) / usd_per_hour
            limits.append(RemainingBudget(seconds=hours / nnodes * 3600, key="max_usd", limit=self.max_usd))
        if self.max_hours is not None:
            hours = self.max_hours - so_far.instance_hours
            limits.append(RemainingBudget(seconds=hours / nnodes * 3600, key="max_hours", limit=self.max_hours))
        return min(limits, key=lambda left: left.seconds, default=None)

    def text(self, so_far: Spent) -> str:
        """Return the used budget as text: `0.42 of 5.00 USD, 0.11 of 8 instance hours`; empty if there is no limit."""
        parts = []
        if self.max_usd is not None:
            parts.append(f"{so_far.usd:.2f} of {self.max_usd:.2f} USD")
        if self.max_hours is not None:
            parts.append(f"{so_far.instance_hours:.2f} of {self.max_hours:g} instance hours")
        return ", ".join(parts)


def budget_stop_reason(
    left: RemainingBudget,
    so_far: Spent,
    *,
    run_id: str,
    capacity: Capacity | None,
    spot_usd_per_hour: float | None = None,
    points: int = 0,
    of_new_point: bool = False,
) -> str:
    """Return a sentence with the limit that stopped a run, what the run used, and the next step.

    `spot_usd_per_hour` is EC2's Spot price, or None if the recorded price was used. `points` is the number of running
    points of a sweep, or 0 for other runs. With `of_new_point`, all points continue, but no new one may start.
    """
    price = f"at the recorded {CAPACITY_NAMES[capacity or 'on-demand']} price"
    if capacity == "spot" and spot_usd_per_hour is not None:
        price = f"at EC2's Spot price of {spot_usd_per_hour:g} USD an hour"
    hours = f"{so_far.instance_hours:.2f} instance hours"
    used = f"{so_far.usd:.2f} USD of max_usd {left.limit:.2f} used, {price}, in {hours}"
    if left.key == "max_hours":
        used = f"{hours} of max_hours {left.limit:g} used, {so_far.usd:.2f} USD {price}"
    rest = _rest(left, points, of_new_point=of_new_point)
    return f"budget: {used}; {rest}. Next: trainyard resume {run_id} --set {left.key}={left.limit * 2:g}"


def _rest(left: RemainingBudget, points: int, *, of_new_point: bool) -> str:
    """Return why the rest of a budget is not used."""
    if left.seconds <= 0:
        return "nothing is left"
    if of_new_point:
        running = f" in addition to the {counted(points, 'running point')}" if points else ""
        return f"the rest does not pay for {MIN_SECONDS / 60:g} minutes of another point{running}"
    for_each = f" for each of the {points} running points" if points > 1 else ""
    return f"the rest is reserved for saving, {SAVE_SECONDS / 60:g} minutes{for_each}"
