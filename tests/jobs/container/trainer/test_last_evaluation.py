"""Trainings whose end is none: the last evaluation fails, or weights or results are no finite numbers."""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from jobs.aws import s3 as object_store
from jobs.container.channel import RankStatus
from jobs.container.saving.metrics import StopOnNan
from jobs.container.trainer.training import _check_finite
from jobs.core.errors import TrainyardError
from tests.support.container.attempts import Attempts

PLAIN: dict[str, Any] = {
    "evaluate_every_steps": None,
    "metric_for_best_model": None,
    "early_stopping_patience": None,
}


def test_a_run_whose_last_evaluation_fails_has_its_model_and_can_be_ended(attempts: Callable[[], Attempts]) -> None:
    run = attempts()
    # WHEN the evaluation after the last step fails, THEN the model is on S3 before, and the error says how to continue
    said = r"the evaluation after the last step failed: RuntimeError: cut off; the model is complete in .*model/\n"
    with pytest.raises(TrainyardError, match=said + r"Next: trainyard resume RUN --set arguments\.final_evaluation="):
        run.train(fail_at=18, **PLAIN)
    model = object_store.sizes(run.s3, run.run / "model")
    assert model.keys() == {"config.json", "model.safetensors", "vocab.txt"}

    # WHEN it is resumed without it, THEN the run ends, with the result that there is
    result = run.train(final_evaluation=False, **PLAIN)
    assert RankStatus.read(run.scratch).resumed_from_step == 18
    assert result.keys() == {"train_samples_per_second", "train_runtime_seconds"}
    assert not run.evaluated


def test_a_result_that_is_no_number_is_refused_and_says_where_the_model_is(attempts: Callable[[], Attempts]) -> None:
    run = attempts()
    run.losses[18] = math.nan
    with pytest.raises(
        TrainyardError, match=r"is no finite number: eval_loss nan; the model is complete in s3://runs/"
    ):
        run.train(**PLAIN)


def test_a_model_that_diverged_is_refused_with_the_step_where_its_loss_did() -> None:
    history = [{"step": 5, "loss": 0.7}, {"step": 10, "loss": math.nan}, {"step": 15, "loss": math.nan}]
    trainer = SimpleNamespace(model=torch.nn.Linear(2, 2), state=SimpleNamespace(global_step=36, log_history=history))
    _check_finite(trainer)
    torch.nn.init.constant_(trainer.model.bias, math.inf)
    with pytest.raises(TrainyardError, match=r"after step 36 .* NaN or infinite; the first loss .* at step 10\nNext"):
        _check_finite(trainer)


def test_a_loss_that_is_no_number_ends_a_run_that_asks_for_it() -> None:
    state: Any = SimpleNamespace(global_step=8)
    StopOnNan().on_log(None, state, None, {"loss": 0.7})
    with pytest.raises(TrainyardError, match="the loss at step 8 is nan, and stop_on_nan is set\nNext: "):
        StopOnNan().on_log(None, state, None, {"loss": float("nan")})
