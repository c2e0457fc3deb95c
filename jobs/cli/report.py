"""`trainyard report RUN`: a run or a sweep as one HTML page, written to a file or served while it continues."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from jobs.cli.options import RUNS_FOLDER, RunOrFolder, folder_of, user_path

if TYPE_CHECKING:
    from jobs.aws.connection import Aws
    from jobs.cli.sweep_state import SweepState
    from jobs.core.stage import DeployedStage
    from jobs.runs.recorded_run import RecordedRun
    from jobs.runs.storage import StoredRun
    from jobs.runs.sweeps import Standing
    from jobs.spec.spec import JobSpec

REPORT = "report.html"
"""Name of the page in a run's folder."""


def report(
    ctx: typer.Context,
    run: RunOrFolder,
    to: Annotated[
        Path | None,
        typer.Option(
            "--to", metavar="FILE", parser=user_path, help="Write the page to FILE. Default: runs/RUN/report.html."
        ),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Serve the page on this machine and keep it current until Ctrl-C.")
    ] = False,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="With --follow: port on localhost. 0 picks a free one.")
    ] = 0,
) -> None:
    """Write the report of a run or a sweep as one HTML page.

    The page has the result, curves, attempts and costs, and needs no network. That of a sweep has its points, best
    first. With --follow, prints the page's address, which contains a token, on stdout and keeps the page current.
    Ctrl-C writes the file; it never ends the run.
    """
    from jobs.cli import tables
    from jobs.cli.serving import LivePages, serving
    from jobs.cli.terminal import print_text, write_page
    from jobs.core.errors import Detached, NotFoundError, UsageError
    from jobs.core.words import printable_name
    from jobs.runs import batch, storage

    if (folder := folder_of(run)) is not None:
        if follow:
            raise UsageError(f"--follow: {folder} is a fetched run, which does not change", next_step="omit --follow")
        write_fetched(folder, to or folder / REPORT)
        return
    aws = ctx.obj.aws()
    stage = batch.read_stage(aws, ctx.obj.stage)
    found = storage.find_run(aws, stage, run)
    path = to or RUNS_FOLDER / found.run_id / REPORT
    if not follow:
        write_page(path, page_of(aws, stage, found))
        print_text(printable_name(str(path)))
        return

    def render(address: str) -> str:
        if address != "/":
            raise NotFoundError("this server has only one page")
        return page_of(aws, stage, found, live=True)

    live = LivePages(render)
    live.html()  # reports an unreadable record here instead of in the browser
    with serving(live, port) as server:
        print_text(f"http://127.0.0.1:{server.server_port}/?token={live.token}")
        tables.stderr().print(f"serving the page on this machine until Ctrl-C, which writes {path}")
        try:
            server.serve_forever(poll_interval=0.1)
        except KeyboardInterrupt:
            write_page(path, page_of(aws, stage, found))
            raise Detached(f"stopped; wrote the current report to {path}", next_step=f"open {path}") from None


def write_fetched(folder: Path, path: Path) -> None:
    """Write the report of a fetched run and print its path."""
    from jobs.cli.terminal import print_text, write_page
    from jobs.core.words import printable_name
    from jobs.runs.run_records import read_fetched_run

    write_page(path, _html(read_fetched_run(folder)))
    print_text(printable_name(str(path)))


def page_of(
    aws: "Aws",
    stage: "DeployedStage",
    run: "StoredRun",
    *,
    live: bool | None = False,
    home: str = "",
    query: str | None = None,
) -> str:
    """Read a run or a sweep and return its page. With `live` None, the page is live until the run has ended.

    `home` and `query`: address of the page of all runs, and the end of the addresses of other pages on its server.
    """
    from jobs.cli.sweep_state import read_state
    from jobs.runs import batch
    from jobs.runs.run_records import read_run
    from jobs.runs.sweeps import read_sweep

    if read_sweep(aws, run.location) is None:
        recorded = read_run(aws, run)
        return _html(recorded, live=recorded.state not in ("succeeded", "failed") if live is None else live, home=home)
    state = read_state(aws, run, batch.find_job(aws, stage, run.run_id))
    assert state is not None  # noqa: S101 - the run is a sweep
    live = state.job is not None and not state.job.ended if live is None else live
    return _sweep_html(aws, state, live=live, home=home, query=query)


def _html(recorded: "RecordedRun", *, live: bool = False, home: str = "") -> str:
    from datetime import datetime, timezone

    from jobs.report.run_page import run_page

    return run_page(recorded, now=datetime.now(timezone.utc), recipe=ready_spec(recorded), live=live, home=home)


def _sweep_html(aws: "Aws", state: "SweepState", *, live: bool, home: str, query: str | None) -> str:
    """Return the page of a sweep. Reads the metrics of its best points."""
    from datetime import datetime, timezone

    from jobs.report.sweep_page import DRAWN_RUNS, SweepPoint, SweepSummary, sweep_page
    from jobs.runs.recorded_run import RecordedRun, metrics_line
    from jobs.runs.storage import in_parallel, read_metrics
    from jobs.runs.sweeps import missing_metric_warning, progress_text

    def read(place: int, standing: "Standing") -> SweepPoint:
        lines = read_metrics(aws, standing.location) if place < DRAWN_RUNS and standing.receipt else []
        return SweepPoint(
            number=standing.point.number,
            values=standing.point.values,
            state=standing.state,
            reason=standing.reason,
            metric=state.metric(standing),
            usd=standing.usd,
            run=RecordedRun(
                run_id=standing.point.run_id,
                team=state.run.team,
                location=str(standing.location),
                receipt=standing.receipt,
                metrics=[line for each in lines if (line := metrics_line(each)) is not None],
            ),
        )

    sweep, job = state.spec.sweep, state.job
    assert sweep is not None  # noqa: S101 - read_state has checked
    summary = SweepSummary(
        run_id=state.run.run_id,
        team=state.run.team,
        job=state.spec.job,
        state=job.state.lower() if job else "ended",
        metric=sweep.metric,
        progress=progress_text(state.points),
        reason=state.reason or missing_metric_warning(state.points, sweep),
        budget=state.budget_text,
        best=state.best.point.run_id if state.best else None,
    )
    found = in_parallel(lambda item: read(*item), enumerate(state.ranked))
    return sweep_page(summary, found, now=datetime.now(timezone.utc), live=live, home=home, query=query)


def ready_spec(run: "RecordedRun") -> "JobSpec | None":
    """Return the ready-made spec with the run's name and kind of job; None if there is none."""
    from jobs.runs.spec_file import READY_SPECS, read_specs

    if run.spec is None:
        return None
    for path in sorted(READY_SPECS.glob("*.yaml")):
        if f"name: {run.spec.name}\n" in path.read_text(encoding="utf-8"):
            for spec in read_specs(path):
                if (spec.name, spec.job) == (run.spec.name, run.spec.job):
                    return spec
    return None
