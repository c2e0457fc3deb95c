"""The meter, with a clock of the test's."""

from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone

import pytest

from jobs.cli.acceptance.runner import LimitReachedError
from jobs.cli.acceptance.spend import Meter, Running

BEGIN = datetime(2026, 11, 25, 12, tzinfo=timezone.utc)


@dataclass
class Account:
    """What runs, and what time it is."""

    time: datetime = BEGIN
    running: list[Running] = field(default_factory=list)
    idle_usd_per_hour: float = 0.0
    silent: bool = False
    kept: list[tuple[datetime, float]] = field(default_factory=list)

    def instances(self) -> list[Running]:
        if self.silent:
            raise TimeoutError
        return self.running

    def meter(self, *, limit_usd: float = 40.0, spent_usd: float = 0.0, until: datetime = BEGIN) -> Meter:
        return Meter(
            limit_usd=limit_usd,
            spent_usd=spent_usd,
            until=until,
            instances=self.instances,
            idle_usd_per_hour=lambda: self.idle_usd_per_hour,
            keep=lambda at, usd: self.kept.append((at, usd)),
            now=lambda: self.time,
        )

    def look_after(self, meter: Meter, minutes: float) -> float:
        self.time += timedelta(minutes=minutes)
        meter.look()
        return meter.spent_usd

    def launch(self, name: str, usd_per_hour: float) -> None:
        self.running = [*self.running, Running(id=name, launched_at=self.time, usd_per_hour=usd_per_hour)]


def test_it_counts_from_the_launch_to_the_end_and_what_the_stage_costs_idle() -> None:
    account = Account(idle_usd_per_hour=0.05)
    meter = account.meter()
    meter.look()
    account.launch("i-1", 12.0)
    assert account.look_after(meter, 30) == pytest.approx(6.0 + 0.025)
    account.launch("i-2", 24.0)
    assert account.look_after(meter, 30) == pytest.approx(12.0 + 12.0 + 0.05)
    account.running = []  # they may have gone at the very end
    assert account.look_after(meter, 1) == pytest.approx(24.05 + 36 / 60 + 0.05 / 60)
    assert account.look_after(meter, 60) == pytest.approx(24.05 + 36 / 60 + 0.05 / 60 + 0.05)
    assert account.kept[-1] == (account.time, meter.spent_usd)
    # A run that continues counts what ran on without it, and nothing twice.
    account = Account()
    account.launch("i-1", 10.0)
    meter = account.meter(spent_usd=5.0, until=BEGIN + timedelta(minutes=30))
    assert account.look_after(meter, 60) == pytest.approx(5.0 + 5.0)


def test_it_ends_the_run_while_there_is_money_to_take_away_what_runs() -> None:
    account = Account()
    meter = account.meter(limit_usd=20.0)
    account.launch("i-1", 16.0)
    account.look_after(meter, 59)
    meter.check()
    account.look_after(meter, 1.5)
    with pytest.raises(LimitReachedError, match=r"16\.13 USD are spent and 4\.00 USD are kept for the end"):
        meter.check()


def test_no_answer_for_five_minutes_counts_as_the_limit() -> None:
    account = Account()
    meter = account.meter()
    account.launch("i-1", 12.0)
    meter.look()
    account.silent = True
    account.look_after(meter, 4.9)
    meter.check()
    account.look_after(meter, 0.1)
    with pytest.raises(LimitReachedError, match="EC2 has not reported for 5 minutes what runs"):
        meter.check()
    account.silent = False
    assert account.look_after(meter, 1) == pytest.approx(12.0 * 6 / 60)
    meter.check()


def test_it_looks_again_after_half_a_minute() -> None:
    account = Account()
    account.launch("i-1", 12.0)
    meter = account.meter()
    meter.check()
    for seconds, looks in ((29, 1), (1, 2), (10, 2)):
        account.time += timedelta(seconds=seconds)
        meter.check()
        assert len(account.kept) == looks
    assert meter.spent_usd == pytest.approx(12.0 / 120)
