"""Estimates of time and cost: of a spec before it is submitted, and of a run until its end.

The estimate of a spec for an instance type is based on measurements of earlier runs, or on a published throughput:

    start       from an attempt's start to its first step: the median of the measured runs
    steps       the spec's samples / the median throughput in samples per second
    rest        evaluations, saves and the last uploads: the median of the measured runs' time after the first step,
                minus their samples / throughput

The range goes from the fastest measured run without reclaims to the slowest one. On Spot, the slowest one also has a
reclaim every `mean_hours_between_reclaims` of the spec. Each reclaim costs another start, but no steps, because they
are saved at the notice.

For a sweep, each point is estimated like this. The cost is the sum over the points; the time is that of the workers,
each of which runs one point after the other.

Published throughputs are rows of throughputs.jsonl, used if the stage has no comparable run. A row names the model,
the cards, the date and the source. Every number is in its source, except `start_seconds`, which is computed from the
source's times.

The forecast of a running run assumes that its remaining steps take as long as the running attempt's steps so far. It
does not include the time after the last step and further reclaims.
"""

import heapq
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from statistics import median

from jobs.core.instance_types import InstanceType
from jobs.core.output import Progress
from jobs.core.queues import Capacity
from jobs.core.records import Attempt
from jobs.core.words import time_left, usd
from jobs.money.budget import attempt_usd_per_hour, spent
from jobs.money.prices import Prices


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """A measured run or a published throughput that an estimate is based on."""

    name: str
    samples_per_second: float
    start_seconds: float | None = None
    rest_seconds: float | None = None
    note: str = ""
    """The source, and how the measurement differs from the spec."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """The work to estimate."""

    samples: int
    """Number of samples over all epochs."""
    samples_text: str
    """How the number was computed: `3,668 examples x 3 epochs`."""
    nnodes: int
    capacity: Capacity
    mean_hours_between_reclaims: float


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The time and cost on one instance type."""

    place: str
    """The instance type, or `this machine`."""
    seconds: float
    low_seconds: float
    high_seconds: float
    usd: float
    low_usd: float
    high_usd: float
    on_demand_usd: float
    arithmetic: tuple[str, ...]


def estimate(work: Work, found: Sequence[Measurement], row: InstanceType | None, prices: Prices | None) -> Estimate:
    """Return the estimate for one instance type from the measurements `found`, which must not be empty.

    Without `row` and `prices`, the estimate is for this machine, which costs nothing.
    """
    start = _known_median([each.start_seconds for each in found])
    rest = _known_median([each.rest_seconds for each in found])
    speeds = sorted(each.samples_per_second for each in found)
    speed = median(speeds)
    steps = work.samples / speed
    seconds = start + steps + rest
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
        f"steps: {work.samples_text} = {work.samples:,} samples / {speed:,.1f} per second = {steps:,.0f} s",
        f"start {start:,.0f} s + steps {steps:,.0f} s + rest {rest:,.0f} s = {seconds:,.0f} s",
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
        lines.append("without start and rest, which are unknown")
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


def sweep_estimate(points: Sequence[Estimate], workers: int) -> Estimate:
    """Return the estimate of a sweep from its points' estimates, in order; at least one, all on one instance type."""

    def wall_clock(seconds: Iterable[float]) -> float:
        busy_until = [0.0] * workers
        for each in seconds:
            heapq.heapreplace(busy_until, busy_until[0] + each)
        return max(busy_until)

    seconds = wall_clock(each.seconds for each in points)
    usd, low_usd, high_usd = (sum(getattr(each, name) for each in points) for name in ("usd", "low_usd", "high_usd"))
    shortest, longest = (choose(each.seconds for each in points) for choose in (min, max))
    each_takes = f"{shortest:,.0f} s each" if longest - shortest < 1 else f"{shortest:,.0f} to {longest:,.0f} s each"
    money = f", {usd:,.2f} USD together" if usd else ""
    return Estimate(
        place=points[0].place,
        seconds=seconds,
        low_seconds=wall_clock(each.low_seconds for each in points),
        high_seconds=wall_clock(each.high_seconds for each in points),
        usd=usd,
        low_usd=low_usd,
        high_usd=high_usd,
        on_demand_usd=sum(each.on_demand_usd for each in points),
        arithmetic=(
            *(f"point 1: {line}" for line in points[0].arithmetic),
            f"{len(points)} points of {each_takes}, {workers} at once = {seconds:,.0f} s{money}",
        ),
    )


