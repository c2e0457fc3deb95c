"""Charts as Vega-Lite describes them, as JSON. Their colours are those of style.css, in either colour scheme.

Vega writes a colour into the SVG as it is given, so `var(--line-1)` follows the page: dark, light and printed.
"""

import json
import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from jobs.contract.phases import PHASES, Phase

CONFIG: Mapping[str, Any] = {
    "background": None,
    "font": "system-ui, sans-serif",
    "view": {"stroke": None},
    "axis": {
        "labelColor": "var(--muted)",
        "titleColor": "var(--muted)",
        "gridColor": "var(--rule)",
        "domainColor": "var(--rule)",
        "tickColor": "var(--rule)",
        "labelFontSize": 12,
        "titleFontSize": 12,
        "titleFontWeight": "normal",
    },
    # The first label is moved into the chart otherwise, onto the second one.
    "axisX": {"labelFlush": False, "labelSeparation": 6},
    "legend": {
        "labelColor": "var(--text)",
        "titleColor": "var(--muted)",
        "labelFontSize": 12,
        "symbolStrokeWidth": 3,
        "orient": "top",
        "title": None,
        "labelLimit": 260,
    },
    "range": {"category": [f"var(--line-{number})" for number in range(1, 7)]},
}
"""What all charts have in common."""

CURVE_HEIGHT = 256
"""That of a whole chart, with axes and legend, in pixels: a page keeps the place free, so that nothing moves."""

ROW_HEIGHT = 32
_HEATMAP_CELL = 28

_RULES = {
    "attempt": ("var(--event-attempt)", [1, 0]),
    "resume": ("var(--event-resume)", [6, 3]),
    "reclaim": ("var(--event-reclaim)", [2, 2]),
    "end": ("var(--event-reclaim)", [8, 2]),
}
_TICKS = {
    "checkpoint": ("var(--event-checkpoint)", "triangle-down"),
    "evaluation": ("var(--event-evaluation)", "diamond"),
}

FEW_POINTS = 40
"""A series of no more points has a dot at each."""

_MOST_TICKS = 8
"""Times below a chart, each with its step."""

_LABELLED_CLASSES = 15
"""A confusion of no more classes has its counts in its cells."""


@dataclass(frozen=True, kw_only=True)
class TimeAxis:
    """The time since a run began, in the unit that suits its length."""

    begin: datetime
    end: datetime
    steps: Sequence[tuple[datetime, int]] = ()
    """When the run was at which step, in the order of time."""

    @property
    def seconds(self) -> float:
        return max(1.0, (self.end - self.begin).total_seconds())

    @property
    def unit(self) -> tuple[str, float]:
        """Return the unit's name and its seconds."""
        limits = (("seconds", 1.0, 180.0), ("minutes", 60.0, 180 * 60.0), ("hours", 3600.0, 72 * 3600.0))
        return next(((name, size) for name, size, limit in limits if self.seconds <= limit), ("days", 86400.0))

    def value(self, at: datetime) -> float:
        return round((at - self.begin).total_seconds() / self.unit[1], 4)

    def text(self, at: datetime) -> str:
        return f"{self.value(at):.1f} {self.unit[0]}"

    def encoding(self, field: str = "t") -> dict[str, Any]:
        return {
            "field": field,
            "type": "quantitative",
            "title": f"{self.unit[0]} since the first start",
            "scale": {"domain": [0, self._length], "nice": False},
            "axis": {"grid": False},
        }

    def encoding_with_steps(self) -> dict[str, Any]:
        """Return the same with the step that the run was at below each time. Steps have no axis of their own: between
        two attempts the time goes on and they do not, and after a loss they are done again.
        """
        plain = self.encoding()
        if not self.steps:
            return plain
        step_at = {f"{tick:g}": f"step {self._step(tick):,}" for tick in self._ticks()}
        axis = {
            "values": [float(tick) for tick in step_at],
            "labelExpr": f"[datum.label, {json.dumps(step_at)}[datum.value]]",
        }
        return {**plain, "title": f"{plain['title']}, and the step by then", "axis": {**plain["axis"], **axis}}

    @property
    def _length(self) -> float:
        return round(self.seconds / self.unit[1], 4)

    def _ticks(self) -> list[float]:
        """Return round times from the start on, at most `_MOST_TICKS`."""
        size = 10.0 ** math.floor(math.log10(self._length / _MOST_TICKS))
        apart = next(size * times for times in (1, 2, 5, 10) if self._length / (size * times) < _MOST_TICKS)
        return [number * apart for number in range(int(self._length / apart) + 1)]

    def _step(self, tick: float) -> int:
        at = self.begin + timedelta(seconds=tick * self.unit[1])
        reached = bisect_right(self.steps, at, key=lambda step: step[0])
        return self.steps[reached - 1][1] if reached else 0


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """A stretch of a series, or one point of it."""

    at: datetime
    step: int
    value: float
    low: float
    high: float
    series: str
    attempt: int


