"""AWS::Batch::* in templates: made, changed and deleted as the stack says, and really used by jobs."""

import json
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from tests.support.emulator.batch_calls import Batch


class BatchStack:
    """A stack with a compute environment, a scheduling policy, a queue and a job definition."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.name = f"batch-{uuid.uuid4().hex[:8]}"
        self.client = batch.aws.client("cloudformation")
        self.resources: dict[str, Any] = {
            "Environment": {
                "Type": "AWS::Batch::ComputeEnvironment",
                "Properties": {
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
                        "UpdateToLatestImageVersion": True,
                        "Tags": {"Name": "instance"},
                    },
                    "Tags": {"Team": "platform"},
                },
            },
            "Policy": {
                "Type": "AWS::Batch::SchedulingPolicy",
                "Properties": {
                    "FairsharePolicy": {
                        "ShareDecaySeconds": 3600,
                        "ShareDistribution": [{"ShareIdentifier": "research", "WeightFactor": 0.5}],
                    }
                },
            },
            "Queue": {
                "Type": "AWS::Batch::JobQueue",
                "Properties": {
                    "Priority": 1,
                    "SchedulingPolicyArn": {"Fn::GetAtt": ["Policy", "Arn"]},
                    "ComputeEnvironmentOrder": [
                        {"Order": 1, "ComputeEnvironment": {"Fn::GetAtt": ["Environment", "ComputeEnvironmentArn"]}}
                    ],
                    "JobStateTimeLimitActions": [
                        {
                            "Action": "CANCEL",
                            "State": "RUNNABLE",
                            "MaxTimeSeconds": 600,
                            "Reason": "MISCONFIGURATION:JOB_RESOURCE_REQUIREMENT",
                        }
                    ],
                },
            },
            "Definition": {
                "Type": "AWS::Batch::JobDefinition",
                "Properties": {
                    "Type": "container",
                    "PlatformCapabilities": ["EC2"],
                    "PropagateTags": True,
                    "SchedulingPriority": 1,
                    "Timeout": {"AttemptDurationSeconds": 600},
                    "RetryStrategy": {
                        "Attempts": 2,
                        "EvaluateOnExit": [{"OnExitCode": "75", "Action": "RETRY"}],
                    },
                    "EcsProperties": {
                        "TaskProperties": [
                            {
                                "IpcMode": "host",
                                "Containers": [
                                    {
                                        "Name": "main",
                                        "Image": "stand-in",
                                        "Essential": "true",
                                        "Command": ["echo", "hello"],
                                        "Environment": [{"Name": "Key", "Value": "Value"}],
                                        "ResourceRequirements": [
                                            {"Type": "VCPU", "Value": "1"},
                                            {"Type": "MEMORY", "Value": "128"},
                                        ],
                                    }
                                ],
                            }
                        ]
                    },
                    "Tags": {"Team": "research"},
                },
            },
        }

    def create(self) -> None:
        self.client.create_stack(StackName=self.name, TemplateBody=self.template())
        self._expect("CREATE_COMPLETE")

    def update(self) -> None:
        self.client.update_stack(StackName=self.name, TemplateBody=self.template())
        self._expect("UPDATE_COMPLETE")

    def delete(self) -> None:
        self.client.delete_stack(StackName=self.name)

    def properties(self, logical_id: str) -> dict[str, Any]:
        properties: dict[str, Any] = self.resources[logical_id]["Properties"]
        return properties

    def physical_id(self, logical_id: str) -> str:
        detail = self.client.describe_stack_resource(StackName=self.name, LogicalResourceId=logical_id)
        physical_id: str = detail["StackResourceDetail"]["PhysicalResourceId"]
        return physical_id

    def outputs(self) -> dict[str, str]:
        (stack,) = self.client.describe_stacks(StackName=self.name)["Stacks"]
        return {output["OutputKey"]: output["OutputValue"] for output in stack["Outputs"]}

    def environment(self) -> dict[str, Any]:
        (found,) = self.batch.client.describe_compute_environments(
            computeEnvironments=[self.physical_id("Environment")]
        )["computeEnvironments"]
        return dict(found)

    def queue(self) -> dict[str, Any]:
        (found,) = self.batch.client.describe_job_queues(jobQueues=[self.physical_id("Queue")])["jobQueues"]
        return dict(found)

    def definition(self, arn: str | None = None) -> dict[str, Any]:
        (found,) = self.batch.client.describe_job_definitions(jobDefinitions=[arn or self.physical_id("Definition")])[
            "jobDefinitions"
        ]
        return dict(found)

    def run(self) -> Mapping[str, Any]:
        """A job of the stack's definition in the stack's queue, to its end."""
        job_id = self.batch.submit(
            self.physical_id("Definition"), self.physical_id("Queue"), shareIdentifier="research"
        )
        return self.batch.ended(job_id)

    def template(self) -> str:
        attributes = {
            "Environment": "ComputeEnvironmentArn",
            "Queue": "JobQueueArn",
            "Definition": "JobDefinitionArn",
            "Policy": "Arn",
        }
        outputs = {
            logical_id: {"Value": {"Fn::GetAtt": [logical_id, attribute]}}
            for logical_id, attribute in attributes.items()
        }
        return json.dumps({"Resources": self.resources, "Outputs": outputs})

    def _expect(self, status: str) -> None:
        (stack,) = self.client.describe_stacks(StackName=self.name)["Stacks"]
        assert stack["StackStatus"] == status, stack.get("StackStatusReason")


@pytest.fixture
def stack(batch: Batch) -> Iterator[BatchStack]:
    stack = BatchStack(batch)
    yield stack
    stack.delete()


def test_a_stack_makes_what_jobs_need(stack: BatchStack) -> None:
    stack.create()
    environment, queue, definition = stack.environment(), stack.queue(), stack.definition()
    assert environment["computeResources"]["maxvCpus"] == 8
    assert environment["computeResources"]["tags"] == {"Name": "instance"}
    assert environment["updatePolicy"] == {"terminateJobsOnUpdate": False, "jobExecutionTimeoutMinutes": 60}
    assert environment["tags"]["Team"] == "platform"
    assert queue["computeEnvironmentOrder"] == [{"order": 1, "computeEnvironment": stack.physical_id("Environment")}]
    assert queue["schedulingPolicyArn"] == stack.physical_id("Policy")
    assert queue["jobStateTimeLimitActions"][0]["maxTimeSeconds"] == 600
    assert definition["timeout"] == {"attemptDurationSeconds": 600}
    assert definition["retryStrategy"] == {
        "attempts": 2,
        "evaluateOnExit": [{"onExitCode": "75", "action": "retry"}],
    }
    assert definition["propagateTags"] is True
    assert definition["tags"]["Team"] == "research"
    (task,) = definition["ecsProperties"]["taskProperties"]
    assert task["ipcMode"] == "host"
    assert task["containers"][0]["essential"] is True
    assert task["containers"][0]["environment"] == [{"name": "Key", "value": "Value"}]
    policies = stack.batch.client.describe_scheduling_policies(arns=[stack.physical_id("Policy")])
    assert policies["schedulingPolicies"][0]["fairsharePolicy"]["shareDistribution"] == [
        {"shareIdentifier": "research", "weightFactor": 0.5}
    ]
    # Ref and Fn::GetAtt both give the ARN.
    assert stack.outputs() == {logical_id: stack.physical_id(logical_id) for logical_id in stack.resources}
    assert all(arn.startswith("arn:aws:batch:us-east-1:123456789012:") for arn in stack.outputs().values())
    job = stack.run()
    (shown,) = job["attempts"][0]["taskProperties"][0]["containers"]
    assert stack.batch.lines(shown["logStreamName"]) == ["hello"]


@pytest.mark.parametrize("kept", [False, True])
def test_an_update_of_a_definition_registers_a_revision(stack: BatchStack, kept: bool) -> None:
    stack.properties("Definition")["ResourceRetentionPolicy"] = {"SkipDeregisterOnUpdate": kept}
    stack.create()
    first = stack.physical_id("Definition")
    stack.properties("Definition")["SchedulingPriority"] = 2
    stack.update()
    second = stack.physical_id("Definition")
    assert (first.rpartition(":")[0], first[-2:], second[-2:]) == (second.rpartition(":")[0], ":1", ":2")
    assert stack.definition(first)["status"] == ("ACTIVE" if kept else "INACTIVE")
    assert stack.definition(second)["schedulingPriority"] == 2
    assert stack.outputs()["Definition"] == second


def test_queue_environment_and_policy_are_changed_in_place(stack: BatchStack) -> None:
    stack.create()
    before = {logical_id: stack.physical_id(logical_id) for logical_id in ("Environment", "Queue", "Policy")}
    stack.properties("Queue").update(Priority=5, Tags={"New": "tag"})
    stack.properties("Environment")["ComputeResources"]["MaxvCpus"] = 16
    stack.properties("Environment")["ComputeResources"]["Ec2Configuration"] = [{"ImageType": "ECS_AL2023"}]
    stack.properties("Policy")["FairsharePolicy"]["ShareDecaySeconds"] = 60
    stack.update()
    assert before == {logical_id: stack.physical_id(logical_id) for logical_id in before}
    assert (stack.queue()["priority"], stack.queue()["tags"]["New"]) == (5, "tag")
    resources = stack.environment()["computeResources"]
    assert (resources["maxvCpus"], resources["ec2Configuration"]) == (16, [{"imageType": "ECS_AL2023"}])
    (policy,) = stack.batch.client.describe_scheduling_policies(arns=[before["Policy"]])["schedulingPolicies"]
    assert policy["fairsharePolicy"]["shareDecaySeconds"] == 60


def test_other_infrastructure_replaces_an_environment_unless_the_template_forbids_it(stack: BatchStack) -> None:
    stack.properties("Environment").pop("ReplaceComputeEnvironment")
    stack.create()
    first = stack.physical_id("Environment")
    stack.properties("Environment")["ComputeResources"]["MaxvCpus"] = 4  # which needs no replacement
    stack.update()
    assert stack.physical_id("Environment") == first
    stack.properties("Environment")["ComputeResources"]["InstanceTypes"] = ["m6i.4xlarge"]
    stack.update()
    second = stack.environment()
    assert second["computeEnvironmentArn"] != first
    assert second["computeResources"]["instanceTypes"] == ["m6i.4xlarge"]
    assert stack.queue()["computeEnvironmentOrder"][0]["computeEnvironment"] == second["computeEnvironmentArn"]
    left = stack.batch.client.describe_compute_environments(computeEnvironments=[first])["computeEnvironments"]
    assert left == []
    assert stack.run()["status"] == "SUCCEEDED"


def test_deleting_the_stack_deletes_all(stack: BatchStack) -> None:
    stack.create()
    ids = {logical_id: stack.physical_id(logical_id) for logical_id in stack.resources}
    stack.delete()
    client = stack.batch.client
    assert client.describe_job_queues(jobQueues=[ids["Queue"]])["jobQueues"] == []
    assert client.describe_compute_environments(computeEnvironments=[ids["Environment"]])["computeEnvironments"] == []
    assert stack.definition(ids["Definition"])["status"] == "INACTIVE"
    assert client.describe_scheduling_policies(arns=[ids["Policy"]])["schedulingPolicies"] == []


def test_an_unknown_property_fails_the_stack(stack: BatchStack) -> None:
    stack.properties("Queue")["Prioritee"] = 1
    stack.client.create_stack(StackName=stack.name, TemplateBody=stack.template())
    (shown,) = stack.client.describe_stacks(StackName=stack.name)["Stacks"]
    assert shown["StackStatus"] == "ROLLBACK_COMPLETE"
    events = stack.client.describe_stack_events(StackName=stack.name)["StackEvents"]
    assert any("extraneous key [Prioritee]" in event.get("ResourceStatusReason", "") for event in events)
