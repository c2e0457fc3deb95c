"""Job definitions: what RegisterJobDefinition takes, refuses and shows again.

The request is kept whole, in the shape of the API; defaults that Batch fills in are filled in here.
"""

import copy
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from moto.batch.exceptions import ClientException
from moto.batch.utils import make_arn_for_task_def

from infra.emulator.batch.quotas import MAX_CONTAINERS, MAX_JOB_DEFINITION_BYTES, minimum_timeout_seconds
from infra.emulator.batch.retry import check_strategy

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}")
_CONTAINER_DEFAULTS: Mapping[str, Any] = {
    "command": [],
    "environment": [],
    "mountPoints": [],
    "resourceRequirements": [],
    "secrets": [],
    "ulimits": [],
    "volumes": [],
}
_TASK_CONTAINER_DEFAULTS: Mapping[str, Any] = {
    "command": [],
    "dependsOn": [],
    "environment": [],
    "essential": True,
    "mountPoints": [],
    "resourceRequirements": [],
    "secrets": [],
    "ulimits": [],
}


class JobDefinition:
    """One revision of a job definition."""

    def __init__(self, request: Mapping[str, Any], *, revision: int, account_id: str, region: str) -> None:
        """`request` has passed `check_request`."""
        self.name: str = request["jobDefinitionName"]
        self.revision = revision
        self.status = "ACTIVE"
        self.arn: str = make_arn_for_task_def(account_id, self.name, revision, region)
        self.properties: dict[str, Any] = copy.deepcopy(
            {name: value for name, value in request.items() if name not in ("jobDefinitionName", "tags")}
        )
        self.properties.setdefault("parameters", {})
        self.properties["platformCapabilities"] = request.get("platformCapabilities") or ["EC2"]
        for rule in self.properties.get("retryStrategy", {}).get("evaluateOnExit", ()):
            rule["action"] = rule["action"].lower()  # Batch shows it so, however it was given
        for container in self._containers():
            defaults = _TASK_CONTAINER_DEFAULTS if "name" in container else _CONTAINER_DEFAULTS
            for name, value in defaults.items():
                container.setdefault(name, copy.deepcopy(value))

    @property
    def is_multinode(self) -> bool:
        return bool(self.properties["type"] == "multinode")

    @property
    def retry_strategy(self) -> Mapping[str, Any]:
        return self.properties.get("retryStrategy") or {}

    @property
    def timeout(self) -> Mapping[str, Any]:
        return self.properties.get("timeout") or {}

    def describe(self, tags: Mapping[str, str]) -> dict[str, Any]:
        """Return it as DescribeJobDefinitions shows it."""
        return {
            **copy.deepcopy(self.properties),
            "jobDefinitionName": self.name,
            "jobDefinitionArn": self.arn,
            "revision": self.revision,
            "status": self.status,
            "containerOrchestrationType": "ECS",
            "tags": dict(tags),
        }

    def _containers(self) -> Iterator[dict[str, Any]]:
        for properties in [self.properties, *self.properties.get("nodeProperties", {}).get("nodeRangeProperties", [])]:
            for _, container in _containers_of(properties):
                yield container


def check_request(request: Mapping[str, Any]) -> None:
    """Raise ClientException where Batch refuses such a definition."""
    name = request.get("jobDefinitionName")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ClientException(
            f"jobDefinitionName {name} is invalid: up to 128 letters, numbers, hyphens and underscores are allowed"
        )
    size = len(json.dumps(request, separators=(",", ":"), ensure_ascii=False).encode())
    if size > MAX_JOB_DEFINITION_BYTES:
        raise ClientException(f"Job definition is {size} bytes long, the limit is {MAX_JOB_DEFINITION_BYTES} bytes")
    if request.get("eksProperties") is not None:
        raise ClientException("eksProperties: the embedded AWS Batch runs jobs on ECS only")
    _check_type(request)
    check_timeout(request.get("timeout"))
    problem = check_strategy(request.get("retryStrategy") or {})
    if problem:
        raise ClientException(problem)


def check_timeout(timeout: Mapping[str, Any] | None) -> None:
    """Raise ClientException where attemptDurationSeconds is too short."""
    seconds = (timeout or {}).get("attemptDurationSeconds")
    if seconds is not None and seconds < minimum_timeout_seconds():
        raise ClientException(
            f"Job timeout attemptDurationSeconds must be at least {minimum_timeout_seconds():g}, but was {seconds}"
        )


