"""`trainyard resume RUN`: continue a run that ended too early, with another job of the same run.

The run keeps its id, folder, metrics and receipt, and the numbers of its attempts continue. Training continues from the
newest checkpoint; a kind of job without checkpoints starts from the beginning.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jobs.cli.options import Detach, DryRun, Mode, NoCheck, Output, Overrides, Run, Wait, Yes, chosen_mode

if TYPE_CHECKING:
    from jobs.aws.connection import Aws
    from jobs.cli.sweep_state import SweepState
    from jobs.core.errors import UsageError
    from jobs.core.records import Attempt
    from jobs.core.stage import DeployedStage
    from jobs.runs.job import Job
    from jobs.runs.storage import StoredRun
    from jobs.spec.plan import Plan
    from jobs.spec.spec import JobSpec

_FIXED = ("name", "job", "team")
"""Keys of a spec that identify the run."""

_KEEPS_CODE = "runs the code as submitted; to send the folder as it is now: --set arguments.code=FOLDER --allow-changes"

_FORGOTTEN = "forgotten"
"""Replaces the id of a job that neither Batch nor the run's records have."""


def resume(
    ctx: typer.Context,
    *,
    run: Run,
    overrides: Overrides = None,
    allow_changes: Annotated[
        bool,
        typer.Option(
            "--allow-changes", help="Continue from the checkpoint even if arguments that affect the result changed."
        ),
    ] = False,
    no_check: NoCheck = False,
    dry_run: DryRun = False,
    wait: Wait = False,
    detach: Detach = False,
    yes: Yes = False,
    output: Output = "table",
) -> None:
    """Continue a run that failed, was cancelled, or timed out.

    Also continues a run that used up its attempts. The run keeps its id, folder, curve and receipt, and continues from
    its newest checkpoint.
    """
    from jobs.cli.submission import confirm, finish, show_dry_run, show_plans
    from jobs.cli.terminal import print_text

    mode = chosen_mode(dry_run=dry_run, wait=wait, detach=detach)
    aws, stage, planned, spec_before = _plan(
        ctx, run, overrides or [], allow_changes=allow_changes, check_contents=not no_check
    )
    if mode is Mode.DRY_RUN:
        show_dry_run([planned], emulated=stage.emulated, output=output)
        return
    show_plans([planned], emulated=stage.emulated)
    if not yes and not stage.emulated:
        confirm([planned], verb="Resume")
    job_id = _send(aws, stage, planned, spec_before)
    if output == "table":
        print_text(planned.run_id)
    finish(aws, stage, [planned], {planned.run_id: job_id}, mode=mode, output=output)


