"""Draw the curves of a run: the values in metrics.jsonl over the time since the run began, with its events."""

from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import groupby
from typing import Any

from jobs.core.output import MEMORY_KEY, UTILIZATION_KEY
from jobs.core.records import Attempt
from jobs.core.retries import is_reclaim
from jobs.core.words import HELD_OUT, figure, is_of_a_whole_phase, result_label
from jobs.money.phases import ended_at
from jobs.report.charts import FEW_POINTS, TimeAxis, chart, short
from jobs.runs.recorded_run import RecordedRun

DRAWN_POINTS = 300
"""Maximum number of points of a curve. A longer curve is drawn as the mean and the range of each section, so that no
peak is lost."""

MAX_FURTHER_CURVES = 12

_EVALUATION = "eval_"

_RUNTIME = "train_runtime_seconds"
_NO_CURVE = frozenset({"step", "time", "epoch", "eval_majority_accuracy", _RUNTIME, "total_memory_gib"})
_TITLES = {
    "loss": "Loss",
    "learning_rate": "Learning rate",
    "samples_per_second": "Samples per second",
    "grad_norm": "Gradient norm",
    "memory_gib": "Accelerator memory of rank 0 (GiB)",
    "max_memory_gib": "Peak accelerator memory of rank 0 (GiB)",
    UTILIZATION_KEY: "Accelerator utilization (%)",
    MEMORY_KEY: "Accelerator memory in use (%)",
}
_LOSSES = frozenset({"loss", "train_loss", *(f"{part}loss" for part in HELD_OUT)})
_FIRST = ("loss", "evaluation", "learning_rate", "samples_per_second", UTILIZATION_KEY, MEMORY_KEY)


@dataclass(frozen=True)
class Point:
    """One value of a curve."""

    at: datetime
    step: int
    value: float
    series: str
    is_numbered: bool = False
    """Whether `step` is only the number of the value, because a script's log does not have its step."""


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """A section of a series that is drawn as one point."""

    at: datetime
    step: int
    value: float
    low: float
    high: float
    series: str
    attempt: int


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened during the run."""

    at: datetime
    kind: str
    """A key of `EVENTS`."""
    text: str


EVENTS = {
    "attempt": "attempt starts",
    "resume": "attempt resumes, or restores a checkpoint",
    "reclaim": "EC2 reclaims the instance",
    "end": "attempt ends early",
    "checkpoint": "kept checkpoint",
    "evaluation": "evaluation",
}


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A chart of one or several series, and its content in words."""

    id: str
    title: str
    summary: str
    spec: Mapping[str, Any]


def curves(run: RecordedRun, marks: Sequence[Event]) -> list[Curve]:
    """Return charts of everything that the run measured, with its events marked."""
    by_title: dict[str, list[Point]] = {}
    for point in points(run):
        by_title.setdefault(_chart_of(point), []).append(point)
    axis = time_axis(run)
    names = [*(name for name in _FIRST if name in by_title), *sorted(by_title.keys() - set(_FIRST))]
    return [_curve(name, by_title[name], axis, marks, run) for name in names[: len(_FIRST) + MAX_FURTHER_CURVES]]


def points(run: RecordedRun) -> Iterator[Point]:
    """Yield every measured value, in the order of the file."""
    # A Trainer calls the mean of the whole training train_loss. Other scripts log each step under this name.
    has_mean = not run.result.keys().isdisjoint(("train_runtime", _RUNTIME))
    left_out = _NO_CURVE | {"train_loss"} if has_mean else _NO_CURVE
    for line in run.metrics:
        for name, value in line.items():
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if is_number and name not in left_out and not is_of_a_whole_phase(name):
                yield Point(line["time"], line["step"], float(value), name, "numbered" in line)
    step, steps = 0, deque((line["time"], line["step"]) for line in run.metrics if "numbered" not in line)
    for line in run.utilization:
        while steps and steps[0][0] <= line["time"]:
            _, step = steps.popleft()
        for name in (UTILIZATION_KEY, MEMORY_KEY):
            if isinstance(value := line.get(name), (int, float)):
                yield Point(line["time"], step, float(value), name)


