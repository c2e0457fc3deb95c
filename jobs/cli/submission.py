"""Plans, submits and watches runs and prints their results, for `submit`, `resume`, `demo` and `acceptance`."""

import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timezone
from functools import partial
from typing import Any, TextIO

from rich.console import Console

from jobs.aws.connection import Aws
from jobs.cli import sweep, sweep_state, tables
from jobs.cli.list import ListedRun, show_runs
from jobs.cli.live import LiveView, detaching
from jobs.cli.options import Mode
from jobs.cli.spec_file import with_absolute_paths
from jobs.cli.terminal import ask, print_text
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
from jobs.data_checks.inputs import check_inputs, input_errors
from jobs.money.aws_prices import current_prices
from jobs.runs.batch import cause_of_failure, room_of, terminate
from jobs.runs.code_archive import pack_code, packed, put_code
from jobs.runs.cuda_calls import cuda_note
from jobs.runs.job import CANCELLED, UNSUCCESSFUL, Job
from jobs.runs.logs import LogReader, follow
from jobs.runs.references import resolve
from jobs.runs.run_records import read_classes
from jobs.runs.script_requirements import check_requirements
from jobs.runs.secrets import check_spec
from jobs.runs.storage import find_run, readable_receipt
from jobs.runs.submit import (
    SUBMIT_DELAYS_SECONDS,
    delete_points,
    delete_spec,
    new_sources,
    plan_points,
    put_points,
    put_spec,
    submit_job,
)
from jobs.spec.placement import check_room, place, with_known_team
from jobs.spec.plan import Plan, plan
from jobs.spec.spec import JobSpec


def plan_runs(aws: Aws, stage: DeployedStage, specs: Sequence[JobSpec], *, check_contents: bool = True) -> list[Plan]:
    """Plan a run for each spec, in order. A spec may read results that an earlier spec's run has yet to write.

    Raises the errors of all specs together. With several specs, each error begins with the spec's name.
    """
    plans: list[Plan] = []
    errors: list[TrainyardError] = []
    refused: set[str] = set()
    for number, spec in enumerate(specs, start=1):
        if refused & _runs_read_by(spec):  # where that run writes is unknown: it has no plan
            refused.add(spec.name)
            continue
        try:
            later = [other.name for other in specs[number:]]
            plans.append(plan_run(aws, stage, spec, earlier=plans, later=later, check_contents=check_contents))
        except TrainyardError as error:
            refused.add(spec.name)
            errors.append(_naming(error, spec, specs))
    raise_all(errors)
    return plans


def errors_without_aws(aws: Aws, specs: Sequence[JobSpec]) -> list[TrainyardError]:
    """Return errors of specs that are found without a request: secrets, errors of the code, missing local files.

    With several specs, each error begins with the spec's name.
    """
    found: list[TrainyardError] = []
    for spec in specs:
        arguments = spec.entrypoint_arguments()
        elsewhere = {argument for argument, location, _ in arguments.sources() if "://" in location}
        errors = input_errors(aws, arguments, pending=elsewhere, emulated=True, check_contents=False)
        try:
            check_spec(spec)
            packed(spec)
        except TrainyardError as error:
            errors.insert(0, error)
        found += [_naming(error, spec, specs) for error in errors]
    return found


def _naming(error: TrainyardError, spec: JobSpec, specs: Sequence[JobSpec]) -> TrainyardError:
    """Return the error with the spec's name before each line, if there are several specs."""
    if len(specs) > 1:
        error.args = ("\n".join(f"{spec.name}: {line}" for line in str(error.args[0]).splitlines()),)
    return error


def _runs_read_by(spec: JobSpec) -> set[str]:
    """Return the names of the runs that a spec reads from."""
    sources = (location for _, location, _ in spec.entrypoint_arguments().sources())
    return {run_parts(location)[0] for location in sources if location.startswith(RUN)}


