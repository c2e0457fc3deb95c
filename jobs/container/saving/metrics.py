"""The metrics of a run: metrics.jsonl, TensorBoard events and progress lines, continuous across its attempts.

S3 cannot append, so the files grow locally, and a thread uploads them whole whenever they have changed.
"""

import json
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jobs.aws import s3 as object_store
from jobs.container.channel import RankStatus
from jobs.container.rank import Callback, one_line
from jobs.container.saving.manifest import SupersededError, Throughput, check_newest
from jobs.core.errors import TrainyardError
from jobs.core.locations import S3Location
from jobs.core.output import TIME_LEFT_SUFFIX, Progress
from jobs.core.records import line_with_step, read_json_lines
from jobs.core.run import METRICS, TENSORBOARD
from jobs.core.words import result_label, time_left

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

    from jobs.container.rank import Rank

log = logging.getLogger("trainyard")

UPLOAD_EVERY_SECONDS = 5.0
"""Time between two uploads, and the most by which readers of metrics.jsonl lag. Each upload sends the whole file."""

RESULT_MARK = "train_runtime_seconds"
"""A key that only the line with the result has."""

LOGGED = ("loss", "grad_norm", "learning_rate")
"""Values to record from the Trainer's log lines."""

_TIMED = ("_runtime", "_per_second", "_time", "_duration")
"""Name endings of evaluation values that depend on the clock."""

MEMORY = {
    "memory_allocated (GB)": "memory_gib",
    "max_memory_allocated (GB)": "max_memory_gib",
    "total_memory_available (GB)": "total_memory_gib",
}
"""GaudiTrainer's names for the memory of the first rank's HPU, and ours. GaudiTrainer's GB are GiB (optimum-habana
1.18.1, `to_gb_rounded`)."""


