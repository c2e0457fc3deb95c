"""AWS::Batch::* in CloudFormation templates: what the stack makes, changes and deletes through the Batch backend.

Ref is the ARN for all four types, as the CloudFormation reference has it; a job definition's has the revision.
"""

from collections.abc import Mapping
from typing import Any

from moto.batch.exceptions import ClientException
from moto.batch.models import batch_backends
from moto.cloudformation.utils import random_suffix

from infra.emulator.batch.backend import BatchBackend
from infra.emulator.resource_model import AccountRegion, ChangeableModel, Properties
from infra.emulator.shapes import to_api

_IN_PLACE = frozenset({"desiredvCpus", "maxvCpus", "minvCpus"})
"""Compute resources that never need the environment to be replaced."""


class BatchResource(ChangeableModel):
    """An ARN and a place, and the ways to change what is there: what the four types of resources share."""

    attributes: tuple[str, ...] = ()
    """Names of Fn::GetAtt that give the ARN."""
    makes_revisions = False
    """True: each change gives it another ARN."""

    def __init__(self, arn: str, properties: Properties, place: AccountRegion) -> None:
        self.arn = arn
        self.properties = properties
        self.place = place

    @property
    def backend(self) -> BatchBackend:
        return _backend(self.place)

    @property
    def physical_resource_id(self) -> str:
        return self.arn

    @classmethod
    def has_cfn_attr(cls, attr: str) -> bool:
        return attr in cls.attributes

    def get_cfn_attribute(self, attribute_name: str) -> str:
        """Answer Fn::GetAtt. Raises NotImplementedError on an attribute that the type does not have."""
        if attribute_name not in self.attributes:
            raise NotImplementedError(f'"Fn::GetAtt" : [ "{{0}}" , "{attribute_name}" ]')
        return self.arn

    @classmethod
    def create(cls, name: str, properties: Properties, place: AccountRegion) -> "BatchResource":
        return cls(cls.register(_backend(place), name, properties), properties, place)

    @classmethod
    def register(cls, backend: BatchBackend, name: str, properties: Properties) -> str:
        """Make one; its ARN."""
        raise NotImplementedError

    @classmethod
    def update(
        cls, resource: "BatchResource", name: str, properties: Properties, place: AccountRegion
    ) -> "BatchResource":
        del name  # the template says what is named
        given = properties.get(cls.name_property)
        if given != resource.properties.get(cls.name_property) or resource.must_replace(properties):
            replacement = cls.create(given or _another_name(resource.arn), properties, place)
            resource.give_way()
            return replacement
        return cls(resource.change(properties), properties, place)

    def must_replace(self, properties: Properties) -> bool:  # noqa: ARG002 - one type looks at them
        """Say whether a change needs a new resource."""
        return False

    def change(self, properties: Properties) -> str:
        """Change it in place; its ARN afterwards."""
        raise NotImplementedError

    def give_way(self) -> None:
        """Delete it: its replacement is there."""
        self.delete(self.arn, self.place)


class ComputeEnvironmentResource(BatchResource):
    """AWS::Batch::ComputeEnvironment."""

    resource_type = "AWS::Batch::ComputeEnvironment"
    name_property = "ComputeEnvironmentName"
    attributes = ("ComputeEnvironmentArn",)

    @classmethod
    def register(cls, backend: BatchBackend, name: str, properties: Properties) -> str:
        request = _without(properties, "ReplaceComputeEnvironment", "UpdatePolicy")
        if "ComputeResources" in request:  # says something about updates only
            request["ComputeResources"] = _without(request["ComputeResources"], "UpdateToLatestImageVersion")
        environment = backend.create_environment(
            to_api("batch", "CreateComputeEnvironment", {**request, "ComputeEnvironmentName": name})
        )
        if "UpdatePolicy" in properties:
            changes = {"ComputeEnvironment": environment.arn, "UpdatePolicy": properties["UpdatePolicy"]}
            backend.update_environment(to_api("batch", "UpdateComputeEnvironment", changes))
        return environment.arn

    def must_replace(self, properties: Properties) -> bool:
        """Another type always does; other resources do unless the template says ReplaceComputeEnvironment: false."""
        if properties.get("Type") != self.properties.get("Type"):
            return True
        in_place = str(properties.get("ReplaceComputeEnvironment", True)).lower() == "false"
        return not in_place and _infrastructure(properties) != _infrastructure(self.properties)

    def change(self, properties: Properties) -> str:
        request = _without(properties, "ComputeEnvironmentName", "ReplaceComputeEnvironment", "Tags", "Type")
        if "ComputeResources" in request:
            request["ComputeResources"] = _without(request["ComputeResources"], "SpotIamFleetRole")
        self.backend.update_environment(
            to_api("batch", "UpdateComputeEnvironment", {**request, "ComputeEnvironment": self.arn})
        )
        _change_tags(self.backend, self.arn, self.properties, properties)
        return self.arn

    @classmethod
    def delete(cls, name: str, place: AccountRegion) -> None:
        backend = _backend(place)
        backend.update_environment({"computeEnvironment": name, "state": "DISABLED"})
        backend.delete_environment(name)

    def give_way(self) -> None:
        # The queues that have it are changed after it.
        self.backend.retire_environment(self.arn)


