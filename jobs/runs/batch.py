"""AWS Batch and what a stage deployed: reads the stage, submits a plan exactly once, describes and stops jobs.

SubmitJob has no idempotency token: when its answer is lost, nobody knows whether the job exists. The run id is the
job's name and is never used twice, so `submit` looks for that name before it sends again.
"""

import logging
import os
import random
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from itertools import chain
from typing import TYPE_CHECKING, Any

from jobs.aws.connection import Aws
from jobs.aws.errors import is_throttling, is_transient
from jobs.core.errors import MaybeSubmittedError, NotFoundError, TrainyardError
from jobs.core.retries import DUPLICATE_REASON
from jobs.core.run import is_run_id
from jobs.core.stage import DeployedStage, parameter_path
from jobs.runs.job import UNSUCCESSFUL, Job, job_from, part_ids
from jobs.spec.placement import Placement
from jobs.spec.plan import Plan
from jobs.spec.submit_job import DEPENDENCY_FAILED

if TYPE_CHECKING:
    from mypy_boto3_batch.client import BatchClient

log = logging.getLogger("trainyard")

SUBMIT_DELAYS_SECONDS = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Pause after each failed try of one submission, drawn out by up to a half, so that clients do not move in step."""

_DESCRIBE_LIMIT = 100
"""Jobs in one DescribeJobs call: the service's own limit."""

_LISTINGS = 8
"""Queues that are listed at once: fewer than the ten connections that a client of boto3 keeps."""


def read_stage(aws: Aws, name: str) -> DeployedStage:
    """Read what stage `name` offers from its SSM parameters. Raises ConfigurationError where it is not deployed."""
    path = parameter_path(name)
    pages = aws.ssm.get_paginator("get_parameters_by_path").paginate(Path=path.rstrip("/"), Recursive=True)
    values = {item["Name"].removeprefix(path): item["Value"] for page in pages for item in page["Parameters"]}
    emulated_processes = min(2, os.cpu_count() or 1) if aws.emulated else None
    return DeployedStage.from_parameters(
        name, values, emulated_processes=emulated_processes, runs_containers=aws.runs_containers
    )


def submit(aws: Aws, plan: Plan, *, delays_seconds: Sequence[float] = SUBMIT_DELAYS_SECONDS) -> str:
    """Submit `plan` and return the job's id; one job exists afterwards, however often it had to be tried.

    Raises MaybeSubmittedError where that cannot be told, since a try went unanswered; where Batch surely has no such
    job, what boto3 raised for its refusal, or TrainyardError after throttling at every try.
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
        # Look after the pause, not before it: what failed here may still be on its way through the service.
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
        f"{plan.run_id} was not submitted: AWS Batch refused it {len(delays_seconds)} times for now: {failure}",
        next_step="try again in some minutes",
    )


def _maybe_submitted(plan: Plan, last_error: Exception | None) -> MaybeSubmittedError:
    return MaybeSubmittedError(
        f"{plan.run_id} may have been submitted: the answer of AWS Batch was lost, and then: {last_error}",
        next_step=f"trainyard status {plan.run_id}, before it is submitted again",
    )


def _jobs_named(aws: Aws, plan: Plan) -> list[str]:
    """Return the ids of the jobs of the plan's queue that have its name and were not stopped as duplicates, the oldest
    first.

    Those that the run went through before it was resumed are none of them.
    """
    before = plan.resumed.job_ids if plan.resumed else ()
    return [
        job["jobId"]
        for job in sorted(
            _list(aws.batch, plan.request["jobQueue"], name=plan.run_id), key=lambda job: job["createdAt"]
        )
        if not job.get("isTerminated") and job["jobId"] not in before
    ]


def _only_one(aws: Aws, plan: Plan, job_id: str) -> str:
    """Return the job that stays where a try given up for lost arrived after all; the ones behind it are stopped."""
    try:
        found = _jobs_named(aws, plan) or [job_id]
    except Exception as error:  # noqa: BLE001 - whatever it is, the job exists
        log.warning(
            "%s is submitted; whether a lost try of it arrived as well could not be seen: %s", plan.run_id, error
        )
        return job_id
    for duplicate in found[1:]:
        _stop_duplicate(aws, duplicate, of=found[0])
    return found[0]


def _stop_duplicate(aws: Aws, job_id: str, *, of: str) -> None:
    try:
        aws.batch.terminate_job(jobId=job_id, reason=f"{DUPLICATE_REASON} {of}: a lost submission arrived late")
    except Exception as error:  # noqa: BLE001 - whatever it is, the job exists
        log.warning(
            "%s, a duplicate of %s, could not be stopped: %s; stop it with: "
            "aws batch terminate-job --job-id %s --reason duplicate",
            job_id,
            of,
            error,
            job_id,
        )


def room_of(aws: Aws, stage: DeployedStage, placement: Placement) -> int:
    """Return how many instances the queue of a placement can hold: those of its enabled compute environments.

    A job has an instance to itself.
    """
    queue = stage.queues[placement.queue_name]
    [described] = aws.batch.describe_job_queues(jobQueues=[queue])["jobQueues"]
    names = [item["computeEnvironment"] for item in described["computeEnvironmentOrder"]]
    environments = aws.batch.describe_compute_environments(computeEnvironments=names)["computeEnvironments"]
    return sum(
        item["computeResources"]["maxvCpus"] // placement.instance_type.vcpus
        for item in environments
        if item["state"] == "ENABLED"
    )


def find_job(aws: Aws, stage: DeployedStage, run_id: str) -> Job | None:
    """Return the job of a run; None where Batch knows none: it forgets a job a week or more after its end."""
    return next(reversed(find_jobs(aws, stage, run_id)), None)


def find_jobs(aws: Aws, stage: DeployedStage, run_id: str) -> list[Job]:
    """Return the jobs that a run has gone through, the newest last: more than one where it was moved or resumed."""
    return _one_after_another(describe(aws, stage, [item["jobId"] for item in _list_all(aws, stage, name=run_id)]))


def job_of(aws: Aws, stage: DeployedStage, run_id: str) -> Job:
    """Return the job that a run is by now. Raises NotFoundError where Batch has forgotten it."""
    return jobs_of(aws, stage, run_id)[-1]


def jobs_of(aws: Aws, stage: DeployedStage, run_id: str) -> list[Job]:
    """Return what `find_jobs` does. Raises NotFoundError where Batch has forgotten the run."""
    jobs = find_jobs(aws, stage, run_id)
    if not jobs:
        raise NotFoundError(
            f"AWS Batch does not know {run_id} any more; its files are still there",
            next_step=f"trainyard fetch {run_id}",
        )
    return jobs


def list_jobs(aws: Aws, stage: DeployedStage, *, since: datetime, team: str | None = None) -> list[Job]:
    """Return the stage's runs created at or after `since`, the newest first, each as the job that it is now."""
    found = _list_all(aws, stage, since=since)
    runs: dict[str, list[Job]] = {}
    for job in describe(aws, stage, [item["jobId"] for item in found if is_run_id(item["jobName"])]):
        if job.created_at >= since and team in (None, job.team):
            runs.setdefault(job.run_id, []).append(job)
    newest = (_one_after_another(jobs)[-1] for jobs in runs.values())
    return sorted(newest, key=lambda job: job.created_at, reverse=True)


