"""The budget of a run over all its attempts, `max_usd` and `max_hours` of its spec, and what it has taken so far.

Hours are instance hours: a minute of four nodes counts four minutes, one that they waited for each other too. Dollars
are those hours times the price of the capacity that an attempt ran on: the recorded one, or of Spot what EC2 said as
the run was submitted, which is an estimate either way. What an instance's start, storage and transfer cost is left out.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from jobs.core.instance_types import InstanceType, instance_type
from jobs.core.queues import CAPACITY_NAMES, Capacity
from jobs.core.records import Attempt
from jobs.core.words import counted

SAVE_SECONDS = 120.0
"""So long before its budget ends a run is asked to save and stop: as long as a Spot notice gives."""

MIN_SECONDS = 300.0
"""A budget has to pay for at least so much of a run: its start, some training, and `SAVE_SECONDS`."""


@dataclass(frozen=True, kw_only=True)
class Spent:
    """Instance hours and dollars that attempts have taken."""

    instance_hours: float = 0.0
    usd: float = 0.0


NOTHING_SPENT = Spent()


def usd_per_hour(row: InstanceType, capacity: Capacity | None, *, spot_usd_per_hour: float | None = None) -> float:
    """Return the price of one instance: the dearer one where nobody knows what it ran on.

    `spot_usd_per_hour`: what EC2 said of Spot; None: the recorded price counts.
    """
    if capacity != "spot":
        return row.on_demand_usd_per_hour
    return row.spot_usd_per_hour if spot_usd_per_hour is None else spot_usd_per_hour


def attempt_usd_per_hour(attempt: Attempt, *, on: Capacity | None = None) -> float:
    """Return the price of one of an attempt's instances: of its own capacity, or of the one `on` which it might be."""
    row = instance_type(attempt.instance_type)
    return usd_per_hour(row, on or attempt.capacity, spot_usd_per_hour=attempt.spot_usd_per_hour)


def duration_seconds(attempt: Attempt) -> float:
    """Return how long an attempt took, never below 0: its machine's clock may have been set back meanwhile."""
    return max(0.0, ((attempt.finished_at or attempt.last_seen_at) - attempt.started_at).total_seconds())


def instance_hours(attempt: Attempt) -> float:
    return (duration_seconds(attempt) * attempt.nnodes + attempt.waited_instance_seconds) / 3600


def spent(attempts: Iterable[Attempt], *, all_on: Capacity | None = None) -> Spent:
    """Add up attempts, each at the price of its own instance type, and of its own capacity or of `all_on`."""
    hours = usd = 0.0
    for attempt in attempts:
        taken = instance_hours(attempt)
        hours += taken
        usd += taken * attempt_usd_per_hour(attempt, on=all_on)
    return Spent(instance_hours=hours, usd=usd)


@dataclass(frozen=True, kw_only=True)
class RemainingBudget:
    """The time for which a run may go on, and the limit that then ends it."""

    seconds: float
    key: str
    """max_usd or max_hours, whichever is reached first."""
    limit: float


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Limits over all attempts of a run; None: there is none."""

    max_usd: float | None = None
    max_hours: float | None = None

    def left(self, so_far: Spent, *, usd_per_hour: float, nnodes: int) -> RemainingBudget | None:
        """Return what is left of the budget; None where nothing limits the run.

        `usd_per_hour`: the price of one instance.
        """
        limits = []
        if self.max_usd is not None:
            hours = (self.max_usd - so_far.usd) / usd_per_hour
            limits.append(RemainingBudget(seconds=hours / nnodes * 3600, key="max_usd", limit=self.max_usd))
        if self.max_hours is not None:
            hours = self.max_hours - so_far.instance_hours
            limits.append(RemainingBudget(seconds=hours / nnodes * 3600, key="max_hours", limit=self.max_hours))
        return min(limits, key=lambda left: left.seconds, default=None)

    def text(self, so_far: Spent) -> str:
        """Return the budget as text: `0.42 of 5.00 USD, 0.11 of 8 instance hours`; empty where there is no limit."""
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
    """Return the sentence that says why a run was stopped, by which rule, and what next.

    `spot_usd_per_hour`: what EC2 said of Spot; None: the recorded price counted.
    `points`: of a sweep, how many run; 0: it is none. `of_new_point`: none was stopped, but no other may begin.
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
    """Return why the rest of a budget may not be used."""
    if left.seconds <= 0:
        return "nothing is left"
    if of_new_point:
        beside = f" beside the {counted(points, 'point')} that {'runs' if points == 1 else 'run'}" if points else ""
        return f"the rest does not pay for {MIN_SECONDS / 60:g} minutes of another point{beside}"
    of_each = f" for each of the {points} points that run" if points > 1 else ""
    return f"the rest is kept for saving, {SAVE_SECONDS / 60:g} minutes{of_each}"
