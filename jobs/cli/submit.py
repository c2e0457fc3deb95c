"""`trainyard submit SPEC`: check, plan, ask, submit exactly once, follow.

The runs of a file with several specs are followed one after the other, in its order.
"""

import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timezone
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from jobs.aws.connection import Aws
from jobs.cli import sweep, tables
from jobs.cli.list import ListedRun, show_runs
from jobs.cli.live import LiveView, detaching
from jobs.cli.options import ask
from jobs.cli.plain import print_text
from jobs.cli.requirements import check_requirements
from jobs.cli.spec_file import read_specs, with_absolute_paths
from jobs.core.errors import (
    Detached,
    JobFailedError,
    MaybeSubmittedError,
    TimedOutError,
    TrainyardError,
    UsageError,
    raise_all,
)
from jobs.core.locations import RUN, S3Location, run_parts
from jobs.core.records import Receipt
from jobs.core.retries import EXITED_REASON, is_reclaim
from jobs.core.run import new_run_id
from jobs.core.stage import DeployedStage
from jobs.core.words import counted, log_text, printable_name
from jobs.data_checks.inputs import check_inputs
from jobs.money.aws_prices import current_prices
from jobs.runs.batch import SUBMIT_DELAYS_SECONDS, cause_of_failure, read_stage, room_of, terminate_id
from jobs.runs.batch import submit as submit_job
from jobs.runs.code_archive import packed, put_code
from jobs.runs.follow import follow
from jobs.runs.job import CANCELLED, UNSUCCESSFUL, Job
from jobs.runs.logs import LogReader
from jobs.runs.planned_points import delete_points, new_sources, plan_points, put_points
from jobs.runs.read_records import read_classes
from jobs.runs.references import resolve
from jobs.runs.secrets import check_spec
from jobs.runs.storage import delete_spec, find_run, put_spec, readable_receipt
from jobs.spec.plan import Plan, plan
from jobs.spec.spec import JobSpec


class How(Enum):
    """The choice of what `submit` does once the plan stands."""

    DRY_RUN = "dry-run"
    FOLLOW = "follow"
    WAIT = "wait"
    DETACH = "detach"


def submit(
    aws: Aws,
    stage_name: str,
    spec_path: Path,
    overrides: Sequence[str],
    *,
    how: How,
    yes: bool,
    output: str,
    look_inside: bool = True,
) -> list[str]:
    """Run `trainyard submit`, and return the ids of the runs.

    Raises the error whose exit code tells how it ended: the first run's that failed.
    """
    specs = read_specs(spec_path, overrides)
    stage = read_stage(aws, stage_name)
    plans = plan_runs(aws, stage, specs, look_inside=look_inside)
    several = len(plans) > 1
    _show(plans, emulated=stage.emulated)
    if how is How.DRY_RUN:
        show_code(plans)
        requests = [planned.request for planned in plans]
        tables.print_json(requests if several else requests[0])
        return []
    if not yes and not stage.emulated:
        confirm(plans)
    job_ids = send_all(aws, plans, say=output == "table")
    finish(aws, stage, plans, job_ids, how=how, output=output)
    return list(job_ids)


def finish(
    aws: Aws, stage: DeployedStage, plans: Sequence[Plan], job_ids: Mapping[str, str], *, how: How, output: str
) -> None:
    """Watch what was submitted as `how` says, show what it came to, and raise the failure of the first that failed."""
    several = len(plans) > 1
    ended: list[tuple[Job, Receipt | None]] = []
    sweeps: dict[str, sweep.SweepNow] = {}
    results: list[dict[str, Any]] = []
    for number, planned in enumerate(plans, start=1):
        job_id = job_ids[planned.run_id]
        if how is How.DETACH:
            results.append({**tables.plan_json(planned), "job_id": job_id})
            continue
        if several:
            tables.stderr().print(f"[{number}/{len(plans)}] {planned.run_id}")
        log_to = sys.stderr if output == "json" else sys.stdout
        job, receipt = watch(
            aws, stage, planned.run_id, planned.run_location, job_id, show_log=how is How.FOLLOW, log_to=log_to
        )
        ended.append((job, receipt))
        now = sweep.read_now(aws, find_run(aws, stage, planned.run_id), job) if planned.sweep else None
        if now is not None:
            sweeps[planned.run_id] = now
            results.append({**tables.plan_json(planned), "job": tables.job_json(job), "sweep": sweep.sweep_json(now)})
            if output == "table":
                sweep.show(now, output=output)
            continue
        classes = read_classes(aws, planned.run_location) if receipt and receipt.result else None
        shown = {
            "job": tables.job_json(job),
            "receipt": receipt.model_dump(mode="json") if receipt else None,
            "classes": classes.model_dump(mode="json") if classes else None,
        }
        results.append({**tables.plan_json(planned), **shown})
        if output == "table" and receipt:
            table = tables.receipt_table(receipt, location=str(planned.run_location), emulated=stage.emulated)
            tables.show_result(table, classes, on=tables.stdout())
    if output == "json":
        tables.print_json(results if several else results[0])
    elif several and ended:
        show_runs([ListedRun(job=job, receipt=receipt) for job, receipt in ended], on=tables.stderr())
    for job, receipt in ended:
        if job.run_id in sweeps:
            sweep.raise_failure(sweeps[job.run_id], job)
            continue
        raise_failure(job, cause=cause_of_failure(aws, stage, job), receipt=receipt)


