"""Hand-written records of runs, in the format that trainings in these tests write."""

import json
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from typing import Any

import yaml

from jobs.container.launcher.accounting import receipt
from jobs.core.instance_types import instance_type
from jobs.core.locations import S3Location
from jobs.core.output import MEMORY_KEY, UTILIZATION_KEY
from jobs.core.records import IMAGE_DIGEST, Attempt
from jobs.core.run import INPUTS
from jobs.data_checks.classes import ClassReport, ClassScore, Mistake
from jobs.data_checks.data_summary import ClassCount, DataSummary
from jobs.runs.job import Job
from jobs.runs.recorded_run import Checkpoint, RecordedRun
from jobs.spec.code import CODE_RECORD, CodeRecord
from jobs.spec.spec import parse_spec

BEGIN = datetime(2026, 11, 1, 12, 0, 5, tzinfo=timezone.utc)
DIGEST = f"sha256:{'5a' * 32}"
CLASSES = ("alarm", "music", "weather", "news & more", "<b>calendar</b>")


def job_of(run_id: str, **values: Any) -> Job:
    """Return a job on Spot that was submitted at `BEGIN`; if `state` is an end state, it ended hours later."""
    given: dict[str, Any] = {
        "state": "RUNNING",
        "attempts": (),
        "log_streams": (),
        "max_attempts": 3,
        "created_at": BEGIN,
        "started_at": None,
        "stopped_at": BEGIN + timedelta(hours=3) if values.get("state") == "SUCCEEDED" else None,
        **values,
    }
    return Job(id="7c1e", run_id=run_id, reason="", queue="spot", team="research", kind="script", moved="", **given)


