"""What Batch refuses, or the embedded AWS does because no stack uses it: with the reason, before anything is made."""

import time
from typing import Any

import pytest

from tests.support.emulator.batch_calls import Batch, ecs_properties, overrides


@pytest.mark.parametrize(
    ("request_", "complaint"),
    [
        ({"jobDefinitionName": "a name", "type": "container", "ecsProperties": ecs_properties()}, "is invalid"),
        ({"type": "container"}, "one task with one container"),
        ({"type": "container", "containerProperties": {"image": "x"}}, "knows ecsProperties only"),
        ({"type": "container", "ecsProperties": {"taskProperties": [{"containers": [{"image": "x"}]}]}}, "vCPU is not"),
        ({"type": "container", "ecsProperties": ecs_properties(image="")}, "must contain image"),
        ({"type": "container", "ecsProperties": ecs_properties(essential=False)}, "at least one essential"),
        ({"type": "container", "ecsProperties": ecs_properties("x" * 25_000)}, "limit is 24576 bytes"),
        (
            {"type": "container", "ecsProperties": ecs_properties(), "retryStrategy": {"attempts": 11}},
            "between 1 and 10, but was 11",
        ),
        (
            {"type": "container", "ecsProperties": ecs_properties(), "timeout": {"attemptDurationSeconds": 0}},
            "at least 1, but was 0",
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
            "one range, of targetNodes 0:",
        ),
    ],
)
def test_definitions(batch: Batch, request_: dict[str, Any], complaint: str) -> None:
    with pytest.raises(batch.client.exceptions.ClientException, match=complaint):
        batch.client.register_job_definition(**{"jobDefinitionName": "refused", **request_})


@pytest.mark.parametrize(
    ("request_", "complaint"),
    [
        ({"jobName": "a name"}, "is invalid"),
        ({"jobQueue": "nobody"}, "JobQueue nobody not found"),
        ({"jobDefinition": "nobody"}, "does not exist or is not in ACTIVE status"),
        ({"retryStrategy": {"attempts": 0}}, "between 1 and 10, but was 0"),
        ({"timeout": {"attemptDurationSeconds": 0}}, "at least 1, but was 0"),
        ({"dependsOn": [{"jobId": "00000000-0000-0000-0000-000000000000"}]}, "does not exist"),
        ({"dependsOn": [{"type": "SEQUENTIAL"}]}, "knows jobId only"),
        ({"arrayProperties": {"size": 1}}, "between 2 and 10000"),
        ({"arrayProperties": {"size": 10_001}}, "between 2 and 10000"),
        ({"ecsPropertiesOverride": overrides(command=["echo", ""])}, "empty string"),
        ({"ecsPropertiesOverride": overrides(environment={"AWS_BATCH_X": "1"})}, "reserved for Batch"),
        ({"ecsPropertiesOverride": overrides(name="other")}, "container other does not exist"),
        ({"containerOverrides": {"command": ["true"]}}, "knows ecsPropertiesOverride and nodeOverrides only"),
        ({"parameters": {"a": "b"}}, "knows ecsPropertiesOverride and nodeOverrides only"),
        ({"nodeOverrides": {"numNodes": 2}}, "not multi-node parallel jobs"),
        ({"shareIdentifier": "research"}, "fair share scheduling policy"),
        ({"tags": {str(number): "" for number in range(51)}}, "at most 50 tags"),
        ({"ecsPropertiesOverride": overrides(command=["x" * 31_000])}, "limit is 30720 bytes"),
    ],
)
def test_submissions(batch: Batch, request_: dict[str, Any], complaint: str) -> None:
    fine = {"jobName": "fine", "jobQueue": batch.queue(), "jobDefinition": batch.definition("true")}
    with pytest.raises(batch.client.exceptions.ClientException, match=complaint):
        batch.client.submit_job(**{**fine, **request_})


def test_a_share_must_be_named_where_a_policy_divides(batch: Batch) -> None:
    policy = batch.client.create_scheduling_policy(name=f"policy-{time.time_ns()}", fairsharePolicy={})["arn"]
    queue, definition = batch.queue(schedulingPolicyArn=policy), batch.definition("true")
    for share, complaint in ((None, "must be specified"), ("not-a-share", "is invalid")):
        with pytest.raises(batch.client.exceptions.ClientException, match=complaint):
            batch.submit(definition, queue, **({"shareIdentifier": share} if share else {}))


def test_queues_and_definitions_that_take_no_more_jobs(batch: Batch) -> None:
    queue, definition = batch.queue(), batch.definition("true")
    batch.client.update_job_queue(jobQueue=queue, state="DISABLED")
    with pytest.raises(batch.client.exceptions.ClientException, match="DISABLED state"):
        batch.submit(definition, queue)
    batch.client.deregister_job_definition(jobDefinition=f"{definition}:1")
    with pytest.raises(batch.client.exceptions.ClientException, match="not in ACTIVE status"):
        batch.submit(definition, batch.queue())


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"type": "UNMANAGED"}, "MANAGED compute environments on ECS only"),
        ({"computeResources": {"type": "FARGATE"}}, "one of EC2 | SPOT"),
        ({"computeResources": {"subnets": ["subnet-none"]}}, "subnet-none"),
        ({"computeResources": {"subnets": []}}, "subnets must be given"),
        ({"computeResources": {"minvCpus": 9}}, "between 0 and maxvCpus"),
        ({"computeResources": {"instanceRole": "nobody"}}, "instance profile nobody does not exist"),
    ],
)
def test_environments(batch: Batch, change: dict[str, Any], complaint: str) -> None:
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


def test_what_a_queue_still_has_stays(batch: Batch) -> None:
    environment = batch.environment()
    queue = batch.queue(environment)
    with pytest.raises(batch.client.exceptions.ClientException, match="must be in DISABLED state"):
        batch.client.delete_job_queue(jobQueue=queue)
    batch.client.update_compute_environment(computeEnvironment=environment, state="DISABLED")
    with pytest.raises(batch.client.exceptions.ClientException, match="existing JobQueue relationship"):
        batch.client.delete_compute_environment(computeEnvironment=environment)
