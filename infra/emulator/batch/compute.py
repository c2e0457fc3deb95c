"""Compute environments and job queues: what Batch's API shows of them, and what the scheduler asks them.

Capacity is maxvCpus. No instance is started: a job that fits runs on this machine. So desiredvCpus is what was last
asked for, where Batch itself changes it as its queues need it.
"""

import copy
import re
from collections.abc import Mapping
from typing import Any

from moto.batch.exceptions import ClientException
from moto.batch.utils import make_arn_for_compute_env, make_arn_for_job_queue

from infra.emulator.batch.quotas import MAX_QUEUE_ENVIRONMENTS, TIME_LIMIT_REASONS, TIME_LIMIT_SECONDS

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}")
_TYPES = ("EC2", "SPOT", "FARGATE", "FARGATE_SPOT")
_STATES = ("ENABLED", "DISABLED")


class ComputeEnvironment:
    """One compute environment."""

    def __init__(self, request: Mapping[str, Any], *, account_id: str, region: str) -> None:
        """Raises ClientException where Batch refuses such a request."""
        self.properties: dict[str, Any] = {"state": "ENABLED", **_without(request, "tags")}
        _check_environment(self.properties)
        self.name: str = self.properties["computeEnvironmentName"]
        self.arn: str = make_arn_for_compute_env(account_id, self.name, region)
        self.properties.setdefault(
            "serviceRole",
            f"arn:aws:iam::{account_id}:role/aws-service-role/batch.amazonaws.com/AWSServiceRoleForBatch",
        )
        # moto's ECS backend keeps the cluster under this name; Batch names it after the environment, too.
        self.ecs_name = f"{self.name}_Batch"
        self.ecs_arn = ""
        self.used_vcpus = 0.0
        self.retired = False
        """True once another took its place: it goes when no queue has it any more."""

    @property
    def enabled(self) -> bool:
        return bool(self.properties["state"] == "ENABLED")

    @property
    def resources(self) -> Mapping[str, Any]:
        return self.properties.get("computeResources") or {}

    @property
    def max_vcpus(self) -> float:
        """Return how many vCPUs it may have: 0 if unmanaged, since there its instances are the user's to start."""
        return float(self.resources.get("maxvCpus", 0))

    @property
    def takes_multinode(self) -> bool:
        """Multi-node parallel jobs run on On-Demand instances of managed environments only."""
        return self.resources.get("type") == "EC2"

    def update(self, changes: Mapping[str, Any]) -> None:
        """Change it. Raises ClientException, with nothing changed, where Batch refuses."""
        properties = copy.deepcopy(self.properties)
        for name, value in _without(changes, "computeEnvironment", "computeResources").items():
            properties[name] = value
        if changes.get("computeResources"):
            properties["computeResources"] = {**properties.get("computeResources", {}), **changes["computeResources"]}
        _check_environment(properties)
        if "desiredvCpus" in (changes.get("computeResources") or {}):
            _check_desired_vcpus(properties["computeResources"], self.resources.get("desiredvCpus", 0))
        self.properties = properties

    def describe(self, tags: Mapping[str, str]) -> dict[str, Any]:
        """Return it as DescribeComputeEnvironments shows it."""
        return {
            **copy.deepcopy(self.properties),
            "computeEnvironmentArn": self.arn,
            "ecsClusterArn": self.ecs_arn,
            "containerOrchestrationType": "ECS",
            "status": "VALID",
            "statusReason": "ComputeEnvironment Healthy",
            "tags": dict(tags),
        }


class JobQueue:
    """One job queue."""

    def __init__(
        self, request: Mapping[str, Any], environments: list[ComputeEnvironment], *, account_id: str, region: str
    ) -> None:
        """`environments` in the request's order. Raises ClientException where Batch refuses such a request."""
        self.properties: dict[str, Any] = {"state": "ENABLED", **_without(request, "tags")}
        self.environments = environments
        _check_queue(self.properties, environments)
        self.name: str = self.properties["jobQueueName"]
        self.arn: str = make_arn_for_job_queue(account_id, self.name, region)

    @property
    def enabled(self) -> bool:
        return bool(self.properties["state"] == "ENABLED")

    @property
    def priority(self) -> int:
        return int(self.properties["priority"])

    @property
    def scheduling_policy_arn(self) -> str | None:
        return self.properties.get("schedulingPolicyArn")

    def update(self, changes: Mapping[str, Any], environments: list[ComputeEnvironment]) -> None:
        """Change it. Raises ClientException, with nothing changed, where Batch refuses."""
        if changes.get("schedulingPolicyArn") and not self.scheduling_policy_arn:
            raise ClientException("A job queue without a fair-share scheduling policy can't have one added")
        properties = {**self.properties, **_without(changes, "jobQueue")}
        _check_queue(properties, environments)
        self.properties, self.environments = properties, environments

    def describe(self, tags: Mapping[str, str]) -> dict[str, Any]:
        """Return it as DescribeJobQueues shows it."""
        return {
            **copy.deepcopy(self.properties),
            "jobQueueArn": self.arn,
            "status": "VALID",
            "statusReason": "JobQueue Healthy",
            "jobQueueType": "ECS",
            "tags": dict(tags),
        }


