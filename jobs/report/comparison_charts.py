"""Charts of several runs: curves over each other, a scatter, parallel coordinates; as charts.py has those of one."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from jobs.report.charts import CONFIG, CURVE_HEIGHT, FEW_POINTS, short

_DASHES = ([1, 0], [6, 3], [2, 2], [10, 3, 2, 3])


def overlaid_chart(*, title: str, series: Sequence[str], points: Sequence[tuple[str, int, float]]) -> dict[str, Any]:
    """Return the curves of several runs over each other, by step. `points`: run, step and value."""
    return {
        "description": title,
        "width": "container",
        "height": CURVE_HEIGHT,
        "autosize": {"type": "fit", "contains": "padding"},
        "data": {"values": [{"r": run, "n": step, "v": short(value)} for run, step, value in points]},
        "mark": {
            "type": "line",
            "strokeWidth": 1.8,
            "aria": False,
            "tooltip": True,
            "point": len(points) <= FEW_POINTS,
        },
        "encoding": {
            "x": {"field": "n", "type": "quantitative", "title": "step", "axis": {"grid": False, "format": "~s"}},
            "y": {
                "field": "v",
                "type": "quantitative",
                "title": None,
                "scale": {"zero": False},
                "axis": {"minExtent": 52, "maxExtent": 52, "tickCount": 5},
            },
            **_by_run(series),
        },
    }


def scatter(
    runs: Sequence[str], points: Sequence[tuple[str, float, float]], *, x: str, y: str, description: str
) -> dict[str, Any]:
    """Return a point for each run that has both. `points`: run, x and y."""
    axis = {"type": "quantitative", "axis": {"tickCount": 5}}
    across, up = [cost for _, cost, _ in points], [height for _, _, height in points]
    return {
        "description": description,
        "width": "container",
        "height": CURVE_HEIGHT + 40,
        "autosize": {"type": "fit", "contains": "padding"},
        "data": {"values": [{"r": run, "x": short(cost), "y": short(height)} for run, cost, height in points]},
        "mark": {"type": "point", "filled": True, "size": 110, "opacity": 1, "tooltip": True, "aria": False},
        "encoding": {
            "x": {**axis, "field": "x", "title": x, "scale": {"domain": _around(across)}},
            "y": {**axis, "field": "y", "title": y, "scale": {"domain": _around(up)}},
            **_by_run(runs),
        },
    }


def parallel_coordinates(
    runs: Sequence[str], axes: Mapping[str, Sequence[float]], *, description: str
) -> dict[str, Any]:
    """Return a line for each run over several upright axes. `axes`: each run's value, by the name of an axis."""
    values = [
        {"r": run, "a": name, "y": _share(of_axis, of_axis[number]), "v": short(of_axis[number])}
        for name, of_axis in axes.items()
        for number, run in enumerate(runs)
    ]
    ends = [
        {"a": name, "y": height, "t": f"{bound:.4g}"}
        for name, of_axis in axes.items()
        for height, bound in ((-0.14, min(of_axis)), (1.14, max(of_axis)))
    ]
    x = {
        "field": "a",
        "type": "nominal",
        "sort": list(axes),
        "title": None,
        "axis": {"labelAngle": 0, "grid": True, "domain": False, "ticks": False, "labelLimit": 120},
        "scale": {"type": "point", "padding": 0.35},
    }
    y = {"field": "y", "type": "quantitative", "axis": None, "scale": {"domain": [-0.22, 1.22]}}
    return {
        "description": description,
        "width": "container",
        "height": CURVE_HEIGHT + 40,
        "autosize": {"type": "fit", "contains": "padding"},
        "layer": [
            {
                "data": {"values": values},
                "mark": {"type": "line", "strokeWidth": 2, "point": {"size": 50}, "aria": False},
                "encoding": {
                    "x": x,
                    "y": y,
                    "tooltip": [
                        {"field": "r", "title": "run"},
                        {"field": "a", "title": "of"},
                        {"field": "v", "title": "value"},
                    ],
                    **_by_run(runs),
                },
            },
            {
                "data": {"values": ends},
                "mark": {
                    "type": "text",
                    "fontSize": 11,
                    "fill": "var(--muted)",
                    "aria": False,
                },
                "encoding": {"x": x, "y": y, "text": {"field": "t"}},
            },
        ],
    }


def _around(values: Sequence[float]) -> tuple[float, float]:
    """Return a range with some room around all values, even where they are one and the same."""
    low, high = min(values), max(values)
    room = (high - low) * 0.1 or abs(high) * 0.1 or 1.0
    return low - room, high + room


def look_of(number: int) -> tuple[str, list[int]]:
    """Return the colour of a run's lines, and their dashes: those tell runs apart that share a colour."""
    colors = CONFIG["range"]["category"]
    return colors[number % len(colors)], _DASHES[number // len(colors) % len(_DASHES)]


def _by_run(runs: Sequence[str]) -> dict[str, Any]:
    """Return what tells runs apart; what is whose is said once on the page, above the charts."""
    looks = [look_of(number) for number in range(len(runs))]
    nominal = {"field": "r", "type": "nominal", "legend": None}
    return {
        "color": {**nominal, "scale": {"domain": list(runs), "range": [color for color, _ in looks]}},
        "strokeDash": {**nominal, "scale": {"domain": list(runs), "range": [dashes for _, dashes in looks]}},
    }


def _share(values: Sequence[float], value: float) -> float:
    """Return how high a value lies between the lowest and the highest: by their digits where they span decades."""
    low, high = min(values), max(values)
    if low == high:
        return 0.5
    if low > 0 and high / low >= 10:
        low, high, value = math.log(low), math.log(high), math.log(value)
    return round((value - low) / (high - low), 4)