def plan_run(
    aws: Aws,
    stage: DeployedStage,
    spec: JobSpec,
    *,
    earlier: Sequence[Plan] = (),
    later: Sequence[str] = (),
    check_contents: bool = True,
) -> Plan:
    """Plan a run with a new id. Its inputs must exist, or the runs that it waits for will write them.

    Raises one error that lists everything wrong with the spec and its inputs. `check_contents=False` only checks that
    inputs exist.
    """
    now = datetime.now(timezone.utc)
    run_id = new_run_id(spec.name, now=now)
    errors: list[TrainyardError] = []
    notes: list[str] = []
    with_code, pack = spec, None
    try:
        check_spec(spec)
        with_code, pack = pack_code(spec, stage)
        check_requirements(stage, spec, pack)
    except TrainyardError as error:
        errors.append(error)
    try:
        resolved, dependencies = resolve(aws, stage, with_code, earlier=earlier, later=later)
    except TrainyardError as error:  # where its inputs are is unknown
        raise_all([*errors, error, *placement_errors(aws, spec, stage)])
        raise
    try:
        prices_of = partial(current_prices, aws)
        room = partial(room_of, aws, stage)
        planned = plan(resolved, stage, run_id=run_id, dependencies=dependencies, prices_of=prices_of, room_of=room)
        planned = replace(planned, pack=pack)
    except TrainyardError as error:
        errors.append(error)
    errors += node_limit_errors(aws, spec, stage)
    check = partial(
        check_inputs, aws, stage, dependencies=dependencies, check_contents=check_contents, note=notes.append
    )
    errors += check(resolved)
    raise_all(errors)
    if spec.sweep is not None:
        of_points = [with_absolute_paths(point) for point in resolved.point_specs()]
        planned = replace(planned, points=plan_points(aws, stage, planned, of_points, now=now))
        for point in new_sources(planned):
            errors += check(point)
        raise_all(errors)
    return replace(planned, notes=(*planned.notes, *dict.fromkeys([*notes, *cuda_note(stage, spec, pack)])))


def placement_errors(aws: Aws, spec: JobSpec, stage: DeployedStage) -> list[TrainyardError]:
    """Return the errors in a spec's team and resources."""
    try:
        place(spec, stage)
    except UsageError as error:
        return [error, *node_limit_errors(aws, spec, stage)]
    return node_limit_errors(aws, spec, stage)


def node_limit_errors(aws: Aws, spec: JobSpec, stage: DeployedStage) -> list[TrainyardError]:
    """Return an error if the stage has no room for the spec's nodes, so that its job would wait forever."""
    if spec.resources.nnodes == 1:
        return []
    try:
        placement = place(with_known_team(spec, stage), stage)
    except UsageError:  # reported elsewhere
        return []
    try:
        check_room(stage, placement, room_of(aws, stage, placement))
    except UsageError as error:
        return [error]
    return []


def show_plans(plans: Sequence[Plan], *, emulated: bool, on: Console | None = None) -> None:
    """Print the plans: a single plan with all details, several as a table. On stderr unless `on` is given."""
    on = on or tables.stderr()
    if len(plans) == 1:
        tables.show(tables.plan_table(plans[0], emulated=emulated), on=on)
        return
    tables.show(tables.plans_table(plans, emulated=emulated), on=on)
    for planned in plans:
        for note in planned.notes:
            on.print(f"{planned.spec.name}: {note}")


def show_dry_run(plans: Sequence[Plan], *, emulated: bool, output: str) -> None:
    """Print the plans and the files that would be uploaded, or with `-o json` the SubmitJob requests."""
    as_json = output == "json"
    on = tables.stderr() if as_json else tables.stdout()
    show_plans(plans, emulated=emulated, on=on)
    for planned in plans:
        files = sorted(planned.pack.files) if planned.pack else []
        width = max((len(f"{file.bytes:,}") for file in files), default=0)
        for file in files:
            on.print(f"code: {file.bytes:{width},} B  {printable_name(file.name)}", soft_wrap=True)
    if as_json:
        requests = [planned.request for planned in plans]
        tables.print_json(requests if len(plans) > 1 else requests[0])
    else:
        tables.stderr().print("dry run: nothing was submitted; -o json prints the SubmitJob request", soft_wrap=True)


