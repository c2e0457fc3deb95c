"""Requests that Batch refuses, or that the emulator refuses because no stack needs them, fail at once with a reason."""

from typing import Any

import pytest

from tests.support.emulator.batch_calls import Batch, ecs_properties, overrides


@pytest.mark.parametrize(
    ("request_", "complaint"),
    [
        ({"jobDefinitionName": "a name", "type": "container", "ecsProperties": ecs_properties()}, "is invalid"),
        ({"type": "container"}, "one task with one container"),
        ({"type": "container", "containerProperties": {"image": "x"}}, "supports only ecsProperties"),
        ({"type": "container", "ecsProperties": {"taskProperties": [{"containers": [{"image": "x"}]}]}}, "vCPU is not"),
        ({"type": "container", "ecsProperties": ecs_properties("x" * 25_000)}, "limit is 24576 bytes"),
        (
            {"type": "container", "ecsProperties": ecs_properties(), "retryStrategy": {"attempts": 11}},
            "between 1 and 10, but was 11",
        ),
        (
            {
                "type": "multinode",
                "nodeProperties": {
                    "numNodes": 2,
                    "mainNode": 0,
                    "nodeRangeProperties": [{"targetNodes": "0:1", "ecsProperties": ecs_properties()}],
                },
            },
            "one range, with targetNodes 0:",
        ),
    ],
)
def test_wrong_definitions_are_refused(batch: Batch, request_: dict[str, Any], complaint: str) -> None:
    with pytest.raises(batch.client.exceptions.ClientException, match=complaint):
        batch.client.register_job_definition(**{"jobDefinitionName": "refused", **request_})


@pytest.mark.parametrize(
    ("request_", "complaint"),
    [
        ({"jobName": "a name"}, "is invalid"),
        ({"jobQueue": "nobody"}, "JobQueue nobody not found"),
        ({"jobDefinition": "nobody"}, "does not exist or is not in ACTIVE status"),
        ({"timeout": {"attemptDurationSeconds": 0}}, "at least 1, but was 0"),
        ({"dependsOn": [{"jobId": "00000000-0000-0000-0000-000000000000"}]}, "does not exist"),
        ({"dependsOn": [{"type": "SEQUENTIAL"}]}, "supports only jobId"),
        ({"arrayProperties": {"size": 1}}, "between 2 and 10000"),
        ({"ecsPropertiesOverride": overrides(command=["echo", ""])}, "empty string"),
        ({"ecsPropertiesOverride": overrides(environment={"AWS_BATCH_X": "1"})}, "reserved for Batch"),
        ({"ecsPropertiesOverride": overrides(name="other")}, "container other does not exist"),
        ({"containerOverrides": {"command": ["true"]}}, "supports only ecsPropertiesOverride and nodeOverrides"),
        ({"nodeOverrides": {"numNodes": 2}}, "not multi-node parallel jobs"),
        ({"shareIdentifier": "research"}, "fair share scheduling policy"),
        ({"ecsPropertiesOverride": overrides(command=["x" * 31_000])}, "limit is 30720 bytes"),
    ],
)
def test_wrong_submissions_are_refused(batch: Batch, request_: dict[str, Any], complaint: str) -> None:
    fine = {"jobName": "fine", "jobQueue": batch.queue(), "jobDefinition": batch.definition("true")}
    with pytest.raises(batch.client.exceptions.ClientException, match=complaint):
        batch.client.submit_job(**{**fine, **request_})


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"type": "UNMANAGED"}, "only MANAGED compute environments on ECS"),
        ({"computeResources": {"type": "FARGATE"}}, "must be EC2 or SPOT"),
        ({"computeResources": {"subnets": ["subnet-none"]}}, "subnet-none"),
        ({"computeResources": {"minvCpus": 9}}, "between 0 and maxvCpus"),
        ({"computeResources": {"desiredvCpus": 1}}, "starts no instances"),
        ({"computeResources": {"instanceRole": "nobody"}}, "instance profile nobody does not exist"),
    ],
)
def test_wrong_environments_are_refused(batch: Batch, change: dict[str, Any], complaint: str) -> None:
    resources = {
        "type": "EC2",
        "minvCpus": 0,
        "maxvCpus": 8,
        "instanceTypes": ["m5.large"],
        "subnets": [batch.subnet],
        "securityGroupIds": [batch.security_group],
        "instanceRole": batch.instance_profile,
        **change.pop("computeResources", {}),
    }
    request = {"computeEnvironmentName": "refused", "type": "MANAGED", "computeResources": resources, **change}
    with pytest.raises(batch.client.exceptions.ClientException, match=complaint):
        batch.client.create_compute_environment(**request)


def test_states_and_uses_of_batch_resources_are_checked(batch: Batch) -> None:
    def refused(operation: str, complaint: str, **request: Any) -> None:
        with pytest.raises(batch.client.exceptions.ClientException, match=complaint):
            getattr(batch.client, operation)(**request)

    environment, definition = batch.environment(), batch.definition("true")
    queue = batch.queue(environment)
    refused("delete_compute_environment", "must be in DISABLED state", computeEnvironment=environment)
    refused("delete_job_queue", "must be in DISABLED state", jobQueue=queue)
    batch.client.update_compute_environment(computeEnvironment=environment, state="DISABLED")
    refused("delete_compute_environment", "existing JobQueue relationship", computeEnvironment=environment)
    batch.client.update_job_queue(jobQueue=queue, state="DISABLED")
    job = {"jobName": "job", "jobQueue": queue, "jobDefinition": definition}
    refused("submit_job", "DISABLED state", **job)
    batch.client.deregister_job_definition(jobDefinition=f"{definition}:1")
    refused("submit_job", "not in ACTIVE status", **job)
    policy = batch.client.create_scheduling_policy(name="of-no-share", fairsharePolicy={})["arn"]
    shared = {**job, "jobQueue": batch.queue(schedulingPolicyArn=policy), "jobDefinition": batch.definition("true")}
    refused("submit_job", "must be specified", **shared)
    refused("submit_job", "is invalid", **shared, shareIdentifier="not-a-share")


def test_update_of_instances_waits_for_running_jobs(batch: Batch) -> None:
    def status() -> str:
        described = batch.client.describe_compute_environments(computeEnvironments=[environment])
        return str(described["computeEnvironments"][0]["status"])

    environment = batch.environment()
    job = batch.submit(batch.definition("sleep", "600"), batch.queue(environment))
    batch.wait_for(job, "RUNNING")
    # A scaling update takes no time, and an update of the instances waits for jobs on the old ones.
    change = batch.client.update_compute_environment
    change(computeEnvironment=environment, computeResources={"maxvCpus": 32})
    assert status() == "VALID"
    change(computeEnvironment=environment, computeResources={"tags": {"Name": "new"}})
    assert status() == "UPDATING"
    with pytest.raises(batch.client.exceptions.ClientException, match="resource is being modified"):
        change(computeEnvironment=environment, state="DISABLED")
    batch.client.terminate_job(jobId=job, reason="test")
    batch.wait_for(job, "FAILED")
    assert status() == "VALID"
    change(computeEnvironment=environment, state="DISABLED")
