"""Jobs as DescribeJobs and ListJobs return them, with filters and pages. Source: the API reference of both.

`attempts` has finished attempts only; the running attempt is in `ecsProperties`. Of the filters of ListJobs, the
emulator supports the two that the command line uses.
"""

import base64
import binascii
import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from moto.batch.exceptions import ClientException

from infra.emulator.batch.job import Job, Status, TaskRecord


def describe_job(job: Job, tags: Mapping[str, str]) -> dict[str, Any]:
    """Return a job as DescribeJobs does."""
    submission = job.submission
    shown = {
        **_head(job),
        "jobQueue": submission.queue.arn,
        "attempts": [_attempt(job, task) for task in job.attempts],
        "retryStrategy": copy.deepcopy(dict(submission.retry_strategy)),
        "dependsOn": [dict(dependency) for dependency in submission.depends_on],
        "parameters": {},
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
    if submission.nodes is None or job.node is not None:
        shown["container"] = {}
        shown["ecsProperties"] = {"taskProperties": [_running_task(job)]}
    else:
        every = {"targetNodes": "0:", "ecsProperties": {"taskProperties": [copy.deepcopy(dict(submission.task))]}}
        shown["nodeProperties"] = {"numNodes": submission.nodes, "mainNode": 0, "nodeRangeProperties": [every]}
    if job.node is not None:
        shown["nodeDetails"] = {"nodeIndex": job.node, "isMainNode": job.is_main_node}
    if job.children:
        shown["arrayProperties"] = {"size": len(job.children), "statusSummary": job.status_summary()}
    elif job.array is not None:
        shown["arrayProperties"] = {"size": job.array.size, "index": job.array.index}
    return _without_none(shown)


def summarize_job(job: Job) -> dict[str, Any]:
    """Return a job as ListJobs does."""
    shown = _head(job)
    shown["shareIdentifier"] = job.submission.share_identifier
    if (task := job.last_task) is not None:
        shown["container"] = _without_none({"exitCode": task.exit_code, "reason": task.reason})
    if job.children:
        shown["arrayProperties"] = {"size": len(job.children)}
    elif job.array is not None:
        shown["arrayProperties"] = {"index": job.array.index}
    if job.submission.nodes is not None:
        node = {} if job.node is None else {"isMainNode": job.is_main_node, "nodeIndex": job.node}
        shown["nodeProperties"] = {"numNodes": job.submission.nodes, **node}
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


def _running_task(job: Job) -> dict[str, Any]:
    """Return the running or last task, in the shape of its definition."""
    task, record = copy.deepcopy(dict(job.submission.task)), job.last_task
    if record is not None:
        task.update(_arns(record))
        task["containers"][0].update(_container(record))
    return task


def _attempt(job: Job, task: TaskRecord) -> dict[str, Any]:
    container = {"name": job.submission.container["name"], **_container(task)}
    return _without_none(
        {
            "startedAt": task.started_at,
            "stoppedAt": task.stopped_at,
            "statusReason": task.status_reason,
            "container": {},
            "taskProperties": [{**_arns(task), "containers": [container]}],
        }
    )


def _arns(task: TaskRecord) -> dict[str, Any]:
    return {"taskArn": task.task_arn, "containerInstanceArn": task.container_instance_arn}


def _container(task: TaskRecord) -> dict[str, Any]:
    shown = {"exitCode": task.exit_code, "reason": task.reason, "logStreamName": task.log_stream_name}
    return {**_without_none(shown), "networkInterfaces": []}


def _without_none(mapping: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in mapping.items() if value is not None}


_FILTERS = ("JOB_NAME", "AFTER_CREATED_AT")

ItemT = TypeVar("ItemT")


def select_jobs(jobs: Iterable[Job], request: Mapping[str, Any]) -> list[Job]:
    """Select jobs by `jobStatus` or `filters`. Raises ClientException if the status or a filter is unknown."""
    status = request.get("jobStatus")
    if status is not None and status not in Status.__members__:
        raise ClientException(f"Job status {status} is not one of {' | '.join(Status.__members__)}")
    filters = request.get("filters") or []
    if not filters or request.get("jobQueue") is None:  # filters do not apply to children and nodes
        wanted = Status(status or "RUNNING")
        return [job for job in jobs if job.status is wanted]
    if len(filters) > 1:
        raise ClientException("Only one filter can be used at a time")
    [item] = filters
    if item.get("name") not in _FILTERS:
        raise ClientException(f"the emulator supports the filters {' and '.join(_FILTERS)}, not {item.get('name')}")
    # With a filter, jobStatus is ignored.
    return [job for job in jobs if any(_matches(job, item["name"], value) for value in item.get("values") or ())]


def page(items: Sequence[ItemT], request: Mapping[str, Any], *, most: int) -> tuple[list[ItemT], str | None]:
    """Return the page that `maxResults` and `nextToken` select, and the token of the next page.

    A token is the number of remaining items, so items added at the front in the meantime do not shift the next
    page. Raises ClientException if the token is invalid.
    """
    size = min(request.get("maxResults") or most, most)
    start = 0
    token = request.get("nextToken")
    if token is not None:
        try:
            left = int(base64.urlsafe_b64decode(token.encode()))
        except (ValueError, binascii.Error):
            raise ClientException("nextToken is invalid") from None
        start = max(0, len(items) - left)
    rest = len(items) - start - size
    following = base64.urlsafe_b64encode(str(rest).encode()).decode() if rest > 0 else None
    return list(items[start : start + size]), following


def _matches(job: Job, name: str, value: str) -> bool:
    if name == "JOB_NAME":
        job_name, wanted = job.submission.name.lower(), value.lower()
        return job_name.startswith(wanted[:-1]) if wanted.endswith("*") else job_name == wanted
    try:
        return job.created_at > int(value)
    except ValueError:
        raise ClientException(f"Filter {name}: {value} is not a number of milliseconds") from None
