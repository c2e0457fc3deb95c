"""What a spec would take, held against amounts worked out by hand; and the rows that it falls back on."""

import math
from dataclasses import replace
from datetime import date

import pytest

from jobs.core.instance_types import INSTANCE_TYPES
from jobs.money.estimate import Measured, Work, estimate, of_sweep
from jobs.money.prices import recorded
from jobs.money.throughputs import model_name, throughputs
from jobs.spec.catalog import CATALOG
from jobs.spec.kinds.finetune_classification import FinetuneClassification
from jobs.spec.kinds.pretrain_mlm import PretrainMlm

ROW = INSTANCE_TYPES["dl1.24xlarge"]
WORK = Work(samples=7_200_000, because="hands", nnodes=1, capacity="spot", mean_hours_between_reclaims=6.0)
RUNS = (
    Measured(name="a", samples_per_second=400.0, start_seconds=100.0, rest_seconds=50.0),
    Measured(name="b", samples_per_second=500.0, start_seconds=300.0, rest_seconds=70.0),
    Measured(name="c", samples_per_second=600.0, start_seconds=200.0, rest_seconds=60.0),
)


def test_time_is_start_steps_and_rest_and_the_range_is_that_of_the_runs_with_the_reclaims_of_the_slowest() -> None:
    found = estimate(WORK, RUNS, ROW, recorded(ROW))
    assert found.seconds == pytest.approx(200 + 7_200_000 / 500 + 60)
    assert found.low_seconds == pytest.approx(200 + 12_000 + 60)
    slow = 200 + 18_000 + 60
    assert found.high_seconds == pytest.approx(slow + slow / 3600 / 6 * 200)
    assert found.usd == pytest.approx(14_660 / 3600 * ROW.spot_usd_per_hour)
    assert found.on_demand_usd == pytest.approx(14_660 / 3600 * ROW.on_demand_usd_per_hour)
    assert "steps: hands = 7,200,000 samples / 500.0 a second = 14,400 s" in found.arithmetic
    assert "start 200 s + steps 14,400 s + rest 60 s = 14,660 s" in found.arithmetic


def test_several_nodes_on_demand_cost_each_and_are_not_reclaimed_and_a_laptop_costs_nothing() -> None:
    work = Work(samples=100, because="hands", nnodes=4, capacity="on-demand", mean_hours_between_reclaims=6.0)
    published = Measured(name="published", samples_per_second=10.0)
    found = estimate(work, [published], ROW, recorded(ROW))
    assert found.high_seconds == found.seconds == found.low_seconds == 10
    assert found.usd == found.on_demand_usd == pytest.approx(10 / 3600 * 4 * ROW.on_demand_usd_per_hour)
    assert found.arithmetic[-1] == "the start and what comes after the last step are not known, and left out"
    here = estimate(work, [published], None, None)
    assert (here.place, here.seconds, here.usd) == ("this machine", 10, 0)


def test_a_sweep_costs_what_all_its_points_do_and_takes_as_long_as_its_workers() -> None:
    measured = Measured(name="a", samples_per_second=10.0)
    points = [
        estimate(replace(WORK, samples=samples, mean_hours_between_reclaims=math.inf), [measured], ROW, recorded(ROW))
        for samples in (3000, 1000, 1000, 500)
    ]
    sweep = of_sweep(points, workers=2)
    assert sweep.seconds == sweep.low_seconds == sweep.high_seconds == 300, "300 beside 100, 100 and 50"
    assert sweep.usd == pytest.approx(550 / 3600 * ROW.spot_usd_per_hour)
    assert sweep.on_demand_usd == pytest.approx(550 / 3600 * ROW.on_demand_usd_per_hour)
    assert f"4 points of 50 to 300 s each, 2 at once = 300 s, {sweep.usd:.2f} USD together" in sweep.arithmetic
    assert of_sweep(points, workers=1).seconds == 550
    assert of_sweep(points[1:3], workers=1).arithmetic[-1].startswith("2 points of 100 s each, 1 at once = 200 s, ")


def test_each_published_row_names_a_kind_a_type_with_as_many_cards_and_where_it_is_from() -> None:
    rows = throughputs()
    assert rows
    for row in rows:
        assert row.job in CATALOG
        assert 1 <= row.cards <= INSTANCE_TYPES[row.instance_type].accelerators
        assert date.fromisoformat(row.date) <= date(2026, 11, 24), "no figure of days to come"
        assert "." in row.source.partition("/")[0]


def test_models_are_known_by_the_last_part_of_their_name_and_new_ones_by_their_shape() -> None:
    def named(model: str) -> str:
        return model_name(FinetuneClassification.model_validate({"model": model, "glue_task": "mrpc"}))

    assert named("hf://FacebookAI/xlm-roberta-large") == named("data://models/xlm-roberta-large") == "xlm-roberta-large"
    assert model_name(PretrainMlm.model_validate({"data": "s3://tokens/packed/"})) == "hidden 768, layers 12"