def curve_chart(
    *,
    title: str,
    axis: TimeAxis,
    points: Sequence[Drawn],
    events: Sequence[tuple[datetime, str, str]],
    logarithmic: bool,
) -> dict[str, Any]:
    """Return a chart of series over the time. `events`: time, kind and text of each."""
    series = list(dict.fromkeys(point.series for point in points))
    tooltip = [
        {"field": "v", "title": "value", "format": ".5~g"},
        {"field": "s", "title": "series"},
        {"field": "n", "title": "step", "format": ","},
        {"field": "t", "title": axis.unit[0], "format": ".2f"},
    ]
    tiny = max(abs(point.high) for point in points) < 0.001
    # Values at a single moment have no course that an axis could show: one from 0 says how far apart they are.
    counts = Counter(point.series for point in points)
    is_one_value = len({height for point in points for height in (point.low, point.high)}) == 1
    from_zero = not logarithmic and (is_one_value or max(counts.values()) == 1)
    y = {
        "field": "v",
        "type": "quantitative",
        "title": None,
        "scale": {"zero": from_zero, "type": "log" if logarithmic else "linear"},
        "axis": {"minExtent": 52, "maxExtent": 52, "tickCount": 5, **({"format": "~e"} if tiny else {})},
    }
    color = {
        "field": "s",
        "type": "nominal",
        "scale": {"domain": series},
        "legend": {"symbolType": "stroke"} if len(series) > 1 else None,
    }
    few = {name for name, count in counts.items() if count <= FEW_POINTS}
    return {
        "description": title,
        "width": "container",
        "height": CURVE_HEIGHT,
        "autosize": {"type": "fit", "contains": "padding"},
        "datasets": {
            "points": [
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
            "events": [{"t": axis.value(at), "k": kind, "e": text} for at, kind, text in events],
        },
        "layer": [
            *_event_marks(axis),
            {
                "data": {"name": "points"},
                "mark": {"type": "area", "fillOpacity": 0.22, "aria": False},
                "encoding": {
                    "x": axis.encoding_with_steps(),
                    "y": {**y, "field": "l"},
                    "y2": {"field": "h"},
                    "color": color,
                    "detail": {"field": "a"},
                },
            },
            {
                "data": {"name": "points"},
                "mark": {"type": "line", "strokeWidth": 1.8, "aria": False, "clip": True},
                "encoding": {
                    "x": axis.encoding_with_steps(),
                    "y": y,
                    "color": color,
                    "detail": {"field": "a"},
                },
            },
            {
                "data": {"name": "points"},
                "transform": [
                    {"window": [{"op": "row_number", "as": "row"}]},
                    {"filter": f"datum.f || ({_some(len(points))})"},
                ],
                "params": [
                    {
                        "name": "pointed",
                        "select": {"type": "point", "on": "pointermove", "nearest": True, "clear": "pointerout"},
                    }
                ],
                "mark": {"type": "point", "filled": True, "aria": False},
                "encoding": {
                    "x": axis.encoding_with_steps(),
                    "y": y,
                    "color": color,
                    "size": {"condition": {"param": "pointed", "empty": False, "value": 90}, "value": 30},
                    "opacity": {
                        "condition": [
                            {"test": "datum.f", "value": 1},
                            {"param": "pointed", "empty": False, "value": 1},
                        ],
                        "value": 0,
                    },
                    "tooltip": tooltip,
                },
            },
        ],
    }


def short(value: float) -> float:
    """Return the value with as many digits as a chart can show: the page gets smaller."""
    return float(f"{value:.5g}")


def _some(points: int) -> str:
    """Return Vega's condition for at most 200 of the points: each has a cell of its own for the pointer."""
    return f"datum.row % {max(1, -(-points // 200))} == 0"


def _event_marks(axis: TimeAxis) -> list[dict[str, Any]]:
    """Return a layer for each kind of event, whose looks are its own whatever the series of a chart are."""
    looks: dict[str, dict[str, Any]] = {
        kind: {"type": "rule", "strokeWidth": 1.5, "stroke": color, "strokeDash": dash}
        for kind, (color, dash) in _RULES.items()
    }
    looks |= {
        kind: {"type": "point", "filled": True, "size": 55, "opacity": 1, "fill": color, "shape": shape}
        for kind, (color, shape) in _TICKS.items()
    }
    return [
        {
            "data": {"name": "events"},
            "transform": [{"filter": {"field": "k", "equal": kind}}],
            "mark": {**look, "aria": False},
            "encoding": {
                "x": axis.encoding_with_steps(),
                **({"y": {"value": "height" if kind == "evaluation" else 0}} if kind in _TICKS else {}),
                "tooltip": {"field": "e", "title": "event"},
            },
        }
        for kind, look in looks.items()
    ]


PHASE_COLORS = [(name, f"var(--phase-{name})") for name in PHASES]
"""For the legend, which is not the chart's: Vega's does not wrap on a phone."""


def by_phase(field: str) -> dict[str, Any]:
    """Return the encoding by the colours of the phases."""
    names, colors = zip(*PHASE_COLORS, strict=True)
    return {"field": field, "type": "nominal", "scale": {"domain": names, "range": colors}, "legend": None}


def timeline(found: Sequence[Phase], axis: TimeAxis, *, description: str) -> dict[str, Any]:
    """Return a bar for each phase, an attempt a row."""
    attempts = list(dict.fromkeys(f"attempt {phase.attempt}" for phase in found))
    return {
        "description": description,
        "width": "container",
        "height": ROW_HEIGHT * len(attempts) + 55,
        "autosize": {"type": "fit", "contains": "padding"},
        "data": {
            "values": [
                {
                    "a": f"attempt {phase.attempt}",
                    "p": phase.name,
                    "b": axis.value(phase.started_at),
                    "e": axis.value(phase.ended_at),
                    "h": round(phase.instance_seconds / 3600, 4),
                    "u": round(phase.usd, 4),
                }
                for phase in found
            ]
        },
        "mark": {"type": "bar", "height": {"band": 0.62}, "clip": True},
        "encoding": {
            "x": axis.encoding("b"),
            "x2": {"field": "e"},
            "y": {
                "field": "a",
                "type": "nominal",
                "title": None,
                "sort": attempts,
                "axis": {"minExtent": 70, "domain": False, "ticks": False},
            },
            "color": by_phase("p"),
            "tooltip": [
                {"field": "a", "title": "of"},
                {"field": "p", "title": "phase"},
                {"field": "h", "title": "instance hours"},
                {"field": "u", "title": "USD"},
            ],
        },
    }


def confusion_chart(names: Sequence[str], counts: Sequence[Sequence[int]], *, description: str) -> dict[str, Any]:
    """Return the examples by their class and the predicted one, the darker the larger their share of the class."""
    values = [
        {"l": label, "p": guess, "n": counts[row][column], "r": counts[row][column] / max(1, sum(counts[row]))}
        for row, label in enumerate(names)
        for column, guess in enumerate(names)
    ]
    side = {"type": "nominal", "sort": list(names)}
    encoding: dict[str, Any] = {
        "x": {**side, "field": "p", "title": "predicted", "axis": {"labelAngle": -45, "labelLimit": 110}},
        "y": {**side, "field": "l", "title": "class", "axis": {"labelLimit": 110}},
    }
    cells = {
        "mark": {"type": "rect", "fill": "var(--line-1)", "stroke": "var(--rule)", "strokeWidth": 0.5},
        "encoding": {
            "fillOpacity": {
                "field": "r",
                "type": "quantitative",
                "scale": {"domain": [0, 1], "range": [0, 1]},
                "legend": None,
            },
            "tooltip": [
                {"field": "l", "title": "class"},
                {"field": "p", "title": "predicted"},
                {"field": "n", "title": "examples"},
                {"field": "r", "title": "share of the class", "format": ".0%"},
            ],
        },
    }
    texts = {
        "transform": [{"filter": "datum.n > 0"}],
        "mark": {"type": "text", "fontSize": 12, "aria": False},
        "encoding": {
            "text": {"field": "n"},
            "color": {"condition": {"test": "datum.r > 0.55", "value": "var(--page)"}, "value": "var(--text)"},
        },
    }
    return {
        "description": description,
        "width": "container",
        "height": (_HEATMAP_CELL if len(names) <= _LABELLED_CLASSES else 14) * len(names) + 130,
        "autosize": {"type": "fit", "contains": "padding"},
        "data": {"values": values},
        "encoding": encoding,
        "layer": [cells, *([texts] if len(names) <= _LABELLED_CLASSES else [])],
    }
