"""Evaluations, the best of them, and early stopping, which interruptions do not change."""

import math
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import ValidationError

from jobs.container.rank import ResumeLaterError
from jobs.container.trainer.evaluation import BestEvaluation, due_every
from jobs.spec.kinds.finetune_classification import FinetuneClassification
from tests.support.container.attempts import Attempts


def test_best_model_and_early_stop_survive_interruptions(
    attempts: Callable[[], Attempts],
) -> None:
    # GIVEN an uninterrupted run, with another optimizer and schedule than usual
    others: dict[str, Any] = {"optimizer": "adafactor", "lr_scheduler_type": "cosine"}
    whole = attempts()
    result = whole.train(**others)
    by_step = dict(whole.evaluated)
    assert [step for step, _ in whole.evaluated] == [3, 6, 9, 12, 12], "the last one is of the best model"
    assert whole.evaluated[-1][1] == by_step[6] != whole.evaluated[-2][1]
    assert whole.model() == by_step[6]
    assert result["best_step"] == 6
    rates = [row["learning_rate"] for row in whole.curve() if "learning_rate" in row]
    assert len(rates) == 12
    # The Trainer's cosine schedule after a warm-up of two of 18 steps; the fifth step follows four
    assert rates[4] == pytest.approx(0.01 * 0.5 * (1 + math.cos(math.pi * (4 - 2) / 16)), rel=1e-6)

    # WHEN an attempt fails before its evaluation, one is stopped in the last evaluation, and one starts after
    # everything was done
    broken = attempts()
    with pytest.raises(RuntimeError, match="cut off"):
        broken.train(fail_at=9, **others)
    with pytest.raises(ResumeLaterError):
        broken.train(interrupt_at=12, **others)
    broken.train(**others)
    again = broken.train(**others)

    # THEN the run ends the same
    assert broken.model() == whole.model()
    assert broken.curve() == whole.curve()
    assert again["best_step"] == 6
    assert [step for step, _ in broken.evaluated] == [3, 6, 9, 12, 12, 12]


def test_last_step_can_be_the_best(attempts: Callable[[], Attempts]) -> None:
    run = attempts()
    result = run.train(early_stopping_patience=None, evaluate_every_steps=6)
    assert [step for step, _ in run.evaluated] == [6, 12, 18, 18]
    assert result["best_step"] == 18
    assert run.model() == run.evaluated[-1][1]


def test_value_that_is_not_finite_is_never_the_best() -> None:
    history: list[dict[str, Any]] = [
        {"step": 1, "loss": 2.0},
        *({"step": step, "eval_f1": value} for step, value in enumerate([None, 0.1])),
    ]
    best = BestEvaluation("eval_f1", patience=2)
    assert best.step(history) == 1
    later = [*history, {"step": 2, "eval_f1": math.nan}]
    assert not best.is_exhausted(later)
    assert best.is_exhausted([*later, {"step": 3, "eval_f1": 0.1}]), "an equal value is not better"
    assert best.step(history[:2]) is None


def test_evaluation_is_due_at_the_end_of_each_epoch() -> None:
    due = due_every("epoch", batch=4, epoch=10)
    assert [step for step in range(1, 11) if due(step)] == [3, 5, 8, 10]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"early_stopping_patience": 2}, "needs 'metric_for_best_model'"),
        ({"metric_for_best_model": "eval_loss"}, "set 'evaluate_every_steps'"),
        (
            {"metric_for_best_model": "eval_acuracy", "evaluate_every_steps": 5},
            "unknown metric 'eval_acuracy'; did you mean 'eval_accuracy'",
        ),
    ],
)
def test_invalid_metric_for_best_model_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        FinetuneClassification.model_validate({"model": "m", "train_data": "t.jsonl", **values})
