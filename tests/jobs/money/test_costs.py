"""Costs of runs, added up from receipts."""

from datetime import datetime, timedelta, timezone

import pytest

from jobs.container.launcher.accounting import receipt
from jobs.core.errors import UsageError
from jobs.core.instance_types import instance_type
from jobs.core.locations import S3Location
from jobs.core.records import Attempt, Receipt
from jobs.money.costs import costs, month_of, spans, total

NOW = datetime(2026, 11, 23, 14, 30, tzinfo=timezone.utc)
ROW = instance_type("dl1.24xlarge")
SPOT, ON_DEMAND = ROW.spot_usd_per_hour, ROW.on_demand_usd_per_hour


def bill(run: str, *hours: tuple[datetime, float], capacity: str = "spot", job: str = "tokenize") -> Receipt:
    """The receipt of a run, given start and hours of each attempt; the first quarter of the hours is startup."""
    attempts = [
        Attempt.model_validate(
            {
                "number": number,
                "started_at": begin,
                "last_seen_at": begin + timedelta(hours=taken),
                "training_started_at": begin + timedelta(hours=taken / 4),
                "instance_type": ROW.name,
                "capacity": capacity,
                "accelerator": "hpu",
                "nnodes": 1,
                "world_size": 8,
            }
        )
        for number, (begin, taken) in enumerate(hours, start=1)
    ]
    location = S3Location("runs", f"{run}/")
    return receipt(location, attempts, job=job, instance=ROW, state="succeeded", result={}, on_instance=True)


def day(number: int, month: int = 11) -> datetime:
    return datetime(2026, month, number, tzinfo=timezone.utc)


def test_costs_are_added_up_by_team_kind_or_run() -> None:
    receipts = [
        bill("vision/a-20261101-000000-0000", (day(1), 2.0)),
        bill("vision/b-20261102-000000-0000", (day(2), 1.0), capacity="on-demand", job="train-tokenizer"),
        bill("speech/c-20261103-000000-0000", (day(3), 4.0)),
    ]
    november = month_of("2026-11", now=NOW)
    vision, speech = costs(receipts, by="team", month=november)
    assert (vision.name, vision.runs) == ("vision", 2)
    assert vision.instance_hours == pytest.approx(3)
    assert vision.usd == pytest.approx(2 * SPOT + ON_DEMAND)
    assert vision.on_demand_usd == pytest.approx(3 * ON_DEMAND)
    assert vision.saved_usd == pytest.approx(2 * (ON_DEMAND - SPOT))
    assert vision.usd_by_phase["starting"] == pytest.approx(vision.usd / 4)
    assert speech.saved_percent == pytest.approx(100 * (1 - SPOT / ON_DEMAND))
    assert [row.name for row in costs(receipts, by="job", month=november)] == ["tokenize", "train-tokenizer"]
    assert [row.runs for row in costs(receipts, by="run", month=november)] == [1, 1, 1]
    everything = total(costs(receipts, by="run", month=november))
    assert everything.usd == pytest.approx(sum(each.estimated_usd or 0 for each in receipts))


def test_run_across_the_end_of_a_month_is_split() -> None:
    over = [bill("vision/a-20261031-000000-0000", (day(31, 10) + timedelta(hours=22), 3.0), (day(2), 1.0))]
    by_month = {name: total(costs(over, by="run", month=month_of(name, now=NOW))) for name in ("2026-10", "2026-11")}
    assert by_month["2026-10"].instance_hours == pytest.approx(2)
    assert by_month["2026-11"].instance_hours == pytest.approx(2)
    assert by_month["2026-10"].usd_by_phase["starting"] == pytest.approx(0.75 * SPOT)
    assert by_month["2026-11"].usd_by_phase["starting"] == pytest.approx(0.25 * SPOT)
    assert costs(over, by="run", month=month_of("2026-12", now=NOW)) == []
    assert total(costs(over, by="run", month=month_of("all", now=NOW))).instance_hours == pytest.approx(4)


@pytest.mark.parametrize(
    ("text", "begin", "end"),
    [
        ("this", day(1), day(1, 12)),
        ("2026-02", day(1, 2), day(1, 3)),
        ("2026-12", day(1, 12), datetime(2027, 1, 1, tzinfo=timezone.utc)),
    ],
)
def test_month_is_a_calendar_month_in_utc(text: str, begin: datetime, end: datetime) -> None:
    month = month_of(text, now=NOW)
    assert (month.begin, month.end) == (begin, end)


@pytest.mark.parametrize("text", ["", "2026-13", "2026-11-01"])
def test_invalid_month_is_rejected(text: str) -> None:
    with pytest.raises(UsageError, match="use a month like 2026-11"):
        month_of(text, now=NOW)


def test_spans_of_a_month_are_days_and_of_all_time_months() -> None:
    receipts = [bill("vision/a-20261031-220000-0000", (day(31, month=10) + timedelta(hours=22), 4.0))]
    november = spans(month_of("2026-11", now=NOW), receipts, now=NOW)
    assert [name for name, _ in november] == [f"11-{number:02}" for number in range(1, 31)]
    by_day = {name: total(costs(receipts, by="team", month=span)).usd for name, span in november}
    assert by_day["11-01"] == pytest.approx(2 * SPOT)
    assert sum(by_day.values()) == by_day["11-01"]
    ever = spans(month_of("all", now=NOW), receipts, now=NOW)
    assert [name for name, _ in ever] == ["2026-10", "2026-11"]
    of_months = [total(costs(receipts, by="team", month=span)).usd for _, span in ever]
    assert of_months == pytest.approx([2 * SPOT, 2 * SPOT])
    assert spans(month_of("all", now=NOW), [], now=NOW) == []
