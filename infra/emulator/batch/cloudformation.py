"""AWS::Batch::* in CloudFormation templates: what the stack makes, changes and deletes through the Batch backend.

Ref is the ARN for all four types, as the CloudFormation reference has it; a job definition's has the revision.
"""

from collections.abc import Mapping
from typing import Any

from moto.batch.exceptions import ClientException
from moto.batch.models import batch_backends
from moto.cloudformation.utils import random_suffix
from moto.core.common_models import CloudFormationModel

from infra.emulator.batch.backend import BatchBackend
from infra.emulator.batch.shapes import to_api

_IN_PLACE = frozenset({"desiredvCpus", "maxvCpus", "minvCpus"})
"""Compute resources that never need the environment to be replaced."""


class BatchResource(CloudFormationModel):
    """What the four have in common: an ARN, a place, and the CloudFormation interface of moto."""

    name_property = ""
    attributes: tuple[str, ...] = ()
    """Names of Fn::GetAtt that give the ARN."""

    def __init__(self, arn: str, properties: Mapping[str, Any], *, account_id: str, region: str) -> None:
        self.arn = arn
        self.properties = properties
        self.account_id = account_id
        self.region = region

    @property
    def backend(self) -> BatchBackend:
        return _backend(self.account_id, self.region)

    @property
    def physical_resource_id(self) -> str:
        return self.arn

    @classmethod
    def cloudformation_name_type(cls) -> str:
        return cls.name_property

    @classmethod
    def cloudformation_type(cls) -> str:
        return ""

    @classmethod
    def has_cfn_attr(cls, attr: str) -> bool:
        return attr in cls.attributes

    def get_cfn_attribute(self, attribute_name: str) -> str:
        """Raises NotImplementedError on an attribute that the type does not have."""
        if attribute_name not in self.attributes:
            raise NotImplementedError(f'"Fn::GetAtt" : [ "{{0}}" , "{attribute_name}" ]')
        return self.arn

    @classmethod
    def create_from_cloudformation_json(
        cls,
        resource_name: str,
        cloudformation_json: Mapping[str, Any],
        account_id: str,
        region_name: str,
        **_: Any,
    ) -> "BatchResource":
        properties = cloudformation_json["Properties"]
        arn = cls.create(_backend(account_id, region_name), resource_name, properties)
        return cls(arn, properties, account_id=account_id, region=region_name)

    @classmethod
    def create(cls, backend: BatchBackend, name: str, properties: Mapping[str, Any]) -> str:
        """Make one; its ARN."""
        raise NotImplementedError

    @classmethod
    def update_from_cloudformation_json(
        cls,
        original_resource: "BatchResource",
        new_resource_name: str,  # noqa: ARG003 - of moto's interface; the template says what is named
        cloudformation_json: Mapping[str, Any],
        account_id: str,
        region_name: str,
    ) -> "BatchResource":
        properties = cloudformation_json["Properties"]
        new_name = properties.get(cls.name_property)
        if new_name != original_resource.properties.get(cls.name_property) or original_resource.must_replace(
            properties
        ):
            name = new_name or _another_name(original_resource.arn)
            replacement = cls.create_from_cloudformation_json(name, cloudformation_json, account_id, region_name)
            original_resource.give_way()
            return replacement
        arn = original_resource.change(properties)
        return cls(arn, properties, account_id=account_id, region=region_name)

    def must_replace(self, properties: Mapping[str, Any]) -> bool:  # noqa: ARG002 - one type looks at them
        """Whether such a change needs a new resource."""
        return False

    def change(self, properties: Mapping[str, Any]) -> str:
        """Change it in place; its ARN afterwards."""
        raise NotImplementedError

    def delete(self, account_id: str, region_name: str) -> None:
        raise NotImplementedError

    def give_way(self) -> None:
        """Delete it: its replacement is there."""
        self.delete(self.account_id, self.region)


class ComputeEnvironmentResource(BatchResource):
    """AWS::Batch::ComputeEnvironment."""

    name_property = "ComputeEnvironmentName"
    attributes = ("ComputeEnvironmentArn",)

    @classmethod
    def cloudformation_type(cls) -> str:
        return "AWS::Batch::ComputeEnvironment"

    @classmethod
    def create(cls, backend: BatchBackend, name: str, properties: Mapping[str, Any]) -> str:
        request = _without(properties, "ReplaceComputeEnvironment", "UpdatePolicy")
        if "ComputeResources" in request:  # says something about updates only
            request["ComputeResources"] = _without(request["ComputeResources"], "UpdateToLatestImageVersion")
        environment = backend.create_environment(
            to_api("CreateComputeEnvironment", {**request, "ComputeEnvironmentName": name})
        )
        if "UpdatePolicy" in properties:
            changes = {"ComputeEnvironment": environment.arn, "UpdatePolicy": properties["UpdatePolicy"]}
            backend.update_environment(to_api("UpdateComputeEnvironment", changes))
        return environment.arn

    def must_replace(self, properties: Mapping[str, Any]) -> bool:
        """Another type always, other compute resources unless the template says ReplaceComputeEnvironment: false."""
        if properties.get("Type") != self.properties.get("Type"):
            return True
        in_place = str(properties.get("ReplaceComputeEnvironment", True)).lower() == "false"
        return not in_place and _infrastructure(properties) != _infrastructure(self.properties)

    def change(self, properties: Mapping[str, Any]) -> str:
        request = _without(properties, "ComputeEnvironmentName", "ReplaceComputeEnvironment", "Tags", "Type")
        if "ComputeResources" in request:
            request["ComputeResources"] = _without(request["ComputeResources"], "SpotIamFleetRole")
        self.backend.update_environment(to_api("UpdateComputeEnvironment", {**request, "ComputeEnvironment": self.arn}))
        _change_tags(self.backend, self.arn, self.properties, properties)
        return self.arn

    def delete(self, account_id: str, region_name: str) -> None:
        backend = _backend(account_id, region_name)
        backend.update_environment({"computeEnvironment": self.arn, "state": "DISABLED"})
        backend.delete_environment(self.arn)

    def give_way(self) -> None:
        # The queues that have it are changed after it.
        self.backend.retire_environment(self.arn)


