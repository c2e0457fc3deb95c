"""AWS::Batch::* in templates: made, changed and deleted as the stack says, and really used by jobs."""

import json
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.emulator.batch_calls import Batch


class BatchStack:
    """A stack with a compute environment, a scheduling policy, a queue and a job definition."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.name = f"batch-{uuid.uuid4().hex[:8]}"
        self.client = batch.aws.client("cloudformation")
        self.environment: dict[str, Any] = {
            "Type": "MANAGED",
            "ReplaceComputeEnvironment": False,
            "UpdatePolicy": {"TerminateJobsOnUpdate": False, "JobExecutionTimeoutMinutes": 60},
            "ComputeResources": {
                "Type": "EC2",
                "MinvCpus": 0,
                "MaxvCpus": "8",  # numbers may come as text
                "InstanceTypes": ["dl1.24xlarge"],
                "Subnets": [batch.subnet],
                "SecurityGroupIds": [batch.security_group],
                "InstanceRole": batch.instance_profile,
            },
            "Tags": {"Team": "platform"},
        }
        self.policy: dict[str, Any] = {"FairsharePolicy": {"ShareDecaySeconds": 3600}}
        self.queue: dict[str, Any] = {
            "Priority": 1,
            "SchedulingPolicyArn": {"Fn::GetAtt": ["Policy", "Arn"]},
            "ComputeEnvironmentOrder": [
                {"Order": 1, "ComputeEnvironment": {"Fn::GetAtt": ["Environment", "ComputeEnvironmentArn"]}}
            ],
        }
        container = {
            "Name": "main",
            "Image": "stand-in",
            "Essential": "true",
            "Command": ["sh", "-c", "echo $Key"],
            "Environment": [{"Name": "Key", "Value": "hello"}],
            "ResourceRequirements": [{"Type": "VCPU", "Value": "1"}, {"Type": "MEMORY", "Value": "128"}],
        }
        self.definition: dict[str, Any] = {
            "Type": "container",
            "RetryStrategy": {"Attempts": 2, "EvaluateOnExit": [{"OnExitCode": "75", "Action": "RETRY"}]},
            "EcsProperties": {"TaskProperties": [{"IpcMode": "host", "Containers": [container]}]},
            "Tags": {"Team": "research"},
        }

    def deploy(self, operation: str = "update") -> dict[str, str]:
        """Create or update it; return the physical ids, which the attributes must be too."""
        kinds = {
            "Environment": ("ComputeEnvironment", self.environment, "ComputeEnvironmentArn"),
            "Policy": ("SchedulingPolicy", self.policy, "Arn"),
            "Queue": ("JobQueue", self.queue, "JobQueueArn"),
            "Definition": ("JobDefinition", self.definition, "JobDefinitionArn"),
        }
        resources = {
            key: {"Type": f"AWS::Batch::{kind}", "Properties": given} for key, (kind, given, _) in kinds.items()
        }
        outputs = {key: {"Value": {"Fn::GetAtt": [key, attribute]}} for key, (*_, attribute) in kinds.items()}
        body = json.dumps({"Resources": resources, "Outputs": outputs})
        getattr(self.client, f"{operation}_stack")(StackName=self.name, TemplateBody=body)
        (stack,) = self.client.describe_stacks(StackName=self.name)["Stacks"]
        assert stack["StackStatus"] == f"{operation.upper()}_COMPLETE", stack.get("StackStatusReason")
        found = self.client.describe_stack_resources(StackName=self.name)["StackResources"]
        ids = {item["LogicalResourceId"]: item["PhysicalResourceId"] for item in found}
        assert {item["OutputKey"]: item["OutputValue"] for item in stack["Outputs"]} == ids
        return ids

    def shown(self, what: str, arn: str) -> dict[str, Any]:
        """Return what Batch shows of `jobQueues`, say; nothing if it is gone."""
        operation = {"jobQueues": "job_queues", "jobDefinitions": "job_definitions"}.get(what, "compute_environments")
        found = getattr(self.batch.client, f"describe_{operation}")(**{what: [arn]})[what]
        return dict(found[0]) if found else {}


@pytest.fixture
def stack(batch: Batch) -> Iterator[BatchStack]:
    stack = BatchStack(batch)
    yield stack
    stack.client.delete_stack(StackName=stack.name)


def test_a_stack_makes_what_jobs_need_and_deletes_it(stack: BatchStack) -> None:
    ids, batch = stack.deploy("create"), stack.batch
    environment = stack.shown("computeEnvironments", ids["Environment"])
    assert environment["computeResources"]["maxvCpus"] == 8
    assert environment["updatePolicy"] == {"terminateJobsOnUpdate": False, "jobExecutionTimeoutMinutes": 60}
    assert environment["tags"]["Team"] == "platform"
    queue = stack.shown("jobQueues", ids["Queue"])
    assert queue["computeEnvironmentOrder"] == [{"order": 1, "computeEnvironment": ids["Environment"]}]
    assert queue["schedulingPolicyArn"] == ids["Policy"]
    definition = stack.shown("jobDefinitions", ids["Definition"])
    assert definition["retryStrategy"]["evaluateOnExit"] == [{"onExitCode": "75", "action": "retry"}]
    assert definition["ecsProperties"]["taskProperties"][0]["containers"][0]["essential"] is True
    job = batch.ended(batch.submit(ids["Definition"], ids["Queue"], shareIdentifier="research"))
    assert batch.output(job) == ["hello"]

    stack.client.delete_stack(StackName=stack.name)
    assert stack.shown("jobQueues", ids["Queue"]) == stack.shown("computeEnvironments", ids["Environment"]) == {}
    assert stack.shown("jobDefinitions", ids["Definition"])["status"] == "INACTIVE"


@pytest.mark.parametrize("kept", [False, True])
def test_an_update_of_a_definition_registers_a_revision(stack: BatchStack, kept: bool) -> None:
    stack.definition["ResourceRetentionPolicy"] = {"SkipDeregisterOnUpdate": kept}
    first = stack.deploy("create")["Definition"]
    stack.definition["SchedulingPriority"] = 2
    second = stack.deploy()["Definition"]
    assert (first.rpartition(":")[0], first[-2:], second[-2:]) == (second.rpartition(":")[0], ":1", ":2")
    assert stack.shown("jobDefinitions", first)["status"] == ("ACTIVE" if kept else "INACTIVE")
    assert stack.shown("jobDefinitions", second)["schedulingPriority"] == 2


def test_queue_environment_and_policy_are_changed_in_place(stack: BatchStack) -> None:
    before = stack.deploy("create")
    stack.queue |= {"Priority": 5, "Tags": {"New": "tag"}}
    stack.environment["ComputeResources"] |= {"MaxvCpus": 16, "InstanceTypes": ["m6i.4xlarge"]}
    stack.policy["FairsharePolicy"]["ShareDecaySeconds"] = 60
    assert stack.deploy() == before
    queue = stack.shown("jobQueues", before["Queue"])
    assert (queue["priority"], queue["tags"]["New"]) == (5, "tag")
    resources = stack.shown("computeEnvironments", before["Environment"])["computeResources"]
    assert (resources["maxvCpus"], resources["instanceTypes"]) == (16, ["m6i.4xlarge"])
    (policy,) = stack.batch.client.describe_scheduling_policies(arns=[before["Policy"]])["schedulingPolicies"]
    assert policy["fairsharePolicy"]["shareDecaySeconds"] == 60


def test_other_infrastructure_replaces_an_environment_unless_the_template_forbids_it(stack: BatchStack) -> None:
    del stack.environment["ReplaceComputeEnvironment"]
    first = stack.deploy("create")
    stack.environment["ComputeResources"]["InstanceTypes"] = ["m6i.4xlarge"]
    second = stack.deploy()
    assert second["Environment"] != first["Environment"]
    assert second["Queue"] == first["Queue"]
    order = stack.shown("jobQueues", second["Queue"])["computeEnvironmentOrder"]
    assert [item["computeEnvironment"] for item in order] == [second["Environment"]]
    assert stack.shown("computeEnvironments", first["Environment"]) == {}


def test_an_unknown_property_fails_the_stack(stack: BatchStack) -> None:
    stack.queue["Prioritee"] = 1
    with pytest.raises(AssertionError, match=r"extraneous key \[Prioritee\]"):
        stack.deploy("create")
