"""Read a deployed stage, and describe, list and stop its jobs on AWS Batch."""

import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from itertools import chain
from typing import TYPE_CHECKING, Any

from jobs.aws.connection import Aws
from jobs.aws.errors import is_denied
from jobs.core.errors import ConfigurationError, NotFoundError
from jobs.core.instance_types import instance_type
from jobs.core.run import is_run_id
from jobs.core.stage import DeployedStage, Fallback, parameter_path
from jobs.runs.job import UNSUCCESSFUL, Job, job_from, part_ids
from jobs.runs.storage import in_parallel
from jobs.spec.placement import Placement
from jobs.spec.submit_job import DEPENDENCY_FAILED

if TYPE_CHECKING:
    from mypy_boto3_batch.client import BatchClient

log = logging.getLogger("trainyard")

_DESCRIBE_LIMIT = 100
"""Jobs per DescribeJobs call: the service's limit."""


def read_stage(aws: Aws, name: str) -> DeployedStage:
    """Read stage `name` from its SSM parameters. Raises ConfigurationError if it is not deployed."""
    path = parameter_path(name)
    pages = aws.ssm.get_paginator("get_parameters_by_path").paginate(Path=path.rstrip("/"), Recursive=True)
    values = {item["Name"].removeprefix(path): item["Value"] for page in pages for item in page["Parameters"]}
    emulated_processes = min(2, os.cpu_count() or 1) if aws.emulated else None
    return DeployedStage.from_parameters(
        name, values, emulated_processes=emulated_processes, runs_containers=aws.runs_containers
    )


def room_of(aws: Aws, stage: DeployedStage, placement: Placement) -> int:
    """Return how many instances a placement's queue can hold: the total of its enabled compute environments.

    Each job has an instance to itself. Nodes that start together are in one environment, so only the largest counts.
    """
    queue = stage.queues[placement.queue_name]
    [described] = aws.batch.describe_job_queues(jobQueues=[queue])["jobQueues"]
    names = [item["computeEnvironment"] for item in described["computeEnvironmentOrder"]]
    environments = aws.batch.describe_compute_environments(computeEnvironments=names)["computeEnvironments"]
    rooms = [most_nodes(item) for item in environments if item["state"] == "ENABLED"]
    return max(rooms, default=0) if placement.queue.several_nodes else sum(rooms)