def began(attempt: Attempt) -> str:
    """Return how an attempt continued from an earlier one, as far as known."""
    if attempt.repeats_from_step is not None:
        return f"started over: it saved again what it had saved before checkpoint {attempt.restored_step}"
    if attempt.restored_step:
        return f"restored checkpoint {attempt.restored_step}; whether the script read it is unknown"
    return f"resumed from step {attempt.resumed_from_step}"


def events(run: RecordedRun) -> list[Event]:
    """Return the events of the run, in order."""
    found = []
    of = "of step " if all(_counter(attempt) == "step" for attempt in run.attempts) else ""
    for number, attempt in enumerate(run.attempts):
        found.append(Event(at=attempt.started_at, kind="attempt", text=f"attempt {attempt.number} starts"))
        if attempt.resumed_from_step or attempt.restored_step:
            at = attempt.training_started_at or attempt.started_at
            text = f"attempt {attempt.number} {began(attempt)}"
            found.append(Event(at=at, kind="resume", text=text))
        if (attempt.finished_at is None and number + 1 < len(run.attempts)) or attempt.exit_code:
            reason = attempt.reason or "it was lost without a message"
            reclaimed = "Spot" in reason or is_reclaim(reason, None)
            text = f"attempt {attempt.number} ends at {_counter(attempt)} {attempt.last_step}: {reason}"
            found.append(Event(at=ended_at(attempt), kind="reclaim" if reclaimed else "end", text=text))
    found += [
        Event(at=checkpoint.at, kind="checkpoint", text=f"checkpoint {of}{checkpoint.step}")
        for checkpoint in run.checkpoints
    ]
    found += [
        Event(at=line["time"], kind="evaluation", text=f"evaluation at step {line['step']}")
        for line in run.metrics
        if any(name.startswith(HELD_OUT) for name in line) and "numbered" not in line
    ]
    return sorted(found, key=lambda event: event.at)


def _counter(attempt: Attempt) -> str:
    """Return what an attempt's numbers count: the checkpoints of a script that saves by itself have no steps."""
    return "step" if attempt.restored_step is None else "checkpoint"


def time_axis(run: RecordedRun) -> TimeAxis:
    """Return the time axis of all charts of a run: from its first start to its last known event."""
    begins = [attempt.started_at for attempt in run.attempts] + [line["time"] for line in run.metrics[:1]]
    begin = min(begins, default=run.submitted_at)
    ends = [ended_at(attempt) for attempt in run.attempts] + [line["time"] for line in run.metrics[-1:]]
    steps = sorted((line["time"], line["step"]) for line in run.metrics if "numbered" not in line)
    return TimeAxis(begin=begin, end=max(ends, default=begin + timedelta(seconds=1)), steps=steps)


