"""Trainings that fail at their end: a failing evaluation, or weights or results that are not finite."""

import io
import math
import re
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from jobs.aws import s3 as object_store
from jobs.container.channel import RankStatus
from jobs.container.rank import one_line
from jobs.container.saving.manifest import list_steps
from jobs.container.saving.metrics import StopOnNan
from jobs.container.trainer.training import _check_finite
from jobs.core.errors import TrainyardError, UsageError
from tests.support.container.attempts import Attempts

PLAIN: dict[str, Any] = {
    "evaluate_every_steps": None,
    "metric_for_best_model": None,
    "early_stopping_patience": None,
}


def test_failed_last_evaluation_leaves_a_complete_model(attempts: Callable[[], Attempts]) -> None:
    run = attempts()
    # WHEN the evaluation after the last step fails, THEN the model is on S3, and the error says how to continue
    message = r"the evaluation after the last step failed: RuntimeError: cut off; the model is complete in .*model/\n"
    with pytest.raises(
        TrainyardError, match=message + r"Next: trainyard resume RUN --set arguments\.final_evaluation="
    ):
        run.train(fail_at=18, **PLAIN)
    model = object_store.sizes(run.s3, run.run / "model")
    assert model.keys() == {"config.json", "model.safetensors", "vocab.txt"}

    # WHEN it is resumed without the evaluation, THEN the run ends with its other results
    result = run.train(final_evaluation=False, **PLAIN)
    assert RankStatus.read(run.scratch).resumed_from_step == 18
    speed = {"train_samples_per_second", "train_runtime_seconds", "train_steps_per_second"}
    assert result.keys() == {"train_loss", "epoch", *speed}
    assert not run.evaluated


def test_result_that_is_not_finite_is_refused(attempts: Callable[[], Attempts]) -> None:
    run = attempts()
    run.losses[18] = math.nan
    with pytest.raises(
        TrainyardError, match=r"has values that are not finite: eval_loss nan; the model is complete in s3://runs/"
    ):
        run.train(**PLAIN)


def test_diverged_model_is_refused_with_the_step_of_its_loss() -> None:
    history = [{"step": 5, "loss": 0.7}, {"step": 10, "loss": math.nan}, {"step": 15, "loss": math.nan}]
    trainer = SimpleNamespace(model=torch.nn.Linear(2, 2), state=SimpleNamespace(global_step=36, log_history=history))
    _check_finite(trainer)
    torch.nn.init.constant_(trainer.model.bias, math.inf)
    with pytest.raises(TrainyardError, match=r"after step 36 .* NaN or infinite; the first loss .* at step 10\nNext"):
        _check_finite(trainer)


def test_stop_on_nan_ends_the_run() -> None:
    state: Any = SimpleNamespace(global_step=8)
    StopOnNan().on_log(None, state, None, {"loss": 0.7})
    with pytest.raises(TrainyardError, match="the loss at step 8 is nan, and stop_on_nan is set\nNext: "):
        StopOnNan().on_log(None, state, None, {"loss": float("nan")})


def test_changed_arguments_are_refused_unless_allowed(
    attempts: Callable[[], Attempts], caplog: pytest.LogCaptureFixture
) -> None:
    run = attempts()
    with pytest.raises(RuntimeError, match="cut off"):
        run.train(fail_at=9)
    # An interval does not affect the result, so it may change at any time.
    changed: dict[str, Any] = {"learning_rate": 0.0001, "log_every_steps": 6}

    asked, run.rank = run.rank, replace(run.rank, allows_changes=False)
    with pytest.raises(UsageError) as refused:
        run.train(**changed)
    message = r"checkpoint step-\d of this run was made with other arguments\. Next: undo learning_rate 0.01 -> 0"
    assert re.match(message, one_line(refused.value))

    run.rank = asked
    with caplog.at_level("INFO", "trainyard"):
        run.train(**changed)
    assert any(line.endswith(", as requested: learning_rate 0.01 -> 0.0001") for line in caplog.messages)
    # A checkpoint's optimizer and scheduler contain its learning rate.
    rates = {row["step"]: row["learning_rate"] for row in run.curve() if "learning_rate" in row}
    assert rates[4] > 0.001
    assert 0 < rates[12] < 0.0001
    assert RankStatus.read(run.scratch).changed == {"learning_rate": (0.01, 0.0001)}


def test_further_training_arguments_reach_optimizer_and_schedule(attempts: Callable[[], Attempts]) -> None:
    run = attempts()
    further = {"adam_beta1": 0.8, "adam_epsilon": 0.001, "warmup_steps": 2, "lr_scheduler_kwargs": {"min_lr": 0.005}}
    further |= {"max_grad_norm": 0.01}

    run.train(training_arguments=further, lr_scheduler_type="cosine_with_min_lr", **PLAIN)

    optimizer = torch.load(io.BytesIO(run.read("checkpoints/step-18/optimizer.pt")), weights_only=True)
    [group, *_] = optimizer["param_groups"]
    assert (group["betas"], group["eps"]) == ((0.8, 0.999), 0.001)
    rates = [row["learning_rate"] for row in run.curve() if "learning_rate" in row]
    share = [0, 0.5, *(0.75 + 0.25 * math.cos(math.pi * step / 16) for step in range(16))]
    assert rates == pytest.approx([0.01 * each for each in share])


def test_each_epoch_is_saved_and_the_best_is_kept(attempts: Callable[[], Attempts]) -> None:
    run = attempts()
    run.losses[18] = 0.6
    result = run.train(checkpoint_every_steps="epoch", keep_checkpoints=10, early_stopping_patience=None)
    assert sorted(list_steps(run.s3, run.run / "checkpoints")) == [3, 6, 9, 12, 15, 18]
    assert (result["best_step"], run.model()) == (15, run.evaluated[4][1])
