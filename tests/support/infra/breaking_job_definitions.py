"""Ways to break a job definition, one thing at a time, and the rule that must notice each."""

from collections.abc import Mapping
from typing import Any

from tests.support.infra.breaking import Change, Properties, of_rule, on, put
from tests.support.infra.synthesis import Templates

JOB_DEFINITION = "AWS::Batch::JobDefinition"


def each_container(change: Change) -> Change:
    """Apply `change` to every container of a job definition."""

    def apply(properties: Properties) -> None:
        for task in _tasks(properties):
            for container in task["Containers"]:
                change(container)

    return apply


def each_task(change: Change) -> Change:
    def apply(properties: Properties) -> None:
        for task in _tasks(properties):
            change(task)

    return apply


def _tasks(properties: Properties) -> list[Properties]:
    ranges = properties.get("NodeProperties", {}).get("NodeRangeProperties", [])
    return [
        task for place in (properties, *ranges) for task in place.get("EcsProperties", {}).get("TaskProperties", [])
    ]


def _accelerated(properties: Properties) -> bool:
    return any(task.get("IpcMode") == "host" for task in _tasks(properties))


def _several_nodes(properties: Properties) -> bool:
    return "NodeProperties" in properties


def _one_node(properties: Properties) -> bool:
    return not _several_nodes(properties)


def _one_role_for_all(templates: Templates) -> None:
    roles: list[Any] = []
    on(JOB_DEFINITION, each_task(lambda task: roles.append(task["TaskRoleArn"])))(templates)
    on(JOB_DEFINITION, each_task(put("TaskRoleArn", roles[0])))(templates)


def _one_device_less(container: Properties) -> None:
    container["LinuxParameters"]["Devices"].pop()


def _read_only_devices(container: Properties) -> None:
    for device in container["LinuxParameters"]["Devices"]:
        device["Permissions"] = ["READ"]


def _retry(*rules: Mapping[str, str]) -> Change:
    return put("RetryStrategy.EvaluateOnExit", [dict(rule) for rule in rules])


_RECLAIM = {"Action": "RETRY", "OnStatusReason": "Host EC2*"}
_NO_REASON, _NO_CODE = {"Action": "EXIT", "OnReason": "*"}, {"Action": "EXIT", "OnExitCode": "*"}


def _variable(name: str, value: str) -> Change:
    return each_container(put("Environment", [{"Name": name, "Value": value}]))