def sections(values: Sequence[Point], starts: Sequence[datetime], *, at_most: int = DRAWN_POINTS) -> list[Drawn]:
    """Return the points to draw for a series: all of a short series, means and ranges of a long one.

    `starts` are the start times of the attempts, in order. No section spans two attempts.
    """
    size = max(1, -(-len(values) // at_most))
    found: list[Drawn] = []
    for attempt, group in groupby(values, key=lambda point: bisect_right(starts, point.at)):
        of_attempt = list(group)
        for first in range(0, len(of_attempt), size):
            part = of_attempt[first : first + size]
            middle, heights = part[len(part) // 2], [point.value for point in part]
            found.append(
                Drawn(
                    at=middle.at,
                    step=middle.step,
                    value=sum(heights) / len(heights),
                    low=min(heights),
                    high=max(heights),
                    series=series_title(middle.series),
                    attempt=attempt,
                )
            )
    return found


def _chart_of(point: Point) -> str:
    if point.series in _LOSSES:
        return "loss"
    is_share = point.series.startswith(HELD_OUT) and -1 <= point.value <= 1
    return "evaluation" if is_share else point.series


def _curve(name: str, values: Sequence[Point], axis: TimeAxis, marks: Sequence[Event], run: RecordedRun) -> Curve:
    title = curve_title(name)
    by_series: dict[str, list[Point]] = {}
    for point in values:
        by_series.setdefault(point.series, []).append(point)
    starts = sorted(attempt.started_at for attempt in run.attempts)
    drawn = [section for series in by_series.values() for section in sections(series, starts)]
    summary = " ".join(in_words(capitalized(series_title(series)), found) for series, found in by_series.items())
    return Curve(
        id=f"curve-{name}",
        title=title,
        summary=summary,
        spec=_chart(
            f"{title}. {summary}",
            drawn,
            axis,
            marks,
            counted="value" if all(point.is_numbered for point in values) else "step",
            logarithmic=name == "loss" and _spans_decades(values),
        ),
    )


def _chart(
    description: str,
    points: Sequence[Drawn],
    axis: TimeAxis,
    marks: Sequence[Event],
    *,
    counted: str,
    logarithmic: bool,
) -> dict[str, Any]:
    counts = Counter(point.series for point in points)
    few = {name for name, count in counts.items() if count <= FEW_POINTS}
    # Values at a single moment show no trend. An axis from 0 shows how far apart they are.
    is_one_value = len({height for point in points for height in (point.low, point.high)}) == 1
    from_zero = not logarithmic and (is_one_value or max(counts.values()) == 1)
    tiny = {"format": "~e"} if max(abs(point.high) for point in points) < 0.001 else {}
    y = {
        "field": "v",
        "type": "quantitative",
        "title": None,
        "scale": {"zero": from_zero, "type": "log" if logarithmic else "linear"},
        "axis": {"minExtent": 52, "maxExtent": 52, "tickCount": 5, **tiny},
    }
    return chart(
        "curve",
        description=description,
        counted=counted,
        points=[
            {
                "t": axis.value(point.at),
                "n": point.step,
                "v": short(point.value),
                "l": short(point.low),
                "h": short(point.high),
                "s": point.series,
                "a": point.attempt,
                **({"f": 1} if point.series in few else {}),
            }
            for point in points
        ],
        events=[{"t": axis.value(event.at), "k": event.kind, "e": event.text} for event in marks],
        x=axis.encoding_with_steps("t"),
        y=y,
        low={**y, "field": "l"},
        color={
            "field": "s",
            "type": "nominal",
            "scale": {"domain": list(counts)},
            "legend": {"symbolType": "stroke"} if len(counts) > 1 else None,
        },
        # At most 200 points react to the pointer, because each gets a separate area.
        pointed=f"datum.f || (datum.row % {max(1, -(-len(points) // 200))} == 0)",
        unit=axis.unit[0],
    )


def curve_title(name: str) -> str:
    return _TITLES.get(name, name.replace("_", " ").capitalize())


def series_title(name: str) -> str:
    """Return the name of a series for legends and sentences."""
    if not name.startswith(_EVALUATION):
        title = curve_title(name)
        return title[:1].lower() + title[1:]
    return result_label(name) + (" on held-out data" if name == "eval_loss" else "")


def capitalized(text: str) -> str:
    """Return a text with a capital first letter and the rest unchanged: `Macro F1`."""
    return text[:1].upper() + text[1:]


def _spans_decades(values: Sequence[Point]) -> bool:
    low, high = min(point.value for point in values), max(point.value for point in values)
    return low > 0 and high / low > 100


def in_words(series: str, values: Sequence[Point]) -> str:
    first, last = values[0], values[-1]
    if len(values) == 1:
        return f"{series}: {figure_of(first.value)} {_place(first)}."
    low, high = min(values, key=lambda point: point.value), max(values, key=lambda point: point.value)
    if first.step == last.step:  # measured over time, while no step was reported
        return (
            f"{series}: from {figure_of(first.value)} to {figure_of(last.value)}; "
            f"lowest {figure_of(low.value)}, highest {figure_of(high.value)}."
        )
    return (
        f"{series}: from {figure_of(first.value)} {_place(first)} to {figure_of(last.value)} {_place(last)}; "
        f"lowest {figure_of(low.value)} at {low.step:,}, highest {figure_of(high.value)} at {high.step:,}."
    )


def _place(point: Point) -> str:
    return f"{'as value' if point.is_numbered else 'at step'} {point.step:,}"


def figure_of(value: float) -> str:
    """Return a value as text. Small values keep their first digits, so that a learning rate is not shown as 0.000."""
    return f"{value:.3g}" if abs(value) < 0.01 else figure(value)
