"""The metrics of scripts that do not use the library: from their files and their log, over attempts."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import ValidationError
from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from jobs.container.channel import read_collected
from jobs.container.script.metrics import ScriptMetrics
from jobs.core.locations import S3Location
from jobs.core.run import METRICS
from jobs.spec.kinds.script import Script
from tests.support.container.launching import Run
from tests.support.container.scripts import script_flags, write_files

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

COUNTS = """
import json, os, sys
from pathlib import Path

output = Path(sys.argv[1])
folder = Path(os.environ["TRAINYARD_CHECKPOINTS"])
begin = max((int(path.name[5:]) for path in folder.glob("step-*")), default=0)
for step in range(begin + 1, 7):
    loss = 10 / step + begin
    print(f"iter {step}: train loss {loss:.3f}, time 3.1ms", flush=True)
    with (output / "log.jsonl").open("a") as file:
        print(json.dumps({"step": step, "scores": {"f1": step / 10}, "text": "a"}), file=file)
    if step == 3:
        (folder / "part.tmp").write_text("")
        (folder / "part.tmp").rename(folder / "step-3")
    if step == 5 and not begin:
        raise SystemExit(1)
(output / "all_results.json").write_text(json.dumps({"epoch": 1.0, "eval_accuracy": 0.75, "train_runtime": 2.5}))
Path("out").mkdir(exist_ok=True)
Path("out/eval_results.json").write_text(json.dumps({"eval_f1": 0.5}))
(output / "predictions.jsonl").write_text(json.dumps({"label": 1, "confidence": 0.5}) + "\\n")
"""


def test_files_and_log_of_all_attempts_make_one_curve(run: Run, s3: "S3Client", tmp_path: Path) -> None:
    code = write_files(tmp_path / "code", {"train.py": COUNTS})
    patterns = {"loss": r"train loss ([\d.]+)", "never": "absent=(.*)"}
    flags = script_flags(s3, code, "train.py {output}", metrics=patterns, keep=["out"])
    # GIVEN an attempt that fails at step 5, after a checkpoint of step 3
    run.attempt(*flags, attempt=1, kind="script", expect=1)
    assert [line["step"] for line in run.metrics() if "loss" in line] == [1, 2, 3, 4, 5]
    # WHEN the next attempt resumes there
    last = run.attempt(*flags, attempt=2, kind="script")
    # THEN its values replace those of the steps that it repeats
    lines = run.metrics()
    assert [(line["step"], line["loss"]) for line in lines if "loss" in line] == [
        (1, 10.0),
        (2, 5.0),
        (3, 3.333),
        (4, 5.5),
        (5, 5.0),
        (6, 4.667),
    ]
    assert [(line["step"], line["scores_f1"]) for line in lines if "scores_f1" in line] == [
        (step, step / 10) for step in range(1, 7)
    ]
    assert sorted(line["time"] for line in lines) == [line["time"] for line in lines]
    result = {"loss": 4.667, "scores_f1": 0.6, "eval_accuracy": 0.75, "train_runtime": 2.5, "eval_f1": 0.5}
    assert run.receipt().result == result
    assert (
        "warning: no log line of rank 0 matches the pattern of never. Next: correct arguments.metrics\n" in last.lines
    )


REPORTS = """
import json, os
from pathlib import Path
import trainyard

print("loss 3.5", flush=True)
Path(os.environ["TRAINYARD_OUTPUT"], "all_results.json").write_text(json.dumps({"eval_accuracy": 0.5, "eval_f1": 0.1}))
trainyard.result(eval_accuracy=0.75)
if os.environ.get("TRAINS"):
    with trainyard.Run(total_steps=1) as loop:
        loop.step(1)
        loop.log(1, loss=0.25)
