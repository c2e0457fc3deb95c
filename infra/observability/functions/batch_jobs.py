"""Jobs as Batch describes them, for the functions that look at some."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SWEEP_TAG = "trainyard:sweep"
"""Tag of a sweep's job (jobs/spec/sweep.py)."""


def size(job: dict[str, Any]) -> int:
    """Return the number of children of an array job's parent; 0 for others."""
    array = job.get("arrayProperties", {})
    return 0 if "index" in array else int(array.get("size", 0))


def describe(batch: Any, job_ids: list[str]) -> list[dict[str, Any]]:
    """Return those of the jobs that Batch has not forgotten."""
    return [
        job
        for start in range(0, len(job_ids), 100)  # the service's limit
        for job in batch.describe_jobs(jobs=job_ids[start : start + 100])["jobs"]
    ]


def children(batch: Any, job: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the children of an array job's parent; none for others."""
    return describe(batch, [f"{job['jobId']}:{index}" for index in range(size(job))])


@dataclass(frozen=True, kw_only=True)
class ReclaimRules:
    """The words and the exit code of a reclaim, as the stack hands them over from `jobs.core.retries`."""

    reclaim_reason: str
    """Begins the reason of an attempt whose instance was gone before its container."""
    exited_reason: str
    """Begins the reason of an attempt whose container ended before its instance did."""
    interrupted_exit_code: int
    """What a container that had the time to end before its instance did exits with."""
    no_capacity_reason: str
    """What Batch cancels a job with that waited too long for Spot."""
    reclaims_before_on_demand: int
    on_demand_nodes: int
    """Instances that an On-Demand queue may have."""


def of_environment() -> dict[str, Any]:
    """Return the fields of `ReclaimRules`, as the stack hands them over."""
    return {
        "reclaim_reason": os.environ["RECLAIM_REASON"],
        "exited_reason": os.environ["EXITED_REASON"],
        "interrupted_exit_code": int(os.environ["INTERRUPTED_EXIT_CODE"]),
        "no_capacity_reason": os.environ["NO_CAPACITY_REASON"],
        "reclaims_before_on_demand": int(os.environ["RECLAIMS_BEFORE_ON_DEMAND"]),
        "on_demand_nodes": int(os.environ["ON_DEMAND_NODES"]),
    }


def is_reclaim(attempt: dict[str, Any], rules: ReclaimRules) -> bool:
    """Return whether a finished attempt in a Spot queue, in the shape that Batch shows, ended by a reclaim.

    Either the instance was gone before the container, or the container used the notice to exit. What a Spot queue runs
    On-Demand while Spot has no capacity is not told apart: Batch's attempts do not say.
    """
    reason: str = attempt.get("statusReason", "")
    exit_codes = [container.get("exitCode") for container in containers(attempt)]
    return reason.startswith(rules.reclaim_reason) or (
        reason.startswith(rules.exited_reason) and rules.interrupted_exit_code in exit_codes
    )


def containers(attempt: dict[str, Any]) -> list[dict[str, Any]]:
    """Return an attempt's containers, wherever the job's definition makes Batch show them; a job of ours has one."""
    tasks = [container for task in attempt.get("taskProperties", []) for container in task.get("containers", [])]
    return tasks or [attempt.get("container", {})]


_SPOT, _ON_DEMAND = "spot", "on-demand"
"""Names of the two queues between which jobs move (jobs/core/queues.py)."""


@dataclass(frozen=True, kw_only=True)
class Queue:
    """One job queue."""

    label: str
    """What the dashboard calls it: `spot@research (dl1-24xlarge-1-20-0)`, of a team and of a pool that retires."""
    name: str
    """What all of its kind are called, whosever they are: a row of jobs/core/queues.py."""
    on_demand: str | None = None
    """ARN of the On-Demand queue of its team and pool, where its jobs may go on."""


def read_queues(path: str) -> dict[str, Queue]:
    """Return the queues of the stage whose parameters lie below `path`, by ARN."""
    import boto3  # noqa: PLC0415 - the rest is used and tested without it

    pages = boto3.client("ssm").get_paginator("get_parameters_by_path")
    found = {
        item["Name"].removeprefix(path): item["Value"]
        for kind in ("queue", "team-queue")
        for page in pages.paginate(Path=f"{path}{kind}", Recursive=True)
        for item in page["Parameters"]
    }
    return queues_of(found)


def queues_of(parameters: Mapping[str, Any]) -> dict[str, Queue]:
    """Return the queues by ARN; `parameters`: ARNs by the names that jobs/core/stage.py gives them.

    `queue/` or `team-queue/<team>/`, the queue's name and, of a pool that retires, a slash and the pool's id.
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
        )
        for (name, team, pool), arn in arns.items()
    }
