"""`trainyard sweep SWEEP`: the points of a sweep, best first."""

from typing import TYPE_CHECKING

import typer

from jobs.cli.options import Output, Run

if TYPE_CHECKING:
    from jobs.cli.sweep_state import SweepState
    from jobs.runs.sweeps import Standing


def sweep(ctx: typer.Context, run: Run, output: Output = "table") -> None:
    """Show the points of a sweep, best first.

    Shows the values, metric, cost and state of each point. Failed points come last.
    """
    from jobs.cli import tables
    from jobs.cli.sweep_state import read_state
    from jobs.core.errors import UsageError
    from jobs.runs import batch, storage
    from jobs.runs.sweeps import sweep_of

    aws = ctx.obj.aws()
    stage = batch.read_stage(aws, ctx.obj.stage)
    found = storage.find_run(aws, stage, run)
    state = read_state(aws, found, batch.find_job(aws, stage, found.run_id))
    if state is None:
        parent = sweep_of(aws, found.location)
        raise UsageError(
            f"{found.run_id} is {f'a point of the sweep {parent}' if parent else 'not a sweep'}",
            next_step=f"trainyard {f'sweep {parent}' if parent else f'status {found.run_id}'}",
        )
    if output == "json":
        tables.print_json(state.as_json())
    else:
        show(state)


def show(state: "SweepState") -> None:
    """Print the points of a sweep as a table on stdout, and what to do next on stderr."""
    from rich.text import Text

    from jobs.cli import tables
    from jobs.core.words import figure, printable, result_label
    from jobs.runs.sweeps import STOPPED_EARLY

    styles = {
        "succeeded": "green",
        STOPPED_EARLY: "green",
        "failed": "red",
        "stopped": "magenta",
        "running": tables.BLUE,
    }
    found = state.ranked
    names = list(state.record.points[0].values)
    short = [name.removeprefix("parameters.") for name in names]
    metrics = [state.metric(standing) for standing in found]
    label = next((result_label(metric[0]) for metric in metrics if metric), "metric")
    table = tables.columns("POINT", *(name.upper() for name in short), label.upper(), "USD", "STATE")
    for column in table.columns[1:-1]:
        column.justify = "right"
    for standing, metric in zip(found, metrics, strict=True):
        stopped_early = standing.state == STOPPED_EARLY
        shown = f"{standing.state}: {standing.reason}" if stopped_early else standing.state
        table.add_row(
            str(standing.point.number),
            *(Text(printable(str(standing.point.values.get(name, "")))) for name in names),
            "" if metric is None else figure(metric[1]),
            "" if standing.usd is None else f"{standing.usd:.2f}",
            Text(shown, style=styles.get(standing.state, tables.ORANGE)),
        )
    tables.show(table, on=tables.stdout())
    _show_next(state, found)


def _show_next(state: "SweepState", found: "list[Standing]") -> None:
    from rich.text import Text

    from jobs.cli import tables
    from jobs.cli.sweep_state import COMPARED, WITHOUT_HALVING
    from jobs.core.locations import RUN
    from jobs.core.words import printable, usd
    from jobs.runs.sweeps import DONE, STOPPED_EARLY, missing_metric_warning, progress_text, spent_by
    from jobs.spec.sweep import BEST

    def say(text: str) -> None:
        tables.stderr().print(Text(text), soft_wrap=True)

    run_id = state.run.run_id
    budget = f"; {state.budget_text} used" if state.budget_text else ""
    say(f"{run_id}: {progress_text(state.points)}, {usd(spent_by(state.points).usd)}{budget}")
    failed = [standing for standing in found if standing.reason and standing.state != STOPPED_EARLY]
    for standing in failed:
        say(f"point {standing.point.number}: {printable(standing.reason)}")
    if state.reason and not failed:
        say(printable(state.reason))
    if state.spec.sweep and (warning := missing_metric_warning(state.points, state.spec.sweep)):
        say(f"warning: {printable(warning)}")
    if state.best is not None and (state.job is None or state.job.ended):
        say(f"best point: {state.best.point.run_id}, which other specs can read as {RUN}{state.spec.name}{BEST}/…")
    done = [standing.point.run_id for standing in found if standing.state == "succeeded"]
    if len(done) > 1:
        say(f"compare the points: trainyard compare {' '.join(done[:COMPARED])} --html FILE")
    if state.job is not None and not state.job.ended:
        return
    if any(standing.state not in DONE for standing in found):
        say(f"run the other points again: trainyard resume {run_id}")
    elif any(standing.state == STOPPED_EARLY for standing in found):
        say(f"finish the points that were stopped early: trainyard resume {run_id} {WITHOUT_HALVING}")
