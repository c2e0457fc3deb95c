"""Jobs as Batch describes them, for the functions that look at some."""

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
