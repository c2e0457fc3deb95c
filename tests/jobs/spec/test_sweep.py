"""Sweeps: their points, the checks of their specs, their single request, and successive halving."""

import math
from datetime import datetime, timezone
from typing import Any

import pytest

from jobs.core.errors import UsageError
from jobs.core.run import new_run_id
from jobs.spec.plan import plan
from jobs.spec.spec import JobSpec, parse_spec
from jobs.spec.sweep import MAX_POINTS, Comparison, Halving, RungValue, Sweep, point_ids, points
from tests.support.jobs.planning import RUN_ID, STAGE, command_of, spec

GRID = {"arguments.learning_rate": [1e-5, 3e-5], "arguments.seed": [1, 2, 3]}


def test_grid_has_a_point_for_each_combination() -> None:
    in_short = spec(sweep=GRID)
    assert in_short.sweep is not None
    found = points(in_short.sweep)
    assert [(point["learning_rate"], point["seed"]) for point in found] == [
        (rate, seed) for rate in (1e-5, 3e-5) for seed in (1, 2, 3)
    ]
    in_full = spec(sweep={"arguments": {"learning_rate": [1e-5, 3e-5], "seed": [1, 2, 3]}})
    assert in_full.sweep == in_short.sweep
    # The resolved spec of a run parses to the same sweep.
    assert parse_spec(in_short.model_dump(mode="json", exclude_none=True), origin="spec.yaml") == in_short


def test_random_points_are_in_range_distinct_and_repeatable() -> None:
    drawn = Sweep.model_validate(
        {
            "random": 40,
            "arguments.learning_rate": {"log": [1e-6, 1e-3]},
            "arguments.warmup_ratio": {"uniform": [0, 0.5]},
            "arguments.epochs": {"integers": [1, 4]},
            "arguments.optimizer": ["adamw", "sgd"],
        }
    )
    found = points(drawn)
    assert len(found) == 40
    assert found == points(drawn) != points(drawn.model_copy(update={"seed": 1}))
    assert all(1e-6 <= point["learning_rate"] <= 1e-3 and 0 <= point["warmup_ratio"] <= 0.5 for point in found)
    assert {point["epochs"] for point in found} == {1, 2, 3, 4}
    assert {point["optimizer"] for point in found} == {"adamw", "sgd"}
    # In a log range, each of the three orders of magnitude gets about a third of the points.
    assert 5 < sum(point["learning_rate"] < 1e-5 for point in found) < 25
    few = Sweep.model_validate({"random": 10, "arguments.seed": [1, 2, 3]})
    assert sorted(point["seed"] for point in points(few)) == [1, 2, 3]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"arguments.learning_rate": [1e-5, -1]},
            "point 2 of 2 (learning_rate -1): arguments.learning_rate: must be more",
        ),
        ({"arguments.learing_rate": [1]}, "unknown key; did you mean 'learning_rate'?"),
        ({"random": 3}, "sweeps no argument"),
        ({"arguments.seed": 3}, "must be a list"),
        ({"arguments.seed": {"log": [1, 2]}}, "a range needs random, the number of points"),
        ({"arguments.seed": {"log": [2, 1]}, "random": 2}, "must be [minimum, maximum], not [2.0, 1.0]"),
        ({"arguments.seed": {"log": [0, 1]}, "random": 2}, "must be above 0"),
        ({"arguments.seed": {}, "random": 2}, "must be a list"),
        ({"arguments.seed": list(range(MAX_POINTS + 1))}, f"{MAX_POINTS + 1} points, more than {MAX_POINTS}"),
        ({"arguments.seed": [1], "paralel": 2}, "sweep.paralel: unknown key"),
        ({"arguments.code": ["a", "b"]}, "all points must run the same"),
        ({"arguments.model": ["a"], "arguments.model.x": ["a"]}, "swept both as a whole and in parts"),
        ({"arguments": 5, "arguments.seed": [1]}, "sweep.arguments: must be a mapping"),
        ([1], "sweep: must be a mapping of keys to values"),
    ],
    ids=str,
)
def test_error_names_the_point(changed: Any, message: str) -> None:
    with pytest.raises(UsageError) as refused:
        spec(sweep=changed)
    assert message in str(refused.value)


