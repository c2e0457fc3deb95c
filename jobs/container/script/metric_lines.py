"""The lines of metrics.jsonl of a script, merged from what its files and its log report."""

import math
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

MAX_METRICS = 100

MAX_VALUES = 50_000
"""Values that are kept of all metrics together. Beyond, every second value of the longest curve is dropped."""

_MAX_PRINTED = 10_000
"""Reports that are kept of the log."""

_TOGETHER_SECONDS = 2.0
"""Values of one step that a source reports within this time share a line."""

STEPS = ("step", "global_step", "iteration", "iter", "current_steps", "epoch")
"""Names of the step in JSON, the best first."""

NO_METRIC = frozenset({*STEPS, "steps", "time", "timestamp", "numbered", "total_steps"})

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
            for name in line.keys() - NO_METRIC:
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
            newer = (name for name in line.keys() - NO_METRIC if line["step"] >= max(self._lines.get(name, {0: 0})))
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
        known = self._steps.get(epoch_text(epoch))
        return known if known is not None else round(epoch * self._steps_per_epoch)

    def _note(self, step: int | None, epoch: float | None) -> None:
        if step and epoch and epoch > 0:
            self._steps[epoch_text(epoch)] = step
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


def epoch_text(epoch: float | None) -> str:
    """Return an epoch as a Trainer prints it."""
    return "" if epoch is None else f"{epoch:.4g}"
