"""`trainyard list`: the runs of a stage with their results and costs."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from jobs.cli.options import Output, parse_since

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from jobs.aws.connection import Aws
    from jobs.cli.sweep_state import SweepState
    from jobs.core.records import Receipt
    from jobs.core.stage import DeployedStage
    from jobs.runs.job import Job
    from jobs.runs.storage import EndedReceipts

Order = Literal["time", "duration", "cost", "metric"]


@dataclass(frozen=True, kw_only=True)
class ListedRun:
    """A run: its Batch job, and its newest receipt."""

    job: "Job"
    receipt: "Receipt | None"
    sweep: "SweepState | None" = None
    """The state of its points, if the run is a sweep."""

    @property
    def usd(self) -> float | None:
        """Return what the run has cost so far; None without a receipt."""
        from datetime import datetime, timezone

        from jobs.money.estimate import forecast

        if self.sweep is not None:
            return sum(point.usd or 0.0 for point in self.sweep.points)
        if self.receipt is None:
            return None
        return forecast(self.receipt.attempts, None, None, now=datetime.now(timezone.utc)).usd

    @property
    def metric(self) -> tuple[str, float] | None:
        """Return the name and value of the run's main result; None if it has none yet."""
        from jobs.core.words import main_result

        if self.sweep is not None:
            return self.sweep.best_metric
        return main_result(self.receipt.result) if self.receipt else None

    @property
    def seconds(self) -> float | None:
        """Return the seconds from submission to end; None if the run has not ended."""
        return (self.job.stopped_at - self.job.created_at).total_seconds() if self.job.stopped_at else None

    def as_json(self) -> dict[str, Any]:
        from jobs.cli import tables
        from jobs.runs.sweeps import progress_text

        return {
            **tables.job_json(self.job),
            "usd": None if self.usd is None else round(self.usd, 6),
            "metric": None if self.metric is None else {"name": self.metric[0], "value": self.metric[1]},
            "result": self.receipt.result if self.receipt else {},
            "points": progress_text(self.sweep.points) if self.sweep else None,
        }


def list_runs(
    ctx: typer.Context,
    *,
    since: Annotated[
        str, typer.Option(help="List runs submitted since this time: 30m, 12h or 7d ago, or an ISO 8601 time.")
    ] = "7d",
    limit: Annotated[int, typer.Option(min=1, help="List at most this many runs.")] = 20,
    state: Annotated[
        str | None, typer.Option(help="List only runs in this state: RUNNING, FAILED, … Default: all states.")
    ] = None,
    job: Annotated[
        str | None, typer.Option(metavar="KIND", help="List only runs of this kind of job. Default: all kinds.")
    ] = None,
    sort: Annotated[
        Order,
        typer.Option(
            help="Sort by submission time, duration, cost or metric: newest, longest, most expensive or best first."
        ),
    ] = "time",
    output: Output = "table",
) -> None:
    """List the runs of the stage with their results and costs.

    Lists the runs that AWS Batch remembers: unfinished runs, and ended runs for at least a week. Costs are estimates
    from the runs' receipts. The global option --team lists only one team's runs.
    """
    from jobs.cli import tables
    from jobs.core.words import FREE_HERE
    from jobs.runs import batch
    from jobs.runs.job import STATES
    from jobs.spec.catalog import CATALOG

    state = state and state.upper()
    _check_known("--state", state, STATES)
    _check_known("--job", job, CATALOG)
    aws = ctx.obj.aws()
    stage = batch.read_stage(aws, ctx.obj.stage)
    jobs = [
        each
        for each in batch.list_jobs(aws, stage, since=parse_since(since), team=ctx.obj.team)
        if state in (None, each.state) and job in (None, each.kind)
    ]
    # Sorting by anything but the time needs the receipts of all runs.
    runs = _with_receipts(aws, stage, jobs[:limit] if sort == "time" else jobs)
    found = sorted(runs, key=_ORDERS[sort])[:limit]
    if output == "json":
        tables.print_json([run.as_json() for run in found])
        return
    if found:
        show_runs(found, on=tables.stdout())
    console = tables.stderr()
    if stage.emulated and any(run.usd for run in found):
        console.print(FREE_HERE)
    if len(jobs) > limit:
        console.print(f"{len(jobs) - limit} more runs; to list them: --limit {len(jobs)}")
    if not jobs:
        filters = "".join(f" {text}" for text in (state, job) if text)
        more = "" if filters else "; submit one: trainyard submit SPEC"
        console.print(f"no{filters} runs in stage '{stage.name}' with --since {since}{more}")


