"""Build Vega-Lite charts from templates/*.json. Their colours come from style.css, in the light and the dark scheme.

Vega copies colours into the SVG unchanged, so `var(--line-1)` follows the page's scheme: dark, light or printed.
"""

import functools
import json
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from jobs.money.phases import PHASES

_TEMPLATES = Path(__file__).parent / "templates"

CURVE_HEIGHT = 256
"""Height of a whole chart with axes and legend, in pixels. The page reserves it, so that nothing moves."""
ROW_HEIGHT = 32

FEW_POINTS = 40
"""A series with at most this many points gets a dot at each."""

PHASE_COLORS = [(name, f"var(--phase-{name})") for name in PHASES]
"""For a legend in the page, because Vega's own does not wrap on a phone."""

_MOST_TICKS = 8
"""Maximum number of ticks on the time axis, each with its step."""


def chart(name: str, *, height: int = CURVE_HEIGHT, **values: Any) -> dict[str, Any]:
    """Return the chart of templates/NAME.json, with each `"$name"` replaced by the value of that name."""
    phases, phase_colors = zip(*PHASE_COLORS, strict=True)
    known = {"height": height, "phases": phases, "phase_colors": phase_colors, **values}

    def filled(part: Any) -> Any:
        if isinstance(part, dict):
            return {key: filled(value) for key, value in part.items()}
        if isinstance(part, list):
            return [filled(value) for value in part]
        return known[part[1:]] if isinstance(part, str) and part.startswith("$") else part

    fitting = {"width": "container", "autosize": {"type": "fit", "contains": "padding"}}
    return {**fitting, **filled(template(name))}


@functools.cache
def template(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((_TEMPLATES / f"{name}.json").read_text(encoding="utf-8"))
    return found


def short(value: float) -> float:
    """Round a value to the precision that a chart can show, which makes the page smaller."""
    return float(f"{value:.5g}")


@dataclass(frozen=True, kw_only=True)
class TimeAxis:
    """The time since a run began, in a unit that suits its length."""

    begin: datetime
    end: datetime
    steps: Sequence[tuple[datetime, int]] = ()
    """When the run reached which step, ordered by time."""

    @property
    def seconds(self) -> float:
        return max(1.0, (self.end - self.begin).total_seconds())

    @property
    def unit(self) -> tuple[str, float]:
        """Return the unit's name and its length in seconds."""
        limits = (("seconds", 1.0, 180.0), ("minutes", 60.0, 180 * 60.0), ("hours", 3600.0, 72 * 3600.0))
        return next(((name, size) for name, size, limit in limits if self.seconds <= limit), ("days", 86400.0))

    def value(self, at: datetime) -> float:
        return round((at - self.begin).total_seconds() / self.unit[1], 4)

    def text(self, at: datetime) -> str:
        return f"{self.value(at):.1f} {self.unit[0]}"

    def encoding(self, field: str) -> dict[str, Any]:
        """Return the Vega-Lite encoding of a time field."""
        return {
            "field": field,
            "type": "quantitative",
            "title": f"{self.unit[0]} since the first start",
            "scale": {"domain": [0, self._length], "nice": False},
            "axis": {"grid": False},
        }

    def encoding_with_steps(self, field: str) -> dict[str, Any]:
        """Return the encoding of a time field, with the step reached by then below each time.

        Steps have no separate axis: between attempts, time continues but steps do not, and lost steps are repeated.
        """
        plain = self.encoding(field)
        if not self.steps:
            return plain
        step_at = {f"{tick:g}": f"step {self._step(tick):,}" for tick in self._ticks()}
        labels = f"[datum.label, {json.dumps(step_at)}[datum.value]]"
        axis = {"grid": False, "values": [float(tick) for tick in step_at], "labelExpr": labels}
        return {**plain, "title": f"{plain['title']}, with the step reached by then", "axis": axis}

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
