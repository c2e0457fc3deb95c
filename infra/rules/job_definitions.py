"""Rules for job definitions: what Batch accepts, what it starts again, and whose rights a container has."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from infra.rules.rule import Finding, found, rule
from infra.rules.stage_templates import COMPUTE_ENVIRONMENT, JOB_DEFINITION, Resource, StageTemplates
from jobs.contract.catalog import CATALOG
from jobs.contract.instance_types import INSTANCE_TYPES
from jobs.contract.queues import MULTINODE
from jobs.contract.stage import job_definition_parameter, queue_parameter

_GUIDE = "AWS Batch User Guide"
_DEFINITION_BYTES = 24 * 1024
_EFA_DEVICE = re.compile(r"/dev/infiniband/uverbs\d+")
_SECRET_NAME = re.compile(r"(?i)(secret|token|passw|api_?key|private_?key|credential|access_?key)")
_SECRET_VALUE = re.compile(
    r"(A[KS]IA[0-9A-Z]{16}|hf_[A-Za-z0-9]{20,}|-----BEGIN [A-Z ]*PRIVATE KEY|://[^/\s:@]+:[^/\s@]+@|gh[pousr]_\w{30,})"
)


def _tasks(definition: Resource) -> Iterator[Mapping[str, Any]]:
    """Yield every ECS task of a definition: of a single node, or of each range of nodes."""
    yield from definition.get("EcsProperties.TaskProperties", [])
    for nodes in definition.get("NodeProperties.NodeRangeProperties", []):
        yield from nodes.get("EcsProperties", {}).get("TaskProperties", [])


def _containers(definition: Resource) -> Iterator[Mapping[str, Any]]:
    """Yield every container of a definition, also of those that are written without ecsProperties."""
    for task in _tasks(definition):
        yield from task.get("Containers", [])
    ranges = definition.get("NodeProperties.NodeRangeProperties", [])
    for old in (definition.get("ContainerProperties"), *(nodes.get("Container") for nodes in ranges)):
        if old is not None:
            yield old


def _efa_devices(container: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    devices = container.get("LinuxParameters", {}).get("Devices", [])
    return [device for device in devices if _EFA_DEVICE.fullmatch(str(device.get("HostPath")))]


def _asks_for(container: Mapping[str, Any], resource: str) -> int:
    requirements = container.get("ResourceRequirements", [])
    return sum(int(item["Value"]) for item in requirements if item.get("Type") == resource)


def _memlock_is_free(container: Mapping[str, Any]) -> bool:
    return any(
        limit.get("Name") == "memlock" and limit.get("SoftLimit") == limit.get("HardLimit") == -1
        for limit in container.get("Ulimits", [])
    )


def _one_process(kind: str) -> bool:
    """Return whether jobs of the kind are on one node always."""
    return kind in CATALOG and CATALOG[kind].one_process


def _accelerated(stage: StageTemplates, definition: Resource) -> bool:
    """Return whether a definition is for accelerators: by the catalog if it is published, else by what it asks for."""
    kinds = [name.split("/")[-1] for name in stage.published_names(definition) if name.startswith("job-definition")]
    if any(kind in CATALOG for kind in kinds):
        return any(CATALOG[kind].accelerated for kind in kinds if kind in CATALOG)
    return any(_memlock_is_free(item) or _asks_for(item, "GPU") for item in _containers(definition))


def _team(stage: StageTemplates, definition: Resource) -> str | None:
    names = [name.split("/") for name in stage.published_names(definition) if name.startswith("job-definition")]
    return names[0][1] if names else definition.get("Tags", {}).get("trainyard:team")


@rule(
    "TY-JobDefinition-RetryRules",
    next_step="give 1 to 10 attempts and at most five rules: RETRY on 'Host EC2*'; last, EXIT on the reason '*' and on "
    "the exit code '*'",
    source=f"{_GUIDE}, Automated job retries: evaluateOnExit; what no rule matches is retried",
)
def retry_rules(stage: StageTemplates) -> Iterable[Finding]:
    """Batch starts again whatever no rule matches, so without a last rule that catches everything a job with a mistake
    runs, and is paid for, as often as it has attempts.
    """
    for definition in stage.of_type(JOB_DEFINITION):
        if not 1 <= int(definition.get("RetryStrategy.Attempts", 0)) <= 10:
            yield found(definition, "RetryStrategy.Attempts")
        rules = definition.get("RetryStrategy.EvaluateOnExit", [])
        conditions = [{key: value for key, value in item.items() if key != "Action"} for item in rules]
        exits = [
            condition
            for condition, item in zip(conditions, rules, strict=True)
            if str(item.get("Action")).upper() == "EXIT"
        ]
        first_exit = next((index for index, item in enumerate(conditions) if item in exits), len(rules))
        retried = [condition.get("OnStatusReason") for condition in conditions[:first_exit]]
        starred = [value.rstrip("*") for condition in conditions for value in condition.values()]
        fine = (
            len(rules) <= 5
            and {"OnReason": "*"} in exits
            and {"OnExitCode": "*"} in exits
            and rules[-1].get("Action", "").upper() == "EXIT"
            and "Host EC2*" in retried
            and not any("*" in value for value in starred)
        )
        if not fine:
            yield found(definition, "RetryStrategy.EvaluateOnExit")


@rule(
    "TY-JobDefinition-Timeout",
    next_step="set timeout.attemptDurationSeconds, 60 or more",
    source=f"{_GUIDE}, Job timeouts",
)
def timeout(stage: StageTemplates) -> Iterable[Finding]:
    """A job that hangs keeps its instance for ever: nothing else ends it."""
    for definition in stage.of_type(JOB_DEFINITION):
        if int(definition.get("Timeout.AttemptDurationSeconds", 0)) < 60:
            yield found(definition, "Timeout.AttemptDurationSeconds")


@rule(
    "TY-JobDefinition-OldRevisionsStay",
    next_step="set resourceRetentionPolicy.skipDeregisterOnUpdate to true",
    source="AWS CloudFormation, AWS::Batch::JobDefinition: an update deregisters the old revision",
)
def old_revisions_stay(stage: StageTemplates) -> Iterable[Finding]:
    """A deployment deregisters the old revision, and then what waits, or is to be started again, with it fails."""
    for definition in stage.of_type(JOB_DEFINITION):
        if definition.get("ResourceRetentionPolicy.SkipDeregisterOnUpdate") is not True:
            yield found(definition, "ResourceRetentionPolicy.SkipDeregisterOnUpdate")


@rule(
    "TY-JobDefinition-Size",
    next_step="move data out of the definition: into the image, S3 or the submission's arguments",
    source=f"{_GUIDE}, Service quotas: a job definition has at most 24 KiB",
)
def size(stage: StageTemplates) -> Iterable[Finding]:
    """Batch refuses a definition of more than 24 KiB."""
    for definition in stage.of_type(JOB_DEFINITION):
        if len(json.dumps(definition.properties, separators=(",", ":")).encode()) > _DEFINITION_BYTES:
            yield found(definition, "EcsProperties")


@rule(
    "TY-JobDefinition-FairShare",
    next_step="set schedulingPriority, and propagateTags to true",
    source=f"{_GUIDE}, Fair-share scheduling: a job needs a scheduling priority",
)
def share_and_tags(stage: StageTemplates) -> Iterable[Finding]:
    """A queue with fair share refuses a job without a scheduling priority; without propagated tags its task is on
    nobody's bill.
    """
    for definition in stage.of_type(JOB_DEFINITION):
        if definition.get("SchedulingPriority") is None:
            yield found(definition, "SchedulingPriority")
        if definition.get("PropagateTags") is not True:
            yield found(definition, "PropagateTags")


@rule(
    "TY-JobDefinition-HostIpc",
    next_step="write ecsProperties with ipcMode 'host' on each task",
    source=f"{_GUIDE}, job definition parameters: only ecsProperties have ipcMode; Habana: --ipc=host",
)
def host_ipc(stage: StageTemplates) -> Iterable[Finding]:
    """HCCL needs the host's IPC namespace, and containerProperties cannot ask for it: all-reduce over eight HPUs fails
    at its first call.
    """
    for definition in stage.of_type(JOB_DEFINITION):
        tasks = list(_tasks(definition))
        if not tasks or definition.get("ContainerProperties") is not None:
            yield found(definition, "EcsProperties")
        elif _accelerated(stage, definition) and any(task.get("IpcMode") != "host" for task in tasks):
            yield found(definition, "EcsProperties.TaskProperties")


@rule(
    "TY-JobDefinition-Memlock",
    next_step="set the ulimit memlock to -1, soft and hard",
    source="AWS Elastic Fabric Adapter, Get started: memlock unlimited; Habana's installation guide",
)
def memlock(stage: StageTemplates) -> Iterable[Finding]:
    """Accelerator drivers and EFA pin the memory they transfer from; with Docker's limit registration fails."""
    for definition in stage.of_type(JOB_DEFINITION):
        accelerated = _accelerated(stage, definition)
        for container in _containers(definition):
            if (accelerated or _efa_devices(container)) and not _memlock_is_free(container):
                yield found(definition, "Ulimits")