def _check_known(option: str, value: str | None, known: Collection[str]) -> None:
    from jobs.core.errors import UsageError

    if value is not None and value not in known:
        raise UsageError(f"{option} {value}: unknown value", next_step=f"use one of {', '.join(known)}")


def _with_receipts(aws: "Aws", stage: "DeployedStage", jobs: "Sequence[Job]") -> list[ListedRun]:
    from jobs.runs.storage import EndedReceipts, in_parallel

    _ = aws.s3  # create the client before the threads share it
    ended = EndedReceipts(stage)

    def read(job: "Job") -> ListedRun:
        try:
            return read_listed(aws, stage, job, ended=ended)
        except Exception:  # noqa: BLE001 - another team's or another release's receipt: list the run without it
            return ListedRun(job=job, receipt=None)

    runs = in_parallel(read, jobs)
    ended.save()
    return runs


def read_listed(aws: "Aws", stage: "DeployedStage", job: "Job", *, ended: "EndedReceipts | None" = None) -> ListedRun:
    """Read the receipt of a job's run, or the state of a sweep's points. Raises the errors of reading them."""
    from jobs.cli.sweep_state import read_state
    from jobs.core.locations import S3Location
    from jobs.core.run import run_prefix
    from jobs.runs.storage import StoredRun, read_receipt

    location = S3Location(stage.run_bucket, run_prefix(job.team, job.run_id))
    if job.points:
        return ListedRun(job=job, receipt=None, sweep=read_state(aws, StoredRun(job.run_id, job.team, location), job))
    receipt = ended.read(aws, location, job) if ended else read_receipt(aws, location)
    return ListedRun(job=job, receipt=job.with_end(receipt) if receipt else None)


def _by_metric(run: ListedRun) -> tuple[str, float]:
    """Return a sort key that puts the best metric first and runs without a result last."""
    from jobs.core.words import smaller_is_better

    if run.metric is None:
        return "~", 0.0
    key, value = run.metric
    return key, value if smaller_is_better(key) else -value


_ORDERS: dict[Order, Callable[[ListedRun], Any]] = {
    "time": lambda run: -run.job.created_at.timestamp(),
    "duration": lambda run: -(run.seconds or 0.0),
    "cost": lambda run: -(run.usd or 0.0),
    "metric": _by_metric,
}


def show_runs(runs: Sequence[ListedRun], *, on: "Console") -> None:
    """Print a table of runs. If the console is too narrow, columns are left out, never a run's id or state."""
    from jobs.cli import tables
    from jobs.core.words import duration, figure, result_label
    from jobs.runs.sweeps import done_text

    jobs = [run.job for run in runs]
    cells: dict[str, list[str | Text]] = {
        "RUN": [job.run_id for job in jobs],
        "STATE": [tables.state(job) for job in jobs],
        "POINTS": [done_text(run.sweep.points) if run.sweep else "" for run in runs],
        "PRIORITY": [str(job.priority or "") for job in jobs],
        "METRIC": [f"{result_label(run.metric[0])} {figure(run.metric[1])}" if run.metric else "" for run in runs],
        "USD": ["" if run.usd is None else f"{run.usd:.2f}" for run in runs],
        "TOOK": ["" if run.seconds is None else duration(run.seconds) for run in runs],
        "ATTEMPT": ["" if job.points else f"{job.attempt} of {job.max_attempts}" for job in jobs],
        "TEAM": [job.team for job in jobs],
        "QUEUE": [job.place for job in jobs],
        "SUBMITTED": [tables.moment(job.created_at) for job in jobs],
    }
    for column in ("POINTS", "PRIORITY"):
        if not any(cells[column]):
            del cells[column]
    # Left out in this order. SUBMITTED is optional because a run's id contains the time.
    optional = ("QUEUE", "TEAM", "SUBMITTED", "ATTEMPT", "POINTS", "TOOK", "USD", "METRIC", "PRIORITY")
    tables.show(tables.fitted(cells, width=on.width, leave_out=optional, right=("USD", "PRIORITY"), wrapped=2), on=on)
