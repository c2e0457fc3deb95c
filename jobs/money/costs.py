"""Costs of runs, added up from their receipts by team, by kind of job, or per run."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from typing import Literal

from jobs.core.errors import UsageError
from jobs.core.instance_types import instance_type
from jobs.core.records import Receipt, Stored
from jobs.money.budget import usd_per_hour
from jobs.money.phases import PHASES, PhaseName, phases

By = Literal["team", "job", "run"]


@dataclass(kw_only=True)
class Cost:
    """Hours and cost of some runs in a period. Dollars are estimates: instance hours times recorded prices."""

    name: str
    runs: int = 0
    instance_hours: float = 0.0
    usd: float = 0.0
    on_demand_usd: float = 0.0
    """Cost of the same hours at the On-Demand price."""
    stored_bytes: int = 0
    """Size of the runs' files now, with deleted and replaced versions."""
    stored_usd_per_month: float = 0.0
    """Cost of storing them for a month."""
    usd_by_phase: dict[PhaseName, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))

    @property
    def saved_usd(self) -> float:
        return self.on_demand_usd - self.usd

    @property
    def saved_percent(self) -> float:
        return 100 * self.saved_usd / self.on_demand_usd if self.on_demand_usd else 0.0

    def add(self, other: "Cost") -> None:
        self.runs += other.runs
        self.instance_hours += other.instance_hours
        self.usd += other.usd
        self.on_demand_usd += other.on_demand_usd
        self.stored_bytes += other.stored_bytes
        self.stored_usd_per_month += other.stored_usd_per_month
        for name, usd in other.usd_by_phase.items():
            self.usd_by_phase[name] += usd


@dataclass(frozen=True, kw_only=True)
class Month:
    """A calendar month in UTC, as for budgets, or all time."""

    begin: datetime
    end: datetime

    def share(self, begin: datetime, end: datetime) -> float:
        """Return the share of a period that is in the month, from 0 to 1."""
        whole = (end - begin).total_seconds()
        if whole <= 0:
            return float(self.begin <= begin < self.end)
        return max(0.0, (min(end, self.end) - max(begin, self.begin)).total_seconds()) / whole


def month_of(text: str, *, now: datetime) -> Month:
    """Return the month for `2026-11`, `this` or `all`. Raises UsageError for any other text."""
    if text == "all":
        return Month(begin=datetime.min.replace(tzinfo=timezone.utc), end=datetime.max.replace(tzinfo=timezone.utc))
    try:
        begin = now if text == "this" else datetime.strptime(f"{text}+0000", "%Y-%m%z")
    except ValueError:
        raise UsageError(f"--month {text}: use a month like 2026-11, 'this' or 'all'") from None
    begin = begin.astimezone(timezone.utc).replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    following = begin.replace(year=begin.year + begin.month // 12, month=begin.month % 12 + 1)
    return Month(begin=begin, end=following)


def spans(month: Month, receipts: Sequence[Receipt], *, now: datetime) -> list[tuple[str, Month]]:
    """Return the days of a month with their dates; for all time, the months from the first attempt to now."""
    if month.begin > datetime.min.replace(tzinfo=timezone.utc):
        starts = [month.begin + timedelta(days=number) for number in range((month.end - month.begin).days + 1)]
        return [(f"{start:%m-%d}", Month(begin=start, end=end)) for start, end in itertools.pairwise(starts)]
    found = [phase for receipt in receipts for phase in phases(receipt.attempts)]
    if not found:
        return []
    first = min(phase.started_at for phase in found).astimezone(timezone.utc)
    months = [month_of(f"{first:%Y-%m}", now=now)]
    while months[-1].end < now:
        months.append(month_of(f"{months[-1].end:%Y-%m}", now=now))
    return [(f"{each.begin:%Y-%m}", each) for each in months]


def costs(receipts: Iterable[Receipt], *, by: By, month: Month, kept: Mapping[str, Stored] | None = None) -> list[Cost]:
    """Return a row for each team, kind or run with hours in the month, the most expensive first.

    `kept`: what S3 stores of each run now, by run id.
    """
    rows: dict[str, Cost] = {}
    for receipt in receipts:
        found = _run_cost(receipt, month)
        if kept and (files := kept.get(receipt.run_id)):
            found.stored_bytes = files.all_bytes + (files.old_version_bytes or 0)
            found.stored_usd_per_month = files.usd_per_month
        if found.instance_hours:
            name = {"team": receipt.team, "job": receipt.job, "run": receipt.run_id}[by]
            rows.setdefault(name, Cost(name=name)).add(found)
    return sorted(rows.values(), key=lambda row: (-row.usd, row.name))


def total(rows: Iterable[Cost]) -> Cost:
    found = Cost(name="all")
    for row in rows:
        found.add(row)
    return found


def _run_cost(receipt: Receipt, month: Month) -> Cost:
    prices = {
        attempt.number: usd_per_hour(instance_type(attempt.instance_type), "on-demand") for attempt in receipt.attempts
    }
    found = Cost(name=receipt.run_id, runs=1)
    for phase in phases(receipt.attempts):
        share = month.share(phase.started_at, phase.ended_at)
        hours, usd = share * phase.instance_seconds / 3600, share * phase.usd
        found.instance_hours += hours
        found.usd += usd
        found.on_demand_usd += hours * prices[phase.attempt]
        found.usd_by_phase[phase.name] += usd
    return found
