"""Cancel the workers of a sweep that have not started, once no point is left for them.

Otherwise Batch would start each of them when it has an instance, only for the worker to find nothing to do.

EventBridge calls this at the end of every job. A sweep's workers are the children of an array job. A worker that finds
no point exits with 0 or `SWEEP_OVER_EXIT_CODE`; after that, no worker will find a point. A worker that was reclaimed
and waits for its next attempt keeps its point, so it is not cancelled.

Children are cancelled one by one, which does not affect the others and makes their parent FAILED when all have ended
(AWS Batch user guide, "Array jobs"). CancelJob has no effect on starting or running jobs (AWS Batch API reference,
"CancelJob"). Readers of the parent's state recognise cancelled children by their reason.
"""

import json
import os
from typing import Any

from infra.observability.functions.batch_jobs import SWEEP_TAG, containers, describe

_WAITING = ("SUBMITTED", "PENDING", "RUNNABLE")


def found_no_point(child: dict[str, Any], sweep_over_exit_code: int) -> bool:
    """Return whether a worker, as DescribeJobs returns it, ended because no point was left."""
    attempts = child.get("attempts", [])
    code = containers(attempts[-1])[0].get("exitCode") if attempts else None
    return child["status"] in ("SUCCEEDED", "FAILED") and code in (0, sweep_over_exit_code)


def handler(event: dict[str, Any], _context: object) -> None:
    """Handle a 'Batch Job State Change' event."""
    import boto3  # noqa: PLC0415 - the function above is used and tested without it

    job_id = event["detail"]["jobId"]
    parent_id, is_child, _ = job_id.partition(":")
    if not is_child:
        return
    batch: Any = boto3.client("batch")
    found = {job["jobId"]: job for job in batch.describe_jobs(jobs=[parent_id, job_id])["jobs"]}
    tags = found[parent_id].get("tags", {}) if parent_id in found else {}
    if SWEEP_TAG not in tags or tags.get("trainyard:stage") != os.environ["STAGE"] or job_id not in found:
        return
    if not found_no_point(found[job_id], int(os.environ["SWEEP_OVER_EXIT_CODE"])):
        return
    pages = batch.get_paginator("list_jobs")
    waiting = [
        child["jobId"]
        for state in _WAITING
        for page in pages.paginate(arrayJobId=parent_id, jobStatus=state)
        for child in page["jobSummaryList"]
    ]
    cancelled = [child["jobId"] for child in describe(batch, waiting) if not child.get("attempts")]
    for child_id in cancelled:
        batch.cancel_job(jobId=child_id, reason=os.environ["NO_POINT_LEFT_REASON"])
    if cancelled:
        print(json.dumps({"sweep": found[parent_id]["jobName"], "job": parent_id, "cancelled": cancelled}))