def _plan(
    ctx: typer.Context, text: str, overrides: Sequence[str], *, allow_changes: bool, check_contents: bool
) -> "tuple[Aws, DeployedStage, Plan, str]":
    """Return the plan of the next job, and the spec that the run has now. Raises if the run cannot be resumed."""
    from dataclasses import replace
    from datetime import datetime, timezone
    from functools import partial

    from jobs.cli.sweep_state import read_state, refuse_point
    from jobs.core.errors import NotFoundError, raise_all
    from jobs.core.run import SPEC
    from jobs.data_checks.inputs import check_inputs
    from jobs.money.aws_prices import current_prices
    from jobs.money.budget import spent
    from jobs.runs import batch, storage
    from jobs.runs.code_archive import pack_code
    from jobs.runs.planning import node_limit_errors
    from jobs.runs.script_requirements import check_requirements
    from jobs.runs.secrets import check_spec
    from jobs.runs.spec_file import read_spec_text
    from jobs.runs.sweeps import spent_by
    from jobs.spec.arguments import changed
    from jobs.spec.plan import ResumedRun, plan

    aws = ctx.obj.aws()
    stage = batch.read_stage(aws, ctx.obj.stage)
    run = storage.find_run(aws, stage, text)
    spec_before = storage.read_spec_text(aws, run.location)
    if spec_before is None:
        raise NotFoundError(
            f"{run.run_id} cannot be resumed: there is no {SPEC} in {run.location}",
            next_step="submit its spec as a new run: trainyard submit SPEC",
        )
    refuse_point(aws, run, "resume")
    jobs = batch.find_jobs(aws, stage, run.run_id)
    sweep = read_state(aws, run, jobs[-1] if jobs else None)
    attempts, has_succeeded = _recorded_attempts(aws, run)
    _check_ended(stage, run, jobs, sweep, has_succeeded=has_succeeded)
    recorded = [attempt.job_id for attempt in attempts if attempt.job_id]
    job_ids = tuple(job.id for job in jobs) or tuple(dict.fromkeys(recorded)) or (_FORGOTTEN,)
    before, spec = read_spec_text(spec_before, overrides, origin=str(run.location / SPEC))
    _check_fixed(run, before, spec)
    if overrides:
        check_spec(spec)
    raise_all(node_limit_errors(aws, spec, stage))
    points_left = _points_left(sweep, before, spec) if sweep else None
    with_code, pack = pack_code(spec, stage)
    check_requirements(stage, spec, pack)
    planned = plan(
        with_code,
        stage,
        run_id=run.run_id,
        resumed=ResumedRun(
            job_ids=job_ids,
            at=datetime.now(timezone.utc),
            spent=spent_by(sweep.points) if sweep else spent(attempts),
            allow_changes=allow_changes,
        ),
        prices_of=partial(current_prices, aws),
        room_of=partial(batch.room_of, aws, stage),
        points_left=points_left,
    ).submitted_by(aws.caller_if_known)
    changes = changed(
        before.entrypoint_arguments().fixed_arguments(), planned.spec.entrypoint_arguments().fixed_arguments()
    )
    if changes and not allow_changes:
        raise _changed_error(run, changes)
    raise_all(check_inputs(aws, stage, planned.spec, check_contents=check_contents))
    begins = "runs the unfinished points, each from its newest checkpoint"
    begins = begins if sweep else _first_step(aws, run, planned.spec.job)
    kept = () if sweep or pack or spec.job != "script" else (_KEEPS_CODE,)
    planned = replace(planned, pack=pack, notes=(begins, *kept, *_change_notes(changes), *planned.notes))
    return aws, stage, planned, spec_before


def _recorded_attempts(aws: "Aws", run: "StoredRun") -> "tuple[Sequence[Attempt], bool]":
    """Return the run's attempts and whether it has succeeded, from its receipt or else from its attempts' records.

    Records that cannot be read are left out, so the budget does not count those attempts.
    """
    from jobs.cli import tables
    from jobs.core.words import counted
    from jobs.runs import storage

    receipt = storage.readable_receipt(aws, run.location)
    if receipt is not None:
        return receipt.attempts, receipt.state == "succeeded"
    attempts = storage.read_attempts(aws, run.location)
    if attempts:
        counted_attempts = counted(len(attempts), "recorded attempt")
        tables.stderr().print(f"no receipt can be read: the budget counts the run's {counted_attempts}")
    return attempts, bool(attempts) and attempts[-1].exit_code == 0


def _check_ended(
    stage: "DeployedStage",
    run: "StoredRun",
    jobs: "Sequence[Job]",
    sweep: "SweepState | None",
    *,
    has_succeeded: bool,
) -> None:
    """Raise UsageError if the run has succeeded, is running, or may continue by itself."""
    from jobs.core.errors import UsageError
    from jobs.runs.logs import may_have_successor
    from jobs.runs.sweeps import STOPPED_EARLY

    job = jobs[-1] if jobs else None
    has_stopped_points = sweep is not None and any(standing.state == STOPPED_EARLY for standing in sweep.points)
    if (job.state == "SUCCEEDED" if job else has_succeeded) and not has_stopped_points:
        raise UsageError(
            f"{run.run_id} has succeeded: there is nothing to resume",
            next_step=f"trainyard fetch {run.run_id}, or submit its spec as a new run",
        )
    if job is None:
        return
    if may_have_successor(stage, job):
        raise UsageError(
            f"{run.run_id} is between two jobs: its Spot job has ended, and it may continue elsewhere by itself",
            next_step=f"trainyard status {run.run_id}; if it does not continue, resume it in a minute",
        )
    if job.ending:
        raise UsageError(
            f"{run.run_id} is being stopped: job {job.id} stays {job.state} until it has saved and ended",
            next_step=f"resume it once 'trainyard status {run.run_id}' shows that it has ended, in a minute or two",
        )
    if not job.ended:
        raise UsageError(
            f"{run.run_id} has not ended: job {job.id} is {job.state} in queue {job.queue}",
            next_step=f"trainyard logs {run.run_id} --follow, or trainyard cancel {run.run_id} and then resume it",
        )