def most_nodes(environment: Mapping[str, Any]) -> int:
    """Return how many instances a compute environment allows: its vCPUs are those of its smallest type."""
    resources = environment["computeResources"]
    return int(resources["maxvCpus"] // min(instance_type(name).vcpus for name in resources["instanceTypes"]))


def find_job(aws: Aws, stage: DeployedStage, run_id: str) -> Job | None:
    """Return a run's current job, or None if Batch has forgotten it (a week or more after its end)."""
    return next(reversed(find_jobs(aws, stage, run_id)), None)


def find_jobs(aws: Aws, stage: DeployedStage, run_id: str) -> list[Job]:
    """Return all jobs of a run, the newest last. A run that was moved or resumed has more than one."""
    found = describe(aws, stage, [item["jobId"] for item in _list_all(aws, stage, name=run_id)])
    if not found or any(job.lacked_capacity for job in found):
        found += _moved_away(aws, stage, name=run_id)
    return _without_duplicates(found)


def place_of(aws: Aws, stage: DeployedStage, job: Job) -> tuple[Aws, DeployedStage]:
    """Return the connection and the stage for a job, which may have moved away from its run's `stage`."""
    return fallback_place(aws, stage.fallback) if job.home and stage.fallback else (aws, stage)


def fallback_place(aws: Aws, fallback: Fallback) -> tuple[Aws, DeployedStage]:
    """Return the connection to a fallback stage, and the stage."""
    there = aws.in_region(fallback.region)
    return there, read_stage(there, fallback.stage)


def _moved_away(aws: Aws, stage: DeployedStage, **which: Any) -> list[Job]:
    """Return the jobs of the stage's runs in its fallback stage. Warns if they cannot be read."""
    if stage.fallback is None:
        return []
    try:
        there, other = fallback_place(aws, stage.fallback)
        found = describe(there, other, [item["jobId"] for item in _list_all(there, other, **which)])
    except Exception as error:
        if not isinstance(error, ConfigurationError) and not is_denied(error):
            raise
        log.warning("runs that moved to %s are missing, because it cannot be read: %s", stage.fallback, error)
        return []
    return [job for job in found if job.home == stage.name]


def job_of(aws: Aws, stage: DeployedStage, run_id: str) -> Job:
    """Return a run's current job. Raises NotFoundError if Batch has forgotten it."""
    return jobs_of(aws, stage, run_id)[-1]


def jobs_of(aws: Aws, stage: DeployedStage, run_id: str) -> list[Job]:
    """Return all jobs of a run, the newest last. Raises NotFoundError if Batch has forgotten the run."""
    jobs = find_jobs(aws, stage, run_id)
    if not jobs:
        raise NotFoundError(
            f"AWS Batch has forgotten {run_id}; the files of the run still exist",
            next_step=f"trainyard fetch {run_id}",
        )
    return jobs


def list_jobs(aws: Aws, stage: DeployedStage, *, since: datetime, team: str | None = None) -> list[Job]:
    """Return the stage's runs created at or after `since`, the newest first, each as its current job."""
    found = _list_all(aws, stage, since=since)
    jobs = describe(aws, stage, [item["jobId"] for item in found if is_run_id(item["jobName"])])
    runs: dict[str, list[Job]] = {}
    for job in (*jobs, *_moved_away(aws, stage, since=since)):
        # A job that moved here belongs to a run of another stage.
        if job.created_at >= since and team in (None, job.team) and job.home in ("", stage.name):
            runs.setdefault(job.run_id, []).append(job)
    newest = (_without_duplicates(jobs)[-1] for jobs in runs.values())
    return sorted(newest, key=lambda job: job.created_at, reverse=True)


def _without_duplicates(jobs: Iterable[Job]) -> list[Job]:
    """Return the run's jobs, out of all jobs with its name.

    In each queue, only the oldest job counts: `submit_job` stops later ones as duplicates. A moved run changes to
    another queue, and the job of a resumed run names the job before it.
    """
    found: dict[tuple[str, str, str], Job] = {}
    for job in sorted(jobs, key=lambda job: job.created_at):
        found.setdefault((job.region, job.queue, job.resumed), job)
    return list(found.values())


def describe(aws: Aws, stage: DeployedStage, job_ids: Sequence[str]) -> list[Job]:
    """Return the jobs that Batch still remembers."""
    names = {arn.rsplit("/", 1)[-1]: name for name, arn in stage.queues.items()}
    details = list(_describe(aws, job_ids))
    parts = {part["jobId"]: part for part in _describe(aws, [*chain.from_iterable(map(part_ids, details))])}
    jobs = (
        job_from(detail, [parts[part_id] for part_id in part_ids(detail) if part_id in parts], queue_names=names)
        for detail in details
    )
    return [_with_log(job, stage) if job.home else job for job in jobs]


def _with_log(job: Job, stage: DeployedStage) -> Job:
    """Return a job that moved to a stage with the place of its log."""
    streams = (replace(stream, region=job.region, log_group=stage.log_group) for stream in job.log_streams)
    return replace(job, log_streams=tuple(streams))


def cause_of_failure(aws: Aws, stage: DeployedStage, job: Job) -> Job:
    """Return the job whose failure kept `job` from starting, followed through all dependencies, or `job` itself."""
    while job.reason.startswith(DEPENDENCY_FAILED):
        failed = [other for other in describe(aws, stage, job.depends_on) if other.state in UNSUCCESSFUL]
        if not failed:
            break
        job = failed[0]
    return job


def terminate(aws: Aws, job_id: str, *, reason: str) -> None:
    """Stop a job in any state. A running job gets SIGTERM; its newest complete checkpoint stays."""
    aws.batch.terminate_job(jobId=job_id, reason=reason)


def _list_all(aws: Aws, stage: DeployedStage, **which: Any) -> list[Mapping[str, Any]]:
    """List the jobs of all queues of the stage, because teams have separate queues."""
    client = aws.batch  # created before the threads: a boto3 session is not thread-safe
    found = in_parallel(lambda queue: [*list_queue(client, queue, **which)], stage.queues.values())
    return list(chain.from_iterable(found))


def list_queue(
    client: "BatchClient", queue: str, *, name: str | None = None, since: datetime | None = None
) -> Iterator[Mapping[str, Any]]:
    """List summaries of a queue's jobs in all states, by name or by creation time (Batch takes one filter per call)."""
    if name is not None:
        filters = [{"name": "JOB_NAME", "values": [name]}]
    else:
        milliseconds = int((since or datetime.fromtimestamp(0, timezone.utc)).timestamp() * 1000)
        filters = [{"name": "AFTER_CREATED_AT", "values": [str(milliseconds)]}]
    pages = client.get_paginator("list_jobs").paginate(jobQueue=queue, filters=filters)  # type: ignore[arg-type]
    for page in pages:
        yield from page["jobSummaryList"]


def _describe(aws: Aws, job_ids: Sequence[str]) -> Iterator[Mapping[str, Any]]:
    client = aws.batch  # created before the threads
    batches = [list(job_ids[start : start + _DESCRIBE_LIMIT]) for start in range(0, len(job_ids), _DESCRIBE_LIMIT)]
    return chain.from_iterable(in_parallel(lambda ids: client.describe_jobs(jobs=ids)["jobs"], batches))
