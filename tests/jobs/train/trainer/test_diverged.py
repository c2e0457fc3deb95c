"""A training whose weights are no finite numbers does not end as a success."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from jobs.contract.errors import TrainyardError
from jobs.contract.locations import S3Location
from jobs.train.trainer.training import _Attempt, _check_finite


def test_a_model_that_diverged_is_refused_with_the_step_where_its_loss_did() -> None:
    history = [{"step": 5, "loss": 0.7}, {"step": 10, "loss": float("nan")}, {"step": 15, "loss": float("nan")}]
    trainer = SimpleNamespace(model=torch.nn.Linear(2, 2), state=SimpleNamespace(global_step=36, log_history=history))
    _check_finite(trainer)
    torch.nn.init.constant_(trainer.model.bias, float("inf"))
    with pytest.raises(TrainyardError, match=r"after step 36 .* NaN or infinite; the first loss .* at step 10\nNext"):
        _check_finite(trainer)


def test_a_final_evaluation_that_is_no_number_is_refused_and_says_where_the_model_is() -> None:
    attempt: Any = SimpleNamespace(
        recipe=SimpleNamespace(final_evaluation=True),
        shutdown=SimpleNamespace(evaluated=lambda evaluate: evaluate()),
        task=SimpleNamespace(evaluate=lambda _: {"eval_accuracy": 0.5, "eval_loss": float("nan")}, eval_data=[1, 2]),
        rank=SimpleNamespace(run=S3Location("runs", "research/r")),
    )
    with pytest.raises(
        TrainyardError, match=r"is no finite number: eval_loss nan; the model is complete in s3://runs/"
    ):
        _Attempt._last_evaluation(attempt, None)
    attempt.task.evaluate = lambda _: {"eval_loss": 0.25}
    assert _Attempt._last_evaluation(attempt, None) == {"eval_loss": 0.25, "eval_samples": 2}
