"""`trainyard compare RUN…`: runs side by side, as a table, as JSON and as an HTML page."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from jobs.cli.options import HtmlPage, Output, complete_run, folder_of, latest_of_team

if TYPE_CHECKING:
    from rich.table import Table

    from jobs.aws.connection import Aws
    from jobs.core.stage import DeployedStage
    from jobs.report.comparison import Fact
    from jobs.runs.recorded_run import RecordedRun

_MAX_COLUMNS = 4
"""Up to this many runs are shown as columns, more as rows."""

_READERS = 4
"""Runs read at the same time."""


def compare(
    ctx: typer.Context,
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN...",
            help="Two or more runs: run ids, beginnings of ids, names of specs (their newest runs) or folders of "
            "fetched runs. For a sweep, its best points are compared.",
            autocompletion=complete_run,
            callback=lambda ctx, runs: [latest_of_team(ctx, run) for run in runs],
        ),
    ],
    html: HtmlPage = None,
    output: Output = "table",
) -> None:
    """Compare the results, time, cost and arguments of runs."""
    from datetime import datetime, timezone

    from jobs.cli import tables
    from jobs.cli.terminal import write_page
    from jobs.core.errors import UsageError
    from jobs.report.comparison import comparison_page, facts

    found = _read(ctx.obj.aws(), ctx.obj.stage, runs)
    if not found:
        raise UsageError("no point of that sweep has started", next_step=f"trainyard status {runs[0]}")
    if len(found) == 1:
        raise UsageError(
            f"only one run to compare, {found[0].run_id}; a spec's name stands for its newest run",
            next_step="give two run ids; list them with: trainyard list",
        )
    compared = facts(found)
    if output == "json":
        tables.print_json(
            [
                {
                    "run_id": run.run_id,
                    "result": dict(run.result),
                    **{fact.label: fact.cells[number] for fact in compared},
                }
                for number, run in enumerate(found)
            ]
        )
    else:
        on = tables.stdout()
        tables.show(comparison_table(found, compared, width=on.width), on=on)
    if html is not None:
        write_page(html, comparison_page(found, now=datetime.now(timezone.utc)))
        tables.stderr().print(f"page: {html}")


def _read(aws: "Aws", stage_name: str, texts: Sequence[str]) -> "list[RecordedRun]":
    """Read each run once, from S3 or its fetched folder. A sweep is replaced by its best points."""
    from concurrent.futures import ThreadPoolExecutor
    from functools import partial

    from jobs.cli import tables
    from jobs.cli.sweep_state import COMPARED, started_points
    from jobs.runs import batch, storage
    from jobs.runs.run_records import read_fetched_run, read_run

    found: dict[str, Callable[[], RecordedRun]] = {}
    stage: DeployedStage | None = None
    for text in texts:
        if (folder := folder_of(text)) is not None:
            found[folder.name] = partial(read_fetched_run, folder)
            continue
        stage = stage or batch.read_stage(aws, stage_name)
        run = storage.find_run(aws, stage, text)
        points = started_points(aws, stage, run)
        found |= {
            each.run_id: partial(read_run, aws, each) for each in ([run] if points is None else points[:COMPARED])
        }
        if points is not None and len(points) > COMPARED:
            only = f"{run.run_id}: comparing the best {COMPARED} of its {len(points)} points"
            tables.stderr().print(f"{only}; all points: trainyard sweep {run.run_id}", soft_wrap=True)
    if stage is not None:
        _ = aws.s3  # create the client before the threads share it
    with ThreadPoolExecutor(_READERS) as threads:
        return list(threads.map(lambda read: read(), found.values()))


def comparison_table(runs: "Sequence[RecordedRun]", compared: "Sequence[Fact]", *, width: int) -> "Table":
    """Return a table with a column per run for up to four runs, and a row per run for more.

    Ids and values wrap instead of being cut. With a row per run, the last facts are left out until the others fit.
    """
    from rich.text import Text

    from jobs.cli import tables

    cells = [
        [Text(cell, style="green" if fact.best == number else "") for number, cell in enumerate(fact.cells)]
        for fact in compared
    ]
    names = [run.run_id for run in runs]
    if len(runs) <= _MAX_COLUMNS:
        table = tables.columns("")
        for name in names:
            table.add_column(name, overflow="fold")
        for fact, row in zip(compared, cells, strict=True):
            table.add_row(fact.label, *row)
        return table
    by_fact = {fact.label.upper(): row for fact, row in zip(compared, cells, strict=True)}
    return tables.fitted({"RUN": names, **by_fact}, width=width, leave_out=reversed(by_fact))
