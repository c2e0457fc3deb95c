"""Submit a plan exactly once: its job, its spec and, for a sweep, its points.

SubmitJob has no idempotency token: if its answer is lost, the job may or may not exist. The run id is the job's
name and is never reused, so `submit_job` looks for a job of that name before it sends the request again.
"""

import logging
import random
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime

from jobs.aws import s3 as object_store
from jobs.aws.connection import Aws
from jobs.aws.errors import error_code, is_throttling, is_transient
from jobs.core.errors import Detached, MaybeSubmittedError, TrainyardError, UsageError
from jobs.core.locations import RUN, S3Location
from jobs.core.retries import DUPLICATE_REASON
from jobs.core.run import SPEC
from jobs.core.stage import DeployedStage
from jobs.runs.batch import list_queue
from jobs.runs.code_archive import put_code
from jobs.runs.references import resolve
from jobs.runs.storage import in_parallel
from jobs.spec.code import CODE_RECORD
from jobs.spec.plan import Plan, plan
from jobs.spec.spec import JobSpec, PlannedPoint
from jobs.spec.sweep import MEMBER_OF, SWEEP, MemberOf, PointRecord, SweepRecord, point_ids, points

log = logging.getLogger("trainyard")


SUBMIT_DELAYS_SECONDS = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Pause after each failed request, plus up to 50 % jitter so that clients do not retry in step."""


def submit_job(aws: Aws, plan: Plan, *, delays_seconds: Sequence[float] = SUBMIT_DELAYS_SECONDS) -> str:
    """Submit `plan` and return the job's id. Exactly one job exists afterwards, however many requests it took.

    Raises MaybeSubmittedError if a request went unanswered and the job was not found. If Batch certainly has no such
    job, raises boto3's error for a refusal, or TrainyardError if every request was throttled.
    """
    failure: Exception | None = None
    unanswered = False
    for delay in delays_seconds:
        try:
            job_id = aws.batch_without_retries.submit_job(**plan.request)["jobId"]
        except Exception as error:
            if not is_transient(error):
                if unanswered:
                    raise _maybe_submitted(plan, error) from error
                raise
            failure = error
            unanswered = unanswered or not is_throttling(error)
        else:
            return _only_one(aws, plan, job_id) if unanswered else job_id
        # Look after the pause, not before: the failed request may still be on its way through the service.
        time.sleep(delay * random.uniform(1.0, 1.5))  # noqa: S311 - spreads load, keeps no secret
        if unanswered:
            try:
                found = _jobs_named(aws, plan)
            except Exception as error:
                raise _maybe_submitted(plan, error) from error
            if found:
                return found[0]
    if unanswered:
        raise _maybe_submitted(plan, failure)
    raise TrainyardError(
        f"{plan.run_id} was not submitted: AWS Batch throttled all {len(delays_seconds)} requests: {failure}",
        next_step="try again in a few minutes",
    )


def _maybe_submitted(plan: Plan, last_error: Exception | None) -> MaybeSubmittedError:
    return MaybeSubmittedError(
        f"{plan.run_id} may have been submitted: AWS Batch's answer was lost, and then: {last_error}",
        next_step=f"run 'trainyard status {plan.run_id}' before you submit it again",
    )


def _jobs_named(aws: Aws, plan: Plan) -> list[str]:
    """Return the ids of the queue's jobs with the plan's name that were not stopped as duplicates, the oldest first.

    A resumed run's earlier jobs are left out.
    """
    before = plan.resumed.job_ids if plan.resumed else ()
    return [
        job["jobId"]
        for job in sorted(
            list_queue(aws.batch, plan.request["jobQueue"], name=plan.run_id), key=lambda job: job["createdAt"]
        )
        if not job.get("isTerminated") and job["jobId"] not in before
    ]


def _only_one(aws: Aws, plan: Plan, job_id: str) -> str:
    """Return the job to keep if an unanswered request arrived after all, and stop the later ones."""
    try:
        found = _jobs_named(aws, plan) or [job_id]
    except Exception as error:  # noqa: BLE001 - whatever the error, the job exists
        log.warning(
            "%s is submitted, but trainyard could not check for a duplicate from a lost request: %s", plan.run_id, error
        )
        return job_id
    for duplicate in found[1:]:
        _stop_duplicate(aws, duplicate, of=found[0])
    return found[0]


def _stop_duplicate(aws: Aws, job_id: str, *, of: str) -> None:
    try:
        aws.batch.terminate_job(jobId=job_id, reason=f"{DUPLICATE_REASON} {of}: a lost submission arrived late")
    except Exception as error:  # noqa: BLE001 - whatever the error, the job exists
        log.warning(
            "could not stop %s, a duplicate of %s: %s; stop it with: "
            "aws batch terminate-job --job-id %s --reason duplicate",
            job_id,
            of,
            error,
            job_id,
        )


def put_spec(aws: Aws, plan: Plan, text: str | None = None) -> None:
    """Write the resolved spec into the run's folder before the job is submitted, or restore the given `text`.

    Arguments that are too long for the job's command line are written to a file next to the spec.
    Raises TrainyardError if a new run's id is already taken by another submission.
    """
    if plan.arguments_file is not None:  # named by its content, so it cannot be another submission's
        place = plan.run_location / plan.arguments_file.name
        aws.s3.put_object(Bucket=place.bucket, Key=place.key, Body=plan.arguments_file.content)
    place = plan.run_location / SPEC
    content = (spec_text(plan.spec) if text is None else text).encode()
    if text is not None or plan.resumed is not None:
        aws.s3.put_object(Bucket=place.bucket, Key=place.key, Body=content, ContentType="application/yaml")
    elif not _create(aws, place, content):
        raise TrainyardError(
            f"another run was submitted as {plan.run_id} in the same second; nothing was submitted",
            next_step="submit again: the run gets another id",
        )


def _create(aws: Aws, place: S3Location, content: bytes) -> bool:
    """Write a spec if there is none. Return whether the stored spec is from this submission."""
    own = {"submission": uuid.uuid4().hex}  # two submissions may have the same content
    try:
        aws.s3.put_object(
            Bucket=place.bucket,
            Key=place.key,
            Body=content,
            ContentType="application/yaml",
            Metadata=own,
            IfNoneMatch="*",
        )
    except Exception as error:
        # ConditionalRequestConflict: two writers at the same time. boto3's retry after a lost answer is refused too.
        if error_code(error) not in ("PreconditionFailed", "ConditionalRequestConflict"):
            raise
        return aws.s3.head_object(Bucket=place.bucket, Key=place.key).get("Metadata") == own
    return True


def delete_spec(aws: Aws, plan: Plan) -> None:
    """Undo `put_spec` after Batch refused the job, so that no run appears to exist."""
    arguments = [plan.arguments_file.name] if plan.arguments_file is not None else []
    for name in (SPEC, *arguments, *([CODE_RECORD] if plan.pack is not None else [])):
        place = plan.run_location / name
        aws.s3.delete_object(Bucket=place.bucket, Key=place.key)


def spec_text(spec: JobSpec) -> str:
    """Return a resolved spec as YAML, as it is stored."""
    from jobs.spec.spec_yaml import dump_spec

    return dump_spec(spec.model_dump(mode="json", exclude_none=True))


def plan_points(
    aws: Aws, stage: DeployedStage, planned: Plan, specs: Sequence[JobSpec], *, now: datetime
) -> tuple[PlannedPoint, ...]:
    """Plan each point of a sweep. `specs` are the points' specs, in order.

    Raises UsageError, naming the point, if the stage cannot run it.
    """
    assert planned.spec.sweep is not None  # noqa: S101 - callers have checked
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
                        f"the spec reads {dependencies[0].run_id}, which has not ended",
                        next_step="submit the sweep after that run has ended; a sweep can only wait for runs that all "
                        "of its points read",
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
    """Return the specs of points that read a source which no earlier point of the sweep reads."""
    seen = set(planned.spec.entrypoint_arguments().sources())
    found = []
    for point in planned.points:
        sources = set(point.spec.entrypoint_arguments().sources())
        if not sources <= seen:
            seen |= sources
            found.append(point.spec)
    return found


def put_points(aws: Aws, planned: Plan) -> None:
    """Write the files that a new sweep's points start from. Does nothing for other plans."""
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
    in_parallel(
        lambda item: aws.s3.put_object(Bucket=item[0].bucket, Key=item[0].key, Body=item[1]),
        [*objects, (planned.run_location / SWEEP, record.model_dump_json().encode())],
    )


def delete_points(aws: Aws, planned: Plan) -> None:
    """Undo `put_points` after Batch refused the job, so that no runs appear to exist."""
    names = (SPEC, MEMBER_OF, CODE_RECORD)
    places = [point.location / name for point in planned.points for name in names]
    in_parallel(
        lambda place: aws.s3.delete_object(Bucket=place.bucket, Key=place.key), [*places, planned.run_location / SWEEP]
    )


def send(
    aws: Aws,
    planned: Plan,
    *,
    spec_before: str | None = None,
    note: Callable[[str], object] = lambda _: None,
    delays_seconds: Sequence[float] = SUBMIT_DELAYS_SECONDS,
) -> str:
    """Submit a plan and return the job's id. The resolved spec is written to the run's folder before the job exists.

    `spec_before`: the previous spec of a resumed run, which is restored if Batch refuses the job. `note` is called with
    a line about the upload of the code.
    """
    put_spec(aws, planned)  # first: this reserves the run id
    try:
        if planned.pack is not None:
            is_new = put_code(aws, planned)
            note(f"code: {'uploaded' if is_new else 'already on S3'}")
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
