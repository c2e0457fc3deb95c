"""What SubmitJob refuses, in the words of AWS where they are known; a refused job does not exist."""

import json
from typing import Any

import pytest

from tests.support.emulator.batch_calls import Batch, container


def refused(batch: Batch, complaint: str, **request: Any) -> None:
    queue = request.get("jobQueue") or batch.queue()
    request = {"jobName": "refused", "jobDefinition": batch.definition("true"), **request, "jobQueue": queue}
    before = sum(batch.aws.health()["jobs"].values())
    with pytest.raises(batch.client.exceptions.ClientException, match=complaint):
        batch.client.submit_job(**request)
    assert sum(batch.aws.health()["jobs"].values()) == before


@pytest.mark.parametrize(
    ("definition", "complaint"),
    [
        ("nope", "JobDefinition name nope does not exist or is not in ACTIVE status"),
        ("nope:3", "does not exist"),
        ("arn:aws:batch:us-east-1:123456789012:job-definition/nope:1", "JobDefinition arn:.* does not exist"),
    ],
)
def test_an_unknown_definition(batch: Batch, definition: str, complaint: str) -> None:
    refused(batch, complaint, jobDefinition=definition)


def test_an_unknown_queue(batch: Batch) -> None:
    refused(batch, "JobQueue nope not found", jobQueue="nope")


def test_a_disabled_queue(batch: Batch) -> None:
    queue = batch.queue()
    batch.client.update_job_queue(jobQueue=queue, state="DISABLED")
    refused(batch, "DISABLED", jobQueue=queue)


@pytest.mark.parametrize("name", ["with space", "-first", "x" * 129, "umläut"])
def test_a_bad_name(batch: Batch, name: str) -> None:
    refused(batch, "Job name", jobName=name)


@pytest.mark.parametrize(
    ("more", "complaint"),
    [
        ({"retryStrategy": {"attempts": 0}}, "between 1 and 10"),
        ({"timeout": {"attemptDurationSeconds": 0}}, "at least 1"),
        ({"dependsOn": [{"jobId": "00000000-0000-0000-0000-000000000000"}]}, "does not exist"),
        ({"dependsOn": [{"type": "SEQUENTIAL"}]}, "array jobs only"),
        ({"containerOverrides": {"command": ["echo", "Ref::nothing"]}}, "No parameter found for reference nothing"),
        ({"containerOverrides": {"command": ["echo", ""]}}, "empty string"),
        ({"containerOverrides": {"environment": [{"name": "AWS_BATCH_X", "value": "1"}]}}, "reserved for Batch"),
        ({"nodeOverrides": {"numNodes": 2}}, "multi-node"),
        ({"ecsPropertiesOverride": {"taskProperties": [{"containers": []}]}}, "do not use ecsProperties"),
        ({"shareIdentifier": "research"}, "fair share"),
        ({"parameters": {"x": "y" * 31_000}}, "limit is 30720 bytes"),
    ],
)
def test_a_bad_request(batch: Batch, more: dict[str, Any], complaint: str) -> None:
    refused(batch, complaint, **more)


def test_overrides_that_do_not_fit_an_ecs_definition(batch: Batch) -> None:
    definition = batch.ecs_definition([container("true", name="main")])
    refused(
        batch,
        "Container overrides should not be set",
        jobDefinition=definition,
        containerOverrides={"command": ["true"]},
    )
    unknown = {"taskProperties": [{"containers": [{"name": "other", "command": ["true"]}]}]}
    refused(batch, "other does not exist", jobDefinition=definition, ecsPropertiesOverride=unknown)


def test_a_queue_with_shares_wants_one_named(batch: Batch) -> None:
    policy = batch.client.create_scheduling_policy(name="shares", fairsharePolicy={})["arn"]
    queue = batch.queue(schedulingPolicyArn=policy)
    refused(batch, "shareIdentifier must be specified", jobQueue=queue)
    refused(batch, "letters and numbers", jobQueue=queue, shareIdentifier="not-this")


def test_a_fargate_queue_takes_no_ec2_job(batch: Batch) -> None:
    queue = batch.queue(batch.environment(kind="FARGATE"))
    refused(batch, "can not run Jobs with capability EC2", jobQueue=queue)


def test_n_to_n_wants_two_arrays_of_one_size(batch: Batch) -> None:
    queue = batch.queue(batch.environment(max_vcpus=0))
    array = batch.submit(batch.definition("true"), queue, arrayProperties={"size": 2})
    dependency = [{"jobId": array, "type": "N_TO_N"}]
    refused(batch, "array job of size 3", jobQueue=queue, arrayProperties={"size": 3}, dependsOn=dependency)


@pytest.mark.parametrize("action", ["cancel_job", "terminate_job"])
def test_ending_a_job_wants_one_that_exists_and_a_reason(batch: Batch, action: str) -> None:
    call = getattr(batch.client, action)
    with pytest.raises(batch.client.exceptions.ClientException, match="does not exist"):
        call(jobId="nope", reason="because")
    with pytest.raises(batch.client.exceptions.ClientException, match="'reason' is a required field"):
        call(jobId="nope", reason="")


def test_a_job_that_does_not_exist_is_left_out(batch: Batch) -> None:
    assert batch.client.describe_jobs(jobs=["nope"])["jobs"] == []
    with pytest.raises(batch.client.exceptions.ClientException, match="at most 100"):
        batch.client.describe_jobs(jobs=["nope"] * 101)


def test_a_refusal_leaves_no_trace_in_the_servers_errors(batch: Batch) -> None:
    refused(batch, "not found", jobQueue="nope")
    assert batch.aws.health()["server_errors"] == [], json.dumps(batch.aws.health(), indent=2)
