"""The figures of a run: what is timed, and what a resumed run keeps."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from transformers import TrainerState

from jobs.aws import s3 as object_store
from jobs.contract.locations import S3Location
from jobs.contract.log_lines import Progress
from jobs.contract.run import METRICS, TENSORBOARD
from jobs.train.channel import RankStatus
from jobs.train.rank import Rank
from jobs.train.trainer import metrics
from jobs.train.trainer.metrics import MetricsFiles, RunMetrics, Throughput

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client


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


def test_lines_that_cannot_be_read_are_left_out_with_a_warning(
    s3: "S3Client", tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = S3Location("runs", f"research/{tmp_path.name}/")
    sound = [b'{"step": 4, "loss": 0.5}', b'{"step": 8, "eval_loss": 0.25}']
    odd = [b'{"step": 5, "lo', b"", b"\xff", b"[]", b"7", b"{}", b'{"step": null}', b'{"step": NaN}', b"[" * 100_000]
    object_store.write(s3, run / METRICS, b"\n".join([sound[0], *odd, sound[1]]))
    files = MetricsFiles(rank_of(0, tmp_path, run), s3, 8)
    files.close()
    assert object_store.read(s3, run / METRICS) == b"".join(line + b"\n" for line in sound)
    assert files.evaluated_steps == {8}
    assert caplog.messages == [
        f"warning: {run}metrics.jsonl: 9 line(s) cannot be read and are left out, the first is line 2"
    ]