class RunMetrics(Callback):
    """Measures a training on every rank; rank 0 writes the files. `close` uploads all of them."""

    def __init__(
        self,
        rank: "Rank",
        s3: "S3Client | None",
        *,
        resumed_from_step: int,
        throughput: Throughput,
        samples_per_step: int,
        samples_per_epoch: int | None = None,
        warmup_steps: int,
        changed: Mapping[str, tuple[Any, Any]] | None = None,
        logs_all: bool = False,
        memory: Callable[[], Mapping[str, float]] = dict,
        shape: Callable[[], Any] = lambda: None,
        saving_seconds: Callable[[], float] = lambda: 0.0,
        report: Callable[[Mapping[str, Any]], None] = lambda _: None,
    ) -> None:
        """Only rank 0 needs `s3`. `samples_per_epoch` is None if the Trainer counts epochs itself.

        `logs_all` records every number in the Trainer's log lines, not only `LOGGED`. `memory` returns the memory of
        the rank's card (`Accelerator.memory`), for Trainers that do not log it. `shape` returns the shape of the newest
        batch if the accelerator compiles for each new shape (`Heartbeats.training_shape`). The first `warmup_steps` of
        each shape are left out of the samples per second. `saving_seconds` returns how long the training has waited for
        saves. `report` is called with evaluations and with the result.
        """
        self.throughput = throughput
        self._rank = rank
        self._samples_per_step = samples_per_step
        self._samples_per_epoch = samples_per_epoch
        self._warmup_steps = warmup_steps
        self._logs_all = logs_all
        self._memory = memory
        self._shape = shape
        self._saving_seconds = saving_seconds
        self._report = report
        self._step = self._resumed_from_step = resumed_from_step
        self._starts_over = False
        self._changed = dict(changed or {})
        self._steps_of_shape: Counter[Any] = Counter()
        self._warmups: list[float] = []
        self._shown_step: int | None = None
        self._logged = resumed_from_step, time.monotonic()
        self._step_started = 0.0
        self._training_started_at: datetime | None = None
        self._files = MetricsFiles(rank, s3, resumed_from_step) if s3 is not None else None
        self._status()

    def start_over(self) -> None:
        """Discard the measurements of earlier attempts, because the script has not loaded its checkpoint."""
        self._starts_over = True
        self._step = self._resumed_from_step = 0
        self._changed = {}
        self.throughput = Throughput()
        if self._files is not None:
            self._files.start_over()
        self._status()

    def on_train_begin(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        self._step_started = time.monotonic()
        self._logged = state.global_step, self._step_started
        self._training_started_at = datetime.now(timezone.utc)
        self._status()
        if self._files:
            self._show(state, "training")

    def on_step_end(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        now = time.monotonic()
        seconds, self._step_started = now - self._step_started, now
        self._step = state.global_step
        shape = self._shape()
        self._steps_of_shape[shape] += 1
        self.throughput.train_seconds += seconds
        if self._steps_of_shape[shape] > self._warmup_steps:
            self.throughput.timed_seconds += seconds
            self.throughput.timed_samples += self._samples_per_step
        elif shape is not None:
            self._warmups.append(seconds)

    def on_log(self, _args: Any, state: Any, _control: Any, logs: Mapping[str, Any], **_: Any) -> None:
        if self._files is None or "loss" not in logs:
            return
        names = [name for name, value in logs.items() if isinstance(value, (int, float))] if self._logs_all else LOGGED
        values = {name: float(logs[name]) for name in names if name in logs and name not in ("epoch", *MEMORY)}
        values |= {own: float(logs[name]) for name, own in MEMORY.items() if name in logs} or self._memory()
        speed = self.throughput.samples_per_second
        self._files.write(state.global_step, {"epoch": self.epoch(state), **values, "samples_per_second": speed})
        self._status()
        note = f"loss {values['loss']:.3f}, {speed:.1f} samples/s, {self._time_left(state)}{TIME_LEFT_SUFFIX}"
        self._show(state, note)

    def logged(self, step: int, values: Mapping[str, float], *, total_steps: float) -> None:
        """Write the values that a custom loop has measured, and print its progress."""
        if self._files is None:
            return
        self._files.write(step, {**values, **self._memory(), "samples_per_second": self.throughput.samples_per_second})
        self._status()
        self._shown_step = step
        note = ", ".join(f"{name} {value:.4g}" for name, value in values.items())
        if math.isfinite(total_steps):
            print(Progress(step, int(total_steps), note), flush=True)
        else:
            log.info("step %s: %s", step, note)

    def _time_left(self, state: Any) -> str:
        """Return, as text, the time for the remaining steps at the speed since the last line."""
        before_step, before = self._logged
        self._logged = state.global_step, time.monotonic()
        seconds_per_step = (self._logged[1] - before) / max(1, state.global_step - before_step)
        return time_left(seconds_per_step * (state.max_steps - state.global_step))

    def on_train_end(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        self._status()
        if self._files and self._shown_step != state.global_step:
            # Too few steps have passed since the last log line to write another.
            self._show(state, "trained" if state.global_step >= state.max_steps else "stopped")

    def evaluated(self, step: int, values: Mapping[str, Any]) -> None:
        """Write the metrics of an evaluation during the training. Its time does not count as training time."""
        if self._files is not None:
            self._report(values)
            self._files.write_evaluation(step, values)
            log.info(
                "evaluation: step %s, %s",
                step,
                ", ".join(f"{result_label(name)} {value:.4g}" for name, value in values.items()),
            )
        self._step_started = time.monotonic()

    def evaluated_at(self, step: int) -> dict[str, Any] | None:
        """Return the results of an earlier attempt's evaluation at this step, or None. Only rank 0 has them."""
        return self._files.evaluations.get(step) if self._files is not None else None

    def evaluated_before(self) -> dict[str, Any]:
        """Return the results of the newest evaluation of earlier attempts. Only rank 0 has them."""
        rows = self._files.earlier if self._files is not None else []
        return next((row for row in reversed(rows) if any(name.startswith("eval_") for name in row)), {})

    def logged_before(self) -> dict[str, Any]:
        """Return the newest value of each metric that earlier attempts have logged. Only rank 0 has them."""
        merged: dict[str, Any] = {}
        for row in self._files.earlier if self._files is not None else []:
            merged |= row
        merged.pop("samples_per_second", None)
        return merged

    def result(self, step: int, values: Mapping[str, Any]) -> None:
        """Write the final metrics: the last line of the file and the result in the receipt."""
        if self._files is not None:
            self._files.write(step, values)
            self._status(values)
            self._report(values)

    def upload(self) -> None:
        """Upload the measurements so far. Raises TrainyardError if that fails."""
        if self._files is not None:
            self._files.upload()

    def close(self) -> None:
        """Upload all files and close them. Raises TrainyardError if the upload fails."""
        if self._files is not None:
            self._files.close()

    def epoch(self, state: Any) -> float:
        """Return the passes over the training data so far."""
        if self._samples_per_epoch is None:
            return float(state.epoch)
        return round(float(state.global_step * self._samples_per_step / self._samples_per_epoch), 4)

    def _show(self, state: Any, note: str) -> None:
        self._shown_step = state.global_step
        if math.isfinite(state.max_steps):
            print(Progress(state.global_step, state.max_steps, note), flush=True)

    def _compiling_seconds(self) -> float:
        """Return the additional time of the steps that compiled a graph, or 0 if none did."""
        timed = self.throughput
        steps = timed.timed_samples / self._samples_per_step
        usual = timed.timed_seconds / steps if steps else 0.0
        return max(0.0, sum(self._warmups) - usual * len(self._warmups))

    def _status(self, result: Mapping[str, Any] | None = None) -> None:
        if self._rank.is_first:
            RankStatus(
                training_started_at=self._training_started_at,
                resumed_from_step=self._resumed_from_step,
                starts_over=self._starts_over,
                last_step=self._step,
                compiling_seconds=self._compiling_seconds(),
                saving_seconds=self._saving_seconds(),
                changed=self._changed,
                result=dict(result or {}),
            ).write(self._rank.scratch)


def tag(name: str) -> str:
    """Return a metric's tag in TensorBoard, which groups tags by their prefix.

    `eval_accuracy` becomes `eval/accuracy`; metrics that are not from an evaluation belong to `train`. The result's
    `train_loss` is a mean, not a point of the curve of `loss`.
    """
    if name == "train_loss":
        return "train/mean_loss"
    part, _, rest = name.partition("_")
    return f"{part}/{rest}" if part in ("eval", "train") and rest else f"train/{name}"


_FOLDER = "metrics"


def library_writes(scratch: Path) -> bool:
    """Return whether a rank of this node writes the run's metrics."""
    return (scratch / _FOLDER / METRICS).exists()


class MetricsFiles:
    """metrics.jsonl and the event files, written locally and uploaded by a thread. `close` uploads the last state."""

    def __init__(self, rank: "Rank", s3: "S3Client", resumed_from_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._s3 = s3
        self._run = rank.run
        self._attempt = rank.attempt
        self._folder = rank.scratch / _FOLDER
        self._folder.mkdir(parents=True, exist_ok=True)
        self._lines = (self._folder / METRICS).open("w+", encoding="utf-8")
        rows = _rows_up_to(object_store.read(s3, self._run / METRICS), resumed_from_step, self._run / METRICS)
        self._lines.writelines(json.dumps(row) + "\n" for row in rows)
        found = ((row["step"], {name: row[name] for name in row if name.startswith("eval_")}) for row in rows)
        self.evaluations = {step: values for step, values in found if values}
        self._found = [_found(row["step"], row) for row in rows]
        self.earlier = [
            {name: math.nan if value is None else value for name, value in row.items() if name not in ("step", "time")}
            for row in rows
        ]
        # TensorBoard hides an earlier attempt's events of steps that are repeated.
        self._events = SummaryWriter(str(self._folder / TENSORBOARD), purge_step=resumed_from_step + 1)
        self._lock = threading.Lock()
        self._uploading = threading.Lock()
        self._changed = threading.Event()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._upload_regularly, name="metrics", daemon=True)
        self._thread.start()

    def start_over(self) -> None:
        """Drop the rows of earlier attempts, because their steps are repeated."""
        from torch.utils.tensorboard import SummaryWriter

        self.evaluations, self._found, self.earlier = {}, [], []
        with self._lock:
            self._lines.seek(0)
            self._lines.truncate()
            self._events.close()
            self._events = SummaryWriter(str(self._folder / TENSORBOARD), purge_step=1)
        self._changed.set()

    def write_evaluation(self, step: int, values: Mapping[str, Any]) -> None:
        """Write an evaluation's results, unless an evaluation at this step already had the same results.

        An attempt may repeat an evaluation of the previous attempt.
        """
        found = _found(step, values)
        if found not in self._found:
            self._found.append(found)
            self.write(step, values)

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        now = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        row = _without_nan({"step": step, "time": now, **values})
        with self._lock:
            self._lines.write(json.dumps(row) + "\n")
            for name, value in values.items():
                if isinstance(value, (int, float)):
                    self._events.add_scalar(tag(name), value, step)
        self._changed.set()

    def close(self) -> None:
        self._closed.set()
        self._changed.set()
        self._thread.join()
        self._events.close()
        try:
            self.upload()
        finally:
            self._lines.close()

    def _upload_regularly(self) -> None:
        while not self._closed.is_set():
            self._changed.wait()
            self._changed.clear()
            if self._closed.is_set():
                return
            try:
                self.upload()
            except SupersededError:
                return  # the training stops at its next save, and logs why
            except Exception as error:  # noqa: BLE001 - the next upload may succeed, so this thread must continue
                log.warning("warning: metrics are late: %s", one_line(error))
            self._closed.wait(UPLOAD_EVERY_SECONDS)

    def upload(self) -> None:
        """Upload the current files. Raises SupersededError if a newer attempt owns them."""
        with self._uploading:  # one at a time; otherwise an older state could arrive last
            with self._lock:
                self._lines.flush()
                self._events.flush()
                content = {name: (self._folder / name).read_bytes() for name in object_store.files_below(self._folder)}
            for name, data in content.items():
                check_newest(self._s3, self._run, self._attempt)
                object_store.write(self._s3, self._run / name, data)


def _without_nan(values: Mapping[str, Any]) -> dict[str, Any]:
    """Replace NaN and infinity with None. JSON has neither, so other languages would reject the whole file."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in values.items()
    }


def _found(step: int, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return an evaluation's results without the values that depend on the clock."""
    found = {name: value for name, value in values.items() if name != "time" and not name.endswith(_TIMED)}
    return {**_without_nan(found), "step": step}


def _rows_up_to(content: bytes | None, step: int, place: S3Location) -> list[dict[str, Any]]:
    """Return the rows of earlier attempts, without a result and without the steps that this attempt repeats.

    If an attempt ended just after it wrote its result, the next attempt writes the result again.
    """
    rows = read_json_lines(content, place=place, accept=line_with_step)
    return [row for row in rows if 0 < row["step"] <= step and RESULT_MARK not in row]


class StopOnNan(Callback):
    """Stops the run if a logged loss is not a finite number."""

    def on_log(self, _args: Any, state: Any, _control: Any, logs: Mapping[str, Any], **_: Any) -> None:
        loss = float(logs.get("loss", 0.0))
        if not math.isfinite(loss):
            raise TrainyardError(
                f"the loss at step {state.global_step} is {loss}, and stop_on_nan is set",
                next_step="submit again with a lower learning_rate or more warm-up, and look at the data",
            )
