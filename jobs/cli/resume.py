"""`trainyard resume RUN`: goes on with a run that has ended before it was done, as another job of the same run.

Id, folder, metrics and receipt are those of the run, and the attempts count on. It starts from the newest checkpoint;
a kind of job that saves none starts from its beginning.
"""

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timezone
from functools import partial
from typing import Any

from jobs.aws.connection import Aws
from jobs.cli import tables
from jobs.cli.plain import print_text
from jobs.cli.requirements import check_requirements
from jobs.cli.spec_file import read_spec_text
from jobs.cli.submit import How, confirm, finish, send, show_code
from jobs.cli.sweep import WITHOUT_HALVING, SweepNow, read_now, refuse_point
from jobs.core.errors import Detached, MaybeSubmittedError, NotFoundError, UsageError, raise_all
from jobs.core.records import Attempt
from jobs.core.run import SPEC
from jobs.core.stage import DeployedStage
from jobs.core.words import counted
from jobs.data_checks.inputs import check_inputs
from jobs.money.aws_prices import current_prices
from jobs.money.budget import spent
from jobs.runs import batch, storage
from jobs.runs.claims import Claim
from jobs.runs.code_archive import packed
from jobs.runs.follow import may_go_on
from jobs.runs.job import Job
from jobs.runs.secrets import check_spec
from jobs.runs.storage import StoredRun
from jobs.runs.sweeps import DONE, STOPPED_EARLY, spent_by
from jobs.spec.arguments import changed
from jobs.spec.plan import Plan, ResumedRun, plan
from jobs.spec.spec import JobSpec

_FIXED = ("name", "job", "team")
"""Keys of a spec that say which run it is."""

_FORGOTTEN = "forgotten"
"""Stands in place of the id of a job that nobody knows any more."""


def resume(
    aws: Aws,
    stage_name: str,
    text: str,
    overrides: Sequence[str],
    *,
    allow_changes: bool,
    how: How,
    yes: bool,
    output: str,
    look_inside: bool = True,
) -> None:
    """Run `trainyard resume`. Raises the error whose exit code tells how the job ended, or why there is none."""
    stage = batch.read_stage(aws, stage_name)
    run = storage.find_run(aws, stage, text)
    spec_before = storage.read_spec_text(aws, run.location)
    if spec_before is None:
        raise NotFoundError(
            f"{run.run_id} has no {SPEC} in {run.location}, so nobody knows what to go on with",
            next_step="submit its spec as a new run: trainyard submit SPEC",
        )
    refuse_point(aws, run, "resume")
    jobs = batch.find_jobs(aws, stage, run.run_id)
    swept = read_now(aws, run, jobs[-1] if jobs else None)
    attempts, has_succeeded = _recorded(aws, run)
    _check_ended(stage, run, jobs, swept, has_succeeded=has_succeeded)
    recorded = [attempt.job_id for attempt in attempts if attempt.job_id]
    job_ids = tuple(job.id for job in jobs) or tuple(dict.fromkeys(recorded)) or (_FORGOTTEN,)
    before, spec = read_spec_text(spec_before, overrides, origin=str(run.location / SPEC))
    _check_fixed(run, before, spec)
    if overrides:
        check_spec(spec)
    so_far = spent_by(swept.points) if swept else spent(attempts)
    resumed = ResumedRun(job_ids=job_ids, at=datetime.now(timezone.utc), spent=so_far, allow_changes=allow_changes)
    points_left = _points_left(swept, before, spec) if swept else None
    with_code, pack = packed(spec, stage)
    check_requirements(stage, spec, pack)
    prices_of = partial(current_prices, aws)
    planned = plan(
        with_code,
        stage,
        run_id=run.run_id,
        resumed=resumed,
        prices_of=prices_of,
        room_of=partial(batch.room_of, aws, stage),
        points_left=points_left,
    )
    planned = replace(planned, pack=pack)
    changes = changed(
        before.entrypoint_arguments().fixed_arguments(), planned.spec.entrypoint_arguments().fixed_arguments()
    )
    if changes and not allow_changes:
        raise _changed_error(run, changes)
    raise_all(check_inputs(aws, stage, planned.spec, look_inside=look_inside))
    where_from = "runs the points that have not come to their end, each from its newest checkpoint"
    where_from = where_from if swept else _where_from(aws, run, planned.spec.job)
    planned = replace(planned, notes=(where_from, *_change_notes(changes), *planned.notes))
    tables.show(tables.plan_table(planned, emulated=stage.emulated), on=tables.stderr())
    if how is How.DRY_RUN:
        show_code([planned])
        tables.print_json(planned.request)
        return
    if not yes and not stage.emulated:
        confirm([planned], verb="Resume")
    job_id = _send(aws, stage, planned, spec_before)
    if output == "table":
        print_text(run.run_id)
    finish(aws, stage, [planned], {run.run_id: job_id}, how=how, output=output)


def _recorded(aws: Aws, run: StoredRun) -> tuple[Sequence[Attempt], bool]:
    """Return the run's attempts up to now and whether it has succeeded: by its receipt, else by the attempts' records.

    Of the records those count that can be read: what the others took is nowhere else.
    """
    receipt = storage.readable_receipt(aws, run.location)
    if receipt is not None:
        return receipt.attempts, receipt.state == "succeeded"
    attempts = storage.read_attempts(aws, run.location)
    if attempts:
        counted_attempts = counted(len(attempts), "recorded attempt")
        tables.stderr().print(f"no receipt can be read: the budget counts the run's {counted_attempts}")
    return attempts, bool(attempts) and attempts[-1].exit_code == 0


