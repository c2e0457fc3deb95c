"""ListJobs: by queue and state, with filters and pages."""

from typing import Any

import pytest

from tests.support.emulator.batch_calls import Batch


def listed(batch: Batch, **request: Any) -> list[str]:
    return [job["jobId"] for job in batch.client.list_jobs(**request)["jobSummaryList"]]


@pytest.fixture(scope="module")
def waiting(batch: Batch) -> tuple[str, str, list[str]]:
    """A queue without capacity, a definition, and jobs alpha-1, Alpha-2 and beta."""
    queue, definition = batch.queue(batch.environment(max_vcpus=0)), batch.definition("true")
    jobs = [
        batch.client.submit_job(jobName=name, jobDefinition=definition, jobQueue=queue)["jobId"]
        for name in ("alpha-1", "Alpha-2", "beta")
    ]
    return queue, definition, jobs


def test_lists_a_queues_jobs_by_state_newest_first(batch: Batch, waiting: tuple[str, str, list[str]]) -> None:
    queue, _, jobs = waiting
    assert listed(batch, jobQueue=queue, jobStatus="RUNNABLE") == jobs[::-1]
    assert listed(batch, jobQueue=queue, jobStatus="SUCCEEDED") == []
    assert listed(batch, jobQueue=queue) == []  # default: running jobs
    *_, summary = batch.client.list_jobs(jobQueue=queue, jobStatus="RUNNABLE")["jobSummaryList"]
    shown = batch.job(jobs[0])  # the first one has a reason for waiting
    assert summary == {
        key: shown[key]
        for key in ("jobArn", "jobId", "jobName", "createdAt", "status", "statusReason", "jobDefinition")
    }


def test_children_and_nodes_are_listed_only_under_their_job(batch: Batch) -> None:
    queue = batch.queue(batch.environment(max_vcpus=0))
    array = batch.submit(batch.definition("true"), queue, arrayProperties={"size": 2})
    multinode = batch.submit(batch.multinode_definition("true"), queue)
    assert listed(batch, arrayJobId=array, jobStatus="RUNNABLE") == [f"{array}:0", f"{array}:1"]
    assert listed(batch, multiNodeJobId=multinode, jobStatus="RUNNABLE") == [f"{multinode}#0", f"{multinode}#1"]
    assert listed(batch, jobQueue=queue, jobStatus="RUNNABLE") == [multinode]
    assert listed(batch, jobQueue=queue, jobStatus="PENDING") == [array]
    (node, _) = batch.client.list_jobs(multiNodeJobId=multinode, jobStatus="RUNNABLE")["jobSummaryList"]
    assert node["nodeProperties"] == {"isMainNode": True, "numNodes": 2, "nodeIndex": 0}
    (parent,) = batch.client.list_jobs(jobQueue=queue, jobStatus="PENDING")["jobSummaryList"]
    assert parent["arrayProperties"] == {"size": 2}


def test_filters_and_pages(batch: Batch, waiting: tuple[str, str, list[str]]) -> None:
    queue, definition, (first, second, third) = waiting

    def filtered(name: str, value: object, **more: Any) -> dict[str, Any]:
        # jobStatus is ignored if there is a filter.
        filters = [{"name": name, "values": [str(value)]}]
        answer: dict[str, Any] = batch.client.list_jobs(jobQueue=queue, jobStatus="FAILED", filters=filters, **more)
        return answer

    def ids(answer: dict[str, Any]) -> list[str]:
        return [job["jobId"] for job in answer["jobSummaryList"]]

    assert ids(filtered("JOB_NAME", "ALPHA-1")) == [first]
    assert ids(filtered("JOB_NAME", "alpha")) == []
    assert ids(filtered("AFTER_CREATED_AT", batch.job(first)["createdAt"] - 1)) == [third, second, first]
    assert ids(filtered("AFTER_CREATED_AT", batch.job(third)["createdAt"])) == []
    page = filtered("JOB_NAME", "alpha*", maxResults=1)
    assert ids(page) == [second]
    # A job submitted between two pages does not move others to another page.
    batch.client.submit_job(jobName="alpha-3", jobDefinition=definition, jobQueue=queue)
    last = filtered("JOB_NAME", "alpha*", maxResults=1, nextToken=page["nextToken"])
    assert (ids(last), "nextToken" in last) == ([first], False)


@pytest.mark.parametrize(
    ("request_", "complaint"),
    [
        ({}, "Exactly one of"),
        ({"jobQueue": "nope"}, "JobQueue nope not found"),
        ({"jobStatus": "LOST"}, "is not one of SUBMITTED"),
        (
            {"filters": [{"name": "SHARE_IDENTIFIER", "values": ["a"]}]},
            "supports the filters JOB_NAME and AFTER_CREATED_AT",
        ),
        ({"nextToken": "?"}, "nextToken is invalid"),
    ],
)
def test_wrong_requests_are_refused(
    batch: Batch, waiting: tuple[str, str, list[str]], request_: dict[str, Any], complaint: str
) -> None:
    queue = {"jobQueue": waiting[0]} if request_ else {}
    with pytest.raises(batch.client.exceptions.ClientException, match=complaint):
        batch.client.list_jobs(**{**queue, **request_})
