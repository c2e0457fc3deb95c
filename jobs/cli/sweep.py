"""`trainyard sweep SWEEP`: its points, the best first, with what each brought, took and cost."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.text import Text

from jobs.aws.connection import Aws
from jobs.cli import tables
from jobs.core.errors import JobFailedError, TrainyardError, UsageError
from jobs.core.locations import RUN
from jobs.core.stage import DeployedStage
from jobs.core.words import figure, printable, result_label, usd
from jobs.runs import batch, storage
from jobs.runs.job import Job
from jobs.runs.read_records import read_spec
from jobs.runs.storage import StoredRun
from jobs.runs.sweeps import (
    DONE,
    STOPPED_EARLY,
    Standing,
    best,
    ended_by,
    progress_text,
    ranked,
    read_sweep,
    spent_by,
    standings,
    sweep_of,
    without_metric,
)
from jobs.spec.spec import JobSpec
from jobs.spec.sweep import BEST, SweepRecord

_STYLES = {"succeeded": "green", STOPPED_EARLY: "blue", "failed": "red", "stopped": "magenta", "running": "cyan"}

WITHOUT_HALVING = "--set sweep.halving=null"
"""With it `trainyard resume` runs the points to their end that halving has stopped."""

COMPARED = 8
"""Points that are compared, the best ones; of more the page would be hard to read."""


@dataclass(frozen=True, kw_only=True)
class SweepNow:
    """A sweep with how its points stand."""

    run: StoredRun
    spec: JobSpec
    record: SweepRecord
    job: Job | None
    """The newest; None: Batch has forgotten it."""
    points: Sequence[Standing]
    """In their order."""
    reason: str
    """Why it ended without all of its points; empty if it did not."""

    @property
    def budget_text(self) -> str:
        """Return the used part of the budget as text; empty where there is none."""
        return self.spec.budget.text(spent_by(self.points))

    @property
    def ranked(self) -> list[Standing]:
        """Return the points, the best first."""
        return ranked(self.points, self.spec.sweep) if self.spec.sweep else []

    @property
    def best(self) -> Standing | None:
        return best(self.points, self.spec.sweep) if self.spec.sweep else None

    @property
    def best_metric(self) -> tuple[str, float] | None:
        return _metric(self, self.best) if self.best else None


def read_now(aws: Aws, run: StoredRun, job: Job | None) -> SweepNow | None:
    """Read a sweep and its points; None where the run is no sweep."""
    record = read_sweep(aws, run.location)
    if record is None:
        return None
    spec = read_spec(aws, run.location)
    if spec is None or spec.sweep is None:
        raise TrainyardError(
            f"{run.run_id} is a sweep of another release, whose spec cannot be read",
            next_step="read its points with the release that submitted it",
        )
    points = standings(aws, run.location, record, job)
    reason = ended_by(aws, run.location, points, job) if job else ""
    return SweepNow(run=run, spec=spec, record=record, job=job, points=points, reason=reason)


def begun_points(aws: Aws, stage: DeployedStage, run: StoredRun) -> list[StoredRun] | None:
    """Return a sweep's points that have a receipt, the best first; None if the run is no sweep."""
    if read_sweep(aws, run.location) is None:
        return None
    now = read_now(aws, run, batch.find_job(aws, stage, run.run_id))
    assert now is not None  # noqa: S101 - it is a sweep
    found = [standing for standing in now.ranked if standing.receipt is not None]
    return [StoredRun(each.point.run_id[-20:], each.point.run_id, run.team, each.location) for each in found]


def refuse_sweep(aws: Aws, stage: DeployedStage, run: StoredRun, *, what: str, command: str) -> None:
    """Raise UsageError if a run is a sweep, of whose points each has `what`; `command` shows or fetches that."""
    found = begun_points(aws, stage, run)
    if found is None:
        return
    named = f"trainyard {command} {found[0].run_id}, its best point so far; all: " if found else ""
    raise UsageError(
        f"{run.run_id} is a sweep, each of whose points has {what} of its own",
        next_step=f"{named}trainyard sweep {run.run_id}",
    )


def sweep(aws: Aws, stage_name: str, text: str, *, output: str) -> None:
    """Run `trainyard sweep`. Raises UsageError where the run is no sweep."""
    stage = batch.read_stage(aws, stage_name)
    run = storage.find_run(aws, stage, text)
    now = read_now(aws, run, batch.find_job(aws, stage, run.run_id))
    if now is None:
        of = sweep_of(aws, run.location)
        raise UsageError(
            f"{run.run_id} is {f'a point of the sweep {of}' if of else 'no sweep'}",
            next_step=f"trainyard {f'sweep {of}' if of else f'status {run.run_id}'}",
        )
    show(now, output=output)