def _points_left(sweep: "SweepState", before: "JobSpec", spec: "JobSpec") -> int:
    """Return the number of points to run, including points stopped early if the spec no longer halves.

    Raises UsageError if there are none, or if the points changed.
    """
    from jobs.cli.sweep_state import WITHOUT_HALVING
    from jobs.core.errors import UsageError
    from jobs.runs.sweeps import DONE, STOPPED_EARLY

    run_id = sweep.run.run_id
    halves = spec.sweep is not None and spec.sweep.halving is not None
    states = [standing.state for standing in sweep.points]
    left = sum(state not in (DONE if halves else ("succeeded",)) for state in states)
    if not left and STOPPED_EARLY in states:
        raise UsageError(
            f"all points of {run_id} have succeeded, or were stopped early because others were better",
            next_step=f"finish the stopped points: trainyard resume {run_id} {WITHOUT_HALVING}",
        )
    if not left:
        raise UsageError(
            f"all points of {run_id} have succeeded: there is nothing to resume",
            next_step=f"trainyard sweep {run_id}",
        )
    if spec.arguments != before.arguments or _choice(spec) != _choice(before):
        raise UsageError(f"{run_id} keeps its points and their arguments", next_step="submit a new sweep for others")
    return left


def _choice(spec: "JobSpec") -> dict[str, Any]:
    """Return the keys of the sweep that choose its points."""
    return spec.sweep.model_dump(include={"arguments", "random", "seed"}) if spec.sweep else {}


def _check_fixed(run: "StoredRun", before: "JobSpec", spec: "JobSpec") -> None:
    from jobs.core.errors import UsageError

    for key in _FIXED:
        old, new = getattr(before, key), getattr(spec, key)
        if old != new:
            raise UsageError(
                f"--set {key}={new}: {run.run_id} keeps its {key} '{old}'",
                next_step="submit a new run",
            )


def _changed_error(run: "StoredRun", changes: dict[str, tuple[Any, Any]]) -> "UsageError":
    import json

    from jobs.core.errors import UsageError

    lines = [f"arguments.{name}: was {json.dumps(old)}, is {json.dumps(new)}" for name, (old, new) in changes.items()]
    return UsageError(
        "\n".join([f"arguments that affect the result of {run.run_id} changed:", *lines]),
        next_step="undo the change, add --allow-changes if you mean it, or submit a new run",
    )


def _first_step(aws: "Aws", run: "StoredRun", job: str) -> str:
    """Return a note on where the next attempt begins."""
    from jobs.runs import storage

    step = storage.newest_checkpoint(aws, run.location)
    if step is None:
        return "starts from the beginning: there is no checkpoint"
    if job == "script":
        return f"checkpoint {step} is restored; the script has to load it"
    return f"resumes from checkpoint step-{step}"


def _change_notes(changes: dict[str, tuple[Any, Any]]) -> list[str]:
    import json

    return [
        f"{name} is {json.dumps(new)} from this step on; it was {json.dumps(old)}"
        for name, (old, new) in changes.items()
    ]


def _send(aws: "Aws", stage: "DeployedStage", planned: "Plan", spec_before: str) -> str:
    """Submit the job and return its id. If several people resume the run at once, only one succeeds."""
    from contextlib import suppress

    from jobs.core.errors import Detached, MaybeSubmittedError, UsageError
    from jobs.runs import batch
    from jobs.runs.resume import Claim
    from jobs.runs.submit import send

    assert planned.resumed is not None  # noqa: S101 - `_plan` sets it
    earlier = planned.resumed.job_ids
    claim = Claim.of(aws, planned.run_id, planned.run_location, earlier[-1])
    if claim.take():
        # The previous owner of the claim may have submitted the job without recording it.
        newest = batch.find_job(aws, stage, planned.run_id)
        if newest is not None and newest.id not in earlier:
            claim.record(newest.id)
            raise UsageError(
                f"{planned.run_id} has already been resumed, as job {newest.id}",
                next_step=f"trainyard status {planned.run_id}",
            )
    try:
        job_id = send(aws, planned, spec_before=spec_before)
    except (MaybeSubmittedError, Detached):
        raise  # the job may exist: keep the claim
    except Exception:
        with suppress(Exception):
            claim.release()
        raise
    claim.record(job_id)
    return job_id