def confirm(plans: Sequence[Plan], *, verb: str = "Submit") -> None:
    """Ask before spending money. Raises UsageError without a terminal, typer.Abort if the answer is no."""
    unasked = UsageError(
        "nothing was submitted: confirming the costs needs a terminal",
        next_step="add --yes, or check the plan first with --dry-run",
    )
    queues = " and ".join(dict.fromkeys(planned.queue for planned in plans))
    runs = f"{len(plans)} runs " if len(plans) > 1 else ""
    if len(plans) == 1 and plans[0].sweep is not None:
        runs = f"{counted(plans[0].sweep.points, 'point')} "
    ask(f"{verb} {runs}to queue {queues}?", unasked=unasked)


def send_all(aws: Aws, plans: Sequence[Plan], *, print_ids: bool) -> dict[str, str]:
    """Submit the plans in order and return each run's job id. If one is refused, the jobs before it are stopped.

    `print_ids` prints each run id on stdout once its job is submitted. Raises the errors of `send`.
    """
    job_ids: dict[str, str] = {}
    for planned in plans:
        try:
            job_ids[planned.run_id] = send(aws, planned.with_job_ids(job_ids))
        except (Exception, KeyboardInterrupt):
            for run_id, job_id in job_ids.items():
                _stop_submitted(aws, run_id, job_id, refused=planned.run_id)
            raise
        if print_ids:
            print_text(planned.run_id)
    return job_ids


def _stop_submitted(aws: Aws, run_id: str, job_id: str, *, refused: str) -> None:
    console = tables.stderr()
    try:
        terminate(aws, job_id, reason=f"{refused}, submitted together with it, was refused")
    except Exception as error:  # noqa: BLE001 - the caller raises the original error
        console.print(f"{run_id} was already submitted and could not be stopped ({error}): trainyard cancel {run_id}")
    else:
        console.print(f"{run_id} was already submitted and is being stopped")


def send(
    aws: Aws,
    planned: Plan,
    *,
    spec_before: str | None = None,
    delays_seconds: Sequence[float] = SUBMIT_DELAYS_SECONDS,
) -> str:
    """Submit a plan and return the job's id. The resolved spec is written to the run's folder before the job exists.

    `spec_before`: the previous spec of a resumed run, which is restored if Batch refuses the job.
    """
    put_spec(aws, planned)  # first: this reserves the run id
    try:
        if planned.pack is not None:
            is_new = put_code(aws, planned)
            tables.stderr().print(f"code: {'uploaded' if is_new else 'already on S3'}")
        put_points(aws, planned)
    except BaseException:
        _restore_files(aws, planned, spec_before)
        raise
    try:
        return submit_job(aws, planned, delays_seconds=delays_seconds)
    except KeyboardInterrupt:
        raise Detached(
            f"interrupted while submitting {planned.run_id}: AWS Batch may have accepted the job",
            next_step=f"trainyard status {planned.run_id}",
        ) from None
    except MaybeSubmittedError:
        raise  # the job may exist, and needs its spec
    except Exception:
        _restore_files(aws, planned, spec_before)
        raise


def _restore_files(aws: Aws, planned: Plan, spec_before: str | None) -> None:
    with suppress(Exception):
        if spec_before is None:
            delete_points(aws, planned)
            delete_spec(aws, planned)
        else:
            put_spec(aws, planned, spec_before)