def _check_ended(
    stage: DeployedStage, run: StoredRun, jobs: Sequence[Job], swept: SweepNow | None, *, has_succeeded: bool
) -> None:
    job = jobs[-1] if jobs else None
    has_stopped_points = swept is not None and any(standing.state == STOPPED_EARLY for standing in swept.points)
    if (job.state == "SUCCEEDED" if job else has_succeeded) and not has_stopped_points:
        raise UsageError(
            f"{run.run_id} has succeeded: there is nothing to go on with",
            next_step=f"trainyard fetch {run.run_id}, or submit its spec as a new run",
        )
    if job is None:
        return
    if may_go_on(stage, job):
        raise UsageError(
            f"{run.run_id} is between two jobs: what ran on Spot has ended, and may go on On-Demand by itself",
            next_step=f"trainyard status {run.run_id}; where it does not, resume it in a minute",
        )
    if job.ending:
        raise UsageError(
            f"{run.run_id} is being stopped, and is {job.state} until it has saved and ended, as job {job.id}",
            next_step=f"resume it once 'trainyard status {run.run_id}' says that it has ended, in a minute or two",
        )
    if not job.ended:
        raise UsageError(
            f"{run.run_id} has not ended: it is {job.state}, as job {job.id} in queue {job.queue}",
            next_step=f"trainyard logs {run.run_id} --follow, or trainyard cancel {run.run_id} and resume it then",
        )


def _points_left(swept: SweepNow, before: JobSpec, spec: JobSpec) -> int:
    """Return how many points there are to run. Raises UsageError where there are none, or others are asked for.

    Those that halving has stopped are, where the spec no longer has it.
    """
    halves = spec.sweep is not None and spec.sweep.halving is not None
    states = [standing.state for standing in swept.points]
    left = sum(state not in (DONE if halves else ("succeeded",)) for state in states)
    if not left and STOPPED_EARLY in states:
        raise UsageError(
            f"all points of {swept.run.run_id} have succeeded, or were stopped early since others were better",
            next_step=f"trainyard resume {swept.run.run_id} {WITHOUT_HALVING} runs those to their end",
        )
    if not left:
        raise UsageError(
            f"all points of {swept.run.run_id} have succeeded: there is nothing to go on with",
            next_step=f"trainyard sweep {swept.run.run_id}",
        )
    if spec.arguments != before.arguments or _choice(spec) != _choice(before):
        raise UsageError(
            f"{swept.run.run_id} keeps its points and their arguments", next_step="submit a new sweep with others"
        )
    return left


def _choice(spec: JobSpec) -> dict[str, Any]:
    return spec.sweep.model_dump(include={"arguments", "random", "seed"}) if spec.sweep else {}


def _check_fixed(run: StoredRun, before: JobSpec, spec: JobSpec) -> None:
    for key in _FIXED:
        old, new = getattr(before, key), getattr(spec, key)
        if old != new:
            raise UsageError(
                f"--set {key}={new}: {run.run_id} is a run of {key} '{old}', which it keeps",
                next_step="submit a new run",
            )


def _changed_error(run: StoredRun, changes: dict[str, tuple[Any, Any]]) -> UsageError:
    lines = [
        f"arguments.{name}: {json.dumps(old)} until now, {json.dumps(new)} asked for"
        for name, (old, new) in changes.items()
    ]
    return UsageError(
        "\n".join([f"{run.run_id} would no longer be one training:", *lines]),
        next_step="leave the change out, add --allow-changes where it is meant, or submit a new run",
    )


def _where_from(aws: Aws, run: StoredRun, job: str) -> str:
    step = storage.newest_checkpoint(aws, run.location)
    if step is None:
        return "starts from its beginning: it has no checkpoint"
    if job == "script":
        return f"checkpoint step-{step} is there for the script, which has to load it"
    return f"resumes from checkpoint step-{step}"


def _change_notes(changes: dict[str, tuple[Any, Any]]) -> list[str]:
    return [
        f"{name} is {json.dumps(new)} from here on, and was {json.dumps(old)}" for name, (old, new) in changes.items()
    ]


def _send(aws: Aws, stage: DeployedStage, planned: Plan, spec_before: str) -> str:
    """Submit the job and return its id: one more than before, however many resume the run at the same time."""
    assert planned.resumed is not None  # noqa: S101 - `resume` made it so
    earlier = planned.resumed.job_ids
    claim = Claim.of(aws, planned.run_id, planned.run_location, earlier[-1])
    if claim.take():
        # Whoever held it may have submitted the job and not come to say so.
        newest = batch.find_job(aws, stage, planned.run_id)
        if newest is not None and newest.id not in earlier:
            claim.record(newest.id)
            raise UsageError(
                f"{planned.run_id} goes on already, as job {newest.id}",
                next_step=f"trainyard status {planned.run_id}",
            )
    try:
        job_id = send(aws, planned, spec_before=spec_before)
    except (MaybeSubmittedError, Detached):
        raise  # the claim stays with what may be a job
    except Exception:
        with suppress(Exception):
            claim.release()
        raise
    claim.record(job_id)
    return job_id
