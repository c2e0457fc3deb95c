"""The metrics of a run: metrics.jsonl, TensorBoard events and progress lines, continuous over its attempts.

S3 has no append, so the files grow locally and are put there again whole, by a thread, whenever they changed.
"""

import json
import logging
import math
import threading
import time
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel
from transformers import TrainerCallback

from jobs.aws import s3 as object_store
from jobs.contract.errors import TrainyardError
from jobs.contract.locations import S3Location
from jobs.contract.log_lines import Progress
from jobs.contract.run import METRICS, TENSORBOARD
from jobs.train.channel import RankStatus

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

    from jobs.train.rank import Rank

log = logging.getLogger("trainyard")

UPLOAD_EVERY_SECONDS = 5.0
"""A reader of metrics.jsonl is at most this far behind; each upload carries the whole file."""

RESULT_MARK = "train_runtime_seconds"
"""A key that only the line of a result has."""

LOGGED = ("loss", "grad_norm", "learning_rate")
"""The values that are taken from the Trainer's own log lines."""


class Throughput(BaseModel):
    """Time and samples of the steps that count: those of earlier attempts up to where this one resumed, and its own."""

    train_seconds: float = 0.0
    """Wall time of all steps, checkpoint stalls included."""
    timed_seconds: float = 0.0
    """The same without the warm-up steps of each attempt."""
    timed_samples: int = 0

    @property
    def samples_per_second(self) -> float:
        return self.timed_samples / self.timed_seconds if self.timed_seconds else 0.0