def test_points_run_on_one_node_and_have_short_names() -> None:
    with pytest.raises(UsageError, match="each point runs on one node"):
        spec(sweep=GRID, resources={"nnodes": 2, "capacity": "spot"})
    with pytest.raises(UsageError, match="at most 57 characters"):
        spec(sweep=GRID, name="a" * 58)


def test_swept_argument_may_be_missing_from_arguments() -> None:
    swept = spec(arguments={"train_data": "data://t.jsonl"}, sweep={"arguments.model": ["data://a", "data://b"]})
    assert [point.arguments["model"] for point in swept.point_specs()] == ["data://a", "data://b"]
    assert swept.entrypoint_arguments().model_dump()["model"] == "data://a"


def test_request_is_one_array_job_of_workers() -> None:
    planned = plan(spec(sweep={**GRID, "parallel": 4}, max_usd=90, timeout_hours=2), STAGE, run_id=RUN_ID)
    assert planned.request["arrayProperties"] == {"size": 4}
    assert planned.request["tags"]["trainyard:sweep"] == "6"
    # An attempt must have time for two points one after the other, and retries for both.
    assert planned.request["timeout"] == {"attemptDurationSeconds": 2 * 2 * 3600}
    assert planned.request["retryStrategy"]["attempts"] == 6
    assert command_of(planned)[3:] == [
        "--instance-type=dl1.24xlarge",
        "--nproc-per-node=8",
        "--capacity=spot",
        "--max-usd=90.0",
        "--sweep-attempts=3",
        "--sweep-timeout-seconds=7200",
        "finetune-classification",
    ]
    one = plan(spec(), STAGE, run_id=RUN_ID)
    assert planned.spot_usd_per_hour == pytest.approx(4 * one.spot_usd_per_hour)


@pytest.mark.parametrize(
    ("parallel", "left", "room", "size"),
    [(None, None, 9, 6), (9, None, 4, 4), (2, None, 4, 2), (4, 3, None, 3), (1, None, None, 1), (4, 1, None, 1)],
)
def test_workers_are_limited_by_points_and_instances(
    parallel: int | None, left: int | None, room: int | None, size: int
) -> None:
    swept = spec(sweep={**GRID, "parallel": parallel})
    planned = plan(swept, STAGE, run_id=RUN_ID, points_left=left, room_of=(lambda _: room) if room else None)
    assert planned.instances == size
    # Batch rejects an array of one job.
    assert planned.request.get("arrayProperties") == ({"size": size} if size > 1 else None)
    assert planned.request["tags"]["trainyard:sweep"] == str(left or 6)


def test_points_are_separate_runs_that_sort_before_the_sweep() -> None:
    now = datetime(2026, 11, 21, 12, 0, 5, tzinfo=timezone.utc)
    ids = point_ids("reviews", count=12, now=now)
    assert ids[0] == "reviews-p01-20261121-120004-fffe"
    assert len(set(ids)) == 12
    assert all(point[-20:] < new_run_id("reviews", now=now)[-20:] for point in ids)
    assert isinstance(spec(sweep=GRID).point_specs()[0], JobSpec)


@pytest.mark.parametrize(
    ("sweep", "metric", "smaller"),
    [({}, "eval_loss", True), ({}, "val_loss", True), ({}, "eval_f1", False), ({"direction": "minimize"}, "wer", True)],
)
def test_losses_are_minimized_and_other_metrics_maximized(sweep: dict[str, Any], metric: str, smaller: bool) -> None:
    made = Sweep.model_validate({"arguments.seed": [1, 2], "metric": metric, **sweep})
    assert made.smaller_is_better(metric) is smaller
    assert made.metric_of({metric: 0.5, "eval_accuracy": 1}) == (metric, 0.5)
    assert made.metric_of({"eval_accuracy": 1}) is None
    assert made.metric_of({metric: float("nan")}) is None


BY_THREE = Comparison(from_step=100, factor=3, metric="eval_loss", smaller_is_better=True)


def test_rungs_are_a_factor_apart() -> None:
    halving = Halving(from_step=100)
    rungs = [halving.rung(step) for step in (99, 100, 299, 300, 899, 2700)]
    assert rungs == [None, 100, 100, 300, 300, 2700]


