"""A run's metrics: what is timed, and what a resumed run keeps."""

import json
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import Trainer, TrainerState, TrainingArguments

from jobs.aws import s3 as object_store
from jobs.container.accelerator import Accelerator
from jobs.container.channel import RankStatus
from jobs.container.rank import Rank
from jobs.container.saving import metrics
from jobs.container.saving.manifest import Throughput
from jobs.container.trainer import heartbeat
from jobs.container.trainer.arguments import training_arguments
from jobs.container.trainer.trainer import Options, trainer_class
from jobs.core.locations import S3Location
from jobs.core.output import Progress
from jobs.core.run import METRICS, TENSORBOARD
from jobs.core.words import time_left
from jobs.spec.kinds.pretrain_mlm import PretrainMlm
from tests.support.container.attempts import metrics_of

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client


def rank_of(number: int, scratch: Path, run: S3Location) -> Rank:
    return Rank(
        rank=number, local_rank=number, world_size=2, local_world_size=2, node=0, nnodes=1, run=run, scratch=scratch
    )


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """A clock that changes only when the test sets `now`."""
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
def test_throughput_excludes_each_attempts_warm_up_steps(
    earlier: Throughput, expected: Throughput, samples_per_second: float, clock: Any, tmp_path: Path
) -> None:
    rank = rank_of(1, tmp_path, S3Location("runs", "team/run/"))
    watched = metrics_of(rank, resumed_from_step=20, throughput=earlier, samples_per_step=16, warmup_steps=2)
    clock.now += 500  # loading the model does not count as a step
    watched.on_train_begin(None, TrainerState(max_steps=30), None)
    for step, seconds in enumerate((10, 5, 1, 1, 2), start=21):
        clock.now += seconds
        watched.on_step_end(None, TrainerState(global_step=step, max_steps=30), None)
    assert watched.throughput == expected
    assert watched.throughput.samples_per_second == samples_per_second


def test_throughput_excludes_compilation_of_each_width(clock: Any, tmp_path: Path) -> None:
    """Three widths take turns, and the first two steps of each wait for a graph."""
    rank = rank_of(0, tmp_path, S3Location("runs", "team/run/"))
    heartbeats = heartbeat.Heartbeats(rank, compiles=True)
    watched = metrics_of(rank, samples_per_step=16, warmup_steps=2, shape=lambda: heartbeats.training_shape)
    watched.on_train_begin(None, TrainerState(max_steps=30), None)
    taken: Counter[int] = Counter()
    for step, width in enumerate((64, 64, 64, 96, 64, 128, 96, 128, 128, 96, 64), start=1):
        taken[width] += 1
        heartbeats.batch("training", {"input_ids": torch.zeros(16, width)})
        heartbeats.batch("evaluating", {"input_ids": torch.zeros(8, width)})  # evaluations have different shapes
        clock.now += 25 if taken[width] <= 2 else 2
        watched.on_step_end(None, TrainerState(global_step=step, max_steps=30), None)
    assert watched.throughput == Throughput(train_seconds=6 * 25 + 5 * 2, timed_seconds=5 * 2, timed_samples=5 * 16)
    assert watched.throughput.samples_per_second == 8
    watched.on_train_end(None, TrainerState(global_step=11, max_steps=30), None)
    # Each of the six steps took 25 seconds, of which a normal step takes 2.
    assert RankStatus.read(tmp_path).compiling_seconds == 6 * 23


def test_resumed_run_keeps_metrics_up_to_its_checkpoint(
    s3: "S3Client", clock: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = S3Location("runs", f"research/{tmp_path.name}/")
    earlier = [{"step": step, "loss": 1 / step, "time": "2026-01-02T03:04:05.000+00:00"} for step in (4, 8, 12, 16)]
    # An attempt that ended after its last line is followed by one that writes that line again.
    result = {"step": 8, "eval_accuracy": 0.5, "train_runtime_seconds": 7.0}
    left = [*earlier[:2], result, *earlier[2:]]
    object_store.write(s3, run / METRICS, "".join(f"{json.dumps(line)}\n" for line in left).encode())

    throughput = Throughput(timed_seconds=2, timed_samples=64)
    watched = metrics_of(rank_of(0, tmp_path, run), s3, resumed_from_step=8, throughput=throughput)
    clock.now += 4
    state = TrainerState(global_step=12, max_steps=20, epoch=1.5)
    memory = {"memory_allocated (GB)": 2.5, "max_memory_allocated (GB)": 4.0, "total_memory_available (GB)": 31.5}
    watched.on_log(None, state, None, {"loss": 0.5, "grad_norm": float("nan"), "learning_rate": 1e-4, **memory})
    watched.on_log(None, state, None, {"train_runtime": 7.0})  # the Trainer's final summary is not a metric
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
        {
            "epoch": 1.5,
            "loss": 0.5,
            "grad_norm": None,
            "learning_rate": 1e-4,
            "samples_per_second": 32.0,
            "memory_gib": 2.5,
            "max_memory_gib": 4.0,
            "total_memory_gib": 31.5,
        },
        {"eval_accuracy": 0.75, "eval_samples": 37},
    ]
    [events] = [name for name in object_store.sizes(s3, run) if name.startswith(TENSORBOARD)]
    (tmp_path / "events.tfevents").write_bytes(object_store.read(s3, run / events) or b"")
    found = EventAccumulator(str(tmp_path / "events.tfevents"))
    found.Reload()
    assert {"train/loss", "train/learning_rate", "eval/accuracy"} <= set(found.Tags()["scalars"])
    (shown,) = map(Progress.parse, capsys.readouterr().out.splitlines())
    assert shown == Progress(12, 20, "loss 0.500, 32.0 samples/s, 8 s left")
    status = RankStatus.read(tmp_path)
    assert (status.resumed_from_step, status.result) == (8, {"eval_accuracy": 0.75, "eval_samples": 37})


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "0 s"),
        (59.6, "1 min"),
        (3_599, "1:00 h"),
        (7_530, "2:06 h"),
    ],
)
def test_time_left_is_shown_in_hours_and_minutes(seconds: float, text: str) -> None:
    assert time_left(seconds) == text