class JobQueueResource(BatchResource):
    """AWS::Batch::JobQueue."""

    resource_type = "AWS::Batch::JobQueue"
    name_property = "JobQueueName"
    attributes = ("JobQueueArn",)

    @classmethod
    def register(cls, backend: BatchBackend, name: str, properties: Properties) -> str:
        return backend.create_queue(to_api("batch", "CreateJobQueue", {**properties, "JobQueueName": name})).arn

    def change(self, properties: Properties) -> str:
        request = _without(properties, "JobQueueName", "JobQueueType", "Tags")
        self.backend.update_queue(to_api("batch", "UpdateJobQueue", {**request, "JobQueue": self.arn}))
        _change_tags(self.backend, self.arn, self.properties, properties)
        return self.arn

    @classmethod
    def delete(cls, name: str, place: AccountRegion) -> None:
        backend = _backend(place)
        backend.update_queue({"jobQueue": name, "state": "DISABLED"})
        backend.delete_queue(name)


class JobDefinitionResource(BatchResource):
    """AWS::Batch::JobDefinition: an update registers a new revision."""

    resource_type = "AWS::Batch::JobDefinition"
    name_property = "JobDefinitionName"
    attributes = ("JobDefinitionArn",)
    makes_revisions = True

    @classmethod
    def register(cls, backend: BatchBackend, name: str, properties: Properties) -> str:
        request = {**_without(properties, "ResourceRetentionPolicy"), "JobDefinitionName": name}
        return backend.register_definition(to_api("batch", "RegisterJobDefinition", request)).arn

    def change(self, properties: Properties) -> str:
        name = self.arn.rsplit("/", 1)[-1].rpartition(":")[0]
        arn = self.register(self.backend, name, properties)
        policy = properties.get("ResourceRetentionPolicy") or {}
        if str(policy.get("SkipDeregisterOnUpdate", False)).lower() != "true":
            self.backend.deregister_definition(self.arn)
        return arn

    @classmethod
    def delete(cls, name: str, place: AccountRegion) -> None:
        _backend(place).deregister_definition(name)


class SchedulingPolicyResource(BatchResource):
    """AWS::Batch::SchedulingPolicy."""

    resource_type = "AWS::Batch::SchedulingPolicy"
    name_property = "Name"
    attributes = ("Arn",)

    @classmethod
    def register(cls, backend: BatchBackend, name: str, properties: Properties) -> str:
        request = to_api("batch", "CreateSchedulingPolicy", {**properties, "Name": name})
        _refuse_quota_shares(request)
        policy = backend.create_scheduling_policy(name, request.get("fairsharePolicy", {}), request.get("tags", {}))
        return str(policy.arn)

    def change(self, properties: Properties) -> str:
        request = to_api("batch", "UpdateSchedulingPolicy", {**_without(properties, "Name", "Tags"), "Arn": self.arn})
        _refuse_quota_shares(request)
        self.backend.update_scheduling_policy(self.arn, request.get("fairsharePolicy", {}))
        _change_tags(self.backend, self.arn, self.properties, properties)
        return self.arn

    @classmethod
    def delete(cls, name: str, place: AccountRegion) -> None:
        _backend(place).delete_scheduling_policy(name)


def _backend(place: AccountRegion) -> BatchBackend:
    backend: BatchBackend = batch_backends[place.account_id][place.region]
    return backend


def _without(properties: Properties, *names: str) -> dict[str, Any]:
    return {name: value for name, value in properties.items() if name not in names}


def _infrastructure(properties: Properties) -> dict[str, Any]:
    resources = properties.get("ComputeResources") or {}
    return {name: value for name, value in resources.items() if name[:1].lower() + name[1:] not in _IN_PLACE}


def _another_name(arn: str) -> str:
    """A fresh name for what replaces a resource: names are unique, and both exist for a moment."""
    name = arn.rsplit("/", 1)[-1]
    return f"{(name.rpartition('-')[0] or name)[:100]}-{random_suffix()}"


def _change_tags(backend: BatchBackend, arn: str, old: Properties, new: Properties) -> None:
    gone = set(old.get("Tags") or {}) - set(new.get("Tags") or {})
    if gone:
        backend.untag_resource(arn, sorted(gone))
    if new.get("Tags"):
        backend.tag_resource(arn, dict(new["Tags"]))


def _refuse_quota_shares(request: Mapping[str, Any]) -> None:
    if request.get("quotaSharePolicy"):
        raise ClientException("quotaSharePolicy: the embedded AWS Batch knows fair-share policies only")