@pytest.mark.parametrize(
    ("own", "others", "rank", "stops"),
    [
        (0.9, [], 1, False),  # points do not wait for each other
        (0.9, [0.8], 2, True),
        (0.7, [0.8], 1, False),
        (0.6, [0.5, 0.8, 0.9, 0.7], 2, True),  # one of five continues
        (0.6, [0.5, 0.8, 0.9, 0.7, 0.7], 2, False),  # two of six
        (0.5, [0.5, 0.8], 1, False),
        (0.9, [math.nan], 1, False),
        (math.nan, [], 1, True),
        (math.inf, [0.5, math.nan], 2, True),
    ],
)
def test_point_continues_if_it_is_among_the_best(own: float, others: list[float], rank: int, *, stops: bool) -> None:
    there = [RungValue.of(100, value) for value in others]
    verdict = BY_THREE.verdict(RungValue.of(100, own), there, rung=100)
    assert (verdict.rank, verdict.of, verdict.stops) == (rank, 1 + len(others), stops)


def test_accuracy_is_maximized_and_the_verdict_has_the_rank() -> None:
    by_accuracy = BY_THREE.model_copy(update={"metric": "eval_accuracy", "smaller_is_better": False})
    first, second = RungValue.of(120, 0.8), RungValue.of(120, 0.7)
    assert by_accuracy.verdict(first, [second], rung=100).text == "ranked 1 of 2 at step 120"
    behind = by_accuracy.verdict(RungValue.of(120, math.nan), [first, second], rung=100)
    assert behind.text == "ranked 3 of 3 at step 120, where eval_accuracy was not a number"


def swept(halving: Any, **keys: Any) -> dict[str, Any]:
    return {"sweep": {"arguments.seed": [1, 2], "halving": halving, **keys}}


def classification(**arguments: Any) -> dict[str, Any]:
    return {"arguments": {"model": "data://m", "train_data": "data://t.jsonl", **arguments}}


def test_halving_is_passed_to_the_launcher() -> None:
    whole = spec(**classification(evaluate_every_steps=50), **swept({"from_step": 100}))
    by_accuracy = '{"from_step": 100, "metric": "eval_accuracy", "smaller_is_better": false}'
    assert f"--halving={by_accuracy}" in command_of(plan(whole, STAGE, run_id=RUN_ID))
    script = {"job": "script", "arguments": {"code": "s3://b/c.tar.gz", "command": "train.py"}}
    keys = {"sweep": {"arguments.parameters.a": [1, 2], "halving": {"from_step": 9, "factor": 2}, "metric": "wer"}}
    by_own_metric = spec(**script, **keys)
    assert by_own_metric.sweep is not None
    assert by_own_metric.sweep.comparison(spec(**script).entrypoint_arguments()) == Comparison(
        from_step=9, factor=2, metric="wer", smaller_is_better=False
    )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {**classification(), **swept({"from_step": 100})},
            "(seed 1): sweep.halving needs evaluations: set arguments",
        ),
        (
            {**classification(evaluate_every_steps=50), **swept({"from_step": 100}, metric="eval_acuracy")},
            "sweep.metric: evaluations of this job have no metric 'eval_acuracy'; did you mean 'eval_accuracy'?",
        ),
        ({**classification(evaluate_every_steps=50), **swept({"factor": 2})}, "sweep.halving.from_step: is required"),
        (
            {
                "job": "pretrain-mlm",
                "arguments": {"data": "data://p", "max_steps": 1500, "evaluate_every_steps": 1000},
                **swept({"from_step": 1200}),
            },
            "ends at step 1500, before the first evaluation after from_step 1200, which would be at step 2000; lower",
        ),
        (
            {
                "job": "script",
                "arguments": {"code": "s3://b/c.tar.gz", "command": "train.py"},
                "sweep": {"arguments.parameters.a": [1, 2], "halving": {"from_step": 9}},
            },
            "the metrics of a script are unknown; set sweep.metric",
        ),
        (
            {
                "job": "evaluate",
                "arguments": {"model": "data://m", "data": "data://t.jsonl"},
                "sweep": {"arguments.max_length": [64, 128], "halving": {"from_step": 9}},
            },
            "this kind of job has no evaluations to compare points by",
        ),
    ],
    ids=str,
)
def test_halving_without_comparable_points_is_rejected(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as refused:
        spec(**values)
    assert message in str(refused.value)