@rule(
    "TY-JobDefinition-Logs",
    next_step="set logConfiguration with the driver awslogs and a log group of the stack",
    source=f"{_GUIDE}, Use the awslogs log driver: without options the group is /aws/batch/job, which never expires",
)
def logs(stage: StageTemplates) -> Iterable[Finding]:
    """Without a group of its own a job logs into the account's /aws/batch/job, which is shared and never expires."""
    for definition in stage.of_type(JOB_DEFINITION):
        for container in _containers(definition):
            log = container.get("LogConfiguration", {})
            if log.get("LogDriver") != "awslogs" or not log.get("Options", {}).get("awslogs-group"):
                yield found(definition, "LogConfiguration")


@rule(
    "TY-JobDefinition-OpenNodeRange",
    next_step="write one node range with targetNodes '0:'",
    source=f"{_GUIDE}, Multi-node parallel jobs: numNodes can be overridden only with an open range",
)
def open_node_range(stage: StageTemplates) -> Iterable[Finding]:
    """A closed range such as 0:1 fixes the number of nodes: a submission for more is refused."""
    for definition in stage.of_type(JOB_DEFINITION):
        if definition.get("NodeProperties") is None:
            continue
        targets = [nodes.get("TargetNodes") for nodes in definition.get("NodeProperties.NodeRangeProperties", [])]
        if targets != ["0:"] or definition.get("NodeProperties.MainNode") != 0:
            yield found(definition, "NodeProperties.NodeRangeProperties")