def _check_environment(properties: Mapping[str, Any]) -> None:
    _check_name(properties.get("computeEnvironmentName"), "computeEnvironmentName")
    _check_state(properties)
    kind = properties.get("type")
    if kind not in ("MANAGED", "UNMANAGED"):
        raise ClientException(f"type {kind} must be one of MANAGED | UNMANAGED")
    if properties.get("eksConfiguration"):
        raise ClientException("eksConfiguration: the embedded AWS Batch runs jobs on ECS only")
    if kind == "UNMANAGED":
        return
    resources = properties.get("computeResources")
    if not resources:
        raise ClientException("computeResources must be specified for a MANAGED compute environment")
    if resources.get("type") not in _TYPES:
        raise ClientException(f"computeResources.type must be one of {' | '.join(_TYPES)}")
    if resources.get("maxvCpus", -1) < 0:
        raise ClientException("computeResources.maxvCpus must be given, and not be negative")
    if not resources.get("subnets"):
        raise ClientException("computeResources.subnets must have at least one subnet")
    if resources["type"].startswith("FARGATE"):
        return
    if not resources.get("instanceRole"):
        raise ClientException("Error executing request, Exception : Instance role is required.")
    if not 0 <= resources.get("minvCpus", 0) <= resources["maxvCpus"]:
        raise ClientException("computeResources.minvCpus must be between 0 and maxvCpus")
    if not resources.get("securityGroupIds") and not resources.get("launchTemplate"):
        raise ClientException("computeResources.securityGroupIds must be given, or a launch template that has some")


def _check_desired_vcpus(resources: Mapping[str, Any], present: float) -> None:
    """Batch raises it on request, and never lowers it (user guide, "Error message when you update desiredvCpus")."""
    if resources["desiredvCpus"] < present:
        raise ClientException(
            "Manually scaling down compute environment is not supported. Disconnecting job queues from compute "
            "environment will cause it to scale-down to minvCpus."
        )
    if not resources.get("minvCpus", 0) <= resources["desiredvCpus"] <= resources["maxvCpus"]:
        raise ClientException("computeResources.desiredvCpus must be between minvCpus and maxvCpus")


def _check_queue(properties: Mapping[str, Any], environments: list[ComputeEnvironment]) -> None:
    _check_name(properties.get("jobQueueName"), "jobQueueName")
    _check_state(properties)
    if properties.get("priority") is None or properties["priority"] < 0:
        raise ClientException("priority must be given, and not be negative")
    if not 1 <= len(environments) <= MAX_QUEUE_ENVIRONMENTS:
        raise ClientException(
            f"computeEnvironmentOrder must have 1 to {MAX_QUEUE_ENVIRONMENTS} compute environments, "
            f"but has {len(environments)}"
        )
    fargate = {str(environment.resources.get("type", "")).startswith("FARGATE") for environment in environments}
    if len(fargate) > 1:
        raise ClientException("EC2 and Fargate compute environments can't be mixed in a job queue")
    for action in properties.get("jobStateTimeLimitActions") or ():
        _check_time_limit(action)


def _check_time_limit(action: Mapping[str, Any]) -> None:
    where = "jobStateTimeLimitActions"
    if action.get("reason") not in TIME_LIMIT_REASONS:
        raise ClientException(f"{where}: reason must be one of {' | '.join(TIME_LIMIT_REASONS)}")
    if action.get("state") != "RUNNABLE" or action.get("action") != "CANCEL":
        raise ClientException(f"{where}: state must be RUNNABLE and action CANCEL")
    if action.get("maxTimeSeconds") not in TIME_LIMIT_SECONDS:
        limits = f"{TIME_LIMIT_SECONDS.start} and {TIME_LIMIT_SECONDS.stop - 1}"
        raise ClientException(f"{where}: maxTimeSeconds must be between {limits}")


def _check_name(name: object, what: str) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ClientException(
            f"{what} {name} is invalid: up to 128 letters, numbers, hyphens and underscores are allowed"
        )


def _check_state(properties: Mapping[str, Any]) -> None:
    if properties["state"] not in _STATES:
        raise ClientException(f"state {properties['state']} must be one of {' | '.join(_STATES)}")


def _without(request: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: copy.deepcopy(value) for name, value in request.items() if name not in names and value is not None}