def finish(
    aws: Aws, stage: DeployedStage, plans: Sequence[Plan], job_ids: Mapping[str, str], *, mode: Mode, output: str
) -> None:
    """Watch the submitted runs, depending on `mode`, and print their results. Raises the first failed run's error."""
    several = len(plans) > 1
    ended: list[tuple[Job, Receipt | None]] = []
    sweeps: dict[str, sweep_state.SweepState] = {}
    results: list[dict[str, Any]] = []
    for number, planned in enumerate(plans, start=1):
        job_id = job_ids[planned.run_id]
        if mode is Mode.DETACH:
            results.append({**tables.plan_json(planned), "job_id": job_id})
            continue
        if several:
            tables.stderr().print(f"[{number}/{len(plans)}] {planned.run_id}")
        log_to = sys.stderr if output == "json" else sys.stdout
        job, receipt = watch(
            aws, stage, planned.run_id, planned.run_location, job_id, show_log=mode is Mode.FOLLOW, log_to=log_to
        )
        ended.append((job, receipt))
        result = {**tables.plan_json(planned), "job": tables.job_json(job)}
        state = sweep_state.read_state(aws, find_run(aws, stage, planned.run_id), job) if planned.sweep else None
        if state is not None:
            sweeps[planned.run_id] = state
            results.append({**result, "sweep": state.as_json()})
            if output == "table":
                sweep.show(state)
            continue
        classes = read_classes(aws, planned.run_location) if receipt and receipt.result else None
        result["receipt"] = receipt.model_dump(mode="json") if receipt else None
        result["classes"] = classes.model_dump(mode="json") if classes else None
        results.append(result)
        if output == "table" and receipt:
            table = tables.receipt_table(receipt, location=str(planned.run_location), emulated=stage.emulated)
            tables.show_result(table, classes, on=tables.stdout())
    if output == "json":
        tables.print_json(results if several else results[0])
    elif several and ended:
        show_runs([ListedRun(job=job, receipt=receipt) for job, receipt in ended], on=tables.stderr())
    for job, receipt in ended:
        if job.run_id in sweeps:
            sweep_state.raise_failure(sweeps[job.run_id], job)
        else:
            raise_failure(job, cause=cause_of_failure(aws, stage, job), receipt=receipt)


def watch(
    aws: Aws, stage: DeployedStage, run_id: str, location: S3Location, job_id: str, *, show_log: bool, log_to: TextIO
) -> tuple[Job, Receipt | None]:
    """Follow a job until it ends, and return it with its receipt. Raises Detached on Ctrl-C.

    If the job fails and its log was not shown, prints the log's last lines on stderr, without an error of the launcher
    that `raise_failure` reports.
    """
    live = LiveView(show_log=show_log, emulated=stage.emulated, log_to=log_to, hold_errors=True)
    with detaching(run_id), live as view:
        job = follow(aws, stage, job_id, reader=LogReader(aws, stage.log_group), show=view.show)
        receipt = readable_receipt(aws, location)
        reported = _recorded_reason(job, receipt)
        if reported is not None:
            view.drop_error(reported)
    if job.state in UNSUCCESSFUL and not show_log:
        for line in view.tail:
            if line != f"error: {reported}":
                print_text(log_text(line), to=sys.stderr)
    return job, receipt


def raise_failure(job: Job, *, cause: Job | None = None, receipt: Receipt | None = None) -> None:
    """Raise JobFailedError or TimedOutError if the job failed.

    `cause`: the other job whose failure kept this one from starting. `receipt`: has the job's own reason, while Batch
    has only the exit code.
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
    # Resuming may finish an interrupted job; a job that failed by itself needs a look at its log.
    interrupted = job.timed_out or is_reclaim(reason, last.exit_code if last else None)
    longer = " --set timeout_hours=HOURS" if job.timed_out else ""
    described = _recorded_reason(job, receipt) or f"{reason}{exit_code}"
    raise kind(
        f"{job.run_id} failed in attempt {job.attempt} of {job.max_attempts}: {described}",
        next_step=f"trainyard {'resume' if interrupted else 'logs'} {job.run_id}{longer}",
    )


def _recorded_reason(job: Job, receipt: Receipt | None) -> str | None:
    """Return the reason that a failed job recorded in its receipt; None if Batch's reason is better."""
    if job.state != "FAILED" or job.points or receipt is None or not job.attempts:
        return None
    newest = receipt.attempts[-1]
    reason = job.attempts[-1].reason or job.reason
    return newest.reason if newest.job_id == job.id and reason == EXITED_REASON else None
