"""Estimates and forecasts, compared with amounts computed by hand; and the published throughputs."""

import math
from dataclasses import replace
from datetime import date, datetime, timedelta, timezone
from typing import Any

import pytest

from jobs.core.instance_types import INSTANCE_TYPES
from jobs.core.output import Progress
from jobs.core.records import Attempt
from jobs.money.estimate import (
    UNSEEN_SECONDS,
    Measurement,
    Work,
    estimate,
    forecast,
    model_name,
    money_text,
    seconds_per_step,
    sweep_estimate,
    throughputs,
    time_text,
)
from jobs.money.prices import recorded
from jobs.spec.catalog import CATALOG
from jobs.spec.kinds.finetune_classification import FinetuneClassification
from jobs.spec.kinds.pretrain_mlm import PretrainMlm

ROW = INSTANCE_TYPES["dl1.24xlarge"]
WORK = Work(samples=7_200_000, samples_text="hands", nnodes=1, capacity="spot", mean_hours_between_reclaims=6.0)
RUNS = (
    Measurement(name="a", samples_per_second=400.0, start_seconds=100.0, rest_seconds=50.0),
    Measurement(name="b", samples_per_second=500.0, start_seconds=300.0, rest_seconds=70.0),
    Measurement(name="c", samples_per_second=600.0, start_seconds=200.0, rest_seconds=60.0),
)


def test_estimate_is_start_plus_steps_plus_rest_with_a_range() -> None:
    found = estimate(WORK, RUNS, ROW, recorded(ROW))
    assert found.seconds == pytest.approx(200 + 7_200_000 / 500 + 60)
    assert found.low_seconds == pytest.approx(200 + 12_000 + 60)
    slow = 200 + 18_000 + 60
    assert found.high_seconds == pytest.approx(slow + slow / 3600 / 6 * 200)
    assert found.usd == pytest.approx(14_660 / 3600 * ROW.spot_usd_per_hour)
    assert found.on_demand_usd == pytest.approx(14_660 / 3600 * ROW.on_demand_usd_per_hour)
    assert "steps: hands = 7,200,000 samples / 500.0 per second = 14,400 s" in found.arithmetic
    assert "start 200 s + steps 14,400 s + rest 60 s = 14,660 s" in found.arithmetic


def test_estimate_of_several_on_demand_nodes_and_of_a_laptop() -> None:
    work = Work(samples=100, samples_text="hands", nnodes=4, capacity="on-demand", mean_hours_between_reclaims=6.0)
    published = Measurement(name="published", samples_per_second=10.0)
    found = estimate(work, [published], ROW, recorded(ROW))
    assert found.high_seconds == found.seconds == found.low_seconds == 10
    assert found.usd == found.on_demand_usd == pytest.approx(10 / 3600 * 4 * ROW.on_demand_usd_per_hour)
    assert found.arithmetic[-1] == "without start and rest, which are unknown"
    here = estimate(work, [published], None, None)
    assert (here.place, here.seconds, here.usd) == ("this machine", 10, 0)


def test_sweep_costs_all_points_and_takes_as_long_as_its_workers() -> None:
    measured = Measurement(name="a", samples_per_second=10.0)
    points = [
        estimate(replace(WORK, samples=samples, mean_hours_between_reclaims=math.inf), [measured], ROW, recorded(ROW))
        for samples in (3000, 1000, 1000, 500)
    ]
    sweep = sweep_estimate(points, workers=2)
    assert sweep.seconds == sweep.low_seconds == sweep.high_seconds == 300, "300 beside 100, 100 and 50"
    assert sweep.usd == pytest.approx(550 / 3600 * ROW.spot_usd_per_hour)
    assert sweep.on_demand_usd == pytest.approx(550 / 3600 * ROW.on_demand_usd_per_hour)
    assert f"4 points of 50 to 300 s each, 2 at once = 300 s, {sweep.usd:.2f} USD together" in sweep.arithmetic
    assert sweep_estimate(points, workers=1).seconds == 550
    assert (
        sweep_estimate(points[1:3], workers=1).arithmetic[-1].startswith("2 points of 100 s each, 1 at once = 200 s, ")
    )


def test_published_throughputs_are_valid_and_have_a_source() -> None:
    rows = throughputs()
    assert rows
    for row in rows:
        assert row.job in CATALOG
        assert 1 <= row.cards <= INSTANCE_TYPES[row.instance_type].accelerators
        assert date.fromisoformat(row.date) <= date(2026, 11, 24), "no figure of days to come"
        assert "." in row.source.partition("/")[0]


def test_model_name_is_the_last_part_or_the_shape() -> None:
    def named(model: str) -> str:
        return model_name(FinetuneClassification.model_validate({"model": model, "glue_task": "mrpc"}))

    assert named("hf://FacebookAI/xlm-roberta-large") == named("data://models/xlm-roberta-large") == "xlm-roberta-large"
    assert model_name(PretrainMlm.model_validate({"data": "s3://tokens/packed/"})) == "hidden 768, layers 12"


BEGIN = datetime(2026, 11, 1, 12, tzinfo=timezone.utc)


def attempt(minutes: float, **changed: Any) -> Attempt:
    fields = {
        "number": 1,
        "started_at": BEGIN,
        "last_seen_at": BEGIN + timedelta(minutes=minutes),
        "training_started_at": BEGIN + timedelta(minutes=6),
        "instance_type": ROW.name,
        "capacity": "spot",
        "accelerator": "hpu",
        "nnodes": 2,
        "world_size": 16,
        **changed,
    }
    return Attempt.model_validate(fields)


def test_forecast_adds_the_remaining_steps_at_the_current_pace() -> None:
    now = BEGIN + timedelta(minutes=60)
    running, progress = attempt(59.5, resumed_from_step=100), Progress(400, 1000)
    pace = seconds_per_step(running, progress, at=now)
    assert pace == pytest.approx(54 * 60 / 300)
    found = forecast([running], progress, pace, now=now)
    assert found.seconds_left == pytest.approx(108 * 60)
    assert found.usd == pytest.approx(2 * ROW.spot_usd_per_hour)
    assert found.usd_at_end == pytest.approx(2 * ROW.spot_usd_per_hour * (1 + 1.8))
    assert found.on_demand_usd_at_end == pytest.approx(2 * ROW.on_demand_usd_per_hour * 2.8)
    assert money_text(found) == "7.86 USD so far, 22.01 USD at the end; On-Demand 26.22 and 73.41 USD"
    assert time_text(found) == "1:48 h to the last step"


def test_forecast_without_pace_or_heartbeat() -> None:
    lost, late = attempt(30), BEGIN + timedelta(minutes=30, seconds=UNSEEN_SECONDS + 1)
    assert seconds_per_step(lost, Progress(0, 10), at=late) is None
    found = forecast([lost], Progress(0, 10), None, now=late)
    assert found.usd == pytest.approx(ROW.spot_usd_per_hour)
    assert (found.usd_at_end, found.seconds_left) == (None, None)
    assert money_text(found) == "3.93 USD so far; On-Demand 13.11 USD"
    ended = attempt(30, finished_at=BEGIN + timedelta(minutes=30), capacity="on-demand")
    assert money_text(forecast([ended], None, None, now=late)) == "13.11 USD so far"
    assert money_text(forecast([ended], None, None, now=late), ended=True) == "13.11 USD"
    assert money_text(found, ended=True) == "3.93 USD; On-Demand 13.11 USD"
