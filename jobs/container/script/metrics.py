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

import json
import logging
import math
import os
import re
import threading
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import regex  # transformers needs it; other than `re`, it has time limits

from jobs.aws import s3 as object_store
from jobs.container.channel import write_collected
from jobs.container.saving.manifest import check_newest
from jobs.container.saving.metrics import library_writes
from jobs.container.script.metric_lines import MAX_METRICS, MetricLines, Report, Values, epoch_text
from jobs.container.script.metric_values import (
    READ_BYTES,
    Followed,
    event_reports,
    json_of,
    number_of,
    printed_report,
    report_of,
)
from jobs.core.locations import S3Location
from jobs.core.records import LARGEST_STEP, line_with_step, read_json_lines
from jobs.core.run import GENERATIONS, METRICS
from jobs.core.words import is_of_a_whole_phase
from jobs.spec.kinds.script import STEP_METRIC

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

log = logging.getLogger("trainyard")

LOOK_SECONDS = 2.0

UPLOAD_SECONDS = 10.0
"""Time between two uploads, which send the whole file."""

_MAX_LINES = 20_000
"""Log lines that are kept until the next look."""

_LINE_CHARACTERS = 2_000
"""Longer log lines are cut."""

_MATCH_SECONDS = 0.1
"""Time limit of a pattern for one line."""

_HEAD_BYTES = 100_000
"""Length after which JSON lines without a metric are not read on: they are examples or predictions."""

_WHOLE_BYTES = 50_000_000
"""Larger JSON files are not read."""

_TRAINER_STATE = "trainer_state.json"
_METRICS_JSON = "metrics.json"
_RESULTS = ("train_results.json", "eval_results.json", "test_results.json", "all_results.json", _METRICS_JSON)
"""Files with results, in the order in which later ones win."""

_NO_RESULT = frozenset({"learning_rate", "lr", "grad_norm"})

_STEP_IN_LINE = re.compile(r"\b(?:step|iter|iteration)s?\b\W{0,3}(\d{1,15})\b", re.IGNORECASE)

_LOG = "log"
_PATTERNS = "patterns"


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
        self._followed: dict[Path, Followed] = {}
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
                self._followed[path] = Followed(state.st_size, (state.st_mtime_ns, state.st_size))

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
        followed = self._followed.setdefault(path, Followed())
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

    def _read_events(self, path: Path, followed: Followed) -> None:
        with path.open("rb") as file:
            for report in event_reports(file, followed):
                values = {self._metrics.name_in(path.parent, name): value for name, value in report.values.items()}
                self._add(str(path.parent), report._replace(values=values))

    def _read_json_lines(self, path: Path, followed: Followed, at: float) -> None:
        if path.match(GENERATIONS):
            followed.is_skipped = True
            return
        with path.open("rb") as file:
            file.seek(followed.offset)
            content = file.read(READ_BYTES)
        complete = content[: content.rfind(b"\n") + 1]
        followed.offset += len(complete) or len(content) * (len(content) == READ_BYTES)  # no line is that long
        reports = [report for line in complete.splitlines() if (report := report_of(json_of(line), at)) is not None]
        reports = [report for report in reports if report.step is not None]
        followed.is_useful = followed.is_useful or bool(reports)
        followed.is_skipped = not followed.is_useful and followed.offset > _HEAD_BYTES
        for report in reports:
            self._add(str(path), report, is_history=True)  # some scripts write the whole file again

    def _read_json(self, path: Path, followed: Followed, at: float) -> None:
        content = path.read_bytes()
        found = json_of(content)
        if path.name == _METRICS_JSON and found is None:
            followed.offset, followed.is_lines = 0, True
            self._results.pop(path, None)
            self._read_json_lines(path, followed, at)
        elif path.name == _TRAINER_STATE:
            history = found.get("log_history") if isinstance(found, dict) else None
            for entry in history if isinstance(history, list) else []:
                if (report := report_of(entry, at)) is not None and report.step is not None:
                    first = next(iter(report.values))
                    logged = self._logged_at.get((first, epoch_text(report.epoch)), at)
                    self._add(_TRAINER_STATE, report._replace(at=logged), is_history=True)
        elif (report := report_of(found, at)) is not None:
            self._results.pop(path, None)  # the newest file of a name wins
            self._results[path] = report.values
            self._changes += 1

    def _read_log(self) -> None:
        while self._log_lines:
            at, line = self._log_lines.popleft()
            self._match(at, line)
            report = printed_report(line, at)
            if report is None:
                continue
            self._logged_at |= {(name, epoch_text(report.epoch)): at for name in report.values}
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
        return number_of(match[1].rstrip(".,;:%")) if match and match[1] else None


def _without(values: Values, names: Collection[str]) -> dict[str, float | None]:
    return {name: value for name, value in values.items() if name not in names}
