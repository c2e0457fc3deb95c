"""Collect the metrics of a script that does not report them through the library, from its files and its log.

Below the script's output, its checkpoints and the folders that it keeps (`keep`):

- TensorBoard's event files: each scalar;
- trainer_state.json of a transformers Trainer: its `log_history`;
- JSON lines with a step: `*.jsonl`, and metrics.json if it has several lines;
- all_results.json, metrics.json and the like: the result.

In the log of rank 0:

- what the patterns of the spec find (`metrics`);
- lines that are a dict of metrics, as a Trainer prints them with an epoch. They count if no file has the value. Their
  steps follow from files with the same epoch; until then they are numbered.

The values become lines of metrics.jsonl, and the newest of each the result. An attempt's values replace those of
earlier attempts from the step on that it repeats. If the script trains with the library, nothing is collected.
"""

import ast
import json
import logging
import math
import os
import re
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import regex  # transformers needs it; other than `re`, it has time limits

from jobs.aws import s3 as object_store
from jobs.container.channel import write_collected
from jobs.container.saving.manifest import check_newest
from jobs.container.saving.metrics import library_writes
from jobs.core.locations import S3Location
from jobs.core.records import LARGEST_STEP, is_step, line_with_step, read_json_lines
from jobs.core.run import GENERATIONS, METRICS
from jobs.core.words import is_of_a_whole_phase
from jobs.spec.kinds.script import STEP_METRIC

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

log = logging.getLogger("trainyard")

LOOK_SECONDS = 2.0

UPLOAD_SECONDS = 10.0
"""Time between two uploads, which send the whole file."""

MAX_METRICS = 100

MAX_VALUES = 50_000
"""Values that are kept of all metrics together. Beyond, every second value of the longest curve is dropped."""

_MAX_PRINTED = 10_000
"""Reports that are kept of the log."""

_TOGETHER_SECONDS = 2.0
"""Values of one step that a source reports within this time share a line."""

_MAX_LINES = 20_000
"""Log lines that are kept until the next look."""

_LINE_CHARACTERS = 2_000
"""Longer log lines are cut."""

_MATCH_SECONDS = 0.1
"""Time limit of a pattern for one line."""

_READ_BYTES = 4_000_000
"""Bytes that are read of a growing file in one look."""

_HEAD_BYTES = 100_000
"""Length after which JSON lines without a metric are not read on: they are examples or predictions."""

_RECORD_BYTES = 100_000
"""Longer records of TensorBoard are skipped: images, histograms, graphs."""

_WHOLE_BYTES = 50_000_000
"""Larger JSON files are not read."""

_TRAINER_STATE = "trainer_state.json"
_METRICS_JSON = "metrics.json"
_RESULTS = ("train_results.json", "eval_results.json", "test_results.json", "all_results.json", _METRICS_JSON)
"""Files with results, in the order in which later ones win."""

_STEPS = ("step", "global_step", "iteration", "iter", "current_steps", "epoch")
"""Names of the step in JSON, the best first."""

_NO_METRIC = frozenset({*_STEPS, "steps", "time", "timestamp", "numbered", "total_steps"})

_NO_RESULT = frozenset({"learning_rate", "lr", "grad_norm"})

_STEP_IN_LINE = re.compile(r"\b(?:step|iter|iteration)s?\b\W{0,3}(\d{1,15})\b", re.IGNORECASE)

_NUMPY = re.compile(r"np\.(?:float|int)\d+\(([^()]*)\)")
"""A number as NumPy prints it in a dict."""

_LOG = "log"
_PATTERNS = "patterns"

Values = Mapping[str, float | None]
"""Numbers by name. None stands for NaN and infinity, which JSON does not have."""


class Report(NamedTuple):
    """What a source reports at once."""

    values: Values
    step: int | None
    at: float
    """Unix time."""
    epoch: float | None = None


