"""Rules for job definitions: retries, what EFA needs, secrets, and the roles of containers."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from infra.rules.templates import COMPUTE_ENVIRONMENT, JOB_DEFINITION, Finding, Resource, StageTemplates, found, rule

_GUIDE = "AWS Batch User Guide"
_EFA_DEVICE = re.compile(r"/dev/infiniband/uverbs\d+")
_SECRET_NAME = re.compile(r"(?i)(secret|token|passw|api_?key|private_?key|credential|access_?key)")
_SECRET_VALUE = re.compile(
    r"(A[KS]IA[0-9A-Z]{16}|hf_[A-Za-z0-9]{20,}|-----BEGIN [A-Z ]*PRIVATE KEY|://[^/\s:@]+:[^/\s@]+@|gh[pousr]_\w{30,})"
)


def _tasks(definition: Resource) -> Iterator[Mapping[str, Any]]:
    """Yield every ECS task of a definition: of its single node, or of each range of nodes."""
    yield from definition.get("EcsProperties.TaskProperties", [])
    for nodes in definition.get("NodeProperties.NodeRangeProperties", []):
        yield from nodes.get("EcsProperties", {}).get("TaskProperties", [])


def _containers(definition: Resource) -> Iterator[Mapping[str, Any]]:
    for task in _tasks(definition):
        yield from task.get("Containers", [])


def _efa_devices(container: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    devices = container.get("LinuxParameters", {}).get("Devices", [])
    return [device for device in devices if _EFA_DEVICE.fullmatch(str(device.get("HostPath")))]


@rule(
    "TY-JobDefinition-RetryRules",
    next_step="set 1 to 10 attempts and at most five rules: RETRY on 'Host EC2*', and at the end EXIT on the status "
    "reason '*' and on the exit code '*'",
    source=f"{_GUIDE}, Automated job retries: evaluateOnExit; attempts that no rule matches are retried",
)
def retry_rules(stage: StageTemplates) -> Iterable[Finding]:
    """Batch retries every attempt that no rule matches. Without a last rule that matches everything, a failing job
    runs, and costs money, once per allowed attempt.
    """
    for definition in stage.of_type(JOB_DEFINITION):
        if not 1 <= int(definition.get("RetryStrategy.Attempts", 0)) <= 10:
            yield found(definition, "RetryStrategy.Attempts")
        rules = [dict(item) for item in definition.get("RetryStrategy.EvaluateOnExit", [])]
        actions = [str(item.pop("Action")).upper() for item in rules]
        before_exits = rules[: actions.index("EXIT")] if "EXIT" in actions else rules
        exits = [item for item, action in zip(rules, actions, strict=True) if action == "EXIT"]
        valid = (
            len(rules) <= 5
            and {"OnStatusReason": "*"} in exits
            and {"OnExitCode": "*"} in exits
            and actions[-1] == "EXIT"
            and {"OnStatusReason": "Host EC2*"} in before_exits
            and not any("*" in value.rstrip("*") for item in rules for value in item.values())
        )
        if not valid:
            yield found(definition, "RetryStrategy.EvaluateOnExit")


@rule(
    "TY-JobDefinition-Memlock",
    next_step="set the ulimit memlock to -1, soft and hard",
    source="AWS Elastic Fabric Adapter, Get started: memlock unlimited; Habana's installation guide",
)
def memlock(stage: StageTemplates) -> Iterable[Finding]:
    """Accelerator drivers and EFA pin the memory they transfer from. With Docker's default limit, this fails."""
    unlimited = {"Name": "memlock", "SoftLimit": -1, "HardLimit": -1}
    for definition in stage.of_type(JOB_DEFINITION):
        for task in _tasks(definition):
            # Only accelerated jobs use the host's IPC namespace.
            pinning = task.get("IpcMode") == "host"
            for container in task.get("Containers", []):
                if (pinning or _efa_devices(container)) and unlimited not in container.get("Ulimits", []):
                    yield found(definition, "Ulimits")


@rule(
    "TY-JobDefinition-EfaDevices",
    next_step="add devices from /dev/infiniband/uverbs0 up, with READ, WRITE and MKNOD, one per EFA interface in the "
    "launch template of the multi-node queue",
    source=f"{_GUIDE}, Elastic Fabric Adapter: devices and ulimits in the job definition",
)
def efa_devices(stage: StageTemplates) -> Iterable[Finding]:
    """The container runtime does not add EFA devices. With fewer devices than interfaces, ranks silently fall back to
    TCP; with more, the container does not start.
    """
    expected = {stage.efa_interfaces(environment) for environment in stage.of_type(COMPUTE_ENVIRONMENT)}
    expected = expected - {0} or expected
    for definition in stage.of_type(JOB_DEFINITION):
        several = definition.get("NodeProperties") is not None
        for container in _containers(definition):
            devices = _efa_devices(container)
            paths = [f"/dev/infiniband/uverbs{index}" for index in range(len(devices))]
            valid = sorted(str(device["HostPath"]) for device in devices) == sorted(paths) and all(
                {"READ", "WRITE", "MKNOD"} <= set(device.get("Permissions", [])) for device in devices
            )
            if not valid or (several and len(devices) not in expected):
                yield found(definition, "NodeProperties")


@rule(
    "TY-JobDefinition-NoSecret",
    next_step="store the value in Secrets Manager, and reference its ARN in the container's secrets",
    source=f"{_GUIDE}, Specify sensitive data: environment variables are shown by DescribeJobDefinitions",
)
def no_secret(stage: StageTemplates) -> Iterable[Finding]:
    """Anyone who may describe job definitions can read all revisions, even long after a secret was removed."""
    for definition in stage.of_type(JOB_DEFINITION):
        variables = [item for container in _containers(definition) for item in container.get("Environment", [])]
        named = any(_SECRET_NAME.search(str(item.get("Name"))) for item in variables)
        if named or _SECRET_VALUE.search(json.dumps(definition.properties)):
            yield found(definition, "Environment")


@rule(
    "TY-JobDefinition-RoleOfItsTeam",
    next_step="give each team's definitions the team's own task role, and a different execution role",
    source=f"{_GUIDE}, IAM roles for jobs",
)
def role_of_its_team(stage: StageTemplates) -> Iterable[Finding]:
    """If two teams share a role, each can read the other's files. Without a role, a container on the host's network
    uses the instance's role.
    """
    teams: dict[str, str | None] = {}
    for definition in stage.of_type(JOB_DEFINITION):
        team = definition.get("Tags", {}).get("trainyard:team")
        for task in _tasks(definition):
            role, execution_role = (json.dumps(task.get(key)) for key in ("TaskRoleArn", "ExecutionRoleArn"))
            if "null" in (role, execution_role) or role == execution_role or teams.setdefault(role, team) != team:
                yield found(definition, "EcsProperties.TaskProperties")
