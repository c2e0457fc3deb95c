"""Points of a sweep before they start: planned, and written where their runs will lie."""

from collections.abc import Sequence
from datetime import datetime

from jobs.aws import s3 as object_store
from jobs.aws.connection import Aws
from jobs.core.errors import TrainyardError, UsageError
from jobs.core.locations import RUN, S3Location
from jobs.core.run import SPEC
from jobs.core.stage import DeployedStage
from jobs.runs.references import resolve
from jobs.runs.storage import spec_text
from jobs.runs.sweeps import each_at_once
from jobs.spec.code import CODE_RECORD
from jobs.spec.plan import Plan, plan
from jobs.spec.spec import JobSpec, PlannedPoint
from jobs.spec.sweep import MEMBER_OF, SWEEP, MemberOf, PointRecord, SweepRecord, point_ids, points


def plan_points(
    aws: Aws, stage: DeployedStage, planned: Plan, specs: Sequence[JobSpec], *, now: datetime
) -> tuple[PlannedPoint, ...]:
    """Plan each point of a sweep; `specs` are theirs, in their order.

    Raises UsageError, which names the point, for what the stage cannot run.
    """
    assert planned.spec.sweep is not None  # noqa: S101 - whoever calls has looked
    values = points(planned.spec.sweep)
    ids = point_ids(planned.spec.name, count=len(values), now=now)
    found: list[PlannedPoint] = []
    for number, (run_id, spec, each) in enumerate(zip(ids, specs, values, strict=True), start=1):
        try:
            resolved = spec
            if any(location.startswith(RUN) for _, location, _ in spec.entrypoint_arguments().sources()):
                resolved, dependencies = resolve(aws, stage, spec)
                if dependencies:
                    raise UsageError(
                        f"{dependencies[0].run_id}, which it reads, has not ended",
                        next_step="submit the sweep when it has; a sweep waits for what all of its points read",
                    )
            of_point = plan(resolved, stage, run_id=run_id, prices_of=lambda _: planned.prices)
        except TrainyardError as error:
            error.args = (f"point {number} of {len(values)}: {error.args[0]}",)
            raise
        record = PointRecord(
            number=number,
            run_id=run_id,
            values=each,
            arguments=of_point.container_arguments.model_dump(mode="json", exclude_none=True),
        )
        found.append(PlannedPoint(record=record, location=of_point.run_location, spec=of_point.spec))
    return tuple(found)


def new_sources(planned: Plan) -> list[JobSpec]:
    """Return the points that read something which neither the sweep's first point nor one before them reads."""
    seen = set(planned.spec.entrypoint_arguments().sources())
    found = []
    for point in planned.points:
        sources = set(point.spec.entrypoint_arguments().sources())
        if not sources <= seen:
            seen |= sources
            found.append(point.spec)
    return found


def put_points(aws: Aws, planned: Plan) -> None:
    """Write what a new sweep's points are started with; other plans have none."""
    if not planned.points:
        return
    code = None
    if planned.pack is not None:
        code = object_store.read_once(aws.s3, planned.run_location / CODE_RECORD)
    record = SweepRecord(run_id=planned.run_id, points=[point.record for point in planned.points])
    objects: list[tuple[S3Location, bytes]] = []
    for point in planned.points:
        member = MemberOf(sweep=planned.run_id, number=point.record.number)
        objects.append((point.location / SPEC, spec_text(point.spec).encode()))
        objects.append((point.location / MEMBER_OF, member.model_dump_json().encode()))
        objects += [(point.location / CODE_RECORD, code)] if code is not None else []
    each_at_once(
        lambda item: aws.s3.put_object(Bucket=item[0].bucket, Key=item[0].key, Body=item[1]),
        [*objects, (planned.run_location / SWEEP, record.model_dump_json().encode())],
    )


def delete_points(aws: Aws, planned: Plan) -> None:
    """Take back `put_points` where Batch refused the job: without it there would seem to be runs."""
    names = (SPEC, MEMBER_OF, CODE_RECORD)
    places = [point.location / name for point in planned.points for name in names]
    each_at_once(
        lambda place: aws.s3.delete_object(Bucket=place.bucket, Key=place.key), [*places, planned.run_location / SWEEP]
    )