class MetricLines:
    """The lines of metrics.jsonl. The first value of an attempt replaces those of the steps that it repeats."""

    def __init__(self, earlier: Iterable[dict[str, Any]] = ()) -> None:
        self._lines: dict[str, dict[int, dict[str, Any]]] = {}
        """The line of each value, by name and step."""
        self._sources: dict[str, str] = {}
        """Where this attempt found each metric first. Other sources of the same name are ignored."""
        self._numbered: set[str] = set()
        """Metrics of this attempt without a step."""
        self._steps: dict[str, int] = {}
        """Steps by epochs, as a Trainer prints them."""
        self._steps_per_epoch = 0.0
        self._printed: deque[Report] = deque(maxlen=_MAX_PRINTED)
        self._newest_lines: dict[str, tuple[float, dict[str, Any]]] = {}
        """The newest line of each source and its time. Events of TensorBoard have one value each."""
        self._count = 0
        for line in earlier:
            if "numbered" not in line:
                self._note(line["step"], line.get("epoch"))
            for name in line.keys() - _NO_METRIC:
                self._put(name, line["step"], line)

    def add(self, source: str, report: Report, *, is_history: bool = False) -> bool:
        """Add a report, and return whether it has anything new. Without a step, it is numbered.

        A history also repeats what is known, which is then kept with its time.
        """
        step = report.step
        if step is not None:
            self._note(step, report.epoch)
        is_new = False
        for name, value in report.values.items():
            known = self._lines.get(name, {})
            if self._sources.get(name, source) != source or (not known and len(self._lines) >= MAX_METRICS):
                continue
            if is_history and step in known and _equal(known[step][name], value):
                continue
            is_new, is_first = True, name not in self._sources
            self._sources[name] = source
            if step is None:
                self._numbered.add(name)
                self._put(name, *self._line(source, report, 1 + next(reversed(known), 0), numbered=True))[name] = value
                continue
            if is_first or name in self._numbered:
                self._drop(name, [other for other in known if other >= step or "numbered" in known[other]])
                self._numbered.discard(name)
            self._drop(name, [step])
            self._put(name, *self._line(source, report, step))[name] = value
        while self._count > MAX_VALUES:
            longest = max(self._lines, key=lambda name: len(self._lines[name]))
            self._drop(longest, sorted(self._lines[longest])[:-1:2])
        return is_new

    def _line(self, source: str, report: Report, step: int, *, numbered: bool = False) -> tuple[int, dict[str, Any]]:
        """Return the step and the line for a value: a new line, or that of the source's last value at this step."""
        at, line = self._newest_lines.get(source, (0.0, dict[str, Any]()))
        if line.get("step") != step or ("numbered" in line) != numbered or report.at - at > _TOGETHER_SECONDS:
            line = {**_line(report, step), **({"numbered": True} if numbered else {})}
            self._newest_lines[source] = report.at, line
        return step, line

    def name_in(self, folder: Path, name: str) -> str:
        """Return the name of a metric of TensorBoard. Some writers have the same names in several folders."""
        is_other = self._sources.get(name, str(folder)) != str(folder)
        return f"{folder.name}_{name}" if is_other and re.fullmatch("[A-Za-z_]+", folder.name) else name

    def add_printed(self, report: Report) -> None:
        """Add a report of the log that has no step."""
        self._printed.append(report)

    def lines(self) -> list[dict[str, Any]]:
        """Return the lines of metrics.jsonl, in the order of their times."""
        by_id = {id(line): line for by_step in self._lines.values() for line in by_step.values()}
        return sorted([*by_id.values(), *self._only_printed()], key=lambda line: str(line["time"]))

    def newest(self) -> dict[str, float | None]:
        """Return the newest value of each metric."""
        found = {name: by_step[max(by_step)][name] for name, by_step in self._lines.items() if by_step}
        for line in self._only_printed():
            newer = (name for name in line.keys() - _NO_METRIC if line["step"] >= max(self._lines.get(name, {0: 0})))
            found |= {name: line[name] for name in newer}
        return found

    def _only_printed(self) -> Iterator[dict[str, Any]]:
        """Yield lines of the values that the log has and no file."""
        numbers: dict[str, int] = {}
        for report in self._printed:
            step = self._step(report.epoch)
            lines: dict[int, dict[str, Any]] = {}
            for name, value in report.values.items():
                known = self._lines.get(name, {})
                if step is not None and step not in known:
                    lines.setdefault(step, _line(report, step))[name] = value
                elif step is None and name not in self._sources:
                    number = numbers[name] = 1 + numbers.get(name, next(reversed(known), 0))
                    lines.setdefault(number, {**_line(report, number), "numbered": True})[name] = value
            yield from lines.values()

    def _step(self, epoch: float | None) -> int | None:
        """Return the step at an epoch, estimated if no file has this epoch yet. None if no file has epochs."""
        if epoch is None or not self._steps_per_epoch:
            return None
        known = self._steps.get(_epoch_text(epoch))
        return known if known is not None else round(epoch * self._steps_per_epoch)

    def _note(self, step: int | None, epoch: float | None) -> None:
        if step and epoch and epoch > 0:
            self._steps[_epoch_text(epoch)] = step
            self._steps_per_epoch = step / epoch

    def _put(self, name: str, step: int, line: dict[str, Any]) -> dict[str, Any]:
        self._lines.setdefault(name, {})[step] = line
        self._count += 1
        return line

    def _drop(self, name: str, steps: Iterable[int]) -> None:
        known = self._lines.get(name, {})
        for step in steps:
            if (line := known.pop(step, None)) is not None:
                del line[name]
                self._count -= 1


