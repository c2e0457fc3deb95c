"""ListJobs: by queue and state, with filters, page by page."""

import uuid
from typing import Any

import pytest

from tests.support.emulator.batch_calls import Batch


def listed(batch: Batch, **request: Any) -> list[str]:
    return [job["jobId"] for job in batch.client.list_jobs(**request)["jobSummaryList"]]


@pytest.fixture(scope="module")
def waiting(batch: Batch) -> tuple[str, str, list[str]]:
    """A queue without capacity, a definition, and three jobs: alpha-1, Alpha-2 and beta."""
    queue, definition = batch.queue(batch.environment(max_vcpus=0)), batch.definition("true")
    jobs = [
        batch.client.submit_job(jobName=name, jobDefinition=definition, jobQueue=queue)["jobId"]
        for name in ("alpha-1", "Alpha-2", "beta")
    ]
    return queue, definition, jobs


def test_a_queues_jobs_by_state_the_newest_first(batch: Batch, waiting: tuple[str, str, list[str]]) -> None:
    queue, _, jobs = waiting
    assert listed(batch, jobQueue=queue, jobStatus="RUNNABLE") == jobs[::-1]
    assert listed(batch, jobQueue=queue, jobStatus="SUCCEEDED") == []
    assert listed(batch, jobQueue=queue) == []  # without a state: those that run
    *_, summary = batch.client.list_jobs(jobQueue=queue, jobStatus="RUNNABLE")["jobSummaryList"]
    shown = batch.job(jobs[0])  # the one at the head says why it waits
    assert summary == {
        key: shown[key]
        for key in ("jobArn", "jobId", "jobName", "createdAt", "status", "statusReason", "jobDefinition")
    }


def test_filters(batch: Batch, waiting: tuple[str, str, list[str]]) -> None:
    queue, _, (first, second, third) = waiting
    created = [batch.job(job_id)["createdAt"] for job_id in (first, second, third)]

    def filtered(name: str, value: object) -> list[str]:
        # jobStatus is ignored beside a filter.
        return listed(batch, jobQueue=queue, jobStatus="FAILED", filters=[{"name": name, "values": [str(value)]}])

    assert filtered("JOB_NAME", "ALPHA-1") == [first]
    assert filtered("JOB_NAME", "alpha*") == [second, first]
    assert filtered("JOB_NAME", "alpha") == []
    assert filtered("AFTER_CREATED_AT", created[0] - 1) == [third, second, first]
    assert filtered("AFTER_CREATED_AT", created[2]) == []
    assert filtered("BEFORE_CREATED_AT", created[2] + 1) == [third, second, first]
    assert filtered("BEFORE_CREATED_AT", created[0]) == []


def test_pages(batch: Batch, waiting: tuple[str, str, list[str]]) -> None:
    queue, definition, _ = waiting
    name = f"page-{uuid.uuid4().hex[:8]}"
    jobs = [batch.client.submit_job(jobName=name, jobDefinition=definition, jobQueue=queue)["jobId"] for _ in range(3)]
    request = {"jobQueue": queue, "filters": [{"name": "JOB_NAME", "values": [name]}], "maxResults": 2}
    first = batch.client.list_jobs(**request)
    assert [job["jobId"] for job in first["jobSummaryList"]] == [jobs[2], jobs[1]]
    # A job that came meanwhile moves nothing to another page.
    batch.client.submit_job(jobName=name, jobDefinition=definition, jobQueue=queue)
    second = batch.client.list_jobs(**request, nextToken=first["nextToken"])
    assert [job["jobId"] for job in second["jobSummaryList"]] == [jobs[0]]
    assert "nextToken" not in second


def test_children_and_nodes_are_listed_under_their_job_only(batch: Batch) -> None:
    queue = batch.queue(batch.environment(max_vcpus=0))
    array = batch.submit(batch.definition("true"), queue, arrayProperties={"size": 2})
    multinode = batch.submit(batch.multinode_definition("true"), queue)
    assert listed(batch, arrayJobId=array, jobStatus="RUNNABLE") == [f"{array}:0", f"{array}:1"]
    assert listed(batch, multiNodeJobId=multinode, jobStatus="RUNNABLE") == [f"{multinode}#0", f"{multinode}#1"]
    assert listed(batch, jobQueue=queue, jobStatus="RUNNABLE") == [multinode]
    assert listed(batch, jobQueue=queue, jobStatus="PENDING") == [array]
    nodes = batch.client.list_jobs(multiNodeJobId=multinode, jobStatus="RUNNABLE")["jobSummaryList"]
    assert [node["nodeProperties"] for node in nodes] == [
        {"isMainNode": True, "numNodes": 2, "nodeIndex": 0},
        {"isMainNode": False, "numNodes": 2, "nodeIndex": 1},
    ]
    parent, child = (
        batch.client.list_jobs(**request)["jobSummaryList"][0]
        for request in (
            {"jobQueue": queue, "jobStatus": "PENDING"},
            {"arrayJobId": array, "jobStatus": "RUNNABLE"},
        )
    )
    assert (parent["arrayProperties"], child["arrayProperties"]) == ({"size": 2}, {"index": 0})


@pytest.mark.parametrize(
    ("request_", "complaint"),
    [
        ({}, "Exactly one of"),
        ({"jobQueue": "nope"}, "JobQueue nope not found"),
        ({"jobQueue": "{queue}", "jobStatus": "LOST"}, "is not one of SUBMITTED"),
        ({"jobQueue": "{queue}", "filters": [{"name": "COLOUR", "values": ["red"]}]}, "Filter COLOUR"),
        ({"jobQueue": "{queue}", "nextToken": "?"}, "nextToken is invalid"),
    ],
)
def test_what_batch_refuses(
    batch: Batch, waiting: tuple[str, str, list[str]], request_: dict[str, Any], complaint: str
) -> None:
    request = {**request_, **({"jobQueue": waiting[0]} if request_.get("jobQueue") == "{queue}" else {})}
    with pytest.raises(batch.client.exceptions.ClientException, match=complaint):
        batch.client.list_jobs(**request)
