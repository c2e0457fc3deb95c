"""Commands that look back at runs, or ahead from them: names, options, help. What they do lies in what they import."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from jobs.cli.completion import complete_run
from jobs.cli.options import RUNS_FOLDER, Output, Overrides, Run, RunOrFolder, latest_of_team, user_path

past = typer.Typer()


@past.command("list")
def list_runs(
    ctx: typer.Context,
    *,
    since: Annotated[str, typer.Option(help="Submitted since: 30m, 12h, 7d, or an ISO 8601 time.")] = "7d",
    limit: Annotated[int, typer.Option(min=1, help="At most so many.")] = 20,
    state: Annotated[str | None, typer.Option(help="Only those in this state: RUNNING, FAILED, …")] = None,
    job: Annotated[str | None, typer.Option(metavar="KIND", help="Only those of this kind of job.")] = None,
    sort: Annotated[
        Literal["time", "duration", "cost", "metric"],
        typer.Option(help="The newest, the longest, the dearest or the best first."),
    ] = "time",
    output: Output = "table",
) -> None:
    """List the runs of the stage that AWS Batch remembers (at least a week after their end).

    What they cost is an estimate from their receipts. The global --team says whose are listed.
    """
    from jobs.cli import list as command

    command.list_runs(
        ctx.obj.aws(),
        ctx.obj.stage,
        team=ctx.obj.team,
        since=since,
        limit=limit,
        state=state and state.upper(),
        kind=job,
        by=sort,
        output=output,
    )


@past.command()
def estimate(
    ctx: typer.Context,
    *,
    spec: Annotated[Path, typer.Argument(metavar="SPEC", help="A job spec; ready ones lie in jobs/specs/.")],
    examples: Annotated[
        int | None, typer.Option(min=1, help="Training examples, where they cannot be counted before the job runs.")
    ] = None,
    overrides: Overrides = None,
    output: Output = "table",
) -> None:
    """Reckon what a spec would take on each instance type: time, money and the range, the cheapest first.

    From the organisation's own runs of the same model, else from published figures, with the arithmetic. It spends
    nothing.
    """
    from jobs.cli import estimate as command

    command.show_estimate(ctx.obj.aws(), ctx.obj.stage, spec, overrides or [], examples=examples, output=output)


@past.command()
def fetch(
    ctx: typer.Context,
    *,
    run: Run,
    to: Annotated[
        Path, typer.Option(metavar="FOLDER", parser=user_path, help="Folder in which the run gets one of its own.")
    ] = RUNS_FOLDER,
    checkpoints: Annotated[bool, typer.Option("--checkpoints", help="The checkpoints too.")] = False,
    code: Annotated[bool, typer.Option("--code", help="The code of a script that it ran, and nothing else.")] = False,
    output: Output = "table",
) -> None:
    """Download what a run wrote: model, metrics, TensorBoard events, receipt."""
    from jobs.cli import fetch as command

    command.fetch(ctx.obj.aws(), ctx.obj.stage, run, to=to, checkpoints=checkpoints, code=code, output=output)


@past.command()
def sweep(ctx: typer.Context, run: Run, output: Output = "table") -> None:
    """Show the points of a sweep, the best first: their values, metric, cost and state; the failed ones last."""
    from jobs.cli import sweep as command

    command.sweep(ctx.obj.aws(), ctx.obj.stage, run, output=output)


@past.command()
def receipt(ctx: typer.Context, run: RunOrFolder, output: Output = "table") -> None:
    """Show what a run took over all its attempts, and what it brought."""
    from jobs.cli import receipt as command

    command.receipt(ctx.obj.aws(), ctx.obj.stage, run, output=output)


@past.command()
def report(
    ctx: typer.Context,
    run: RunOrFolder,
    to: Annotated[
        Path | None,
        typer.Option("--to", metavar="FILE", parser=user_path, help="The page; default: runs/RUN/report.html."),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Serve it on this machine while the run goes on, until Ctrl-C.")
    ] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="With --follow: loopback port; 0 takes a free one.")] = 0,
) -> None:
    """Write a run's report: one HTML page with its result, curves, attempts and money, that needs no network.

    With --follow the page is kept up to date, and its address (with a token) is printed on stdout; Ctrl-C leaves the
    file, never ends the run.
    """
    from jobs.cli import report as command

    command.report(ctx.obj.aws(), ctx.obj.stage, run, to=to, follow=follow, port=port)


@past.command()
def compare(
    ctx: typer.Context,
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN...",
            help="Two or more runs: ids, beginnings of ids, specs' names (their newest runs), folders of fetched "
            "runs; or a sweep: its best points.",
            autocompletion=complete_run,
            callback=lambda ctx, runs: [latest_of_team(ctx, run) for run in runs],
        ),
    ],
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", parser=user_path, help="Write a page too, with curves.")
    ] = None,
    output: Output = "table",
) -> None:
    """Hold runs against each other: results, time, money, and the arguments in which they differ."""
    from jobs.cli import compare as command

    command.compare(ctx.obj.aws(), ctx.obj.stage, runs, html=html, output=output)


@past.command()
def costs(
    ctx: typer.Context,
    *,
    by: Annotated[Literal["team", "job", "run"], typer.Option(help="A row for each of them.")] = "team",
    month: Annotated[str, typer.Option(metavar="MONTH", help="2026-11 (in UTC), 'this', or 'all'.")] = "this",
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", parser=user_path, help="Write a page too, with pictures.")
    ] = None,
    output: Annotated[
        Literal["table", "csv", "json"], typer.Option("--output", "-o", help="How to print: for eyes or scripts.")
    ] = "table",
) -> None:
    """Add up what runs cost, from their own receipts, what Spot saved, and what brought no step."""
    from jobs.cli import costs as command

    command.show_costs(ctx.obj.aws(), ctx.obj.stage, by=by, month=month, team=ctx.obj.team, html=html, output=output)
