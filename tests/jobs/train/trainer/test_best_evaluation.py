"""Evaluations at the end of epochs, the best of them, and the early stop: the same however a run was interrupted."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from pydantic import ValidationError
from transformers.utils import import_utils

from jobs.contract.locations import S3Location
from jobs.kinds.finetune_classification import FinetuneClassification
from jobs.kinds.pretrain_mlm import PretrainMlm
from jobs.train.accelerator import Accelerator
from jobs.train.channel import RankStatus, RequestFiles
from jobs.train.rank import Rank, ResumeLaterError
from jobs.train.trainer.best import BestEvaluation
from jobs.train.trainer.evaluation import stretches
from jobs.train.trainer.training import Task, train
from tests.jobs.train.trainer.test_last_evaluation import collate, tiny

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

LOSSES = {3: 0.9, 6: 0.5, 9: 0.7, 12: 0.5, 15: 0.4}
"""What an evaluation finds by its step, each the end of an epoch: after the best, two are no better, and it stops."""


class Examples:
    """Ten of two tokens in two classes: with four a step an epoch has three steps."""

    def __len__(self) -> int:
        return 10

    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        return [{"input_ids": [index % 8, 1], "labels": index % 2} for index in indices]


@dataclass
class Attempts:
    """Attempts of one run in this process."""

    rank: Rank
    s3: "S3Client"
    run: S3Location
    evaluated: list[tuple[int, bytes]] = field(default_factory=list)
    """Step and weights of each evaluation."""
    number: int = 0

    def train(self, *, interrupt_at: int | None = None, fail_at: int | None = None, **arguments: Any) -> dict[str, Any]:
        """Train, and return the result; the evaluation after a step is interrupted by its launcher, or fails."""
        self.number += 1
        rank = replace(self.rank, run=self.run, scratch=self.rank.scratch / f"{self.run.key}{self.number}")
        rank.scratch.mkdir(parents=True)

        def evaluate(trainer: Any) -> Mapping[str, float]:
            step = trainer.state.global_step
            if step == fail_at:
                raise RuntimeError("cut off")
            if step == interrupt_at:
                RequestFiles(rank.scratch).ask("stop", "SIGTERM")
                trainer.callback_handler.on_prediction_step(trainer.args, trainer.state, trainer.control)
            self.evaluated.append((step, weights(trainer.model.state_dict())))
            return {"eval_loss": LOSSES[step]}

        recipe = FinetuneClassification(
            **{
                "model": "m",
                "train_data": "t.jsonl",
                "global_batch_size": 4,
                "learning_rate": 0.01,
                "checkpoint_every_steps": 4,
                "evaluate_every_steps": "epoch",
                "metric_for_best_model": "eval_loss",
                "early_stopping_patience": 2,
                "keep_checkpoints": 1,
                "log_every_steps": 1,
                **arguments,
            }
        )
        task = Task(
            model=lambda _: tiny(),
            start="nothing",
            train_data=Examples(),
            order=lambda chance: chance.permutation(12) % 10,
            eval_data=Examples(),
            collate=collate,
            evaluate=evaluate,
            save_beside=lambda folder: None,
            schedule={"num_train_epochs": 6},
        )
        accelerator = Accelerator(name="cpu", devices=0, reason="asked for")
        train(rank, recipe, task, s3=self.s3, accelerator=accelerator)
        return dict(RankStatus.read(rank.scratch).result)

    def read(self, name: str) -> bytes:
        place = self.run / name
        return self.s3.get_object(Bucket=place.bucket, Key=place.key)["Body"].read()

    def model(self) -> bytes:
        from safetensors.torch import load

        return weights(load(self.read("model/model.safetensors")))

    def curve(self) -> list[dict[str, Any]]:
        rows = [json.loads(line) for line in self.read("metrics.jsonl").splitlines()]
        kept = [{name: row[name] for name in row if not name.endswith(("time", "second", "seconds"))} for row in rows]
        # An evaluation that is made up for stands after the other line of its step, not before.
        return sorted(kept, key=lambda row: (row["step"], sorted(row)))


def weights(state: Mapping[str, torch.Tensor]) -> bytes:
    return b"".join(state[name].numpy().tobytes() for name in sorted(state))


@pytest.fixture
def attempts(
    first_rank: Callable[[int], Rank], s3: "S3Client", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], Attempts]:
    monkeypatch.setattr(import_utils, "_datasets_available", import_utils._datasets_available)
    rank = first_rank(1)
    made: list[Attempts] = []

    def of_new_run() -> Attempts:
        for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
            monkeypatch.setenv(name, value)  # as torchrun does; a rank that is alone takes them away
        made.append(Attempts(rank, s3, S3Location("runs", f"research/{tmp_path.name}-{len(made)}/")))
        return made[-1]

    return of_new_run


def test_the_best_model_is_left_and_the_training_stops_early_however_it_was_interrupted(
    attempts: Callable[[], Attempts],
) -> None:
    # GIVEN a run that nobody interrupts, with another optimizer and schedule than the usual ones
    others: dict[str, Any] = {"optimizer": "adafactor", "lr_scheduler_type": "cosine"}
    whole = attempts()
    result = whole.train(**others)
    by_step = dict(whole.evaluated)
    assert [step for step, _ in whole.evaluated] == [3, 6, 9, 12, 12], "after the last step that of the best model"
    assert whole.evaluated[-1][1] == by_step[6] != whole.evaluated[-2][1]
    assert whole.model() == by_step[6]
    assert result["best_step"] == 6
    rates = [row["learning_rate"] for row in whole.curve() if "learning_rate" in row]
    assert len(rates) == 12
    # The Trainer's cosine after a rise over two of 18 steps; the fifth step has taken four before it
    assert rates[4] == pytest.approx(0.01 * 0.5 * (1 + math.cos(math.pi * (4 - 2) / 16)), rel=1e-6)

    # WHEN an attempt dies before its evaluation, one is stopped in the last evaluation that there is to be, and one
    # comes after it had all been done
    broken = attempts()
    with pytest.raises(RuntimeError, match="cut off"):
        broken.train(fail_at=9, **others)
    with pytest.raises(ResumeLaterError):
        broken.train(interrupt_at=12, **others)
    broken.train(**others)
    again = broken.train(**others)

    # THEN the run is the same
    assert broken.model() == whole.model()
    assert broken.curve() == whole.curve()
    assert again["best_step"] == 6
    assert [step for step, _ in broken.evaluated] == [3, 6, 9, 12, 12, 12]


def test_the_last_step_is_among_those_that_are_chosen_from(attempts: Callable[[], Attempts]) -> None:
    run = attempts()
    LOSSES[18] = 0.3
    try:
        result = run.train(early_stopping_patience=None, evaluate_every_steps=6)
    finally:
        del LOSSES[18]
    assert [step for step, _ in run.evaluated] == [6, 12, 18, 18]
    assert result["best_step"] == 18
    assert run.model() == run.evaluated[-1][1]


@pytest.mark.parametrize("optimizer", ["sgd", "rmsprop", "adagrad"])
def test_the_other_optimizers_learn_and_are_saved(optimizer: str, attempts: Callable[[], Attempts]) -> None:
    run = attempts()
    run.train(optimizer=optimizer)
    by_step = dict(run.evaluated)
    assert by_step[3] != by_step[6]
    assert run.model() == by_step[6]


def test_a_value_that_is_no_number_is_never_the_best() -> None:
    history: list[dict[str, Any]] = [
        {"step": 1, "loss": 2.0},
        *({"step": step, "eval_f1": value} for step, value in enumerate([None, 0.1])),
    ]
    best = BestEvaluation("eval_f1", patience=2)
    assert best.step(history) == 1
    later = [*history, {"step": 2, "eval_f1": math.nan}]
    assert not best.is_enough(later)
    assert best.is_enough([*later, {"step": 3, "eval_f1": 0.1}]), "an equal one is no better"
    assert best.step(history[:2]) is None


def test_an_epoch_ends_where_the_last_of_its_sequences_was_taken() -> None:
    due = stretches("epoch", batch=4, epoch=10)
    assert [step for step in range(1, 11) if due(step)] == [3, 5, 8, 10]


@pytest.mark.parametrize(
    ("kind", "values", "said"),
    [
        (FinetuneClassification, {"early_stopping_patience": 2}, "needs 'metric_for_best_model'"),
        (FinetuneClassification, {"metric_for_best_model": "eval_loss"}, "set 'evaluate_every_steps'"),
        (
            FinetuneClassification,
            {"metric_for_best_model": "eval_acuracy", "evaluate_every_steps": 5},
            "'eval_acuracy' is no metric of this job; did you mean 'eval_accuracy'",
        ),
        (
            FinetuneClassification,
            {"metric_for_best_model": "eval_combined_score", "evaluate_every_steps": 5},
            "it has eval_accuracy, eval_f1, eval_f1_micro, eval_loss",
        ),
        (PretrainMlm, {"metric_for_best_model": "eval_loss", "deepspeed_zero_stage": 1}, "without 'deepspeed_zero"),
        (FinetuneClassification, {"evaluate_every_steps": "epochs"}, "epoch"),
        (FinetuneClassification, {"optimizer": "adam"}, "adamw"),
    ],
)
def test_what_cannot_be_chosen_by_is_refused(kind: type[Any], values: dict[str, Any], said: str) -> None:
    needed = {"data": "d"} if kind is PretrainMlm else {"model": "m", "train_data": "t.jsonl"}
    with pytest.raises(ValidationError, match=said):
        kind.model_validate({**needed, **values})
