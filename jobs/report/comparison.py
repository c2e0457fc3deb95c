"""Compare several runs: their results, time and cost, and the arguments in which they differ."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from jobs.core.records import Receipt
from jobs.core.words import counted, duration, figure, is_of_a_whole_phase, main_result, result_label, smaller_is_better
from jobs.report.charts import CURVE_HEIGHT, FEW_POINTS, chart, short, template
from jobs.report.curves import (
    Curve,
    Point,
    capitalized,
    curve_title,
    figure_of,
    points,
    sections,
    series_title,
)
from jobs.report.rendering import render
from jobs.runs.recorded_run import RecordedRun

_COMPARED = (
    "eval_accuracy",
    "eval_f1",
    "eval_combined_score",
    "eval_matthews_correlation",
    "eval_perplexity",
    "eval_loss",
    "train_samples_per_second",
)
_CURVES = ("loss", "eval_accuracy", "eval_f1", "eval_loss", "eval_perplexity", "learning_rate", "samples_per_second")
_FURTHER = 12
"""The most rows and charts of metrics that only scripts have."""
_DASHES = ([1, 0], [6, 3], [2, 2], [10, 3, 2, 3])


@dataclass(frozen=True, kw_only=True)
class Fact:
    """A row of a comparison."""

    label: str
    cells: Sequence[str]
    """One cell for each run, in order."""
    best: int | None = None
    """Index of the best run, or None if the values have no order."""
    is_argument: bool = False


def facts(runs: Sequence[RecordedRun]) -> list[Fact]:
    """Return the results, time and cost of the runs, and the arguments in which they differ."""
    found = [Fact(label="state", cells=[run.state for run in runs])]
    for key in _compared(runs):
        values = [run.result.get(key) for run in runs]
        if any(value is not None for value in values):
            cells = ["" if value is None else figure(value) for value in values]
            found.append(Fact(label=result_label(key), cells=cells, best=_best(key, values)))
    receipts = [run.receipt for run in runs]
    found += [
        Fact(label="attempts", cells=[str(len(run.attempts)) for run in runs]),
        Fact(label="time", cells=[duration(bill.duration_seconds) if bill else "" for bill in receipts]),
        Fact(label="USD", cells=["" if (cost := usd_of(run)) is None else f"{cost:.2f}" for run in runs]),
        _usd_per_percent(runs),
        Fact(label="saved", cells=[_saved(bill) for bill in receipts]),
        Fact(label="ran on", cells=[run.ran_on for run in runs]),
    ]
    found += [
        Fact(label=name, cells=[argument_text(value) for value in values], is_argument=True)
        for name, values in differing_arguments(runs).items()
    ]
    return [fact for fact in found if any(fact.cells)]


def _is_script(run: RecordedRun) -> bool:
    return run.receipt is not None and run.receipt.job == "script"


def _compared(runs: Sequence[RecordedRun]) -> list[str]:
    """Return the metrics to compare: the known ones, and the numbers that scripts report."""
    found = (
        key
        for run in runs
        if _is_script(run)
        for key, value in run.result.items()
        if isinstance(value, (int, float)) and not is_of_a_whole_phase(key)
    )
    return [*_COMPARED, *[key for key in dict.fromkeys(found) if key not in _COMPARED][:_FURTHER]]


def _usd_per_percent(runs: Sequence[RecordedRun]) -> Fact:
    """Return the cost per hundredth of the main metric, for each run.

    Has no cells if the main metric is a loss, or if the runs have different main metrics.
    """
    main = [main_result(run.result) for run in runs]
    keys = {found[0] for found in main if found}
    if len(keys) != 1:
        return Fact(label="", cells=[])
    prices = [
        cost / (100 * found[1]) if found and not smaller_is_better(found[0]) and found[1] > 0 and cost else None
        for run, found in zip(runs, main, strict=True)
        for cost in (usd_of(run),)
    ]
    known = [(price, number) for number, price in enumerate(prices) if price is not None]
    cells = ["" if price is None else f"{price:.4f}" for price in prices]
    best = min(known)[1] if len({price for price, _ in known}) > 1 else None
    return Fact(label=f"USD per % of {result_label(*keys)}", cells=cells, best=best)


def short_names(runs: Sequence[RecordedRun]) -> list[str]:
    """Return short names of the runs for charts, which have no space for ids."""
    return [f"run {number}" for number in range(1, len(runs) + 1)]


def differing_arguments(runs: Sequence[RecordedRun]) -> dict[str, list[Any]]:
    """Return the arguments that differ between runs, with each run's value.

    For runs of several kinds, only arguments that all kinds have. Mappings get a row for each key: `parameters.rate`.
    """
    given: list[Mapping[str, Any]] = [
        {"kind": run.spec.job, **run.spec.entrypoint_arguments().model_dump(mode="json")} if run.spec else {}
        for run in runs
    ]
    specified = [arguments for arguments in given if arguments]
    names = [name for name in (specified[0] if specified else {}) if all(name in each for each in specified)]
    by_name: dict[str, list[Any]] = {}
    for name in names:
        values = [arguments.get(name) for arguments in given]
        mappings = [value for value in values if isinstance(value, dict)]
        if not mappings:
            by_name[name] = values
        for key in dict.fromkeys(key for mapping in mappings for key in mapping):
            by_name[f"{name}.{key}"] = [value.get(key) if isinstance(value, dict) else None for value in values]
    return {name: values for name, values in by_name.items() if any(value != values[0] for value in values)}


def usd_of(run: RecordedRun) -> float | None:
    return run.receipt.estimated_usd if run.receipt else None


def comparison_page(runs: Sequence[RecordedRun], *, now: datetime) -> str:
    """Return the page that compares the runs, as one HTML file."""
    found = facts(runs)
    drawn = shared_curves(runs)
    cost_chart = _cost_chart(runs)
    further = {} if cost_chart is None else {"scatter": cost_chart[2]}
    return render(
        "comparison.html",
        charts={**{curve.id: curve.spec for curve in drawn}, **further},
        now=now,
        title=f"Comparison of {counted(len(runs), 'run')}",
        names=list(zip(short_names(runs), (run.run_id for run in runs), strict=True)),
        line_styles=[line_style(number) for number in range(len(runs))],
        facts=[fact for fact in found if not fact.is_argument],
        arguments=[fact for fact in found if fact.is_argument],
        curves=drawn,
        curve_height=CURVE_HEIGHT,
        cost_chart=cost_chart,
    )


def shared_curves(runs: Sequence[RecordedRun]) -> list[Curve]:
    """Return the curves of all runs by step, one chart for each metric."""
    by_name: dict[str, dict[str, list[Point]]] = {}
    for name, run in zip(short_names(runs), runs, strict=True):
        for point in points(run):
            by_name.setdefault(point.series, {}).setdefault(name, []).append(point)
    measured_by_scripts = {name for run in runs if _is_script(run) for line in run.metrics for name in line}
    further = [name for name in by_name if name not in _CURVES and name in measured_by_scripts]
    names = [each for each in (*_CURVES, *further[:_FURTHER]) if each in by_name]
    return [overlaid(name, by_name[name], **_line_styles(short_names(runs))) for name in names]


def overlaid(name: str, by_run: Mapping[str, Sequence[Point]], **styles: Any) -> Curve:
    """Return a chart of one metric by step, with a line for each run. `styles`: runs, colors and dashes, in order."""
    words = "Final values: " + ", ".join(f"{run} {figure_of(of[-1].value)}" for run, of in by_run.items()) + "."
    drawn = [(run, section.step, section.value) for run, values in by_run.items() for section in sections(values, ())]
    title = curve_title(name) if name == "loss" else capitalized(series_title(name))
    spec = chart(
        "overlaid",
        description=f"{title}. {words}",
        values=[{"r": run, "n": step, "v": short(value)} for run, step, value in drawn],
        dots=len(drawn) <= FEW_POINTS,
        **styles,
    )
    return Curve(id=f"curve-{name}", title=title, summary=words, spec=spec)


def _cost_chart(runs: Sequence[RecordedRun]) -> tuple[str, str, dict[str, Any]] | None:
    """Return title, description and chart of cost against result, if two runs have the same metric."""
    metric = next((key for key in _COMPARED if sum(key in run.result for run in runs) > 1), None)
    names = short_names(runs)
    priced = [
        (name, cost, run.result[metric])
        for name, run in zip(names, runs, strict=True)
        if metric is not None and (cost := usd_of(run)) and metric in run.result
    ]
    if metric is None or not priced:
        return None
    label = result_label(metric)
    words = "; ".join(f"{name}: {figure(value)} for {cost:.2f} USD" for name, cost, value in priced) + "."
    return f"Cost vs. result: {label}", words, scatter(names, priced, x="USD", y=label, description=words)


def scatter(
    runs: Sequence[str], points: Sequence[tuple[str, float, float]], *, x: str, y: str, description: str
) -> dict[str, Any]:
    """Return a chart with a point for each run. `points` are (run, x, y)."""
    return chart(
        "scatter",
        description=description,
        values=[{"r": run, "x": short(cost), "y": short(height)} for run, cost, height in points],
        x_title=x,
        y_title=y,
        x_domain=_around([cost for _, cost, _ in points]),
        y_domain=_around([height for _, _, height in points]),
        **_line_styles(runs),
    )


def line_style(number: int) -> tuple[str, list[int]]:
    """Return the colour of a run's lines, and the dashes that distinguish runs of the same colour."""
    colors = template("config")["range"]["category"]
    return colors[number % len(colors)], _DASHES[number // len(colors) % len(_DASHES)]


def _line_styles(runs: Sequence[str]) -> dict[str, Any]:
    """Return colours and dashes of the runs in a chart. Their legend is above the charts, in the page."""
    colors, dashes = zip(*(line_style(number) for number in range(len(runs))), strict=True)
    return {"runs": list(runs), "colors": colors, "dashes": dashes}


def _around(values: Sequence[float]) -> tuple[float, float]:
    """Return a range with some margin around the values, even if all values are equal."""
    low, high = min(values), max(values)
    room = (high - low) * 0.1 or abs(high) * 0.1 or 1.0
    return low - room, high + room


def _best(key: str, values: Sequence[Any]) -> int | None:
    known = [(value, number) for number, value in enumerate(values) if isinstance(value, (int, float))]
    if len(known) < 2 or len({value for value, _ in known}) == 1:
        return None
    return (min(known) if smaller_is_better(key) else max(known))[1]


def _saved(receipt: Receipt | None) -> str:
    return f"{receipt.saved_percent:.0f} %" if receipt and receipt.saved_percent else ""


def argument_text(value: Any) -> str:
    """Return a value as written in a spec, or an empty string if it is not set."""
    if value in (None, [], {}):
        return ""
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)