"""


@pytest.mark.parametrize("trains", ["", "1"])
def test_the_library_wins(run: Run, s3: "S3Client", tmp_path: Path, trains: str) -> None:
    code = write_files(tmp_path / "code", {"train.py": REPORTS})
    flags = script_flags(s3, code, "train.py", metrics={"loss": "loss ([0-9.]+)"})
    run.attempt(*flags, attempt=1, kind="script", script_ranks="forked", TRAINS=trains)
    result = run.receipt().result
    assert result["eval_accuracy"] == 0.75
    if trains:
        assert [line["loss"] for line in run.metrics()] == [0.25, 0.25], "that of the step and the result"
        assert result["loss"] == 0.25
        assert "eval_f1" not in result
    else:
        assert [(line["step"], line["numbered"], line["loss"]) for line in run.metrics()] == [(1, True, 3.5)]
        assert result == {"loss": 3.5, "eval_accuracy": 0.75, "eval_f1": 0.1}


class Collected:
    """The collected metrics of one attempt, without a launcher."""

    def __init__(self, s3: "S3Client", folder: Path, *, attempt: int = 1, **patterns: str) -> None:
        self.output = folder / "output"
        self.output.mkdir(exist_ok=True)
        self._s3, self._scratch = s3, folder / f"scratch-{attempt}"
        self._scratch.mkdir()
        self._run = S3Location("runs", f"research/{folder.name}/")
        self.metrics = ScriptMetrics(
            s3, self._run, self._scratch, folders=[self.output], patterns=patterns, attempt=None
        )
        self.metrics.restored()

    def lines(self) -> Iterator[dict[str, Any]]:
        self.metrics.look(upload_now=True)
        place = self._run / METRICS
        content = self._s3.get_object(Bucket=place.bucket, Key=place.key)["Body"].read()
        return (json.loads(line) for line in content.splitlines())

    def curve(self, name: str) -> list[tuple[int, float]]:
        return [(line["step"], line[name]) for line in self.lines() if name in line]

    @property
    def result(self) -> dict[str, Any]:
        return read_collected(self._scratch)


def events(folder: Path, **values: dict[int, float]) -> None:
    """Write an event file, with an image between the values and a cut-off event at its end."""
    writer = EventFileWriter(str(folder))
    for name, by_step in values.items():
        for step, value in by_step.items():
            scalar = summary_pb2.Summary.Value(tag=name.replace("__", "/"), simple_value=value)
            image = summary_pb2.Summary.Value(
                tag="image", image=summary_pb2.Summary.Image(encoded_image_string=b"x" * 200_000)
            )
            for each in (image, scalar):
                event = event_pb2.Event(wall_time=1e9 + step, step=step, summary=summary_pb2.Summary(value=[each]))
                writer.add_event(event)
    writer.close()
    (path,) = folder.glob("*.tfevents.*")
    with path.open("ab") as file:
        file.write(b"\x10\0\0\0\0\0\0\0\0\0")


def test_events_of_tensorboard(s3: "S3Client", tmp_path: Path) -> None:
    collected = Collected(s3, tmp_path)
    events(collected.output / "runs/train", train__loss={1: 3.0, 2: float("nan")}, eval__f1={2: 0.5}, Epoch={1: 7.0})
    events(collected.output / "runs/validation", Epoch={1: 8.0})
    assert collected.curve("loss") == [(1, 3.0), (2, None)]
    assert collected.curve("eval_f1") == [(2, 0.5)]
    assert collected.curve("validation_Epoch") == [(1, 8.0)]
    assert next(collected.lines())["time"] == "2001-09-09T01:46:41.000+00:00"
    assert collected.result["loss"] is None


def state(folder: Path, *history: dict[str, float]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "trainer_state.json").write_text(json.dumps({"log_history": history}))


def test_a_trainer_that_reports_nowhere(s3: "S3Client", tmp_path: Path) -> None:
    first = Collected(s3, tmp_path)
    # GIVEN printed lines, numbered until a checkpoint has the steps of their epochs
    for epoch in ("0.25", "0.5"):
        first.metrics.add_line(f"{{'loss': '{epoch}', 'learning_rate': '1e-05', 'epoch': '{epoch}'}}")
    assert first.curve("loss") == [(1, 0.25), (2, 0.5)]
    logged = [line["time"] for line in first.lines()]
    time.sleep(0.01)
    state(first.output / "checkpoint-20", *({"loss": at, "epoch": at, "step": round(40 * at)} for at in (0.25, 0.5)))
    first.metrics.add_line("{'loss': '0.75', 'epoch': '0.75'}")
    assert first.curve("loss") == [(10, 0.25), (20, 0.5), (30, 0.75)]
    assert [line["time"] for line in first.lines()][:2] == logged, "the times of the log"
    assert not any("numbered" in line for line in first.lines())
    # WHEN the next attempt resumes at step 20 and repeats step 30
    second = Collected(s3, tmp_path, attempt=2)
    history = [{"loss": at, "epoch": at, "step": round(40 * at)} for at in (0.25, 0.5)]
    history += [{"loss": 0.7, "epoch": 0.75, "step": 30}, {"train_runtime": 9.0, "train_loss": 0.6, "step": 30}]
    state(second.output / "checkpoint-30", *history)
    second.metrics.add_line("{'eval_loss': '0.4', 'eval_runtime': '2', 'epoch': '0.75'}")
    second.metrics.add_line("{'seed': 1, 'rate': 0.5}")
    second.metrics.add_line("{'accuracy': np.float64(0.25)}")
    # THEN its values replace the others, and the log only adds what no file has
    assert second.curve("loss") == [(10, 0.25), (20, 0.5), (30, 0.7)]
    assert [line["time"] for line in second.lines()][:2] == logged
    assert second.curve("eval_loss") == [(30, 0.4)]
    whole = {"train_runtime": 9.0, "train_loss": 0.6, "eval_runtime": 2}
    assert second.result == {"loss": 0.7, "eval_loss": 0.4, "accuracy": 0.25, **whole}


def test_patterns_with_steps_and_without_end(s3: "S3Client", tmp_path: Path) -> None:
    collected = Collected(s3, tmp_path, step=r"Epoch: (\d+)", loss=r"loss=([\d.]+)", slow="(?:a|aa)+b(c)")
    for line in ("Epoch: 3, loss=0.5.", "loss=0.25", "a" * 500, "Epoch: 4 loss=0.125"):
        collected.metrics.add_line(line)
    started = time.monotonic()
    assert collected.curve("loss") == [(3, 0.25), (4, 0.125)]
    assert time.monotonic() - started < 60, "a pattern that would take years is given up"


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ({"loss": "loss ("}, "is not a regular expression"),
        ({"loss": "loss"}, "has 0 groups"),
        ({"loss": "(a)(b)"}, "has 2 groups"),
        ({"loss": r"(?:\d+)+ (x)"}, "repeats a group"),
        ({"my loss": "(a)"}, "is not a valid metric name"),
        ({"step": "(a)"}, "only 'step' is given"),
    ],
)
def test_useless_patterns_are_refused(metrics: dict[str, str], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Script(code=".", command="train.py", metrics=metrics)
