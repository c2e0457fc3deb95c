"""AWS::Batch::*; a job definition's Ref has the revision, of which each change makes another."""

from infra.emulator.cloudformation.api import Api, Properties
from infra.emulator.cloudformation.resource_type import TYPES, Made, Row, Tagging, holds


class JobDefinition(Row):
    """AWS::Batch::JobDefinition."""

    def change(self, api: Api, made: Made, old: Properties, new: Properties) -> Made:
        changed = self.create(api, made.name, new)
        if not holds(new.get("ResourceRetentionPolicy", {}).get("SkipDeregisterOnUpdate")):
            self.delete(api, made, old)
        return changed


TYPES |= {
    "AWS::Batch::ComputeEnvironment": Row(
        service="batch",
        name_property="ComputeEnvironmentName",
        create_by="CreateComputeEnvironment",
        ref="computeEnvironmentArn",
        attributes={"ComputeEnvironmentArn": "computeEnvironmentArn"},
        update_by="UpdateComputeEnvironment",
        ids=("ComputeEnvironment",),
        left_out=frozenset({"ReplaceComputeEnvironment"}),
        sets={"UpdatePolicy": lambda policy: ("UpdateComputeEnvironment", {"UpdatePolicy": policy})},
        disable={"State": "DISABLED"},
        tagging=Tagging(),
    ),
    "AWS::Batch::JobDefinition": JobDefinition(
        service="batch",
        name_property="JobDefinitionName",
        create_by="RegisterJobDefinition",
        ref="jobDefinitionArn",
        attributes={"JobDefinitionArn": "jobDefinitionArn"},
        ids=("JobDefinition",),
        left_out=frozenset({"ResourceRetentionPolicy"}),
        delete_by="DeregisterJobDefinition",
    ),
    "AWS::Batch::JobQueue": Row(
        service="batch",
        name_property="JobQueueName",
        create_by="CreateJobQueue",
        ref="jobQueueArn",
        attributes={"JobQueueArn": "jobQueueArn"},
        update_by="UpdateJobQueue",
        emptied={"JobStateTimeLimitActions": []},
        ids=("JobQueue",),
        disable={"State": "DISABLED"},
        tagging=Tagging(),
    ),
    "AWS::Batch::SchedulingPolicy": Row(
        service="batch",
        name_property="Name",
        create_by="CreateSchedulingPolicy",
        ref="arn",
        attributes={"Arn": "arn"},
        update_by="UpdateSchedulingPolicy",
        tagging=Tagging(),
    ),
}
