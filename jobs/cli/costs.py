"""`trainyard costs`: what the runs of a stage cost, from their receipts, as a table, CSV, JSON and an HTML page."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from jobs.cli.options import HtmlPage

if TYPE_CHECKING:
    from rich.table import Table

    from jobs.aws.connection import Aws
    from jobs.core.records import Receipt
    from jobs.money.costs import By, Cost
    from jobs.runs.storage import StoredRun


def show_costs(
    ctx: typer.Context,
    *,
    by: Annotated[Literal["team", "job", "run"], typer.Option(help="Print a row per team, kind of job, or run.")] = (
        "team"
    ),
    month: Annotated[
        str, typer.Option(metavar="MONTH", help="Month to add up (UTC): 2026-11, 'this', or 'all'.")
    ] = "this",
    html: HtmlPage = None,
    output: Annotated[
        Literal["table", "csv", "json"],
        typer.Option("--output", "-o", help="Print a table for people, or CSV or JSON for scripts."),
    ] = "table",
) -> None:
    """Add up what runs cost and what Spot saved.

    Reads the runs' receipts, and also shows what their files cost a month, and the cost of waiting, starting, saving
    and other time without training steps. The global option --team adds up only one team's runs.
    """
    import csv
    import sys
    from datetime import datetime, timezone

    from jobs.aws import s3 as object_store
    from jobs.cli import tables
    from jobs.core.words import FREE_HERE, counted, usd
    from jobs.money.costs import Cost, costs, month_of, spans, total
    from jobs.money.prices import stored
    from jobs.money.receipt import unknown_loss
    from jobs.runs import batch, storage

    now = datetime.now(timezone.utc)
    wanted = month_of(month, now=now)
    aws, team = ctx.obj.aws(), ctx.obj.team
    stage = batch.read_stage(aws, ctx.obj.stage)
    runs = [run for run in storage.stored_runs(aws, stage) if team in (None, run.team)]
    receipts, unreadable = read_receipts(aws, runs)
    sizes = storage.in_parallel(lambda run: stored(*object_store.billed_sizes(aws.s3, run.location)), runs)
    kept = {run.run_id: size for run, size in zip(runs, sizes, strict=True)}
    found = costs(receipts, by=by, month=wanted, kept=kept)
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
        "estimates from the runs' receipts at the prices named there, without the boot time of instances; STORAGE is "
        "what the runs' files cost a month now"
    )
    others = sum(each.usd_per_month for each in kept.values()) - total(found).stored_usd_per_month
    if others >= 0.005:
        note += f", in addition to {usd(others)} a month for files of other runs"
    if any(each.old_version_bytes is None for each in kept.values()):
        note += ", not counting old versions, which you may not list (s3:ListBucketVersions)"
    if stage.emulated:
        note += f"; {FREE_HERE}"
    if left_out := unknown_loss(receipt for receipt in receipts if costs([receipt], by="run", month=wanted)):
        note += f"; LOST is {left_out}"
    if not found:
        when = "yet" if month == "all" else f"in {wanted.begin:%Y-%m}"
        console.print(f"no run of stage '{stage.name}' cost anything {when}; another month: --month 2026-01, or all")
    elif output == "table":
        console.print(note)
    if unreadable:
        console.print(f"left out {counted(len(unreadable), 'unreadable receipt')}: {', '.join(unreadable)}")
    if html is not None:
        from jobs.cli.terminal import write_page
        from jobs.report.costs import costs_page

        parts = [(name, costs(receipts, by=by, month=span)) for name, span in spans(wanted, receipts, now=now)]
        when = "all time" if month == "all" else f"{wanted.begin:%Y-%m}"
        page = costs_page(found, parts, by=by, when=when, stage=stage.name, note=note, now=now)
        write_page(html, page)
        console.print(f"page: {html}")


def read_receipts(aws: "Aws", runs: "Sequence[StoredRun]") -> "tuple[list[Receipt], list[str]]":
    """Return the runs' receipts, and the ids of runs whose receipts this release cannot read."""
    from datetime import datetime, timezone

    from jobs.core.errors import TrainyardError
    from jobs.money.costs import costs, month_of
    from jobs.runs import storage

    _ = aws.s3  # create the client before the threads share it
    unreadable: list[str] = []

    def read(run: "StoredRun") -> "Receipt | None":
        try:
            receipt = storage.read_receipt(aws, run.location)
            if receipt is not None:
                costs([receipt], by="run", month=month_of("all", now=datetime.now(timezone.utc)))
        except TrainyardError:  # an unknown format or instance type
            unreadable.append(run.run_id)
            return None
        return receipt

    found = [receipt for receipt in storage.in_parallel(read, runs) if receipt is not None]
    return found, sorted(unreadable)


def costs_table(found: "Sequence[Cost]", *, by: "By", width: int) -> "Table":
    """Return the costs as a table with a total row.

    If the table is too wide, columns are left out: first the cheapest phases, then counts and savings.
    """
    from jobs.cli import tables
    from jobs.money.costs import total
    from jobs.money.phases import UNPRODUCTIVE

    whole = total(found)
    rows = [*found, whole] if len(found) > 1 else found
    cells = {
        by.upper(): [row.name for row in rows],
        "RUNS": [str(row.runs) for row in rows],
        "HOURS": [f"{row.instance_hours:.2f}" for row in rows],
        "USD": [f"{row.usd:.2f}" for row in rows],
        "ON-DEMAND": [f"{row.on_demand_usd:.2f}" for row in rows],
        "SAVED": [f"{row.saved_percent:.0f} %" for row in rows],
        "STORAGE": [f"{row.stored_usd_per_month:.2f}" for row in rows],
        **{name.upper(): [f"{row.usd_by_phase[name]:.2f}" for row in rows] for name in UNPRODUCTIVE},
    }
    cheapest = sorted(UNPRODUCTIVE, key=lambda name: whole.usd_by_phase[name])
    optional = [*(name.upper() for name in cheapest), "RUNS", "HOURS", "ON-DEMAND", "SAVED"]
    return tables.fitted(cells, width=width, leave_out=optional, right=list(cells)[1:])


def _fields(row: "Cost", by: "By") -> dict[str, str | int | float | None]:
    from jobs.money.phases import UNPRODUCTIVE

    return {
        by: row.name,
        "runs": row.runs,
        "instance_hours": round(row.instance_hours, 6),
        "usd": round(row.usd, 6),
        "on_demand_usd": round(row.on_demand_usd, 6),
        "saved_usd": round(row.saved_usd, 6),
        "saved_percent": round(row.saved_percent, 1),
        "stored_bytes": row.stored_bytes,
        "stored_usd_per_month": round(row.stored_usd_per_month, 6),
        **{f"{name}_usd": round(row.usd_by_phase[name], 6) for name in UNPRODUCTIVE},
    }
