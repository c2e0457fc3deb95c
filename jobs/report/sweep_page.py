"""Render the page of a sweep: its points with their values, best first, the curves of the objective, and the cost."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from jobs.core.run import submitted_at
from jobs.core.words import figure, main_result, result_label, usd
from jobs.report import charts
from jobs.report.charts import template
from jobs.report.comparison import argument_text, overlaid
from jobs.report.curves import Curve, Point, points
from jobs.report.rendering import Tile, render
from jobs.runs.recorded_run import RecordedRun

DRAWN_RUNS = 40
"""Maximum number of points with a curve: the best ones. More lines would hide each other."""


@dataclass(frozen=True, kw_only=True)
class SweepPoint:
    """One point of a sweep, as its page shows it."""

    number: int
    values: Mapping[str, Any]
    state: str
    reason: str
    metric: tuple[str, float] | None
    """The metric that ranks it, with its name."""
    usd: float | None
    run: RecordedRun
    """What the point has recorded; of points without a curve only the receipt."""

    @property
    def label(self) -> str:
        return f"point {self.number}"


@dataclass(frozen=True, kw_only=True)
class SweepSummary:
    """A sweep as a whole."""

    run_id: str
    team: str
    job: str
    """Kind of job."""
    state: str
    metric: str | None
    """The metric that the spec names."""
    progress: str
    reason: str
    """Why the sweep ended before all points did, or a warning; may be empty."""
    budget: str
    best: str | None
    """Run id of the best point; None if no point has succeeded with the metric."""


def sweep_page(
    sweep: SweepSummary,
    found: Sequence[SweepPoint],
    *,
    now: datetime,
    live: bool = False,
    home: str = "",
    query: str | None = None,
) -> str:
    """Return the page as one HTML file. `found` has the points, best first.

    `query` ends the addresses of the points' reports, if the page is served together with them.
    """
    names = list(dict.fromkeys(name for point in found for name in point.values))
    colors = _colors(found)
    curve = objective_curve(sweep, found, colors)
    metric = next((point.metric[0] for point in found if point.metric), sweep.metric or "metric")
    return render(
        "sweep.html",
        charts={curve.id: curve.spec} if curve else {},
        now=now,
        live=live,
        home=home,
        query=query,
        sweep=sweep,
        head=f"sweep of {sweep.job}, team {sweep.team}, submitted {submitted_at(sweep.run_id):%Y-%m-%d %H:%M:%S} UTC",
        tiles=_tiles(sweep, found),
        curve=curve,
        curve_height=charts.CURVE_HEIGHT,
        left_out=max(0, len(found) - DRAWN_RUNS),
        colors=colors,
        label=result_label(metric),
        names=[name.removeprefix("parameters.") for name in names],
        rows=[
            (
                point,
                [argument_text(point.values.get(name)) for name in names],
                "" if point.metric is None else figure(point.metric[1]),
                "" if point.usd is None else f"{point.usd:.2f}",
            )
            for point in found
        ],
    )


def _colors(found: Sequence[SweepPoint]) -> dict[str, str]:
    """Return the colours of the points' lines: one for each of the best that has a line, and one for all others."""
    drawn = [point.label for point in found if point.run.metrics]
    best = dict(zip(drawn, template("config")["range"]["category"], strict=False))
    return {point.label: best.get(point.label, "var(--rule)") for point in found}


def objective_curve(sweep: SweepSummary, found: Sequence[SweepPoint], colors: Mapping[str, str]) -> Curve | None:
    """Return the curves of the metric that ranks the points over each other; None if no point has logged a metric.

    Before the first result of a sweep without `metric`, that is the main metric among those that the points log.
    """
    by_metric: dict[str, dict[str, list[Point]]] = {}
    for point in found[:DRAWN_RUNS]:
        for each in points(point.run):
            by_metric.setdefault(each.series, {}).setdefault(point.label, []).append(each)
    ranking = next((point.metric[0] for point in found if point.metric), sweep.metric)
    main = main_result(dict.fromkeys(by_metric, 0.0))
    name = ranking if ranking in by_metric else main[0] if main else next(iter(by_metric), None)
    if name is None:
        return None
    # The best points are drawn last, so that they are above the others.
    by_point = by_metric[name]
    labels = [point.label for point in reversed(found) if point.label in by_point]
    return overlaid(
        name,
        {label: by_point[label] for label in labels},
        runs=labels,
        colors=[colors[label] for label in labels],
        dashes=[[1, 0] for _ in labels],
    )


def _tiles(sweep: SweepSummary, found: Sequence[SweepPoint]) -> list[Tile]:
    best = next((point for point in found if point.run.run_id == sweep.best), None)
    done = sum(point.state == "succeeded" for point in found)
    tiles = [Tile("Points", f"{done} of {len(found)}", sweep.progress.partition(", ")[2])]
    if best is not None and best.metric is not None:
        tiles.append(Tile(f"Best {result_label(best.metric[0])}", figure(best.metric[1]), best.label))
    cost = usd(sum(point.usd or 0.0 for point in found))
    return [*tiles, Tile("Estimated cost", cost, f"{sweep.budget} used" if sweep.budget else "")]