def _one_after_another(jobs: Iterable[Job]) -> list[Job]:
    """Return those of the jobs with a run's name that are or were the run.

    A queue's oldest is; `submit` stopped the others as duplicates. A run is moved to another queue than its last, and a
    job with which it was resumed names the one before.
    """
    found: dict[tuple[str, str], Job] = {}
    for job in sorted(jobs, key=lambda job: job.created_at):
        found.setdefault((job.queue, job.resumed), job)
    return list(found.values())


def describe(aws: Aws, stage: DeployedStage, job_ids: Sequence[str]) -> list[Job]:
    """Return those of the jobs that Batch still knows."""
    names = {arn.rsplit("/", 1)[-1]: name for name, arn in stage.queues.items()}
    details = list(_describe(aws, job_ids))
    parts = {part["jobId"]: part for part in _describe(aws, [*chain.from_iterable(map(part_ids, details))])}
    return [
        job_from(detail, [parts[part_id] for part_id in part_ids(detail) if part_id in parts], queue_names=names)
        for detail in details
    ]


def cause_of_failure(aws: Aws, stage: DeployedStage, job: Job) -> Job:
    """Return the job itself, or the one whose failure kept it from starting, through however many that waited alike."""
    while job.reason.startswith(DEPENDENCY_FAILED):
        failed = [other for other in describe(aws, stage, job.depends_on) if other.state in UNSUCCESSFUL]
        if not failed:
            break
        job = failed[0]
    return job


def terminate(aws: Aws, job: Job, *, reason: str) -> None:
    """Stop a job in whichever state it is; what runs gets SIGTERM, and its newest complete checkpoint stays."""
    terminate_id(aws, job.id, reason=reason)


def terminate_id(aws: Aws, job_id: str, *, reason: str) -> None:
    aws.batch.terminate_job(jobId=job_id, reason=reason)


def _list_all(aws: Aws, stage: DeployedStage, **which: Any) -> list[Mapping[str, Any]]:
    """List what `_list` does in all queues of the stage, of which each team has some."""
    client = aws.batch  # made before there are threads, which a session of boto3 is not for
    with ThreadPoolExecutor(_LISTINGS, thread_name_prefix="queue") as pool:
        found = pool.map(lambda queue: [*_list(client, queue, **which)], stage.queues.values())
        return list(chain.from_iterable(found))


def _list(
    client: "BatchClient", queue: str, *, name: str | None = None, since: datetime | None = None
) -> Iterator[Mapping[str, Any]]:
    """List summaries of jobs in every state, by name or by time of creation (Batch takes one filter a call)."""
    if name is not None:
        filters = [{"name": "JOB_NAME", "values": [name]}]
    else:
        milliseconds = int((since or datetime.fromtimestamp(0, timezone.utc)).timestamp() * 1000)
        filters = [{"name": "AFTER_CREATED_AT", "values": [str(milliseconds)]}]
    pages = client.get_paginator("list_jobs").paginate(jobQueue=queue, filters=filters)  # type: ignore[arg-type]
    for page in pages:
        yield from page["jobSummaryList"]


def _describe(aws: Aws, job_ids: Sequence[str]) -> Iterator[Mapping[str, Any]]:
    for start in range(0, len(job_ids), _DESCRIBE_LIMIT):
        yield from aws.batch.describe_jobs(jobs=list(job_ids[start : start + _DESCRIBE_LIMIT]))["jobs"]