def show(now: SweepNow, *, output: str) -> None:
    """Print a sweep's points: the table on stdout, what to do next on stderr."""
    if output == "json":
        tables.print_json(sweep_json(now))
        return
    found = now.ranked
    names = list(now.record.points[0].values)
    short = [name.removeprefix("parameters.") for name in names]
    metrics = [_metric(now, standing) for standing in found]
    label = next((result_label(metric[0]) for metric in metrics if metric), "metric")
    table = tables.columns("POINT", *(name.upper() for name in short), label.upper(), "USD", "STATE")
    for column in table.columns[1:-1]:
        column.justify = "right"
    for standing, metric in zip(found, metrics, strict=True):
        table.add_row(
            str(standing.point.number),
            *(Text(printable(str(standing.point.values.get(name, "")))) for name in names),
            "" if metric is None else figure(metric[1]),
            "" if standing.usd is None else f"{standing.usd:.2f}",
            Text(_state_text(standing), style=_STYLES.get(standing.state, "yellow")),
        )
    tables.show(table, on=tables.stdout())
    _say_next(now, found)


def _state_text(standing: Standing) -> str:
    return f"{standing.state}: {standing.reason}" if standing.state == STOPPED_EARLY else standing.state


def _say_next(now: SweepNow, found: Sequence[Standing]) -> None:
    console = tables.stderr()
    total = spent_by(now.points).usd
    budget = f"; {now.budget_text} used" if now.budget_text else ""
    console.print(Text(f"{now.run.run_id}: {progress_text(now.points)}, {usd(total)}{budget}"), soft_wrap=True)
    for standing in found:
        if standing.reason and standing.state != STOPPED_EARLY:  # the table says why
            console.print(Text(f"point {standing.point.number}: {printable(standing.reason)}"), soft_wrap=True)
    if now.reason and not any(standing.reason for standing in found if standing.state != STOPPED_EARLY):
        console.print(Text(printable(now.reason)), soft_wrap=True)
    if now.spec.sweep and (warning := without_metric(now.points, now.spec.sweep)):
        console.print(Text(f"warning: {printable(warning)}"), soft_wrap=True)
    if now.best is not None and (now.job is None or now.job.ended):
        console.print(Text(f"the best is {now.best.point.run_id}: {RUN}{now.spec.name}{BEST}/…"), soft_wrap=True)
    done = [standing.point.run_id for standing in found if standing.state == "succeeded"]
    if len(done) > 1:
        compared = " ".join(done[:COMPARED])
        console.print(Text(f"side by side, with curves: trainyard compare {compared} --html FILE"), soft_wrap=True)
    if now.job is not None and not now.job.ended:
        return
    if any(standing.state not in DONE for standing in found):
        console.print(Text(f"the others again: trainyard resume {now.run.run_id}"), soft_wrap=True)
    elif any(standing.state == STOPPED_EARLY for standing in found):
        resume = f"trainyard resume {now.run.run_id} {WITHOUT_HALVING}"
        console.print(Text(f"those that were stopped early, to their end: {resume}"), soft_wrap=True)


def _metric(now: SweepNow, standing: Standing) -> tuple[str, float] | None:
    return standing.metric(now.spec.sweep) if now.spec.sweep else None


def sweep_json(now: SweepNow) -> dict[str, Any]:
    """Return a sweep and its points, the best first, as JSON."""
    so_far = spent_by(now.points)
    found = now.ranked
    return {
        "run_id": now.run.run_id,
        "state": now.job.state if now.job else None,
        "progress": progress_text(now.points),
        "usd": round(so_far.usd, 6),
        "instance_hours": round(so_far.instance_hours, 6),
        "budget": now.budget_text,
        "reason": now.reason,
        "best": now.best.point.run_id if now.best else None,
        "points": [
            {
                "number": standing.point.number,
                "run_id": standing.point.run_id,
                "values": standing.point.values,
                "state": standing.state,
                "reason": standing.reason,
                "metric": None if (metric := _metric(now, standing)) is None else dict([metric]),
                "usd": None if standing.usd is None else round(standing.usd, 6),
                "result": standing.receipt.result if standing.receipt else {},
            }
            for standing in found
        ],
    }


def raise_failure(now: SweepNow, job: Job) -> None:
    """Raises JobFailedError where a sweep has ended and not all of its points have succeeded."""
    states = [standing.state for standing in now.points]
    if job.state == "SUCCEEDED" and all(state in DONE for state in states):
        return
    ended = f": {now.reason}" if now.reason else ""
    raise JobFailedError(
        f"{now.run.run_id} has ended with {progress_text(now.points)}{ended}",
        next_step=f"trainyard sweep {now.run.run_id}, then trainyard resume {now.run.run_id}",
    )


def refuse_point(aws: Aws, run: StoredRun, what: str) -> None:
    """Raise UsageError where a run is a point of a sweep, whose job is the sweep's. `what`: the command for that."""
    of = sweep_of(aws, run.location)
    if of is not None:
        raise UsageError(
            f"{run.run_id} is a point of the sweep {of}, and has no job of its own",
            next_step=f"trainyard {what} {of}",
        )
