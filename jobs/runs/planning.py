"""Plan runs: check specs, their code and their inputs, and find queue, instances and price. Submits nothing."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timezone
from functools import partial

from jobs.aws import s3 as object_store
from jobs.aws.connection import Aws
from jobs.core.errors import TrainyardError, UsageError, raise_all
from jobs.core.locations import RUN, S3, S3Location, run_parts
from jobs.core.run import new_run_id
from jobs.core.stage import DeployedStage
from jobs.core.words import size
from jobs.data_checks.inputs import check_inputs, input_errors
from jobs.money.aws_prices import current_prices
from jobs.money.prices import transfer_text
from jobs.runs.batch import room_of
from jobs.runs.code_archive import pack_code, packed
from jobs.runs.cuda_calls import cuda_note
from jobs.runs.references import resolve
from jobs.runs.script_requirements import check_requirements
from jobs.runs.secrets import check_spec
from jobs.runs.spec_file import with_absolute_paths
from jobs.runs.submit import new_sources, plan_points
from jobs.spec.placement import check_room, may_fall_back, place, with_known_team
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
        planned = replace(planned, pack=pack).submitted_by(aws.caller_if_known)
        notes += fallback_note(aws, stage, planned)
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


def fallback_note(aws: Aws, stage: DeployedStage, planned: Plan) -> list[str]:
    """Return a note on what a move to the fallback stage costs, if the run may move there: its files stay here."""
    if not may_fall_back(planned.spec, stage, planned.queue):
        return []
    read, unknown = sum(file.bytes for file in planned.pack.files) if planned.pack else 0, ""
    for argument, location, _ in planned.inputs:
        if location.startswith(S3):
            place = S3Location.parse(location)
            below = f"{place.key.rstrip('/')}/"
            try:
                found = object_store.listing(aws.s3, place, prefix=place.key)
            except TrainyardError:  # this person may not list it, or a run has yet to write it
                unknown += f", and {argument} of unknown size"
            else:
                read += sum(item["Size"] for item in found if f"{item['Key']}/".startswith(below))
    text = (
        f"may move to {stage.fallback}, whose jobs use its files here: {size(read)} of code and inputs{unknown} cost "
        f"{transfer_text(read)}; checkpoints and results, whose size is not known yet, cost the same per GB"
    )
    return [text]


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
