"""The figures of a run: what is computed from logits, what is timed, and what a resumed run keeps."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from transformers import TrainerState

from jobs.aws import s3 as object_store
from jobs.contract.locations import S3Location
from jobs.contract.log_lines import Progress
from jobs.contract.run import METRICS, TENSORBOARD
from jobs.train.attempts import RankStatus
from jobs.train.rank import Rank
from jobs.train.trainer import metrics
from jobs.train.trainer.metrics import RunMetrics, Throughput, classification_metrics

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client


def figures(labels: list[int], predicted: list[int], *, classes: int, glue_task: str | None = None) -> dict[str, float]:
    """Of logits that give the predicted class three times the weight of any other."""
    logits = np.full((len(labels), classes), 7.0, dtype=np.float32)
    logits[np.arange(len(labels)), predicted] += math.log(3)
    return classification_metrics(logits, np.asarray(labels), glue_task=glue_task)


def test_two_classes_f1_is_that_of_class_1() -> None:
    # Class 1: two found, one missed, one false. Three predictions of five hold.
    assert figures([1, 1, 1, 0, 0], [1, 1, 0, 0, 1], classes=2) == pytest.approx(
        {
            "eval_accuracy": 3 / 5,
            "eval_f1": 2 * 2 / (2 * 2 + 1 + 1),
            "eval_majority_accuracy": 3 / 5,
            "eval_loss": -(3 * math.log(3 / 4) + 2 * math.log(1 / 4)) / 5,
        }
    )


@pytest.mark.parametrize("task", ["mrpc", "qqp"])
def test_glue_scores_paraphrases_by_the_mean_of_accuracy_and_f1(task: str) -> None:
    plain = figures([1, 1, 1, 0, 0], [1, 1, 0, 0, 1], classes=2)
    scored = figures([1, 1, 1, 0, 0], [1, 1, 0, 0, 1], classes=2, glue_task=task)
    assert scored == {**plain, "eval_combined_score": pytest.approx((3 / 5 + 2 / 3) / 2)}


@pytest.mark.parametrize(
    ("labels", "predicted", "expected"),
    [
        # (true positives x true negatives - false positives x false negatives) / sqrt of the four margins.
        ([1, 1, 1, 0, 0], [1, 1, 0, 0, 1], (2 * 1 - 1 * 1) / math.sqrt(3 * 3 * 2 * 2)),
        ([1, 0], [1, 0], 1.0),
        ([1, 0], [0, 1], -1.0),
        ([1, 0], [1, 1], 0.0),
        ([1, 1], [1, 0], 0.0),
        ([0, 0], [0, 0], 0.0),
    ],
)
def test_glue_scores_cola_by_matthews_correlation(labels: list[int], predicted: list[int], expected: float) -> None:
    scored = figures(labels, predicted, classes=2, glue_task="cola")
    assert scored["eval_matthews_correlation"] == pytest.approx(expected)


@pytest.mark.parametrize("task", ["mnli", "qnli", "rte", "sst2", "wnli"])
def test_glue_scores_the_others_by_accuracy_alone(task: str) -> None:
    assert figures([1, 0], [1, 1], classes=2, glue_task=task) == figures([1, 0], [1, 1], classes=2)


def test_more_classes_f1_is_the_mean_over_those_that_occur() -> None:
    # Class 0: 2 of 3, none false. Class 1: 1 of 2, one false. Class 2: 1 of 1, one false. Class 3: nowhere.
    assert figures([0, 0, 0, 1, 1, 2], [0, 0, 1, 1, 2, 2], classes=4) == pytest.approx(
        {
            "eval_accuracy": 4 / 6,
            "eval_f1": (4 / 5 + 2 / 4 + 2 / 3) / 3,
            "eval_majority_accuracy": 3 / 6,
            "eval_loss": -(4 * math.log(3 / 6) + 2 * math.log(1 / 6)) / 6,
        }
    )


def test_a_class_that_is_only_predicted_counts_as_zero_in_the_mean() -> None:
    assert figures([0, 0], [0, 2], classes=3)["eval_f1"] == pytest.approx((2 / 3 + 0) / 2)


def test_f1_is_zero_where_class_1_is_neither_there_nor_predicted() -> None:
    assert figures([0, 0], [0, 0], classes=2)["eval_f1"] == 0


def test_cross_entropy_of_large_logits_is_finite() -> None:
    logits = np.asarray([[1000.0, -1000.0], [-1000.0, 1000.0]], dtype=np.float32)
    assert classification_metrics(logits, np.asarray([1, 1]))["eval_loss"] == pytest.approx(1000)


def rank_of(number: int, scratch: Path, run: S3Location) -> Rank:
    return Rank(
        rank=number, local_rank=number, world_size=2, local_world_size=2, node=0, nnodes=1, run=run, scratch=scratch
    )


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """A clock that stands until the test moves `now`."""
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(metrics, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


@pytest.mark.parametrize(
    ("earlier", "expected", "samples_per_second"),
    [
        (Throughput(), Throughput(train_seconds=19, timed_seconds=4, timed_samples=48), 12),
        (
            Throughput(train_seconds=30, timed_seconds=20, timed_samples=96),
            Throughput(train_seconds=49, timed_seconds=24, timed_samples=144),
            6,
        ),
    ],
    ids=["first attempt", "resumed"],
)
def test_throughput_leaves_out_the_warm_up_steps_of_each_attempt(
    earlier: Throughput, expected: Throughput, samples_per_second: float, clock: Any, tmp_path: Path
) -> None:
    watched = RunMetrics(
        rank_of(1, tmp_path, S3Location("runs", "team/run/")),
        None,
        resumed_from_step=20,
        throughput=earlier,
        samples_per_step=16,
        warmup_steps=2,
    )
    clock.now += 500  # loading the model is no step
    watched.on_train_begin(None, TrainerState(max_steps=30), None)
    for step, seconds in enumerate((10, 5, 1, 1, 2), start=21):
        clock.now += seconds
        watched.on_step_end(None, TrainerState(global_step=step, max_steps=30), None)
    assert watched.throughput == expected
    assert watched.throughput.samples_per_second == samples_per_second


def test_nothing_was_timed_when_only_warm_up_steps_ran() -> None:
    assert Throughput(train_seconds=9).samples_per_second == 0


def test_a_resumed_run_keeps_the_lines_up_to_its_checkpoint_and_goes_on_from_there(
    s3: "S3Client", tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = S3Location("runs", f"research/{tmp_path.name}/")
    earlier = [{"step": step, "loss": 1 / step, "time": "2026-01-02T03:04:05.000+00:00"} for step in (4, 8, 12, 16)]
    # An attempt that was ended after its last line is followed by one that writes that line again.
    result = {"step": 8, "eval_accuracy": 0.5, "train_runtime_seconds": 7.0}
    left = [*earlier[:2], result, *earlier[2:]]
    object_store.write(s3, run / METRICS, "".join(f"{json.dumps(line)}\n" for line in left).encode())

    watched = RunMetrics(
        rank_of(0, tmp_path, run),
        s3,
        resumed_from_step=8,
        throughput=Throughput(timed_seconds=2, timed_samples=64),
        samples_per_step=16,
        warmup_steps=0,
    )
    state = TrainerState(global_step=12, max_steps=20, epoch=1.5)
    watched.on_log(None, state, None, {"loss": 0.5, "grad_norm": float("nan"), "learning_rate": 1e-4})
    watched.on_log(None, state, None, {"train_runtime": 7.0})  # the Trainer's closing summary is no measurement
    watched.result(12, {"eval_accuracy": 0.75, "eval_samples": 37})
    watched.close()

    content = object_store.read(s3, run / METRICS)
    assert content is not None
    # The file is JSON, which has no NaN.
    lines = [json.loads(line, parse_constant=pytest.fail) for line in content.splitlines()]
    assert lines[:2] == earlier[:2]
    assert [line.pop("step") for line in lines[2:]] == [12, 12]
    assert all(line.pop("time") > earlier[0]["time"] for line in lines[2:])
    assert lines[2:] == [
        {"epoch": 1.5, "loss": 0.5, "grad_norm": None, "learning_rate": 1e-4, "samples_per_second": 32.0},
        {"eval_accuracy": 0.75, "eval_samples": 37},
    ]
    assert [name for name in object_store.sizes(s3, run) if name.startswith(TENSORBOARD)]
    (shown,) = map(Progress.parse, capsys.readouterr().out.splitlines())
    assert shown == Progress(12, 20, "loss 0.500, 32.0 samples/s, 4 s left")
    status = RankStatus.read(tmp_path)
    assert (status.resumed_from_step, status.result) == (8, {"eval_accuracy": 0.75, "eval_samples": 37})