def _known_median(values: Sequence[float | None]) -> float:
    known = [value for value in values if value is not None]
    return median(known) if known else 0.0


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """A published throughput."""

    job: str
    model: str
    """The last part of the model's name; for a pre-training, the model's shape."""
    instance_type: str
    cards: int
    length: int
    """Tokens per sequence, including padding."""
    samples_per_second: float
    """Throughput of all cards together."""
    start_seconds: float | None = None
    """Time from the start to the first step that the throughput includes. None if the source does not give it."""
    date: str
    source: str


def throughputs() -> list[Throughput]:
    lines = Path(__file__).with_name("throughputs.jsonl").read_text(encoding="utf-8").splitlines()
    return [Throughput(**json.loads(line)) for line in lines]


def model_name(arguments: object) -> str:
    """Return the model's name as in throughputs.jsonl: the last part of its location, or the shape of a new model."""
    model = getattr(arguments, "model", None)
    if model is not None:
        return str(model).partition("?")[0].partition("@")[0].rstrip("/").rpartition("/")[2]
    if getattr(arguments, "config", None) is None and hasattr(arguments, "hidden_size"):
        return f"hidden {arguments.hidden_size}, layers {getattr(arguments, 'layers', '?')}"
    return ""


UNSEEN_SECONDS = 120.0
"""An attempt is assumed to still run if its last heartbeat is at most this old; heartbeats are sent every 30 s."""


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """The cost so far and at the end of a running run. Dollars are estimates: instance hours times recorded prices."""

    seconds_left: float | None
    """Time until the last step. None if unknown."""
    usd: float
    on_demand_usd: float
    """Cost of the same hours at the On-Demand price."""
    usd_at_end: float | None
    on_demand_usd_at_end: float | None


def seconds_per_step(attempt: Attempt, progress: Progress, *, at: datetime) -> float | None:
    """Return the mean seconds per step of an attempt, given its progress at a time; None before its first step."""
    steps = progress.step - attempt.start_step
    if attempt.training_started_at is None or steps < 1:
        return None
    return max(0.0, (at - attempt.training_started_at).total_seconds()) / steps


def forecast(attempts: Sequence[Attempt], progress: Progress | None, pace: float | None, *, now: datetime) -> Forecast:
    """Return the forecast of a run at `progress`. `pace` is its seconds per step, or None if unknown."""
    *before, last = attempts
    unseen = (now - last.last_seen_at).total_seconds()
    if last.finished_at is None and 0 < unseen < UNSEEN_SECONDS:
        last = last.model_copy(update={"last_seen_at": last.last_seen_at + timedelta(seconds=unseen)})
    so_far, on_demand = spent([*before, last]), spent([*before, last], all_on="on-demand")
    left = None
    if progress is not None and pace is not None and last.finished_at is None:
        left = pace * max(0, progress.total_steps - progress.step)
    hours = (left or 0.0) / 3600 * last.nnodes
    on_demand_usd_per_hour = attempt_usd_per_hour(last, on="on-demand")
    return Forecast(
        seconds_left=left,
        usd=so_far.usd,
        on_demand_usd=on_demand.usd,
        usd_at_end=None if left is None else so_far.usd + hours * attempt_usd_per_hour(last),
        on_demand_usd_at_end=None if left is None else on_demand.usd + hours * on_demand_usd_per_hour,
    )


def money_text(found: Forecast, *, ended: bool = False) -> str:
    """Return the costs as text: `0.12 USD so far, 0.40 USD at the end; On-Demand 0.41 and 1.33 USD`."""
    parts = [usd(found.usd) if ended else f"{usd(found.usd)} so far"]
    if found.usd_at_end is not None:
        parts.append(f"{usd(found.usd_at_end)} at the end")
    text = ", ".join(parts)
    if found.on_demand_usd <= found.usd:
        return text
    on_demand = usd(found.on_demand_usd)
    if found.on_demand_usd_at_end is not None:
        on_demand = f"{on_demand.removesuffix(' USD')} and {usd(found.on_demand_usd_at_end)}"
    return f"{text}; On-Demand {on_demand}"


def time_text(found: Forecast) -> str:
    """Return the time until the last step as text; empty if unknown."""
    return "" if found.seconds_left is None else f"{time_left(found.seconds_left)} to the last step"
