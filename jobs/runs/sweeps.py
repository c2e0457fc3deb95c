"""Read the state of a sweep: each point, the best point, and their cost."""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from itertools import chain
from pathlib import PurePosixPath

from pydantic import ValidationError

from jobs.aws import s3 as object_store
from jobs.aws.connection import Aws
from jobs.core.errors import TrainyardError, did_you_mean
from jobs.core.locations import S3Location
from jobs.core.records import Receipt, parse_record
from jobs.core.words import counted
from jobs.money.budget import NOTHING_SPENT, Spent, spent
from jobs.money.estimate import forecast
from jobs.runs.job import CANCELLED, UNSUCCESSFUL, Job
from jobs.runs.storage import in_parallel, read_receipt
from jobs.spec.sweep import (
    MEMBER_OF,
    SWEEP,
    SWEEP_CLAIMS,
    Claim,
    MemberOf,
    PointRecord,
    Sweep,
    SweepRecord,
    claim_name,
    claimed,
    stop_name,
)

STOPPED_EARLY = "stopped early"
"""The state of a point that successive halving has stopped. It is never run again."""

DONE = ("succeeded", STOPPED_EARLY)
"""States of points that need no more work."""

_ORDER = ("succeeded", "running", STOPPED_EARLY, "waiting", "interrupted", "not run", "stopped", "failed")
"""States of points, in display order."""

_NAMED = 3
"""Number of failed points whose reasons appear in the sweep's reason."""


def read_sweep(aws: Aws, run: S3Location) -> SweepRecord | None:
    """Read the points of a sweep, or return None if the run is not a sweep."""
    content = object_store.read_once(aws.s3, run / SWEEP)
    return None if content is None else parse_record(SweepRecord, content, place=run / SWEEP)


def sweep_of(aws: Aws, run: S3Location) -> str | None:
    """Return the run id of the sweep that a run is a point of, or None if it is not part of a sweep."""
    content = object_store.read_once(aws.s3, run / MEMBER_OF)
    return None if content is None else parse_record(MemberOf, content, place=run / MEMBER_OF).sweep


@dataclass(frozen=True, kw_only=True)
class Standing:
    """The state and result of one point of a sweep."""

    point: PointRecord
    location: S3Location
    state: str
    """succeeded, running, stopped early, waiting, interrupted, not run, stopped (at the end of the budget), failed."""
    receipt: Receipt | None
    reason: str = ""
    """Why it failed or was stopped."""

    @property
    def rung(self) -> int:
        """Return the last step at which halving compared the point with others; 0 if it has not yet."""
        return self.receipt.halving.rung if self.receipt and self.receipt.halving else 0

    def metric(self, sweep: Sweep) -> tuple[str, float] | None:
        """Return the metric that ranks the point, with its name. Before a result, its value at the last rung."""
        if self.receipt is None:
            return None
        found, halving = sweep.metric_of(self.receipt.result), self.receipt.halving
        if found is None and halving is not None and halving.value is not None:
            return halving.metric, halving.value
        return found

    @property
    def usd(self) -> float | None:
        """Return the point's cost so far, in USD, or None if it has written no receipt."""
        if self.receipt is None:
            return None
        return forecast(self.receipt.attempts, None, None, now=datetime.now(timezone.utc)).usd


def standings(aws: Aws, run: S3Location, record: SweepRecord, job: Job | None) -> list[Standing]:
    """Return the state of all points, in order. `job` is the sweep's newest job, or None if Batch has forgotten it."""
    pages = aws.s3.get_paginator("list_objects_v2").paginate(Bucket=run.bucket, Prefix=(run / SWEEP_CLAIMS).key)
    start = len((run / SWEEP_CLAIMS).key)
    items = [item for page in pages for item in page.get("Contents", [])]
    names = [item["Key"][start:] for item in sorted(items, key=lambda item: item["LastModified"])]
    newest = {number: of_job for of_job, number in claimed(names) if job is None or job.ended or of_job == job.id}
    team = PurePosixPath(run.key.rstrip("/")).parent
    is_active = job is not None and not job.ended

    def standing(point: PointRecord) -> Standing:
        location = S3Location(run.bucket, f"{team}/{point.run_id}/")
        receipt: Receipt | None = None
        with suppress(TrainyardError):  # written by another release
            receipt = read_receipt(aws, location)
        claim: Claim | None = None
        if point.number in newest:
            content = object_store.read_once(aws.s3, run / claim_name(newest[point.number], point.number))
            with suppress(ValidationError):
                claim = Claim.model_validate_json(content or b"")
        last = receipt.attempts[-1].reason if receipt and receipt.attempts else None
        reason = ""
        if receipt is not None and receipt.stopped_early and receipt.halving is not None:
            state, reason = STOPPED_EARLY, receipt.halving.text
        elif receipt is not None and receipt.state == "succeeded":
            state = "succeeded"
        elif claim is None:
            recorded = "not run" if receipt is None else receipt.state
            recorded = "interrupted" if recorded == "running" else recorded  # its worker was lost
            state = "waiting" if is_active else recorded
        elif claim.ended is not None:
            state = claim.ended
            reason = (last or claim.reason) if claim.reason.startswith("exit code") else claim.reason
        else:
            state = "running" if is_active else "interrupted"
        return Standing(point=point, location=location, state=state, receipt=receipt, reason=reason)

    return in_parallel(standing, record.points)