def _show(plans: Sequence[Plan], *, emulated: bool) -> None:
    if len(plans) == 1:
        tables.show(tables.plan_table(plans[0], emulated=emulated), on=tables.stderr())
        return
    tables.show(tables.plans_table(plans, emulated=emulated), on=tables.stderr())
    for planned in plans:
        for note in planned.notes:
            tables.stderr().print(f"{planned.spec.name}: {note}")


def show_code(plans: Sequence[Plan]) -> None:
    """Name the files that would be uploaded."""
    for planned in plans:
        if planned.pack is not None:
            for file in sorted(planned.pack.files):
                tables.stderr().print(f"code: {file.bytes:>12,} {printable_name(file.name)}")


def plan_runs(aws: Aws, stage: DeployedStage, specs: Sequence[JobSpec], *, look_inside: bool = True) -> list[Plan]:
    """A plan for each, in their order; what one reads of another's run need not be there yet.

    Raises what `plan_run` raises: all of it together, each with the name of its spec, where there are several.
    """
    plans: list[Plan] = []
    errors: list[TrainyardError] = []
    refused: set[str] = set()
    for number, spec in enumerate(specs, start=1):
        if refused & _read_by(spec):  # nobody knows where that run would lie
            refused.add(spec.name)
            continue
        try:
            later = [other.name for other in specs[number:]]
            plans.append(plan_run(aws, stage, spec, earlier=plans, later=later, look_inside=look_inside))
        except TrainyardError as error:
            refused.add(spec.name)
            errors.append(_of_spec(error, spec) if len(specs) > 1 else error)
    raise_all(errors)
    return plans


def _read_by(spec: JobSpec) -> set[str]:
    """Return the names of runs that a spec reads from."""
    sources = (location for _, location, _ in spec.entrypoint_arguments().sources())
    return {run_parts(location)[0] for location in sources if location.startswith(RUN)}


def _of_spec(error: TrainyardError, spec: JobSpec) -> TrainyardError:
    error.args = ("\n".join(f"{spec.name}: {line}" for line in str(error.args[0]).splitlines()),)
    return error


def plan_run(
    aws: Aws,
    stage: DeployedStage,
    spec: JobSpec,
    *,
    earlier: Sequence[Plan] = (),
    later: Sequence[str] = (),
    look_inside: bool = True,
) -> Plan:
    """A plan with a new run id, all of whose inputs exist, or will be written by the runs that it waits for.

    Raises one error with all that is wrong with the spec and its inputs; `look_inside`: False looks at no input's
    content.
    """
    now = datetime.now(timezone.utc)
    run_id = new_run_id(spec.name, now=now)
    check_spec(spec)
    with_code, pack = packed(spec, stage)
    check_requirements(stage, spec, pack)
    resolved, dependencies = resolve(aws, stage, with_code, earlier=earlier, later=later)
    errors: list[TrainyardError] = []
    notes: list[str] = []
    try:
        prices_of = partial(current_prices, aws)
        room = partial(room_of, aws, stage)
        planned = plan(resolved, stage, run_id=run_id, dependencies=dependencies, prices_of=prices_of, room_of=room)
        planned = replace(planned, pack=pack)
    except UsageError as error:
        errors.append(error)
    errors += check_inputs(aws, stage, resolved, dependencies=dependencies, look_inside=look_inside, note=notes.append)
    raise_all(errors)
    if spec.sweep is not None:
        of_points = [with_absolute_paths(point) for point in resolved.point_specs()]
        planned = replace(planned, points=plan_points(aws, stage, planned, of_points, now=now))
        for point in new_sources(planned):
            errors += check_inputs(
                aws, stage, point, dependencies=dependencies, look_inside=look_inside, note=notes.append
            )
        raise_all(errors)
    return replace(planned, notes=(*planned.notes, *dict.fromkeys(notes)))


def send_all(aws: Aws, plans: Sequence[Plan], *, say: bool) -> dict[str, str]:
    """Submit the plans in their order; each's job id by its run id. Where one is refused, those before it are stopped.

    `say`: each run's id is printed once it is submitted. Raises what `send` raises.
    """
    job_ids: dict[str, str] = {}
    for planned in plans:
        try:
            job_ids[planned.run_id] = send(aws, planned.with_job_ids(job_ids))
        except (Exception, KeyboardInterrupt):
            for run_id, job_id in job_ids.items():
                _take_back(aws, run_id, job_id, because=planned.run_id)
            raise
        if say:
            print_text(planned.run_id)
    return job_ids