def _line(report: Report, step: int) -> dict[str, Any]:
    at = datetime.fromtimestamp(report.at, timezone.utc).isoformat(timespec="milliseconds")
    return {"step": step, "time": at, **({} if report.epoch is None else {"epoch": report.epoch})}


def _equal(left: Any, right: float | None) -> bool:
    if left is None or right is None:
        return left is right
    return math.isclose(left, right, rel_tol=1e-5)


@dataclass
class _Followed:
    """How much of a file has been read."""

    offset: int = 0
    version: tuple[int, int] = (0, 0)
    """Its time in nanoseconds and its size when it was read last."""
    is_skipped: bool = False
    is_useful: bool = False
    """Whether JSON lines had a metric."""
    is_lines: bool = False
    """Whether a metrics.json has JSON lines."""


class ScriptMetrics:
    """The metrics of one script on the main node. Its methods may be called by several threads."""

    def __init__(
        self,
        s3: "S3Client",
        run: S3Location,
        scratch: Path,
        *,
        folders: Iterable[Path],
        patterns: Mapping[str, str],
        attempt: int | None,
    ) -> None:
        self._s3 = s3
        self._run = run
        self._scratch = scratch
        self._folders = [*folders]
        self._patterns = {name: regex.compile(pattern) for name, pattern in patterns.items()}
        self._step_pattern = self._patterns.pop(STEP_METRIC, None)
        self._wanted = frozenset(self._patterns)
        self._unmatched = {*self._patterns}
        self._line_step: int | None = None
        self._attempt = attempt
        self._lock = threading.Lock()
        self._followed: dict[Path, _Followed] = {}
        self._log_lines: deque[tuple[float, str]] = deque(maxlen=_MAX_LINES)
        self._logged_at: dict[tuple[str, str], float] = {}
        """When the log had a value of a metric at an epoch: a Trainer's files have no times."""
        self._once: dict[str, float | None] = {}
        self._results: dict[Path, Values] = {}
        self._changes = self._written_changes = self._uploaded_changes = 0
        self._uploaded_at = -math.inf
        self._metrics = MetricLines()

    def restored(self) -> None:
        """Read what earlier attempts have recorded, and skip what their files contain, except for results."""
        place = self._run / METRICS
        content = object_store.read(self._s3, place)
        self._metrics = MetricLines(read_json_lines(content, place=place, accept=line_with_step))
        for path, state in self._files():
            if path.name not in _RESULTS:
                self._followed[path] = _Followed(state.st_size, (state.st_mtime_ns, state.st_size))

    def add_line(self, line: str) -> None:
        """Take a line of rank 0's log. Returns at once: the ranks wait for their log."""
        if self._patterns or line.startswith("{"):
            self._log_lines.append((time.time(), line[:_LINE_CHARACTERS]))

    def look(self, *, upload_now: bool = False) -> None:
        """Read what is new, and upload it. Raises TrainyardError if that fails."""
        with self._lock:
            if library_writes(self._scratch):
                self._log_lines.clear()
                write_collected(self._scratch, {})
                return
            self._read_log()
            for path, state in self._files():
                self._read(path, state)
            if self._changes != self._written_changes:
                write_collected(self._scratch, self._result())
                self._written_changes = self._changes
            is_due = upload_now or time.monotonic() - self._uploaded_at >= UPLOAD_SECONDS
            if self._changes != self._uploaded_changes and is_due:
                content = "".join(f"{json.dumps(line)}\n" for line in self._metrics.lines())
                check_newest(self._s3, self._run, self._attempt)
                object_store.write(self._s3, self._run / METRICS, content.encode())
                self._uploaded_changes, self._uploaded_at = self._changes, time.monotonic()

    def finish(self, *, ended_well: bool) -> None:
        """Read and upload the rest. Raises TrainyardError if that fails."""
        self.look(upload_now=True)
        if ended_well and self._unmatched and not library_writes(self._scratch):
            log.warning(
                "warning: no log line of rank 0 matches the pattern of %s. Next: correct arguments.metrics",
                ", ".join(sorted(self._unmatched)),
            )

    def _add(self, source: str, report: Report, *, is_history: bool = False) -> None:
        values = report.values if source == _PATTERNS else _without(report.values, self._wanted)
        once = {name: value for name, value in values.items() if is_of_a_whole_phase(name)}
        if "train_runtime" in once:  # the last line of a Trainer
            once = dict(values)
        self._once.update(once)
        self._changes += bool(once)
        report = report._replace(values=_without(values, once))
        if source == _LOG and report.step is None:
            self._metrics.add_printed(report)
            self._changes += 1
        else:
            self._changes += self._metrics.add(source, report, is_history=is_history)

    def _result(self) -> dict[str, float | None]:
        newest = self._metrics.newest()
        result = {**_without(newest, _NO_RESULT), **self._once}
        for path in sorted(self._results, key=lambda path: _RESULTS.index(path.name)):
            result |= self._results[path]
        result |= {name: newest[name] for name in self._wanted if name in newest}
        return dict([*result.items()][-MAX_METRICS:])

    def _files(self) -> Iterator[tuple[Path, os.stat_result]]:
        """Yield the files that may have metrics, in the order of their names."""
        for top in self._folders:
            for folder, folders, names in os.walk(top):
                folders.sort()
                for name in sorted(names):
                    if not (".tfevents." in name or name.endswith(".jsonl") or name in (_TRAINER_STATE, *_RESULTS)):
                        continue
                    path = Path(folder, name)
                    try:
                        yield path, path.stat()
                    except OSError:  # it has been removed or renamed
                        continue

    def _read(self, path: Path, state: os.stat_result) -> None:
        followed = self._followed.setdefault(path, _Followed())
        version = (state.st_mtime_ns, state.st_size)
        if followed.is_skipped or (followed.version == version and followed.offset >= state.st_size):
            return
        if state.st_size < followed.offset:  # it has been written again
            followed.offset = 0
        followed.version = version
        try:
            if ".tfevents." in path.name:
                self._read_events(path, followed)
            elif path.suffix == ".jsonl" or followed.is_lines:
                self._read_json_lines(path, followed, state.st_mtime)
            elif state.st_size <= _WHOLE_BYTES:
                followed.offset = state.st_size
                self._read_json(path, followed, state.st_mtime)
        except OSError:  # it has been removed, or the script may read it but we may not
            return

    def _read_events(self, path: Path, followed: _Followed) -> None:
        folder = path.parent
        with path.open("rb") as file:
            for event in _events(file, followed):
                values = {_name_of_tag(value.tag): _scalar(value) for value in event.summary.value}
                values = {name: value for name, value in values.items() if value is not ...}
                epoch = values.get("epoch")
                found = {self._metrics.name_in(folder, name): values[name] for name in values.keys() - _NO_METRIC}
                at = event.wall_time if 0 < event.wall_time <= time.time() + 60 else time.time()
                self._add(str(folder), Report(found, event.step, at, epoch))

    def _read_json_lines(self, path: Path, followed: _Followed, at: float) -> None:
        if path.match(GENERATIONS):
            followed.is_skipped = True
            return
        with path.open("rb") as file:
            file.seek(followed.offset)
            content = file.read(_READ_BYTES)
        complete = content[: content.rfind(b"\n") + 1]
        followed.offset += len(complete) or len(content) * (len(content) == _READ_BYTES)  # no line is that long
        reports = [report for line in complete.splitlines() if (report := _report(_json(line), at)) is not None]
        reports = [report for report in reports if report.step is not None]
        followed.is_useful = followed.is_useful or bool(reports)
        followed.is_skipped = not followed.is_useful and followed.offset > _HEAD_BYTES
        for report in reports:
            self._add(str(path), report, is_history=True)  # some scripts write the whole file again

    def _read_json(self, path: Path, followed: _Followed, at: float) -> None:
        content = path.read_bytes()
        found = _json(content)
        if path.name == _METRICS_JSON and found is None:
            followed.offset, followed.is_lines = 0, True
            self._results.pop(path, None)
            self._read_json_lines(path, followed, at)
        elif path.name == _TRAINER_STATE:
            history = found.get("log_history") if isinstance(found, dict) else None
            for entry in history if isinstance(history, list) else []:
                if (report := _report(entry, at)) is not None and report.step is not None:
                    first = next(iter(report.values))
                    logged = self._logged_at.get((first, _epoch_text(report.epoch)), at)
                    self._add(_TRAINER_STATE, report._replace(at=logged), is_history=True)
        elif (report := _report(found, at)) is not None:
            self._results.pop(path, None)  # the newest file of a name wins
            self._results[path] = report.values
            self._changes += 1

    def _read_log(self) -> None:
        while self._log_lines:
            at, line = self._log_lines.popleft()
            self._match(at, line)
            report = _printed(line, at)
            if report is None:
                continue
            self._logged_at |= {(name, _epoch_text(report.epoch)): at for name in report.values}
            self._add(_LOG, report)

    def _match(self, at: float, line: str) -> None:
        """Add what the spec's patterns find in a line."""
        if not self._patterns:
            return
        step = self._found(STEP_METRIC, self._step_pattern, line)
        if step is not None:
            self._line_step = int(step) if 0 <= step <= LARGEST_STEP else None
        found = {name: self._found(name, pattern, line) for name, pattern in [*self._patterns.items()]}
        values = {name: value if math.isfinite(value) else None for name, value in found.items() if value is not None}
        self._unmatched -= values.keys()
        if values and self._step_pattern is None and (in_line := _STEP_IN_LINE.search(line)):
            self._line_step = int(in_line[1])
        if values:
            self._add(_PATTERNS, Report(values, self._line_step, at))

    def _found(self, name: str, pattern: Any, line: str) -> float | None:
        """Return the number that a pattern finds. A pattern that takes too long is not used again."""
        if pattern is None:
            return None
        try:
            match = pattern.search(line, timeout=_MATCH_SECONDS, concurrent=True)
        except TimeoutError:
            log.warning(
                "warning: the pattern of %s takes more than %s s for one line, and is not used again. Next: repeat "
                "nothing that repeats itself in arguments.metrics, as (a+)+ does",
                name,
                _MATCH_SECONDS,
            )
            self._patterns.pop(name, None)
            self._unmatched.discard(name)
            self._step_pattern = None if name == STEP_METRIC else self._step_pattern
            return None
        return _number(match[1].rstrip(".,;:%")) if match and match[1] else None