JOB_DEFINITION_BREAKS = [
    *of_rule(
        "JobDefinition",
        ("RetryRules", "eleven attempts", on(JOB_DEFINITION, put("RetryStrategy.Attempts", 11))),
        ("RetryRules", "no strategy", on(JOB_DEFINITION, put("RetryStrategy"))),
        ("RetryRules", "nothing catches the rest", on(JOB_DEFINITION, _retry(_RECLAIM))),
        ("RetryRules", "no code catches the rest", on(JOB_DEFINITION, _retry(_RECLAIM, _NO_REASON))),
        ("RetryRules", "a reclaim is not retried", on(JOB_DEFINITION, _retry(_NO_REASON, _NO_CODE))),
        ("RetryRules", "a reclaim is caught first", on(JOB_DEFINITION, _retry(_NO_REASON, _NO_CODE, _RECLAIM))),
        ("RetryRules", "six rules", on(JOB_DEFINITION, _retry(*[_RECLAIM] * 4, _NO_REASON, _NO_CODE))),
        (
            "RetryRules",
            "a star in front",
            on(JOB_DEFINITION, _retry(_RECLAIM, {"Action": "RETRY", "OnReason": "*Host"}, _NO_REASON, _NO_CODE)),
        ),
        ("Timeout", "none", on(JOB_DEFINITION, put("Timeout"))),
        ("Timeout", "under a minute", on(JOB_DEFINITION, put("Timeout.AttemptDurationSeconds", 59))),
        ("OldRevisionsStay", "deregistered", on(JOB_DEFINITION, put("ResourceRetentionPolicy"))),
        ("Size", "25 KiB", on(JOB_DEFINITION, put("Parameters", {"data": "x" * 25 * 1024}))),
        ("FairShare", "no priority", on(JOB_DEFINITION, put("SchedulingPriority"))),
        ("FairShare", "tags not passed on", on(JOB_DEFINITION, put("PropagateTags"))),
        ("HostIpc", "a namespace of its own", on(JOB_DEFINITION, each_task(put("IpcMode", "task")), _accelerated)),
        (
            "HostIpc",
            "containerProperties",
            on(JOB_DEFINITION, put("ContainerProperties", {"Image": "x"}), _one_node),
        ),
        ("Memlock", "no ulimit", on(JOB_DEFINITION, each_container(put("Ulimits")), _accelerated)),
        (
            "Memlock",
            "a soft limit",
            on(JOB_DEFINITION, each_container(put("Ulimits.0.SoftLimit", 65536)), _accelerated),
        ),
        ("Logs", "no log", on(JOB_DEFINITION, each_container(put("LogConfiguration")))),
        ("Logs", "the account's group", on(JOB_DEFINITION, each_container(put("LogConfiguration.Options", {})))),
        (
            "OpenNodeRange",
            "a closed range",
            on(JOB_DEFINITION, put("NodeProperties.NodeRangeProperties.0.TargetNodes", "0:1"), _several_nodes),
        ),
        ("EfaDevices", "one less", on(JOB_DEFINITION, each_container(_one_device_less), _several_nodes)),
        ("EfaDevices", "none", on(JOB_DEFINITION, each_container(put("LinuxParameters")), _several_nodes)),
        ("EfaDevices", "read only", on(JOB_DEFINITION, each_container(_read_only_devices), _several_nodes)),
        (
            "Fits",
            "97 vCPUs",
            on(
                JOB_DEFINITION,
                each_container(put("ResourceRequirements.0", {"Type": "VCPU", "Value": "97"})),
                _accelerated,
            ),
        ),
        (
            "Fits",
            "all of the memory",
            on(
                JOB_DEFINITION,
                each_container(put("ResourceRequirements.1", {"Type": "MEMORY", "Value": "786432"})),
                _accelerated,
            ),
        ),
        (
            "Fits",
            "GPUs of a Gaudi",
            on(
                JOB_DEFINITION,
                each_container(lambda item: item["ResourceRequirements"].append({"Type": "GPU", "Value": "8"})),
                _accelerated,
            ),
        ),
        ("NoSecret", "a token by its name", on(JOB_DEFINITION, _variable("HF_TOKEN", "x"))),
        ("NoSecret", "a token by its looks", on(JOB_DEFINITION, _variable("EXTRA", "hf_" + "aB3" * 11))),
        ("NoSecret", "an access key", on(JOB_DEFINITION, _variable("EXTRA", "AKIA" + "A1B2" * 4))),
        ("NoSecret", "a password in a URL", on(JOB_DEFINITION, _variable("EXTRA", "https://me:word@host/x"))),
        ("HcclAutoDetection", "set", on(JOB_DEFINITION, _variable("HCCL_OVER_OFI", "1"))),
        ("RoleOfItsTeam", "one role for all", _one_role_for_all),
        ("RoleOfItsTeam", "no role", on(JOB_DEFINITION, each_task(put("TaskRoleArn")))),
        (
            "RoleOfItsTeam",
            "the agent's role",
            on(JOB_DEFINITION, each_task(lambda task: task.update(TaskRoleArn=task["ExecutionRoleArn"]))),
        ),
        (
            "BothWays",
            "nothing published",
            on(
                "AWS::SSM::Parameter",
                put("Name", "/trainyard/all/elsewhere"),
                lambda item: "/job-definition-multinode/" in str(item["Name"]),
            ),
        ),
    ),
]