@rule(
    "TY-JobDefinition-EfaDevices",
    next_step="give the container /dev/infiniband/uverbs0 and up, READ, WRITE and MKNOD, one for each EFA interface of "
    "the multi-node queue's launch template",
    source="AWS Batch User Guide, Elastic Fabric Adapter: devices and ulimits in the job definition",
)
def efa_devices(stage: StageTemplates) -> Iterable[Finding]:
    """The container runtime adds no EFA devices: without them, or with fewer than interfaces, ranks fall back to TCP
    without a word; with more, the container does not start.
    """
    wanted = _efa_interfaces_of_multinode(stage)
    for definition in stage.of_type(JOB_DEFINITION):
        several = definition.get("NodeProperties") is not None and _accelerated(stage, definition)
        for container in _containers(definition):
            devices = _efa_devices(container)
            paths = [f"/dev/infiniband/uverbs{index}" for index in range(len(devices))]
            fine = sorted(str(device["HostPath"]) for device in devices) == sorted(paths) and all(
                {"READ", "WRITE", "MKNOD"} <= set(device.get("Permissions", [])) for device in devices
            )
            if not fine or (several and wanted is not None and len(devices) != wanted):
                yield found(definition, "NodeProperties")


def _efa_interfaces_of_multinode(stage: StageTemplates) -> int | None:
    """Return the EFA interfaces of instances behind the queue for new multi-node jobs; None where there is none."""
    queues = [
        resource
        for resource in stage.of_type("AWS::Batch::JobQueue")
        if queue_parameter(MULTINODE) in stage.published_names(resource)
    ]
    environments = [environment for queue in queues for environment in stage.compute_environments(queue)]
    return min((stage.efa_interfaces(environment) for environment in environments), default=None)