def _without(values: Values, names: Collection[str]) -> dict[str, float | None]:
    return {name: value for name, value in values.items() if name not in names}


def _events(file: Any, followed: _Followed) -> Iterator[Any]:
    """Yield the complete events of TensorBoard after what has been read of a file."""
    from tensorboard.compat.proto import event_pb2  # slow, and most scripts have no events

    file.seek(0, os.SEEK_END)
    end = file.tell()
    last = followed.offset + _READ_BYTES
    while followed.offset < min(end, last):
        file.seek(followed.offset)
        head = file.read(12)
        # TFRecord: the length in 8 bytes, its checksum in 4, the content, and its checksum in 4
        length = struct.unpack_from("<Q", head)[0] if len(head) == 12 else end
        if followed.offset + length + 16 > end:
            return
        followed.offset += length + 16
        if length <= _RECORD_BYTES:
            try:
                yield event_pb2.Event.FromString(file.read(length))
            except Exception:  # noqa: BLE001 - protobuf's error; the file is damaged
                followed.is_skipped = True
                return


def _scalar(value: Any) -> Any:
    """Return a summary's number, or ... if it has none."""
    if value.HasField("simple_value"):
        return _finite(value.simple_value)
    if value.HasField("tensor") and not value.tensor.tensor_shape.dim:
        from tensorboard.util.tensor_util import make_ndarray

        found = make_ndarray(value.tensor)
        if found.size == 1 and found.dtype.kind in "fiu":
            return _finite(float(found))
    return ...