def _take_back(aws: Aws, run_id: str, job_id: str, *, because: str) -> None:
    console = tables.stderr()
    try:
        terminate_id(aws, job_id, reason=f"{because}, submitted together with it, was not taken")
    except Exception as error:  # noqa: BLE001 - the user is told of what is left, and of the error that led here
        console.print(f"{run_id} was submitted and could not be stopped ({error}): trainyard cancel {run_id}")
    else:
        console.print(f"{run_id} was submitted before, and is being stopped")


def send(
    aws: Aws,
    planned: Plan,
    *,
    spec_before: str | None = None,
    delays_seconds: Sequence[float] = SUBMIT_DELAYS_SECONDS,
) -> str:
    """Submit a plan; its resolved spec lies with the run's files before the run exists. Returns the job's id.

    `spec_before`: of a run that is resumed, which gets it back where Batch refuses the job.
    """
    put_spec(aws, planned)  # first: it makes the id this submission's
    try:
        if planned.pack is not None:
            is_new = put_code(aws, planned)
            tables.stderr().print(f"code: {tables.code_text(planned.pack)}, {'uploaded' if is_new else 'on S3 before'}")
        put_points(aws, planned)
    except BaseException:
        _take_back_files(aws, planned, spec_before)
        raise
    try:
        return submit_job(aws, planned, delays_seconds=delays_seconds)
    except KeyboardInterrupt:
        raise Detached(
            f"interrupted while {planned.run_id} was being submitted: AWS Batch may have taken it",
            next_step=f"trainyard status {planned.run_id}",
        ) from None
    except MaybeSubmittedError:
        # The spec stays with what may be a run.
        raise
    except Exception:
        _take_back_files(aws, planned, spec_before)
        raise


def _take_back_files(aws: Aws, planned: Plan, spec_before: str | None) -> None:
    with suppress(Exception):
        if spec_before is None:
            delete_points(aws, planned)
            delete_spec(aws, planned)
        else:
            put_spec(aws, planned, spec_before)


def watch(
    aws: Aws, stage: DeployedStage, run_id: str, location: S3Location, job_id: str, *, show_log: bool, log_to: TextIO
) -> tuple[Job, Receipt | None]:
    """Follow a job to its end, and return it and the receipt it wrote. Raises Detached on Ctrl-C."""
    with detaching(run_id), LiveView(show_log=show_log, emulated=stage.emulated, log_to=log_to) as view:
        job = follow(aws, stage, job_id, reader=LogReader(aws, stage.log_group), show=view.show)
    if job.state in UNSUCCESSFUL and not show_log:
        for line in view.tail:
            print_text(log_text(line), to=sys.stderr)
    return job, readable_receipt(aws, location)


def raise_failure(job: Job, *, cause: Job | None = None, receipt: Receipt | None = None) -> None:
    """Raises JobFailedError, or TimedOutError, for a job that failed; nothing for one that succeeded.

    `cause`: the job whose failure kept this one from starting, where that is another. `receipt`: what the job itself
    says of its end, of which Batch knows no more than the exit code.
    """
    if job.state not in UNSUCCESSFUL:
        return
    if cause is not None and cause.id != job.id:
        how = "was cancelled" if cause.state == CANCELLED else "failed"
        raise JobFailedError(
            f"{job.run_id} was not started: {cause.run_id}, which it waited for, {how}",
            next_step=f"trainyard logs {cause.run_id}",
        )
    if job.state == CANCELLED:
        raise JobFailedError(f"{job.run_id} was ended: {job.reason}", next_step=f"trainyard resume {job.run_id}")
    last = job.attempts[-1] if job.attempts else None
    exit_code = f" (exit code {last.exit_code})" if last and last.exit_code is not None else ""
    kind = TimedOutError if job.timed_out else JobFailedError
    reason = (last.reason if last else "") or job.reason
    # What another start alone may finish; whose own fault it was should read the log.
    interrupted = job.timed_out or is_reclaim(reason, last.exit_code if last else None)
    longer = " --set timeout_hours=HOURS" if job.timed_out else ""
    newest = receipt.attempts[-1] if receipt else None
    said = newest.reason if newest and newest.job_id == job.id and reason == EXITED_REASON else None
    raise kind(
        f"{job.run_id} failed in attempt {job.attempt} of {job.max_attempts}: {said or f'{reason}{exit_code}'}",
        next_step=f"trainyard {'resume' if interrupted else 'logs'} {job.run_id}{longer}",
    )


def confirm(plans: Sequence[Plan], *, verb: str = "Submit") -> None:
    """Ask before money is spent. Raises UsageError where nobody can be asked, typer.Abort on a no."""
    unasked = UsageError(
        "nothing was submitted: there is no terminal to ask on before money is spent",
        next_step="add --yes, or look first with --dry-run",
    )
    queues = " and ".join(dict.fromkeys(planned.queue for planned in plans))
    runs = f"{len(plans)} runs " if len(plans) > 1 else ""
    if len(plans) == 1 and plans[0].sweep is not None:
        runs = f"{counted(plans[0].sweep.points, 'point')} "
    ask(f"{verb} {runs}to queue {queues}?", unasked=unasked)
