"""What a spec would take before it is submitted: time and money on each instance type, from what was measured before.

    start       from an attempt's start to its first step: the middle one of the runs that this is reckoned from
    steps       samples / throughput: as many as the spec has, over the runs' own samples a second
    rest        evaluations, saves and the last uploads: the middle one of those runs' time after the first step, less
                their own samples / throughput

The range goes from the fastest of them without a reclaim to the slowest with one every `mean_hours_between_reclaims` of
the spec on Spot, each of which costs another start: the steps themselves are saved at the notice.

Of a sweep each point is reckoned so. Its money is that of all of them; its time is that of its workers, each of which
takes the next point when it has done one.
"""

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from jobs.core.instance_types import InstanceType
from jobs.core.queues import Capacity
from jobs.money.prices import Prices


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A run, or somebody's published figure, that an estimate is reckoned from."""

    name: str
    samples_per_second: float
    start_seconds: float | None = None
    rest_seconds: float | None = None
    note: str = ""
    """Who measured it, and in what it is not the spec's own case."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """What is to be done."""

    samples: int
    """The number of all epochs together."""
    because: str
    """How many, in words: `3,668 examples x 3 epochs`."""
    nnodes: int
    capacity: Capacity
    mean_hours_between_reclaims: float


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The time and the money of one instance type."""

    place: str
    """The instance type; of runs on a machine that stands in for one: that."""
    seconds: float
    low_seconds: float
    high_seconds: float
    usd: float
    low_usd: float
    high_usd: float
    on_demand_usd: float
    arithmetic: tuple[str, ...]


def estimate(work: Work, found: Sequence[Measured], row: InstanceType | None, prices: Prices | None) -> Estimate:
    """Return the estimate from what was measured on one type; `found` is not empty.

    Without a row and prices it is a machine for which nobody pays.
    """
    start = _middle([each.start_seconds for each in found])
    rest = _middle([each.rest_seconds for each in found])
    speeds = sorted(each.samples_per_second for each in found)
    speed = median(speeds)
    seconds = start + work.samples / speed + rest
    fast = start + work.samples / speeds[-1] + rest
    slow = start + work.samples / speeds[0] + rest
    reclaims = slow / 3600 / work.mean_hours_between_reclaims * work.nnodes if row and start else 0.0
    if work.capacity != "spot":
        reclaims = 0.0
    hourly = prices.of(work.capacity).usd_per_hour * work.nnodes if prices else 0.0
    on_demand = prices.on_demand.usd_per_hour * work.nnodes if prices else 0.0
    slowest = slow + reclaims * start
    lines = [
        *(
            f"{each.name}: {each.samples_per_second:,.1f} samples/s{f' ({each.note})' if each.note else ''}"
            for each in found
        ),
        f"steps: {work.because} = {work.samples:,} samples / {speed:,.1f} a second = {work.samples / speed:,.0f} s",
        f"start {start:,.0f} s + steps {work.samples / speed:,.0f} s + rest {rest:,.0f} s = {seconds:,.0f} s",
    ]
    if prices:
        quote = prices.of(work.capacity)
        nodes = f" x {work.nnodes} nodes" if work.nnodes > 1 else ""
        lines.append(
            f"{seconds / 3600:,.3f} h x {quote.usd_per_hour:.2f} USD{nodes} = {seconds / 3600 * hourly:,.2f} USD "
            f"({work.capacity}, as of {quote.date}, from {quote.source})"
        )
    with_reclaims = f" with {reclaims:.2f} reclaims of {start:,.0f} s each" if reclaims else ""
    lines.append(
        f"range: {fast:,.0f} s at {speeds[-1]:,.1f} samples/s, no reclaim; {slowest:,.0f} s at {speeds[0]:,.1f}"
        f"{with_reclaims}"
    )
    if any(each.start_seconds is None for each in found) and not start:
        lines.append("the start and what comes after the last step are not known, and left out")
    return Estimate(
        place=row.name if row else "this machine",
        seconds=seconds,
        low_seconds=fast,
        high_seconds=slowest,
        usd=seconds / 3600 * hourly,
        low_usd=fast / 3600 * hourly,
        high_usd=slowest / 3600 * hourly,
        on_demand_usd=seconds / 3600 * on_demand,
        arithmetic=tuple(lines),
    )


def of_sweep(points: Sequence[Estimate], workers: int) -> Estimate:
    """Return the estimate of a sweep from those of its points, in their order and all of one place; there is one."""

    def on_the_clock(seconds: Iterable[float]) -> float:
        busy_until = [0.0] * workers
        for each in seconds:
            heapq.heapreplace(busy_until, busy_until[0] + each)
        return max(busy_until)

    seconds = on_the_clock(each.seconds for each in points)
    usd, low_usd, high_usd = (sum(getattr(each, name) for each in points) for name in ("usd", "low_usd", "high_usd"))
    shortest, longest = (choose(each.seconds for each in points) for choose in (min, max))
    each_takes = f"{shortest:,.0f} s each" if longest - shortest < 1 else f"{shortest:,.0f} to {longest:,.0f} s each"
    money = f", {usd:,.2f} USD together" if usd else ""
    return Estimate(
        place=points[0].place,
        seconds=seconds,
        low_seconds=on_the_clock(each.low_seconds for each in points),
        high_seconds=on_the_clock(each.high_seconds for each in points),
        usd=usd,
        low_usd=low_usd,
        high_usd=high_usd,
        on_demand_usd=sum(each.on_demand_usd for each in points),
        arithmetic=(
            *(f"point 1: {line}" for line in points[0].arithmetic),
            f"{len(points)} points of {each_takes}, {workers} at once = {seconds:,.0f} s{money}",
        ),
    )


def _middle(values: Sequence[float | None]) -> float:
    known = [value for value in values if value is not None]
    return median(known) if known else 0.0