def _name_of_tag(tag: str) -> str:
    """Return the metric of a tag of TensorBoard: `loss` for train/loss, `eval_loss` for eval/loss."""
    return _name(tag.removeprefix("train/"))


def _name(text: str) -> str:
    """Return a text as a metric's name."""
    return re.sub(r"[^\w.@%+-]+", "_", text).strip("_")[:80]


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _json(content: bytes) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return None


def _epoch_text(epoch: float | None) -> str:
    """Return an epoch as a Trainer prints it."""
    return "" if epoch is None else f"{epoch:.4g}"


def _report(found: Any, at: float) -> Report | None:
    """Return the numbers of a JSON object as a report, or None if it has none."""
    if not isinstance(found, dict):
        return None
    known = (found.get(name) for name in _STEPS)
    steps = (step for step in known if isinstance(step, int) and is_step(step) and step >= 0)
    numbers = dict(_numbers(found))
    epoch = numbers.get("epoch")
    values = {name: value for name, value in numbers.items() if name and name not in _NO_METRIC}
    return Report(values, next(steps, None), at, epoch) if values else None


def _numbers(found: Mapping[str, Any], prefix: str = "", depth: int = 0) -> Iterator[tuple[str, float | None]]:
    """Yield the numbers of a mapping, and those of mappings in it as `outer_inner`."""
    for key, value in found.items():
        name = _name(f"{prefix}{key}")
        if isinstance(value, Mapping) and depth < 2:
            yield from _numbers(value, f"{name}_", depth + 1)
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            yield name, value if abs(value) <= sys.float_info.max else None


def _printed(line: str, at: float) -> Report | None:
    """Return the metrics of a log line that is a dict: a Trainer's, with an epoch or a step, or floats only."""
    text = _NUMPY.sub(r"\1", line.strip())
    if not (text.startswith("{") and text.endswith("}")):
        return None
    try:
        found = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        found = _json(text.encode())
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        return None
    if not found.keys() & {*_STEPS} and not all(isinstance(value, float) for value in found.values()):
        return None
    # Transformers 5 prints numbers as texts.
    numbers = {key: _number(value) if isinstance(value, str) else value for key, value in found.items()}
    return _report(numbers, at)
