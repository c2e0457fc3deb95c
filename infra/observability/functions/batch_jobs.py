"""Read Batch's jobs, attempts and queues; several functions share this module.

Queues are read from SSM, because those of many teams exceed the 4,096 characters that Lambda allows for all of a
function's environment variables.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SWEEP_TAG = "trainyard:sweep"
"""Tag of a sweep's job (jobs/spec/sweep.py)."""

HOME_TAG = "trainyard:home"
"""Tag of a job that moved here from another stage: `<stage>/<run bucket>` (jobs/core/retries.py). Members of a team may
not set it."""


def team_of(job: Mapping[str, Any]) -> str:
    """Return the team that submitted the job (IAM enforces it), or "" if `trainyard submit` was not used."""
    return str(job.get("tags", {}).get("trainyard:team", ""))


def size(job: dict[str, Any]) -> int:
    """Return the number of children of an array job's parent; 0 for other jobs."""
    array = job.get("arrayProperties", {})
    return 0 if "index" in array else int(array.get("size", 0))


def describe(batch: Any, job_ids: list[str]) -> list[dict[str, Any]]:
    """Return the descriptions of jobs that Batch still lists."""
    return [
        job
        for start in range(0, len(job_ids), 100)  # limit of DescribeJobs
        for job in batch.describe_jobs(jobs=job_ids[start : start + 100])["jobs"]
    ]


def children(batch: Any, job: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the children of an array job's parent; none for other jobs."""
    return describe(batch, [f"{job['jobId']}:{index}" for index in range(size(job))])


@dataclass(frozen=True, kw_only=True)
class ReclaimRules:
    """How to recognise a reclaim: reasons and exit code, which the stack passes from `jobs.core.retries`."""

    reclaim_reason: str
    """Prefix of an attempt's reason if the instance was gone before the container exited."""
    exited_reason: str
    """Prefix of an attempt's reason if the container exited before the instance was gone."""
    interrupted_exit_code: int
    """Exit code of a container that had time to stop before the instance was gone."""
    no_capacity_reason: str
    """Prefix of the reason with which Batch cancels a job that waited too long for Spot capacity."""
    reclaims_before_on_demand: int
    """Number of reclaims after which a job moves to On-Demand."""
    on_demand_nodes: int
    """Maximum number of instances of an On-Demand queue."""
    fallback: tuple[str, str] | None = None
    """Name and region of the stage to which jobs move for lack of Spot capacity; None if there is none."""

    def falls_back(self, job: dict[str, Any], queue: "Queue | None") -> bool:
        """Return whether a job may move to the fallback stage. It moves only once."""
        may_move = queue is not None and queue.name == _SPOT and not queue.retiring
        return self.fallback is not None and may_move and not size(job) and HOME_TAG not in job.get("tags", {})


def reclaim_rules_from_environment() -> dict[str, Any]:
    """Return the fields of `ReclaimRules` from the environment variables that the stack sets."""
    return {
        "reclaim_reason": os.environ["RECLAIM_REASON"],
        "exited_reason": os.environ["EXITED_REASON"],
        "interrupted_exit_code": int(os.environ["INTERRUPTED_EXIT_CODE"]),
        "no_capacity_reason": os.environ["NO_CAPACITY_REASON"],
        "reclaims_before_on_demand": int(os.environ["RECLAIMS_BEFORE_ON_DEMAND"]),
        "on_demand_nodes": int(os.environ["ON_DEMAND_NODES"]),
        "fallback": tuple(os.environ["FALLBACK_STAGE"].split()) if "FALLBACK_STAGE" in os.environ else None,
    }


def is_reclaim(attempt: dict[str, Any], rules: ReclaimRules) -> bool:
    """Return whether a finished attempt in a Spot queue, as DescribeJobs returns it, ended by a reclaim.

    Either the instance was gone before the container exited, or the container exited because of the notice. Attempts do
    not record whether a Spot queue fell back to On-Demand, so such attempts count as well.
    """
    reason: str = attempt.get("statusReason", "")
    exit_codes = [container.get("exitCode") for container in containers(attempt)]
    return reason.startswith(rules.reclaim_reason) or (
        reason.startswith(rules.exited_reason) and rules.interrupted_exit_code in exit_codes
    )


def containers(attempt: dict[str, Any]) -> list[dict[str, Any]]:
    """Return an attempt's containers from either shape of a job definition. Our jobs have one container."""
    tasks = [container for task in attempt.get("taskProperties", []) for container in task.get("containers", [])]
    return tasks or [attempt.get("container", {})]


_SPOT, _ON_DEMAND = "spot", "on-demand"
"""Names of the queues between which jobs move (jobs/core/queues.py)."""


@dataclass(frozen=True, kw_only=True)
class Queue:
    """A job queue of the stage."""

    label: str
    """Name on the dashboard: `spot@research (dl1-24xlarge-1-20-0)` for a team's queue of a retiring pool."""
    name: str
    """Name without team and pool: a row of jobs/core/queues.py."""
    on_demand: str | None = None
    """ARN of the On-Demand queue of the same team and pool, to which jobs can move."""
    retiring: bool = False
    """Whether the queue's pool is retiring."""


def read_queues(path: str) -> dict[str, Queue]:
    """Return the queues of the stage with parameters below `path`, by ARN."""
    import boto3  # noqa: PLC0415 - the other functions are used and tested without it

    pages = boto3.client("ssm").get_paginator("get_parameters_by_path")
    found = {
        item["Name"].removeprefix(path): item["Value"]
        for kind in ("queue", "team-queue")
        for page in pages.paginate(Path=f"{path}{kind}", Recursive=True)
        for item in page["Parameters"]
    }
    return queues_of(found)


def queues_of(parameters: Mapping[str, Any]) -> dict[str, Queue]:
    """Return the queues by ARN. `parameters` maps parameter names, as in jobs/core/stage.py, to ARNs.

    A name is `queue/` or `team-queue/<team>/`, then the queue's name and, for a retiring pool, a slash and the pool's
    id.
    """
    arns = {}
    for parameter, arn in parameters.items():
        kind, *rest = parameter.split("/")
        team = rest.pop(0) if kind == "team-queue" else ""
        name, pool = [*rest, ""][:2]
        arns[name, team, pool] = arn
    return {
        arn: Queue(
            label=f"{name}{f'@{team}' if team else ''}{f' ({pool})' if pool else ''}",
            name=name,
            on_demand=arns.get((_ON_DEMAND, team, pool)) if name == _SPOT else None,
            retiring=bool(pool),
        )
        for (name, team, pool), arn in arns.items()
    }
