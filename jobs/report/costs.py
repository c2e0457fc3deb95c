"""Render the page of `trainyard costs`: who spent how much on which phases, and when."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from jobs.core.words import counted, usd
from jobs.money.costs import By, Cost, total
from jobs.money.phases import PHASES, UNPRODUCTIVE
from jobs.report.charts import PHASE_COLORS, ROW_HEIGHT, chart
from jobs.report.rendering import Tile, render

MOST_ROWS = 20
"""Maximum number of bars, for the most expensive rows. The other rows share one bar."""

_MOST_COLORS = 6
_HEADINGS = ("Runs", "Hours", "USD", "On-Demand", "Saved", "Storage")


def costs_page(
    found: Sequence[Cost],
    spans: Sequence[tuple[str, Sequence[Cost]]],
    *,
    by: By,
    when: str,
    stage: str,
    note: str,
    now: datetime,
) -> str:
    """Return the page as one HTML file. `spans` has the rows of each day or month, in order."""
    everything = total(found)
    names = [row.name for row in found]
    shown = names if len(names) <= _MOST_COLORS else [*names[: _MOST_COLORS - 1], "others"]
    drawn: dict[str, Any] = {}
    if found:
        drawn["shares"] = _shares(_at_most(found, MOST_ROWS))
        drawn["spans"] = _spans(shown, spans)
    return render(
        "costs.html",
        charts=drawn,
        now=now,
        title=f"Costs of stage {stage}, {when}",
        note=note,
        tiles=_tiles(everything),
        heights={name: chart["height"] for name, chart in drawn.items()},
        phase_colors=PHASE_COLORS,
        span_colors=[(name, f"var(--line-{number})") for number, name in enumerate(shown, start=1)],
        shares_note=_shares_text(everything),
        spans_note=_spans_text(spans),
        headings=(by.capitalize(), *_HEADINGS, *map(str.capitalize, UNPRODUCTIVE)),
        rows=[_cells(row) for row in found],
        sum=_cells(everything) if len(found) > 1 else None,
    )


def _tiles(everything: Cost) -> list[Tile]:
    lost = sum(everything.usd_by_phase[name] for name in UNPRODUCTIVE)
    share = f"{100 * lost / everything.usd:.0f} % of the cost" if everything.usd else ""
    hours = f"{everything.instance_hours:.1f} instance hours of {counted(everything.runs, 'run')}"
    return [
        Tile("Cost of runs", usd(everything.usd), hours),
        Tile("On-Demand", usd(everything.on_demand_usd), "the same hours"),
        Tile("Saved", usd(everything.saved_usd), f"{everything.saved_percent:.0f} % of the On-Demand price"),
        Tile("Overhead", usd(lost), share),
    ]


def _cells(row: Cost) -> tuple[str, ...]:
    return (
        row.name,
        str(row.runs),
        f"{row.instance_hours:.2f}",
        f"{row.usd:.2f}",
        f"{row.on_demand_usd:.2f}",
        f"{row.saved_percent:.0f} %",
        f"{row.stored_usd_per_month:.2f}",
        *(f"{row.usd_by_phase[name]:.2f}" for name in UNPRODUCTIVE),
    )


def _at_most(rows: Sequence[Cost], count: int) -> list[Cost]:
    if len(rows) <= count:
        return list(rows)
    others = total(rows[count - 1 :])
    others.name = f"{len(rows) - count + 1} others"
    return [*rows[: count - 1], others]


def _shares(rows: Sequence[Cost]) -> dict[str, Any]:
    """Return a chart with a bar for each row, divided by phase, and a mark for the On-Demand price."""
    return chart(
        "shares",
        height=ROW_HEIGHT * len(rows) + 55,
        names=[row.name for row in rows],
        values=[
            {"n": row.name, "p": phase, "u": round(row.usd_by_phase[phase], 4), "o": number}
            for row in rows
            for number, phase in enumerate(PHASES)
        ],
        on_demand=[{"n": row.name, "d": round(row.on_demand_usd, 4)} for row in rows],
    )


def _spans(shown: Sequence[str], spans: Sequence[tuple[str, Sequence[Cost]]]) -> dict[str, Any]:
    """Return a chart with a bar for each day or month, in the colours of the most expensive rows."""
    usd_of: dict[tuple[str, str], float] = {(span, name): 0.0 for span, _ in spans for name in shown}
    for span, rows in spans:
        for row in rows:
            usd_of[span, row.name if row.name in shown else "others"] += row.usd
    values = [{"t": span, "n": name, "u": round(cost, 4)} for (span, name), cost in usd_of.items()]
    return chart("spans", values=values, names=list(shown))


def _shares_text(everything: Cost) -> str:
    parts = [f"{name} {usd(cost)}" for name, cost in everything.usd_by_phase.items() if cost]
    return f"Total: {', '.join(parts)}. The vertical mark is what On-Demand instances would have cost."


def _spans_text(spans: Sequence[tuple[str, Sequence[Cost]]]) -> str:
    sums = [(total(rows).usd, name) for name, rows in spans]
    most, name = max(sums, default=(0.0, ""))
    return f"The most was spent on {name}: {usd(most)}." if most else ""
