"""Jobs as DescribeJobs and ListJobs show them.

`attempts` holds the finished attempts only; the one that runs shows beside it, in `container` or `ecsProperties` (where
TorchX and Airflow look for a running job's log stream).
"""

import copy
from collections.abc import Mapping
from typing import Any

from infra.emulator.batch.job import Job
from infra.emulator.batch.overrides import Node
from infra.emulator.batch.task import ContainerRecord, TaskRecord


def describe_job(job: Job, tags: Mapping[str, str]) -> dict[str, Any]:
    """Return a job as DescribeJobs shows it."""
    submission = job.submission
    node = job.node or (None if submission.is_multinode else submission.nodes[0])
    shown = {
        **_head(job),
        "jobQueue": submission.queue.arn,
        "attempts": [_attempt(task, node or submission.nodes[submission.main_node]) for task in job.attempts],
        "retryStrategy": copy.deepcopy(dict(submission.retry_strategy)),
        "dependsOn": [dict(dependency) for dependency in submission.depends_on],
        "parameters": dict(submission.parameters),
        "propagateTags": submission.propagate_tags,
        "platformCapabilities": submission.definition.properties["platformCapabilities"],
        "tags": dict(tags),
        "shareIdentifier": submission.share_identifier,
        "schedulingPriority": submission.scheduling_priority,
        "isCancelled": job.is_cancelled,
        "isTerminated": job.is_terminated,
    }
    if submission.timeout_seconds is not None:
        shown["timeout"] = {"attemptDurationSeconds": int(submission.timeout_seconds)}
    if node is not None:
        shown.update(_running_containers(node, job.last_task))
    if submission.is_multinode and job.node is None:
        shown["nodeProperties"] = copy.deepcopy(submission.node_properties)
    if job.node is not None:
        shown["nodeDetails"] = {"nodeIndex": job.node.index, "isMainNode": job.is_main_node}
    if job.children:
        shown["arrayProperties"] = {"size": len(job.children), "statusSummary": job.status_summary()}
    elif job.array is not None:
        shown["arrayProperties"] = {"size": job.array.size, "index": job.array.index}
    return _without_none(shown)


def summarize_job(job: Job) -> dict[str, Any]:
    """Return a job as ListJobs shows it."""
    shown = _head(job)
    shown["shareIdentifier"] = job.submission.share_identifier
    task = job.last_task
    if task is not None and len(task.containers) == 1:
        container = task.containers[0]
        shown["container"] = _without_none({"exitCode": container.exit_code, "reason": container.reason})
    if job.children:
        shown["arrayProperties"] = {"size": len(job.children)}
    elif job.array is not None:
        shown["arrayProperties"] = {"index": job.array.index}
    if job.submission.is_multinode:
        shown["nodeProperties"] = _without_none(
            {
                "numNodes": len(job.submission.nodes),
                "isMainNode": job.is_main_node if job.node else None,
                "nodeIndex": job.node.index if job.node else None,
            }
        )
    return _without_none(shown)


def _head(job: Job) -> dict[str, Any]:
    return {
        "jobArn": job.arn,
        "jobId": job.id,
        "jobName": job.submission.name,
        "jobDefinition": job.submission.definition.arn,
        "status": job.status.value,
        "statusReason": job.status_reason,
        "createdAt": job.created_at,
        "startedAt": job.started_at,
        "stoppedAt": job.stopped_at,
    }


def _running_containers(node: Node, task: TaskRecord | None) -> dict[str, Any]:
    """Return `container`, or `ecsProperties` with an empty `container` beside it."""
    where = {} if task is None else _where(task)
    records = {record.name: record for record in task.containers} if task is not None else {}
    if node.task is None:
        properties = node.properties["containerProperties"]
        return {"container": {**copy.deepcopy(properties), **where, **_container(records.get("default"))}}
    containers = [
        {**copy.deepcopy(dict(container.properties)), **_container(records.get(container.name))}
        for container in node.containers
    ]
    return {
        "container": {},
        "ecsProperties": {"taskProperties": [{**copy.deepcopy(dict(node.task)), **where, "containers": containers}]},
    }


def _attempt(task: TaskRecord, node: Node) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "startedAt": task.started_at,
        "stoppedAt": task.stopped_at,
        "statusReason": task.status_reason,
    }
    if node.task is None:
        shown["container"] = {**_where(task), **_container(task.containers[0])}
    else:
        containers = [{"name": record.name, **_container(record)} for record in task.containers]
        shown["container"] = {}
        shown["taskProperties"] = [{**_where(task), "containers": containers}]
    return _without_none(shown)


def _where(task: TaskRecord) -> dict[str, Any]:
    return {"taskArn": task.task_arn, "containerInstanceArn": task.container_instance_arn}


def _container(record: ContainerRecord | None) -> dict[str, Any]:
    if record is None:
        return {}
    return _without_none(
        {
            "exitCode": record.exit_code,
            "reason": record.reason,
            "logStreamName": record.log_stream_name,
            "networkInterfaces": [],
        }
    )


def _without_none(mapping: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in mapping.items() if value is not None}
