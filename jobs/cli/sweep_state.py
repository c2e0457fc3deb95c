"""Reads the state of a sweep and its points, and rejects sweeps or points in commands that cannot take them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jobs.aws.connection import Aws
from jobs.core.errors import JobFailedError, TrainyardError, UsageError
from jobs.core.stage import DeployedStage
from jobs.runs import batch
from jobs.runs.job import Job
from jobs.runs.run_records import read_spec
from jobs.runs.storage import StoredRun
from jobs.runs.sweeps import (
    DONE,
    Standing,
    best,
    ended_by,
    progress_text,
    ranked,
    read_sweep,
    spent_by,
    standings,
    sweep_of,
)
from jobs.spec.spec import JobSpec
from jobs.spec.sweep import SweepRecord

WITHOUT_HALVING = "--set sweep.halving=null"
"""Makes `trainyard resume` finish the points that halving has stopped."""

COMPARED = 8
"""`compare` uses at most this many points of a sweep, the best ones, because more would make the page hard to read."""


@dataclass(frozen=True, kw_only=True)
class SweepState:
    """A sweep with the current state of its points."""

    run: StoredRun
    spec: JobSpec
    record: SweepRecord
    job: Job | None
    """The newest job; None if Batch has forgotten it."""
    points: Sequence[Standing]
    """In the order of their numbers."""
    reason: str
    """Why the sweep ended before all points did; empty otherwise."""

    @property
    def budget_text(self) -> str:
        """Return how much of the budget is used; empty without a budget."""
        return self.spec.budget.text(spent_by(self.points))

    @property
    def ranked(self) -> list[Standing]:
        """Return the points, best first."""
        return ranked(self.points, self.spec.sweep) if self.spec.sweep else []

    @property
    def best(self) -> Standing | None:
        return best(self.points, self.spec.sweep) if self.spec.sweep else None

    @property
    def best_metric(self) -> tuple[str, float] | None:
        return self.metric(self.best) if self.best else None

    def metric(self, standing: Standing) -> tuple[str, float] | None:
        """Return the name and value of the metric that ranks a point; None if it has none yet."""
        return standing.metric(self.spec.sweep) if self.spec.sweep else None

    def as_json(self) -> dict[str, Any]:
        """Return the sweep and its points, best first, as JSON."""
        spent = spent_by(self.points)
        return {
            "run_id": self.run.run_id,
            "state": self.job.state if self.job else None,
            "progress": progress_text(self.points),
            "usd": round(spent.usd, 6),
            "instance_hours": round(spent.instance_hours, 6),
            "budget": self.budget_text,
            "reason": self.reason,
            "best": self.best.point.run_id if self.best else None,
            "points": [
                {
                    "number": standing.point.number,
                    "run_id": standing.point.run_id,
                    "values": standing.point.values,
                    "state": standing.state,
                    "reason": standing.reason,
                    "metric": None if (metric := self.metric(standing)) is None else dict([metric]),
                    "usd": None if standing.usd is None else round(standing.usd, 6),
                    "result": standing.receipt.result if standing.receipt else {},
                }
                for standing in self.ranked
            ],
        }


def read_state(aws: Aws, run: StoredRun, job: Job | None) -> SweepState | None:
    """Read a sweep and its points from S3. Returns None if the run is not a sweep."""
    record = read_sweep(aws, run.location)
    if record is None:
        return None
    spec = read_spec(aws, run.location)
    if spec is None or spec.sweep is None:
        raise TrainyardError(
            f"{run.run_id} is a sweep whose spec this release of trainyard cannot read",
            next_step="use the release that submitted it",
        )
    points = standings(aws, run.location, record, job)
    reason = ended_by(aws, run.location, points, job) if job else ""
    return SweepState(run=run, spec=spec, record=record, job=job, points=points, reason=reason)


def started_points(aws: Aws, stage: DeployedStage, run: StoredRun) -> list[StoredRun] | None:
    """Return the points of a sweep that have a receipt, best first; None if the run is not a sweep."""
    if read_sweep(aws, run.location) is None:
        return None
    state = read_state(aws, run, batch.find_job(aws, stage, run.run_id))
    assert state is not None  # noqa: S101 - the run is a sweep
    found = [standing for standing in state.ranked if standing.receipt is not None]
    return [StoredRun(each.point.run_id, run.team, each.location) for each in found]


def refuse_sweep(aws: Aws, stage: DeployedStage, run: StoredRun, *, what: str, command: str) -> None:
    """Raise UsageError if the run is a sweep. `command` shows or fetches `what`, which only its points have."""
    found = started_points(aws, stage, run)
    if found is None:
        return
    named = f"trainyard {command} {found[0].run_id} for its best point so far; all points: " if found else ""
    raise UsageError(
        f"{run.run_id} is a sweep: it has no {what}, but each of its points has",
        next_step=f"{named}trainyard sweep {run.run_id}",
    )


def refuse_point(aws: Aws, run: StoredRun, command: str) -> None:
    """Raise UsageError if the run is a point of a sweep: only the sweep has a job, which `command` needs."""
    sweep = sweep_of(aws, run.location)
    if sweep is not None:
        raise UsageError(
            f"{run.run_id} is a point of the sweep {sweep} and has no job of its own",
            next_step=f"trainyard {command} {sweep}",
        )


def raise_failure(state: SweepState, job: Job) -> None:
    """Raise JobFailedError if the sweep has ended and not all of its points succeeded or were stopped early."""
    if job.state == "SUCCEEDED" and all(standing.state in DONE for standing in state.points):
        return
    raise JobFailedError(
        f"{state.run.run_id} has ended: {state.reason or progress_text(state.points)}",
        next_step=f"trainyard sweep {state.run.run_id}, then trainyard resume {state.run.run_id}",
    )
