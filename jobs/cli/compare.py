"""`trainyard compare RUN…`: runs side by side, as a table, as JSON and as a page."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from functools import partial
from pathlib import Path

from rich.table import Table
from rich.text import Text

from jobs.aws.connection import Aws
from jobs.cli import tables
from jobs.cli.options import folder_of
from jobs.cli.report import write
from jobs.cli.sweep import COMPARED, begun_points
from jobs.core.errors import UsageError
from jobs.core.stage import DeployedStage
from jobs.report.comparison import Fact, facts
from jobs.runs import batch, storage
from jobs.runs.read_records import read_fetched_run, read_run
from jobs.runs.recorded_run import RecordedRun

_SIDE_BY_SIDE = 4
"""So many runs are columns; more of them are rows."""

_READERS = 4
"""Runs that are read at once."""


def compare(aws: Aws, stage_name: str, texts: Sequence[str], *, html: Path | None, output: str) -> None:
    """Run `trainyard compare`."""
    runs = _read(aws, stage_name, texts)
    if len(runs) < 2:
        if not runs:
            raise UsageError("no point of that sweep has begun", next_step=f"trainyard status {texts[0]}")
        raise UsageError(
            f"there is one run to compare, {runs[0].run_id}: a spec's name is that of its newest run",
            next_step="name two runs by their ids: trainyard list",
        )
    compared = facts(runs)
    if output == "json":
        tables.print_json(
            [
                {
                    "run_id": run.run_id,
                    "result": dict(run.result),
                    **{fact.label: fact.cells[number] for fact in compared},
                }
                for number, run in enumerate(runs)
            ]
        )
    else:
        on = tables.stdout()
        tables.show(comparison_table(runs, compared, width=on.width), on=on)
    if html is not None:
        from jobs.report.comparison import comparison_page

        write(html, comparison_page(runs, now=datetime.now(timezone.utc)))
        tables.stderr().print(f"the page: {html}")


def _read(aws: Aws, stage_name: str, texts: Sequence[str]) -> list[RecordedRun]:
    """Read the runs, each once: fetched ones from their folders, of a sweep its best points."""
    found: dict[str, Callable[[], RecordedRun]] = {}
    stage: DeployedStage | None = None
    for text in texts:
        if (folder := folder_of(text)) is not None:
            found[folder.name] = partial(read_fetched_run, folder)
            continue
        stage = stage or batch.read_stage(aws, stage_name)
        run = storage.find_run(aws, stage, text)
        points = begun_points(aws, stage, run)
        found |= {
            each.run_id: partial(read_run, aws, each) for each in ([run] if points is None else points[:COMPARED])
        }
        if points is not None and len(points) > COMPARED:
            left_out = f"{run.run_id}: its {COMPARED} best points of {len(points)}; all: trainyard sweep {run.run_id}"
            tables.stderr().print(left_out, soft_wrap=True)
    if stage is not None:
        _ = aws.s3  # made before threads share it
    with ThreadPoolExecutor(_READERS) as threads:
        return list(threads.map(lambda read: read(), found.values()))


def comparison_table(runs: Sequence[RecordedRun], compared: Sequence[Fact], *, width: int) -> Table:
    """Return the table: a column for each of a few runs, a row for each of many.

    Nothing is cut: ids and values wrap, and of many runs the last facts that do not fit are left out.
    """
    cells = [
        [Text(cell, style="green" if fact.best == number else "") for number, cell in enumerate(fact.cells)]
        for fact in compared
    ]
    names = [run.run_id for run in runs]
    if len(runs) <= _SIDE_BY_SIDE:
        table = tables.columns("")
        for name in names:
            table.add_column(name, overflow="fold", ratio=1)
        for fact, row in zip(compared, cells, strict=True):
            table.add_row(fact.label, *row)
        return table
    by_fact = {fact.label.upper(): row for fact, row in zip(compared, cells, strict=True)}
    return tables.fitted({"RUN": names, **by_fact}, width=width, leave_out=reversed(by_fact))