def three_attempts(
    lines: int = 10_000,
    *,
    run_id: str = "massive-20261101-120000-00ab",
    learning_rate: float = 3e-5,
    end: str = "succeeded",
    accuracy: float = 0.874,
) -> RecordedRun:
    """Return a fine-tuning on DL1 with `lines` lines of metrics. It was reclaimed, then killed, and then ended.

    `end` is `succeeded`, or `running` if the third attempt is still running.
    """
    chance = random.Random(run_id)
    cuts = (0, int(lines * 0.45), int(lines * 0.8), lines)
    metrics: list[dict[str, Any]] = []
    attempts: list[Attempt] = []
    at = BEGIN
    for number in (1, 2, 3):
        started_at, at = at, at + timedelta(seconds=48)
        training_at = at
        for line in range(cuts[number - 1], cuts[number]):
            at += timedelta(seconds=0.55)
            loss = 4.1 * math.exp(-3 * line / lines) + 0.12 + chance.random() * 0.12
            values = {
                "loss": loss,
                "grad_norm": 1 + chance.random(),
                "learning_rate": learning_rate * _slope(line, lines),
            }
            step = 10 * (line + 1)
            metrics.append({"step": step, "time": at, **values, "samples_per_second": 900 + 15 * chance.random()})
            if (line + 1) % max(1, lines // 8) == 0:
                share = accuracy * (1 - math.exp(-4 * line / lines))
                metrics.append(
                    {"step": step, "time": at, "eval_accuracy": share, "eval_f1": share - 0.02, "eval_loss": loss + 0.1}
                )
        last_step = 10 * cuts[number]
        again = number == 2  # killed after more steps than its newest checkpoint has
        finished = at + timedelta(seconds=1 if not again else 70)
        endings: dict[int, dict[str, Any]] = {
            1: {
                "finished_at": finished,
                "exit_code": 75,
                "reason": f"Spot notice: terminate at 12:45:00Z; saved step {last_step}",
            },
            2: {},
            3: {"finished_at": finished, "exit_code": 0} if end == "succeeded" else {},
        }
        attempts.append(
            Attempt(
                number=number,
                started_at=started_at,
                last_seen_at=finished,
                instance_type="dl1.24xlarge",
                capacity="spot",
                accelerator="hpu",
                nnodes=1,
                world_size=8,
                ran_with={
                    "image": "trainyard/gaudi:1.21.0-0123456789ab",
                    IMAGE_DIGEST: DIGEST,
                    "python": "3.10.12",
                    "torch": "2.6.0",
                },
                training_started_at=training_at,
                resumed_from_step=10 * cuts[number - 1],
                last_step=last_step + (1200 if again else 0),
                **endings[number],
            )
        )
        at = finished + timedelta(minutes=6)
    result = {
        "eval_accuracy": accuracy,
        "eval_majority_accuracy": 0.07,
        "eval_f1": accuracy - 0.02,
        "eval_loss": 0.41,
        "eval_samples": 2033,
        "train_samples_per_second": 907.3,
    }
    found = _run(run_id, attempts, metrics, result=result if end == "succeeded" else {}, learning_rate=learning_rate)
    return replace(found, utilization=_minutes(attempts, chance))


def _minutes(attempts: Sequence[Attempt], chance: random.Random) -> list[dict[str, Any]]:
    """Return one line per minute of card utilization: low before an attempt's first step, then high."""
    found = []
    for attempt in attempts:
        seconds = (attempt.last_seen_at - attempt.started_at).total_seconds()
        for minute in range(int((seconds - 10) // 60) + 1):
            busy = 85 + 10 * chance.random() if minute else 4.0
            at = attempt.started_at + timedelta(minutes=minute, seconds=10)
            found.append({"time": at, UTILIZATION_KEY: busy, MEMORY_KEY: 61.0 if minute else 2.0, "idle_seconds": 0.0})
    return found


def _slope(line: int, lines: int) -> float:
    warmup = lines * 0.1
    return line / warmup if line < warmup else 1 - (line - warmup) / (lines - warmup)


def _run(
    run_id: str,
    attempts: Sequence[Attempt],
    metrics: list[dict[str, Any]],
    *,
    result: dict[str, Any],
    learning_rate: float,
) -> RecordedRun:
    location = S3Location("runs", f"research/{run_id}/")
    spec = {
        "name": run_id[:-21],
        "job": "finetune-classification",
        "team": "research",
        "arguments": {
            "model": "hf://FacebookAI/xlm-roberta-large",
            "train_data": "s3://data/shared/massive/train.jsonl",
            "learning_rate": learning_rate,
            "epochs": 5.0,
        },
    }
    bill = receipt(
        location,
        list(attempts),
        job="finetune-classification",
        instance=instance_type("dl1.24xlarge"),
        state="succeeded" if result else "running",
        result=result,
        on_instance=True,
    )
    return RecordedRun(
        run_id=run_id,
        team="research",
        location=str(location),
        spec_text=yaml.safe_dump(spec, sort_keys=False),
        spec=parse_spec(spec, origin="the test"),
        receipt=bill,
        metrics=metrics,
        checkpoints=[
            Checkpoint(step=line["step"], at=line["time"])
            for line in metrics[len(metrics) // 2 :: max(1, len(metrics) // 4)]
        ],
        classes=class_report() if result else None,
        data=DataSummary(
            training=11514,
            held_out=2033,
            classes=[ClassCount(name=name, training=20) for name in CLASSES],
            fingerprints={"s3://data/shared/massive/train.jsonl": "0f1e2d3c"},
            repeated=3,
        ),
        code=CodeRecord(
            fingerprint="ab12", location="s3://c", folder="/home/me", files=2, bytes=9, commit="c0ffee" * 6
        ),
    )


def with_samples(run: RecordedRun) -> RecordedRun:
    """Return the run with generations of a language model."""
    generation = {"prompt": "What is <b>tar</b>?", "base": "tar tar tar", "tuned": "It packs files into one."}
    return replace(run, generations=[generation, {"prompt": "And zip?", "tuned": "It too."}])


def class_report(names: Sequence[str] = CLASSES) -> ClassReport:
    """Return a report in which each class is predicted correctly nine times out of ten, otherwise as the next class."""
    confusion = [
        [18 if column == row else 2 if column == (row + 1) % len(names) else 0 for column in range(len(names))]
        for row in range(len(names))
    ]
    scores = [ClassScore(name=name, examples=20, predicted=20, precision=0.9, recall=0.9, f1=0.9) for name in names]
    mistake = Mistake(
        text="wake me <script>alert(1)</script> at nine", label=names[0], predicted=names[1], confidence=0.98
    )
    return ClassReport(classes=scores, confusion=confusion, mistakes=[mistake])


def files_of(run: RecordedRun) -> dict[str, bytes]:
    """Return the files of the run's folder on S3, by name."""
    assert run.receipt is not None
    return {
        "spec.yaml": run.spec_text.encode(),
        "receipt.json": run.receipt.model_dump_json().encode(),
        "metrics.jsonl": _jsonl(run.metrics),
        **{
            f"utilization/{attempt.number}.jsonl": _jsonl(
                line for line in run.utilization if attempt.started_at <= line["time"] <= attempt.last_seen_at
            )
            for attempt in run.attempts
        },
        **({"data.json": run.data.model_dump_json().encode()} if run.data else {}),
        **({INPUTS: run.inputs.model_dump_json().encode()} if run.inputs else {}),
        **({CODE_RECORD: run.code.model_dump_json().encode()} if run.code else {}),
        **({"classes.json": run.classes.model_dump_json().encode()} if run.classes else {}),
        **({"output/generations.jsonl": _lines(run.generations)} if run.generations else {}),
        **{f"checkpoints/step-{checkpoint.step}/manifest.json": b"{}" for checkpoint in run.checkpoints},
    }


def _jsonl(lines: Iterable[Mapping[str, Any]]) -> bytes:
    return _lines({**line, "time": line["time"].isoformat()} for line in lines)


def _lines(objects: Iterable[Mapping[str, Any]]) -> bytes:
    return "\n".join(map(json.dumps, objects)).encode()


def sweep() -> list[RecordedRun]:
    """Return seven runs of one recipe with learning rates from 3e-6 to 3e-4. The middle rate is best."""
    rates = [3e-6, 1e-5, 2e-5, 3e-5, 5e-5, 1e-4, 3e-4]
    return [
        three_attempts(
            200,
            run_id=f"massive-20261101-12000{number}-00ab",
            learning_rate=rate,
            accuracy=0.88 - 0.03 * abs(number - 3),
        )
        for number, rate in enumerate(rates)
    ]
