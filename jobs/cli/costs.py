"""`trainyard costs`: what the stage's runs cost, from their own receipts, as a table, as CSV, as JSON and as a page."""

import csv
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from pathlib import Path

from rich.table import Table

from jobs.aws.connection import Aws
from jobs.cli import tables
from jobs.cli.report import write
from jobs.core.errors import TrainyardError
from jobs.core.records import Receipt
from jobs.core.words import FREE_HERE, counted
from jobs.money.costs import By, Cost, costs, month_of, spans, total
from jobs.money.phases import UNPRODUCTIVE
from jobs.money.receipt import unknown_loss
from jobs.runs import batch, storage
from jobs.runs.storage import StoredRun

_READERS = 16
"""Receipts that are read at once."""


def show_costs(
    aws: Aws, stage_name: str, *, by: By, month: str, team: str | None, html: Path | None, output: str
) -> None:
    """Run `trainyard costs`."""
    now = datetime.now(timezone.utc)
    wanted = month_of(month, now=now)
    stage = batch.read_stage(aws, stage_name)
    runs = [run for run in storage.stored_runs(aws, stage) if team in (None, run.team)]
    receipts, unreadable = receipts_of(aws, runs)
    found = costs(receipts, by=by, month=wanted)
    if output == "json":
        tables.print_json([_fields(row, by) for row in found])
    elif output == "csv":
        writer = csv.DictWriter(sys.stdout, fieldnames=list(_fields(Cost(name=""), by)), lineterminator="\n")
        writer.writeheader()
        writer.writerows(_fields(row, by) for row in found)
    elif found:
        on = tables.stdout()
        tables.show(costs_table(found, by=by, width=on.width), on=on)
    console = tables.stderr()
    note = (
        "estimated from the runs' own receipts, at the prices that each names, without storage and without the time in "
        "which an instance boots"
    )
    if stage.emulated:
        note += f"; {FREE_HERE}"
    if left_out := unknown_loss(receipt for receipt in receipts if costs([receipt], by="run", month=wanted)):
        note += f"; LOST is {left_out}"
    if not found:
        when = "ever" if month == "all" else f"in {wanted.begin:%Y-%m}"
        console.print(f"no run of stage '{stage.name}' took anything {when}; another month: --month 2026-01, or all")
    elif output == "table":
        console.print(note)
    if unreadable:
        console.print(f"left out: {counted(len(unreadable), 'receipt')} that cannot be read: {', '.join(unreadable)}")
    if html is not None:
        from jobs.report.costs import costs_page

        parts = [(name, costs(receipts, by=by, month=span)) for name, span in spans(wanted, receipts, now=now)]
        when = "all time" if month == "all" else f"{wanted.begin:%Y-%m}"
        page = costs_page(found, parts, by=by, when=when, stage=stage.name, note=note, now=now)
        write(html, page)
        console.print(f"the page: {html}")


def receipts_of(aws: Aws, runs: Sequence[StoredRun]) -> tuple[list[Receipt], list[str]]:
    """Return the receipts that there are, and the runs whose receipts this release does not read."""
    _ = aws.s3  # made before threads share it
    unreadable: list[str] = []

    def read(run: StoredRun) -> Receipt | None:
        try:
            receipt = storage.read_receipt(aws, run.location)
            if receipt is not None:
                costs([receipt], by="run", month=month_of("all", now=datetime.now(timezone.utc)))
        except TrainyardError:  # its shape, or an instance type that this release has no row of
            unreadable.append(run.run_id)
            return None
        return receipt

    with ThreadPoolExecutor(_READERS) as threads:
        found = [receipt for receipt in threads.map(read, runs) if receipt is not None]
    return found, sorted(unreadable)


def costs_table(found: Sequence[Cost], *, by: By, width: int) -> Table:
    """Return the rows as a table, with their sum.

    Of the columns that do not fit, those go first that have no money, then those with the least.
    """
    whole = total(found)
    rows = [*found, whole] if len(found) > 1 else found
    cells = {
        by.upper(): [row.name for row in rows],
        "RUNS": [str(row.runs) for row in rows],
        "HOURS": [f"{row.instance_hours:.2f}" for row in rows],
        "USD": [f"{row.usd:.2f}" for row in rows],
        "ON-DEMAND": [f"{row.on_demand_usd:.2f}" for row in rows],
        "SAVED": [f"{row.saved_percent:.0f} %" for row in rows],
        **{name.upper(): [f"{row.usd_by_phase[name]:.2f}" for row in rows] for name in UNPRODUCTIVE},
    }
    least = sorted(UNPRODUCTIVE, key=lambda name: whole.usd_by_phase[name])
    less_needed = [*(name.upper() for name in least), "RUNS", "HOURS", "ON-DEMAND", "SAVED"]
    return tables.fitted(cells, width=width, leave_out=less_needed, right=list(cells)[1:])


def _fields(row: Cost, by: By) -> dict[str, str | int | float | None]:
    return {
        by: row.name,
        "runs": row.runs,
        "instance_hours": round(row.instance_hours, 6),
        "usd": round(row.usd, 6),
        "on_demand_usd": round(row.on_demand_usd, 6),
        "saved_usd": round(row.saved_usd, 6),
        "saved_percent": round(row.saved_percent, 1),
        **{f"{name}_usd": round(row.usd_by_phase[name], 6) for name in UNPRODUCTIVE},
    }
