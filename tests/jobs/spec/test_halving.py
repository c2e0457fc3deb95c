"""Which points of a sweep go on at a rung, and which specs could never compare any."""

import math
from typing import Any

import pytest

from jobs.core.errors import UsageError
from jobs.spec.halving import Comparison, Halving, RungValue
from jobs.spec.plan import plan
from tests.support.jobs.planning import RUN_ID, STAGE, command_of, spec

BY_THREE = Comparison(from_step=100, factor=3, metric="eval_loss", smaller_is_better=True)


def test_rungs_are_a_factor_apart() -> None:
    halving = Halving(from_step=100)
    rungs = [halving.rung(step) for step in (99, 100, 299, 300, 899, 2700)]
    assert rungs == [None, 100, 100, 300, 300, 2700]


@pytest.mark.parametrize(
    ("own", "others", "rank", "stops"),
    [
        (0.9, [], 1, False),  # nobody waits for the others
        (0.9, [0.8], 2, True),
        (0.7, [0.8], 1, False),
        (0.6, [0.5, 0.8, 0.9, 0.7], 2, True),  # of five one goes on
        (0.6, [0.5, 0.8, 0.9, 0.7, 0.7], 2, False),  # of six two
        (0.5, [0.5, 0.8], 1, False),
        (0.9, [math.nan], 1, False),
        (math.nan, [], 1, True),
        (math.inf, [0.5, math.nan], 2, True),
    ],
)
def test_a_point_goes_on_where_it_is_among_the_best(own: float, others: list[float], rank: int, *, stops: bool) -> None:
    there = [RungValue.of(100, value) for value in others]
    verdict = BY_THREE.verdict(RungValue.of(100, own), there, rung=100)
    assert (verdict.rank, verdict.of, verdict.stops) == (rank, 1 + len(others), stops)


def test_the_greatest_is_the_best_where_that_is_what_counts_and_a_verdict_says_where_a_point_stood() -> None:
    by_accuracy = BY_THREE.model_copy(update={"metric": "eval_accuracy", "smaller_is_better": False})
    first, second = RungValue.of(120, 0.8), RungValue.of(120, 0.7)
    assert by_accuracy.verdict(first, [second], rung=100).text == "ranked 1 of 2 at step 120"
    behind = by_accuracy.verdict(RungValue.of(120, math.nan), [first, second], rung=100)
    assert behind.text == "ranked 3 of 3 at step 120, where eval_accuracy was no number"


def swept(halving: Any, **keys: Any) -> dict[str, Any]:
    return {"sweep": {"arguments.seed": [1, 2], "halving": halving, **keys}}


def classification(**arguments: Any) -> dict[str, Any]:
    return {"arguments": {"model": "data://m", "train_data": "data://t.jsonl", **arguments}}


def test_the_launcher_of_a_point_is_told_how_it_is_compared() -> None:
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
    ("values", "said"),
    [
        (
            {**classification(), **swept({"from_step": 100})},
            "(seed 1): sweep.halving compares evaluations: set arguments",
        ),
        (
            {**classification(evaluate_every_steps=50), **swept({"from_step": 100}, metric="eval_acuracy")},
            "sweep.metric: 'eval_acuracy' is no metric of this job's evaluations; did you mean 'eval_accuracy'?",
        ),
        ({**classification(evaluate_every_steps=50), **swept({"factor": 2})}, "sweep.halving.from_step: missing"),
        (
            {
                "job": "pretrain-mlm",
                "arguments": {"data": "data://p", "max_steps": 1500, "evaluate_every_steps": 1000},
                **swept({"from_step": 1200}),
            },
            "ends at step 1500, before its first evaluation from step 1200 on, which would be at step 2000; lower",
        ),
        (
            {
                "job": "script",
                "arguments": {"code": "s3://b/c.tar.gz", "command": "train.py"},
                "sweep": {"arguments.parameters.a": [1, 2], "halving": {"from_step": 9}},
            },
            "only your script knows what it evaluates; name that in sweep.metric",
        ),
        (
            {
                "job": "evaluate",
                "arguments": {"model": "data://m", "data": "data://t.jsonl"},
                "sweep": {"arguments.max_length": [64, 128], "halving": {"from_step": 9}},
            },
            "this kind of job has no evaluations by which points could be compared",
        ),
    ],
    ids=str,
)
def test_a_sweep_whose_points_could_never_be_compared_is_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as refused:
        spec(**values)
    assert said in str(refused.value)
