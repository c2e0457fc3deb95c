"""`trainyard list`: the stage's runs with what they brought and what they cost, filtered and in an order of choice."""

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any, Literal

from rich.console import Console
from rich.text import Text

from jobs.aws.connection import Aws
from jobs.cli import tables
from jobs.cli.options import parse_since
from jobs.cli.sweep import SweepNow, read_now
from jobs.core.errors import UsageError
from jobs.core.locations import S3Location
from jobs.core.records import Receipt
from jobs.core.run import run_prefix
from jobs.core.stage import DeployedStage
from jobs.core.words import FREE_HERE, duration, figure, main_result, result_label
from jobs.money.estimate import forecast
from jobs.runs import batch
from jobs.runs.job import STATES, Job
from jobs.runs.storage import StoredRun, read_receipt
from jobs.runs.sweeps import done_text, progress_text, spent_by
from jobs.spec.catalog import CATALOG
from jobs.spec.recipe import SMALLER_IS_BETTER

By = Literal["time", "duration", "cost", "metric"]

_READERS = 16
"""Receipts that are read at once."""


@dataclass(frozen=True, kw_only=True)
class ListedRun:
    """A run as Batch knows it, with the receipt that it has written so far."""

    job: Job
    receipt: Receipt | None
    sweep: SweepNow | None = None
    """Of a sweep: how its points stand."""

    @property
    def usd(self) -> float | None:
        """What it has cost by now; None: it has written no receipt."""
        if self.sweep is not None:
            return spent_by(self.sweep.points).usd
        if self.receipt is None:
            return None
        return forecast(self.receipt.attempts, None, None, now=datetime.now(timezone.utc)).usd

    @property
    def metric(self) -> tuple[str, float] | None:
        if self.sweep is not None:
            return self.sweep.best_metric
        return main_result(self.receipt.result) if self.receipt else None

    @property
    def seconds(self) -> float | None:
        """From the submission to the end; None: it goes on."""
        return (self.job.stopped_at - self.job.created_at).total_seconds() if self.job.stopped_at else None


def list_runs(
    aws: Aws,
    stage_name: str,
    *,
    team: str | None,
    since: str,
    limit: int,
    state: str | None,
    kind: str | None,
    by: By,
    output: str,
) -> None:
    """Run `trainyard list`."""
    _check("--state", state, STATES)
    _check("--job", kind, CATALOG)
    stage = batch.read_stage(aws, stage_name)
    jobs = [
        job
        for job in batch.list_jobs(aws, stage, since=parse_since(since), team=team)
        if state in (None, job.state) and kind in (None, job.kind)
    ]
    # Which are the first of them by what their receipts say, all receipts tell.
    runs = _with_receipts(aws, stage, jobs[:limit] if by == "time" else jobs)
    found = sorted(runs, key=_ORDERS[by])[:limit]
    if output == "json":
        tables.print_json([_json(run) for run in found])
        return
    if found:
        show_runs(found, on=tables.stdout())
    console = tables.stderr()
    if stage.emulated and any(run.usd for run in found):
        console.print(FREE_HERE)
    if len(jobs) > limit:
        console.print(f"{len(jobs) - limit} more; see --limit")
    if not jobs:
        asked = "".join(f" that are {text}" for text in (state, kind) if text)
        console.print(f"no runs{asked} since {since} in stage '{stage.name}'; submit one: trainyard submit SPEC")


def _check(option: str, value: str | None, known: Collection[str]) -> None:
    if value is not None and value not in known:
        raise UsageError(f"{option} {value}: there is no such", next_step=f"one of {', '.join(known)}")


def _with_receipts(aws: Aws, stage: DeployedStage, jobs: Sequence[Job]) -> list[ListedRun]:
    _ = aws.s3  # made before threads share it

    def read(job: Job) -> ListedRun:
        location = S3Location(stage.run_bucket, run_prefix(job.team, job.run_id))
        try:
            if job.points:
                run = StoredRun(job.run_id[-20:], job.run_id, job.team, location)
                return ListedRun(job=job, receipt=None, sweep=read_now(aws, run, job))
            receipt = read_receipt(aws, location)
        except Exception:  # noqa: BLE001 - another team's that may not be read, or another release's: the run is listed
            receipt = None
        return ListedRun(job=job, receipt=job.with_end(receipt) if receipt else None)

    with ThreadPoolExecutor(_READERS) as threads:
        return list(threads.map(read, jobs))


def _by_metric(run: ListedRun) -> tuple[str, float]:
    """Order by what is measured, the best first; those without a result come last."""
    if run.metric is None:
        return "~", 0.0
    key, value = run.metric
    return key, value if key in SMALLER_IS_BETTER else -value


_ORDERS: dict[By, Callable[[ListedRun], Any]] = {
    "time": lambda run: -run.job.created_at.timestamp(),
    "duration": lambda run: -(run.seconds or 0.0),
    "cost": lambda run: -(run.usd or 0.0),
    "metric": _by_metric,
}


def show_runs(runs: Sequence[ListedRun], *, on: Console) -> None:
    """Print a table of runs, one a row.

    Where the console is too narrow for all columns some are left out; a run's id and its state are never cut.
    """
    jobs = [run.job for run in runs]
    cells: dict[str, list[str | Text]] = {
        "RUN": [job.run_id for job in jobs],
        "STATE": [tables.state(job) for job in jobs],
        "POINTS": [done_text(run.sweep.points) if run.sweep else "" for run in runs],
        "METRIC": [f"{result_label(run.metric[0])} {figure(run.metric[1])}" if run.metric else "" for run in runs],
        "USD": ["" if run.usd is None else f"{run.usd:.2f}" for run in runs],
        "TOOK": ["" if run.seconds is None else duration(run.seconds) for run in runs],
        "ATTEMPT": ["" if job.points else f"{job.attempt} of {job.max_attempts}" for job in jobs],
        "TEAM": [job.team for job in jobs],
        "QUEUE": [job.queue for job in jobs],
        "SUBMITTED": [tables.moment(job.created_at) for job in jobs],
    }
    if not any(cells["POINTS"]):
        del cells["POINTS"]
    less_needed = ("QUEUE", "TEAM", "SUBMITTED", "ATTEMPT", "POINTS", "TOOK", "USD", "METRIC")  # an id tells when, too
    tables.show(tables.fitted(cells, width=on.width, leave_out=less_needed, right=("USD",), wrapped=2), on=on)


def _json(run: ListedRun) -> dict[str, Any]:
    return {
        **tables.job_json(run.job),
        "usd": None if run.usd is None else round(run.usd, 6),
        "metric": None if run.metric is None else {"name": run.metric[0], "value": run.metric[1]},
        "result": run.receipt.result if run.receipt else {},
        "points": progress_text(run.sweep.points) if run.sweep else None,
    }