def test_card_memory_is_a_metric_if_the_trainer_logs_none(
    s3: "S3Client", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, size in {
        "memory_allocated": 3 << 29,
        "max_memory_allocated": 3 << 30,
        "mem_get_info": (0, 80 << 30),
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda size=size: size)
    run = S3Location("runs", f"research/{tmp_path.name}/")
    card = Accelerator(name="cuda", devices=1, reason="a test")
    watched = metrics_of(rank_of(0, tmp_path, run), s3, memory=card.memory)
    watched.on_log(None, TrainerState(global_step=1, max_steps=2, epoch=1.0), None, {"loss": 0.5})
    watched.logged(2, {"loss": 0.25}, total_steps=2)  # logged by a script's own loop
    watched.close()
    lines = [json.loads(line) for line in (object_store.read(s3, run / METRICS) or b"").splitlines()]
    memory = {"memory_gib": 1.5, "max_memory_gib": 3.0, "total_memory_gib": 80.0}
    assert [{name: line.get(name) for name in memory} for line in lines] == [memory, memory]
    assert Accelerator(name="cpu", devices=0, reason="a test").memory() == {}


def test_attempt_reads_metrics_of_earlier_attempts(s3: "S3Client", tmp_path: Path) -> None:
    run = S3Location("runs", f"research/{tmp_path.name}/")
    lines: list[dict[str, Any]] = [
        {"step": 2, "loss": 0.5, "accuracy": 0.1, "samples_per_second": 3.0},
        {"step": 2, "eval_loss": 0.4, "epoch": 1.0},
        {"step": 4, "eval_loss": None, "epoch": 2.0},
        {"step": 4, "loss": 0.25, "samples_per_second": 3.0},
        {"step": 6, "loss": 0.125, "eval_loss": 0.1},
    ]
    object_store.write(s3, run / METRICS, "".join(f"{json.dumps(line)}\n" for line in lines).encode())
    watched = metrics_of(rank_of(0, tmp_path, run), s3, resumed_from_step=4)
    # A repeated evaluation with the same result adds no line
    for found in (math.nan, 0.5):
        watched.evaluated(4, {"eval_loss": found, "epoch": 2.0, "eval_runtime": 3.0})
    watched.close()
    left = [json.loads(line) for line in (object_store.read(s3, run / METRICS) or b"").splitlines()]
    assert [line["eval_loss"] for line in left if "eval_loss" in line] == [0.4, None, 0.5]
    assert watched.evaluated_before() == {"eval_loss": pytest.approx(math.nan, nan_ok=True), "epoch": 2.0}
    logged = watched.logged_before()
    assert (logged["loss"], logged["accuracy"], logged.keys() & {"step", "samples_per_second"}) == (0.25, 0.1, set())


class OneBadLoss(torch.nn.Module):
    """A model whose second loss is NaN although its gradients are finite."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.steps = 0

    def forward(self, value: torch.Tensor) -> dict[str, torch.Tensor]:
        self.steps += 1
        loss = 1 + (self.weight * value).mean()
        return {"loss": loss + math.nan if self.steps == 2 else loss}


def test_nan_loss_is_logged_and_does_not_spoil_later_lines(tmp_path: Path) -> None:
    recipe = PretrainMlm(data="run://tokens", log_every_steps=1, global_batch_size=2, learning_rate=1e-4)
    given = training_arguments(recipe, rank_of(0, tmp_path, S3Location("runs", "research/run/")))
    trainer = trainer_class(Trainer)(
        model=OneBadLoss(),
        args=TrainingArguments(**given, max_steps=4, use_cpu=True),
        train_dataset=[{"value": torch.ones(1)}] * 4,
        options=Options(),
    )
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert [math.isnan(loss) for loss in losses] == [False, True, False, False]
    assert losses[2:] == [pytest.approx(1, abs=1e-2)] * 2