class JobQueueResource(BatchResource):
    """AWS::Batch::JobQueue."""

    name_property = "JobQueueName"
    attributes = ("JobQueueArn",)

    @classmethod
    def cloudformation_type(cls) -> str:
        return "AWS::Batch::JobQueue"

    @classmethod
    def create(cls, backend: BatchBackend, name: str, properties: Mapping[str, Any]) -> str:
        return backend.create_queue(to_api("CreateJobQueue", {**properties, "JobQueueName": name})).arn

    def change(self, properties: Mapping[str, Any]) -> str:
        request = _without(properties, "JobQueueName", "JobQueueType", "Tags")
        self.backend.update_queue(to_api("UpdateJobQueue", {**request, "JobQueue": self.arn}))
        _change_tags(self.backend, self.arn, self.properties, properties)
        return self.arn

    def delete(self, account_id: str, region_name: str) -> None:
        backend = _backend(account_id, region_name)
        backend.update_queue({"jobQueue": self.arn, "state": "DISABLED"})
        backend.delete_queue(self.arn)


class JobDefinitionResource(BatchResource):
    """AWS::Batch::JobDefinition: an update registers a new revision."""

    name_property = "JobDefinitionName"
    attributes = ("JobDefinitionArn",)

    @classmethod
    def cloudformation_type(cls) -> str:
        return "AWS::Batch::JobDefinition"

    @classmethod
    def create(cls, backend: BatchBackend, name: str, properties: Mapping[str, Any]) -> str:
        request = {**_without(properties, "ResourceRetentionPolicy"), "JobDefinitionName": name}
        return backend.register_definition(to_api("RegisterJobDefinition", request)).arn

    def change(self, properties: Mapping[str, Any]) -> str:
        name = self.arn.rsplit("/", 1)[-1].rpartition(":")[0]
        arn = self.create(self.backend, name, properties)
        policy = properties.get("ResourceRetentionPolicy") or {}
        if str(policy.get("SkipDeregisterOnUpdate", False)).lower() != "true":
            self.backend.deregister_definition(self.arn)
        return arn

    def delete(self, account_id: str, region_name: str) -> None:
        _backend(account_id, region_name).deregister_definition(self.arn)


class SchedulingPolicyResource(BatchResource):
    """AWS::Batch::SchedulingPolicy."""

    name_property = "Name"
    attributes = ("Arn",)

    @classmethod
    def cloudformation_type(cls) -> str:
        return "AWS::Batch::SchedulingPolicy"

    @classmethod
    def create(cls, backend: BatchBackend, name: str, properties: Mapping[str, Any]) -> str:
        request = to_api("CreateSchedulingPolicy", {**properties, "Name": name})
        _refuse_quota_shares(request)
        policy = backend.create_scheduling_policy(name, request.get("fairsharePolicy", {}), request.get("tags", {}))
        return str(policy.arn)

    def change(self, properties: Mapping[str, Any]) -> str:
        request = to_api("UpdateSchedulingPolicy", {**_without(properties, "Name", "Tags"), "Arn": self.arn})
        _refuse_quota_shares(request)
        self.backend.update_scheduling_policy(self.arn, request.get("fairsharePolicy", {}))
        _change_tags(self.backend, self.arn, self.properties, properties)
        return self.arn

    def delete(self, account_id: str, region_name: str) -> None:
        _backend(account_id, region_name).delete_scheduling_policy(self.arn)


def _backend(account_id: str, region: str) -> BatchBackend:
    backend: BatchBackend = batch_backends[account_id][region]
    return backend


def _without(properties: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in properties.items() if name not in names}


def _infrastructure(properties: Mapping[str, Any]) -> dict[str, Any]:
    resources = properties.get("ComputeResources") or {}
    return {name: value for name, value in resources.items() if name[:1].lower() + name[1:] not in _IN_PLACE}


def _another_name(arn: str) -> str:
    """A fresh name for what replaces a resource: names are unique, and both exist for a moment."""
    name = arn.rsplit("/", 1)[-1]
    return f"{(name.rpartition('-')[0] or name)[:100]}-{random_suffix()}"


def _change_tags(backend: BatchBackend, arn: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    gone = set(old.get("Tags") or {}) - set(new.get("Tags") or {})
    if gone:
        backend.untag_resource(arn, sorted(gone))
    if new.get("Tags"):
        backend.tag_resource(arn, dict(new["Tags"]))


def _refuse_quota_shares(request: Mapping[str, Any]) -> None:
    if request.get("quotaSharePolicy"):
        raise ClientException("quotaSharePolicy: the embedded AWS Batch knows fair-share policies only")
