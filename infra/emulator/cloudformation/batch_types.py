"""AWS::Batch::*; a job definition's Ref has the revision, of which each change makes another."""

from infra.emulator.cloudformation.api import Api, Properties
from infra.emulator.cloudformation.resource_type import TYPES, Made, Plain, ResourceType, holds, without

_TAGGING = ("TagResource", "UntagResource", "ResourceArn")


class ComputeEnvironment(ResourceType):
    """AWS::Batch::ComputeEnvironment."""

    service = "batch"
    name_property = "ComputeEnvironmentName"
    tagging = _TAGGING

    def create(self, api: Api, name: str, properties: Properties) -> Made:
        request = without(properties, "ReplaceComputeEnvironment", "UpdatePolicy")
        request["ComputeResources"] = without(request["ComputeResources"], "UpdateToLatestImageVersion")
        arn = api("CreateComputeEnvironment", **{**request, "ComputeEnvironmentName": name})["computeEnvironmentArn"]
        if "UpdatePolicy" in properties:
            api("UpdateComputeEnvironment", ComputeEnvironment=arn, UpdatePolicy=properties["UpdatePolicy"])
        return Made(arn, {"ComputeEnvironmentArn": arn}, name)

    def change(self, api: Api, made: Made, old: Properties, new: Properties) -> Made:
        request = without(new, "ComputeEnvironmentName", "ReplaceComputeEnvironment", "Tags", "Type")
        request["ComputeResources"] = without(new["ComputeResources"], "SpotIamFleetRole")
        api("UpdateComputeEnvironment", **request, ComputeEnvironment=made.ref)
        return made

    def delete(self, api: Api, made: Made, properties: Properties) -> None:
        api("UpdateComputeEnvironment", ComputeEnvironment=made.ref, State="DISABLED")
        api("DeleteComputeEnvironment", ComputeEnvironment=made.ref)


class JobQueue(ResourceType):
    """AWS::Batch::JobQueue."""

    service = "batch"
    name_property = "JobQueueName"
    tagging = _TAGGING

    def create(self, api: Api, name: str, properties: Properties) -> Made:
        arn = api("CreateJobQueue", **{**properties, "JobQueueName": name})["jobQueueArn"]
        return Made(arn, {"JobQueueArn": arn}, name)

    def change(self, api: Api, made: Made, old: Properties, new: Properties) -> Made:
        api("UpdateJobQueue", **without(new, "JobQueueName", "JobQueueType", "Tags"), JobQueue=made.ref)
        return made

    def delete(self, api: Api, made: Made, properties: Properties) -> None:
        api("UpdateJobQueue", JobQueue=made.ref, State="DISABLED")
        api("DeleteJobQueue", JobQueue=made.ref)


class JobDefinition(ResourceType):
    """AWS::Batch::JobDefinition."""

    service = "batch"
    name_property = "JobDefinitionName"

    def create(self, api: Api, name: str, properties: Properties) -> Made:
        request = {**without(properties, "ResourceRetentionPolicy"), "JobDefinitionName": name}
        arn = api("RegisterJobDefinition", **request)["jobDefinitionArn"]
        return Made(arn, {"JobDefinitionArn": arn}, name)

    def change(self, api: Api, made: Made, old: Properties, new: Properties) -> Made:
        changed = self.create(api, made.name, new)
        if not holds(new.get("ResourceRetentionPolicy", {}).get("SkipDeregisterOnUpdate")):
            self.delete(api, made, old)
        return changed

    def delete(self, api: Api, made: Made, properties: Properties) -> None:
        api("DeregisterJobDefinition", JobDefinition=made.ref)


class SchedulingPolicy(Plain):
    """AWS::Batch::SchedulingPolicy."""

    def change(self, api: Api, made: Made, old: Properties, new: Properties) -> Made:
        api("UpdateSchedulingPolicy", **without(new, "Name", "Tags"), Arn=made.ref)
        return made


TYPES |= {
    "AWS::Batch::ComputeEnvironment": ComputeEnvironment(),
    "AWS::Batch::JobDefinition": JobDefinition(),
    "AWS::Batch::JobQueue": JobQueue(),
    "AWS::Batch::SchedulingPolicy": SchedulingPolicy(
        service="batch",
        name_property="Name",
        create_by="CreateSchedulingPolicy",
        ref="arn",
        attributes={"Arn": "arn"},
        delete_by=("DeleteSchedulingPolicy", "Arn"),
        tagging=_TAGGING,
    ),
}