def parse_targets(targets: str, node_count: int) -> range:
    """The nodes that a targetNodes such as `0:3`, `2:` or `:` names. Raises ClientException where it names none."""
    match = re.fullmatch(r"(\d*):(\d*)|(\d+)", targets)
    if match is None:
        raise ClientException(f"targetNodes {targets} is no range of node indexes such as 0:3")
    if match[3] is not None:
        return range(int(match[3]), int(match[3]) + 1)
    first = int(match[1] or 0)
    last = int(match[2]) if match[2] else node_count - 1
    return range(first, last + 1)


def _check_type(request: Mapping[str, Any]) -> None:
    kind = request.get("type")
    given = [name for name in ("containerProperties", "ecsProperties", "nodeProperties") if request.get(name)]
    if kind == "multinode":
        if given != ["nodeProperties"]:
            raise ClientException("A multinode job definition must have nodeProperties, and only them")
        if "FARGATE" in (request.get("platformCapabilities") or ()):
            raise ClientException("Multinode job definitions are not supported on Fargate")
        _check_nodes(request["nodeProperties"])
    elif kind == "container":
        if len(given) != 1 or given == ["nodeProperties"]:
            raise ClientException(
                "A container job definition must have exactly one of containerProperties and ecsProperties"
            )
        _check_containers(_containers_of(request), "")
    else:
        raise ClientException(f"Job definition type must be one of container, multinode, but was {kind}")


def _check_nodes(nodes: Mapping[str, Any]) -> None:
    count = nodes.get("numNodes", 0)
    if count < 1:
        raise ClientException("nodeProperties: numNodes must be at least 1")
    if not 0 <= nodes.get("mainNode", -1) < count:
        raise ClientException("nodeProperties: mainNode must be fewer than numNodes")
    ranges = nodes.get("nodeRangeProperties") or []
    covered: set[int] = set()
    for item in ranges:
        targets = item.get("targetNodes", "")
        covered.update(parse_targets(targets, count))
        if len([name for name in ("container", "ecsProperties") if item.get(name)]) != 1:
            raise ClientException(f"Node range {targets} must have exactly one of container and ecsProperties")
        _check_containers(_containers_of(item), f"Node range {targets}: ")
    if covered != set(range(count)):
        raise ClientException(f"Node ranges must account for all nodes, 0 to {count - 1}, and no others")


def _check_containers(containers: Iterable[tuple[str, Mapping[str, Any]]], where: str) -> None:
    listed = list(containers)
    if not listed:
        raise ClientException(f"{where}taskProperties must have exactly one element with at least one container")
    if len(listed) > MAX_CONTAINERS:
        raise ClientException(f"{where}a task can have at most {MAX_CONTAINERS} containers")
    names = [container.get("name") for style, container in listed if style == "ecs"]
    if len(listed) > 1 and (None in names or len(set(names)) < len(names)):
        raise ClientException(f"{where}every container of a task must have a name of its own")
    if not any(container.get("essential", True) for _, container in listed):
        raise ClientException(f"{where}All jobs must have at least one essential container")
    for _, container in listed:
        if not container.get("image"):
            raise ClientException(f"{where}Container properties must contain image")
        for kind, what in (("VCPU", "vCPU"), ("MEMORY", "Memory")):
            if resource(container, kind) is None:
                raise ClientException(f"Error executing request, Exception : {where}{what} is not provided.")


def resource(container: Mapping[str, Any], kind: str) -> float | None:
    """Return what a container asks for: VCPU, MEMORY (MiB) or GPU; None where it says nothing."""
    for requirement in container.get("resourceRequirements") or ():
        if requirement["type"] == kind:
            return float(requirement["value"])
    # The fields that came before resourceRequirements.
    old: int | None = container.get({"VCPU": "vcpus", "MEMORY": "memory"}.get(kind, ""))
    return None if old is None else float(old)


def _containers_of(properties: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the containers of a definition or of one node range, each with `container` or `ecs` before it."""
    single = properties.get("containerProperties") or properties.get("container")
    if single:
        yield "container", single
    tasks = (properties.get("ecsProperties") or {}).get("taskProperties") or []
    if len(tasks) == 1:
        for container in tasks[0].get("containers") or ():
            yield "ecs", container