def ended_by(aws: Aws, run: S3Location, found: Sequence[Standing], job: Job) -> str:
    """Return why a sweep ended before all of its points were done, or an empty string.

    Batch reports only that a worker exited.
    """
    if job.state not in UNSUCCESSFUL:
        return ""
    if job.state == CANCELLED:
        return job.reason
    stopped = next((standing.reason for standing in found if standing.state == "stopped"), "")
    if not stopped and any(standing.state not in DONE for standing in found):
        with suppress(ValidationError):
            stopped = Claim.model_validate_json(object_store.read_once(aws.s3, run / stop_name(job.id)) or b"").reason
    failed = [standing for standing in found if standing.state == "failed"]
    why = "; ".join(f"point {standing.point.number}: {standing.reason}" for standing in failed[:_NAMED])
    failures = f"{len(failed)} of {counted(len(found), 'point')} failed: {why}" if failed else ""
    rest = f"; and {len(failed) - _NAMED} more" if len(failed) > _NAMED else ""
    return "; ".join(filter(None, (stopped, f"{failures}{rest}"))) or job.reason


def missing_metric_warning(found: Sequence[Standing], sweep: Sweep) -> str:
    """Return a warning if points have succeeded but none has the metric to rank by, else an empty string."""
    results = [standing.receipt.result for standing in found if standing.state == "succeeded" and standing.receipt]
    if not results or any(standing.metric(sweep) for standing in found):
        return ""
    known = sorted({name for result in results for name, value in result.items() if isinstance(value, (int, float))})
    metric = f"sweep.metric '{sweep.metric}'" if sweep.metric else "a metric to rank by; name one in sweep.metric"
    has = did_you_mean(sweep.metric or "", known) if known else "; they reported no numbers"
    return f"none of the points that have succeeded has {metric}{has}"


def ranked(found: Sequence[Standing], sweep: Sweep) -> list[Standing]:
    """Return the points, the best first, then those without the metric, and failed points last.

    Among unfinished points, those that have reached a later rung come first.
    """

    def order(standing: Standing) -> tuple[int, int, bool, float, int]:
        metric = standing.metric(sweep)
        value = 0.0 if metric is None else metric[1] if sweep.smaller_is_better(metric[0]) else -metric[1]
        rung = 0 if standing.state == "succeeded" else standing.rung
        return _ORDER.index(standing.state), -rung, metric is None, value, standing.point.number

    return sorted(found, key=order)


def best(found: Sequence[Standing], sweep: Sweep) -> Standing | None:
    """Return the best of the successful points, or None if no point has succeeded with the metric."""
    first = next(iter(ranked(found, sweep)), None)
    if first is None or first.state != "succeeded" or first.receipt is None:
        return None
    return first if first.metric(sweep) is not None else None


def progress_text(found: Sequence[Standing]) -> str:
    """Return a sweep's progress in one line: `7 of 9 points done, 1 failed, 1 running`."""
    states = [standing.state for standing in found]
    others = [f"{states.count(state)} {state}" for state in _ORDER[:0:-1] if state in states]
    return ", ".join([f"{states.count('succeeded')} of {counted(len(states), 'point')} done", *others])


def done_text(found: Sequence[Standing]) -> str:
    """Return how many of a sweep's points have succeeded, in the shortest form: `7 of 9`."""
    return f"{sum(standing.state == 'succeeded' for standing in found)} of {len(found)}"


def spent_by(found: Iterable[Standing]) -> Spent:
    """Return what all points have used together."""
    attempts = list(chain.from_iterable(standing.receipt.attempts for standing in found if standing.receipt))
    return spent(attempts) if attempts else NOTHING_SPENT