class RunMetrics(TrainerCallback):  # type: ignore[misc]  # transformers has no types
    """Watches a Trainer on every rank; rank 0 writes. `close` puts all files on S3."""

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
    ) -> None:
        """`s3` is needed on rank 0 only. `samples_per_epoch`: None where the Trainer itself counts the epochs."""
        self.throughput = throughput
        self._rank = rank
        self._samples_per_step = samples_per_step
        self._samples_per_epoch = samples_per_epoch
        self._warmup_steps = warmup_steps
        self._step = self._resumed_from_step = resumed_from_step
        self._changed = dict(changed or {})
        self._steps_here = 0
        self._shown_step: int | None = None
        self._step_started = 0.0
        self._files = MetricsFiles(rank, s3, resumed_from_step) if s3 is not None else None
        self._status()

    def on_train_begin(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        self._step_started = time.monotonic()
        if self._files:
            self._show(state, "training")

    def on_step_end(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        now = time.monotonic()
        seconds, self._step_started = now - self._step_started, now
        self._step = state.global_step
        self._steps_here += 1
        self.throughput.train_seconds += seconds
        if self._steps_here > self._warmup_steps:
            self.throughput.timed_seconds += seconds
            self.throughput.timed_samples += self._samples_per_step

    def on_log(self, _args: Any, state: Any, _control: Any, logs: Mapping[str, Any], **_: Any) -> None:
        if self._files is None or "loss" not in logs:
            return
        values = {name: float(logs[name]) for name in LOGGED if name in logs}
        speed = self.throughput.samples_per_second
        self._files.write(state.global_step, {"epoch": self._epoch(state), **values, "samples_per_second": speed})
        self._status()
        left = (state.max_steps - state.global_step) * self._samples_per_step / speed if speed else 0.0
        note = f"loss {values['loss']:.3f}, {speed:.1f} samples/s, {left:.0f} s left"
        self._show(state, note)

    def on_train_end(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        self._status()
        if self._files and self._shown_step != state.global_step:
            self._show(state, "trained")  # the steps since the last log are too few for one of their own

    def evaluated(self, step: int, values: Mapping[str, Any]) -> None:
        """Write the metrics of an evaluation during the training; the time it took is none of the training's."""
        self._step_started = time.monotonic()
        if self._files is not None:
            self._files.write(step, values)
            log.info(
                "evaluation: step %s, %s", step, ", ".join(f"{name} {value:.4g}" for name, value in values.items())
            )

    def evaluated_at(self, step: int) -> bool:
        """Return, on rank 0, whether the lines that earlier attempts left have an evaluation at this step."""
        return self._files is not None and step in self._files.evaluated_steps

    def result(self, step: int, values: Mapping[str, Any]) -> None:
        """Write the final metrics: the last line of the file, and the result of the receipt."""
        if self._files is not None:
            self._files.write(step, values)
            self._status(values)

    def upload(self) -> None:
        """Put on S3 what was measured so far. Raises TrainyardError where that fails."""
        if self._files is not None:
            self._files.upload()

    def close(self) -> None:
        """Put all files on S3. Raises TrainyardError where that fails."""
        if self._files is not None:
            self._files.close()

    def _epoch(self, state: Any) -> float:
        if self._samples_per_epoch is None:
            return float(state.epoch)
        return round(float(state.global_step * self._samples_per_step / self._samples_per_epoch), 4)

    def _show(self, state: Any, note: str) -> None:
        self._shown_step = state.global_step
        print(Progress(state.global_step, state.max_steps, note), flush=True)

    def _status(self, result: Mapping[str, Any] | None = None) -> None:
        if self._rank.is_first:
            RankStatus(
                resumed_from_step=self._resumed_from_step,
                last_step=self._step,
                changed=self._changed,
                result=dict(result or {}),
            ).write(self._rank.scratch)


class MetricsFiles:
    """metrics.jsonl and the event files, locally and (by a thread) on S3. `close` puts the last of them there."""

    def __init__(self, rank: "Rank", s3: "S3Client", resumed_from_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._s3 = s3
        self._run = rank.run
        self._folder = rank.scratch / "metrics"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._lines = (self._folder / METRICS).open("w+", encoding="utf-8")
        rows = _rows_up_to(object_store.read(s3, self._run / METRICS), resumed_from_step, self._run / METRICS)
        self._lines.writelines(json.dumps(row) + "\n" for row in rows)
        self.evaluated_steps = {row["step"] for row in rows if any(name.startswith("eval_") for name in row)}
        # The events of the steps that are done again: TensorBoard hides those that an earlier attempt wrote.
        self._events = SummaryWriter(str(self._folder / TENSORBOARD), purge_step=resumed_from_step + 1)
        self._lock = threading.Lock()
        self._uploading = threading.Lock()
        self._changed = threading.Event()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._upload_now_and_then, name="metrics", daemon=True)
        self._thread.start()

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        row = {"step": step, "time": datetime.now(timezone.utc).isoformat(timespec="milliseconds"), **values}
        # JSON has no NaN; a reader in another language would refuse the whole file.
        row = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in row.items()
        }
        with self._lock:
            self._lines.write(json.dumps(row) + "\n")
            for name, value in values.items():
                if isinstance(value, (int, float)):
                    self._events.add_scalar(name.replace("_", "/", 1) if "_" in name else f"train/{name}", value, step)
        self._changed.set()

    def close(self) -> None:
        self._closed.set()
        self._changed.set()
        self._thread.join()
        self._events.close()
        self.upload()
        self._lines.close()

    def _upload_now_and_then(self) -> None:
        while not self._closed.is_set():
            self._changed.wait()
            self._changed.clear()
            if self._closed.is_set():
                return
            try:
                self.upload()
            except (TrainyardError, OSError) as error:
                log.warning("warning: metrics are late: %s", str(error).splitlines()[0])
            self._closed.wait(UPLOAD_EVERY_SECONDS)

    def upload(self) -> None:
        with self._uploading:  # one at a time, or an older state could arrive last
            with self._lock:
                self._lines.flush()
                self._events.flush()
                content = {name: (self._folder / name).read_bytes() for name in object_store.files_below(self._folder)}
            for name, data in content.items():
                object_store.write(self._s3, self._run / name, data)


def _rows_up_to(content: bytes | None, step: int, place: S3Location) -> list[dict[str, Any]]:
    """Return what earlier attempts wrote, less the steps that this one does again, and less a result.

    An attempt that was ended just after it had written its result is followed by one that comes to it again. A line
    that cannot be read is left out with a warning: it is no reason not to train on.
    """
    rows = [_row(line) for line in (content or b"").splitlines()]
    if None in rows:
        log.warning(
            "warning: %s: %s line(s) cannot be read and are left out, the first is line %s",
            place,
            rows.count(None),
            rows.index(None) + 1,
        )
    return [row for row in rows if row is not None and 0 < row["step"] <= step and RESULT_MARK not in row]


def _row(line: bytes) -> dict[str, Any] | None:
    """Return the values of a line of metrics; None where it is none."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


class StopOnNan(TrainerCallback):  # type: ignore[misc]  # transformers has no types
    """Ends the run where the loss is no number any more. It looks where the Trainer fetches it anyway: to be logged."""

    def on_log(self, _args: Any, state: Any, _control: Any, logs: Mapping[str, Any], **_: Any) -> None:
        loss = float(logs.get("loss", 0.0))
        if not math.isfinite(loss):
            raise TrainyardError(
                f"the loss at step {state.global_step} is {loss}, and stop_on_nan is set",
                next_step="submit again with a lower learning_rate or more warm-up, and look at the data",
            )