@rule(
    "TY-JobDefinition-Fits",
    next_step="ask for no more than job_memory_mib and the vCPUs of the row in jobs/contract/instance_types.py",
    source=f"{_GUIDE}, Jobs stuck in RUNNABLE: MISCONFIGURATION:JOB_RESOURCE_REQUIREMENT",
)
def fits(stage: StageTemplates) -> Iterable[Finding]:
    """A job that asks for more vCPUs, memory or GPUs than any instance of its stage can give waits for ever; so does
    one that leaves no memory to the ECS agent.
    """
    names = [
        name for item in stage.of_type(COMPUTE_ENVIRONMENT) for name in item.get("ComputeResources.InstanceTypes", [])
    ]
    rows = [INSTANCE_TYPES[name] for name in names if name in INSTANCE_TYPES]
    for definition in stage.of_type(JOB_DEFINITION):
        accelerated = _accelerated(stage, definition)
        # A stage may train on CPUs, and then has no other instances.
        candidates = [row for row in rows if bool(row.accelerators) == accelerated] or rows
        for container in _containers(definition):
            room = any(
                0 < _asks_for(container, "VCPU") <= row.vcpus
                and 0 < _asks_for(container, "MEMORY") <= row.job_memory_mib
                and _asks_for(container, "GPU") <= (row.accelerators if row.accelerator == "cuda" else 0)
                for row in candidates
            )
            if rows and not room:
                yield found(definition, "ResourceRequirements")


@rule(
    "TY-JobDefinition-NoSecret",
    next_step="put it into Secrets Manager and name its ARN under the container's secrets",
    source=f"{_GUIDE}, Specify sensitive data: environment variables are shown by DescribeJobDefinitions",
)
def no_secret(stage: StageTemplates) -> Iterable[Finding]:
    """Everyone who may describe job definitions reads them, revision by revision, long after the secret was removed."""
    for definition in stage.of_type(JOB_DEFINITION):
        variables = [item for container in _containers(definition) for item in container.get("Environment", [])]
        named = any(_SECRET_NAME.search(str(item.get("Name"))) for item in variables)
        if named or _SECRET_VALUE.search(json.dumps(definition.properties)):
            yield found(definition, "Environment")


@rule(
    "TY-JobDefinition-HcclAutoDetection",
    next_step="remove HCCL_OVER_OFI from the environment",
    source="Habana's documentation, Scale-Out via Host-NIC: OFI is detected by itself",
)
def hccl_auto_detection(stage: StageTemplates) -> Iterable[Finding]:
    """Setting HCCL_OVER_OFI, to whatever value, turns off HCCL's own detection of EFA."""
    for definition in stage.of_type(JOB_DEFINITION):
        variables = [item for container in _containers(definition) for item in container.get("Environment", [])]
        if any(item.get("Name") == "HCCL_OVER_OFI" for item in variables):
            yield found(definition, "Environment")


@rule(
    "TY-JobDefinition-RoleOfItsTeam",
    next_step="give each team's definitions the team's own role, and the agent another",
    source=f"{_GUIDE}, IAM roles for jobs",
)
def role_of_its_team(stage: StageTemplates) -> Iterable[Finding]:
    """With one role for two teams each reads the other's files; without one a container on the host's network falls
    back to the instance's role.
    """
    teams: dict[str, str | None] = {}
    for definition in stage.of_type(JOB_DEFINITION):
        team = _team(stage, definition)
        for task in _tasks(definition):
            role, execution_role = (json.dumps(task.get(key)) for key in ("TaskRoleArn", "ExecutionRoleArn"))
            if "null" in (role, execution_role) or role == execution_role or teams.setdefault(role, team) != team:
                yield found(definition, "EcsProperties.TaskProperties")


@rule(
    "TY-JobDefinition-BothWays",
    next_step="publish a definition of several nodes for each accelerated kind and team, or no multi-node queue",
    source="jobs/contract/plan.py: a submission of several nodes takes the definition published for them",
)
def both_ways(stage: StageTemplates) -> Iterable[Finding]:
    """A definition is of one node or of several, never both: where the stage has a multi-node queue but a kind lacks
    its second definition, every such submission is refused.
    """
    if _efa_interfaces_of_multinode(stage) is None:
        return
    published = {name for definition in stage.of_type(JOB_DEFINITION) for name in stage.published_names(definition)}
    for definition in stage.of_type(JOB_DEFINITION):
        for name in stage.published_names(definition):
            match name.split("/"):
                case ["job-definition", team, kind] if _accelerated(stage, definition) and not _one_process(kind):
                    if job_definition_parameter(team, kind, several_nodes=True) not in published:
                        yield found(definition, "NodeProperties")
