"""Compute environments and job queues. The capacity of an environment is maxvCpus; no instance is started.

Source: AWS Batch user guide, "Updating compute environments": a changed setting of the instances starts an
infrastructure update, during which the status is UPDATING. Here it lasts until no job runs in the environment.
"""

import copy
from collections.abc import Mapping
from typing import Any

from moto.batch.exceptions import ClientException
from moto.batch.utils import make_arn_for_compute_env, make_arn_for_job_queue

from infra.emulator.batch.job_definition import check_name

_TYPES = ("EC2", "SPOT")
_STATES = ("ENABLED", "DISABLED")
MAX_QUEUE_ENVIRONMENTS = 3
_SCALING = frozenset({"minvCpus", "maxvCpus", "desiredvCpus"})
"""Compute resources that Batch changes without replacing instances."""


class _BatchResource:
    """Common to environments and queues: their properties are those of the request, with later updates."""

    kind: str
    """Prefix of its property names."""
    name: str
    arn: str
    properties: dict[str, Any]
    status: str = "VALID"

    @property
    def enabled(self) -> bool:
        return bool(self.properties["state"] == "ENABLED")

    @property
    def named(self) -> dict[str, str]:
        """Return the response to a request that creates or updates it."""
        return {f"{self.kind}Name": self.name, f"{self.kind}Arn": self.arn}

    def describe(self, tags: Mapping[str, str]) -> dict[str, Any]:
        """Return it as the Describe operations do."""
        return {
            **copy.deepcopy(self.properties),
            f"{self.kind}Arn": self.arn,
            "status": self.status,
            "statusReason": f"{self.kind[0].upper()}{self.kind[1:]} Healthy",
            "tags": dict(tags),
        }


class ComputeEnvironment(_BatchResource):
    """A compute environment."""

    kind = "computeEnvironment"

    def __init__(self, request: Mapping[str, Any], *, account_id: str, region: str) -> None:
        """Raises ClientException if Batch refuses the request."""
        self.properties = {"state": "ENABLED", **_without(request, "tags")}
        _check_environment(self.properties)
        self.name = self.properties["computeEnvironmentName"]
        self.arn = make_arn_for_compute_env(account_id, self.name, region)
        self.properties.setdefault(
            "serviceRole",
            f"arn:aws:iam::{account_id}:role/aws-service-role/batch.amazonaws.com/AWSServiceRoleForBatch",
        )
        # The name of its cluster in moto's ECS. Batch also names the cluster after the environment.
        self.ecs_name = f"AWSBatch-{self.name}"
        self.ecs_arn = ""
        self.used_vcpus = 0.0

    @property
    def resources(self) -> Mapping[str, Any]:
        resources: Mapping[str, Any] = self.properties["computeResources"]
        return resources

    @property
    def max_vcpus(self) -> float:
        """Return the capacity in vCPUs."""
        return float(self.resources["maxvCpus"])

    @property
    def accepts_multinode(self) -> bool:
        """Return whether multi-node jobs can run here. Only On-Demand environments accept them."""
        return self.resources.get("type") == "EC2"

    def update(self, changes: Mapping[str, Any]) -> None:
        """Update it. Raises ClientException and changes nothing if Batch refuses."""
        if self.status == "UPDATING":
            raise ClientException("Cannot update, resource is being modified.")
        properties = {**self.properties, **_without(changes, "computeEnvironment", "computeResources")}
        resources = properties["computeResources"] = {**self.resources, **(changes.get("computeResources") or {})}
        _check_environment(properties)
        if self.used_vcpus and any(resources[name] != self.resources.get(name) for name in resources.keys() - _SCALING):
            self.status = "UPDATING"
        self.properties = properties

    def release(self, vcpus: float) -> None:
        """Free the vCPUs of an attempt that has ended. The last one ends an infrastructure update."""
        self.used_vcpus -= vcpus
        if not self.used_vcpus:
            self.status = "VALID"

    def describe(self, tags: Mapping[str, str]) -> dict[str, Any]:
        return {**super().describe(tags), "ecsClusterArn": self.ecs_arn, "containerOrchestrationType": "ECS"}


class JobQueue(_BatchResource):
    """A job queue."""

    kind = "jobQueue"

    def __init__(
        self, request: Mapping[str, Any], environments: list[ComputeEnvironment], *, account_id: str, region: str
    ) -> None:
        """`environments` are in the order of the request. Raises ClientException if Batch refuses the request."""
        self.properties = {"state": "ENABLED", **_without(request, "tags")}
        self.environments = environments
        _check_queue(self.properties, environments)
        self.name = self.properties["jobQueueName"]
        self.arn = make_arn_for_job_queue(account_id, self.name, region)

    @property
    def priority(self) -> int:
        return int(self.properties["priority"])

    @property
    def scheduling_policy_arn(self) -> str | None:
        return self.properties.get("schedulingPolicyArn")

    def update(self, changes: Mapping[str, Any], environments: list[ComputeEnvironment]) -> None:
        """Update it. Raises ClientException and changes nothing if Batch refuses."""
        if changes.get("schedulingPolicyArn") and not self.scheduling_policy_arn:
            raise ClientException("A job queue without a fair-share scheduling policy can't have one added")
        properties = {**self.properties, **_without(changes, "jobQueue")}
        _check_queue(properties, environments)
        self.properties, self.environments = properties, environments

    def describe(self, tags: Mapping[str, str]) -> dict[str, Any]:
        return {**super().describe(tags), "jobQueueType": "ECS"}


def _check_environment(properties: Mapping[str, Any]) -> None:
    check_name(properties.get("computeEnvironmentName"), "computeEnvironmentName")
    _check_state(properties)
    if properties.get("type") != "MANAGED" or properties.get("eksConfiguration"):
        raise ClientException("the emulator supports only MANAGED compute environments on ECS")
    resources = properties.get("computeResources") or {}
    if resources.get("type") not in _TYPES:
        raise ClientException(f"computeResources.type must be {' or '.join(_TYPES)} on the emulator")
    if "desiredvCpus" in resources:
        raise ClientException("computeResources.desiredvCpus is not supported: the emulator starts no instances")
    for name in ("subnets", "instanceRole"):
        if not resources.get(name):
            raise ClientException(f"computeResources.{name} is missing")
    if not 0 <= resources.get("minvCpus", 0) <= resources.get("maxvCpus", -1):
        raise ClientException("computeResources.maxvCpus is missing, or minvCpus is not between 0 and maxvCpus")
    if not resources.get("securityGroupIds") and not resources.get("launchTemplate"):
        raise ClientException("computeResources.securityGroupIds is missing, and no launch template sets it")


def _check_queue(properties: Mapping[str, Any], environments: list[ComputeEnvironment]) -> None:
    check_name(properties.get("jobQueueName"), "jobQueueName")
    _check_state(properties)
    if properties.get("priority") is None or properties["priority"] < 0:
        raise ClientException("priority is missing or negative")
    if not 1 <= len(environments) <= MAX_QUEUE_ENVIRONMENTS:
        raise ClientException(
            f"computeEnvironmentOrder must have 1 to {MAX_QUEUE_ENVIRONMENTS} compute environments, "
            f"but has {len(environments)}"
        )


def _check_state(properties: Mapping[str, Any]) -> None:
    if properties["state"] not in _STATES:
        raise ClientException(f"state {properties['state']} must be one of {' | '.join(_STATES)}")


def _without(request: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: copy.deepcopy(value) for name, value in request.items() if name not in names and value is not None}
