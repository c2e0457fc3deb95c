"""What a submission changes about its job definition: overrides and parameters, applied. Pure.

The result is in the shape of the API still, so DescribeJobs shows exactly what runs.
"""

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moto.batch.exceptions import ClientException

from infra.emulator.batch.job_definition import JobDefinition, parse_targets, resource

DEFAULT_CONTAINER = "default"
"""What Batch calls the container of containerProperties, in the names of log streams."""

_REFERENCE = re.compile(r"Ref::([A-Za-z0-9_-]+)")


@dataclass(frozen=True, kw_only=True)
class Container:
    """One container as it will run."""

    name: str
    properties: Mapping[str, Any]
    """ContainerProperties or TaskContainerProperties of the API, overrides applied."""
    command: tuple[str, ...]
    """With parameters put in."""

    @property
    def environment(self) -> dict[str, str]:
        return {item["name"]: item.get("value", "") for item in self.properties.get("environment") or ()}

    @property
    def vcpus(self) -> float:
        return resource(self.properties, "VCPU") or 0

    @property
    def essential(self) -> bool:
        return bool(self.properties.get("essential", True))


@dataclass(frozen=True, kw_only=True)
class Node:
    """What runs on one instance: the whole of a job of one node, or one node of a multi-node job."""

    index: int
    containers: tuple[Container, ...]
    properties: Mapping[str, Any]
    """`containerProperties` or `ecsProperties`, overrides applied."""

    @property
    def vcpus(self) -> float:
        return sum(container.vcpus for container in self.containers)

    @property
    def task(self) -> Mapping[str, Any] | None:
        """The one element of ecsProperties.taskProperties, or None for containerProperties."""
        ecs = self.properties.get("ecsProperties")
        return ecs["taskProperties"][0] if ecs else None


def resolve_nodes(
    definition: JobDefinition, request: Mapping[str, Any], parameters: Mapping[str, str]
) -> tuple[tuple[Node, ...], Mapping[str, Any] | None]:
    """The nodes of a job, and its nodeProperties where it is a multi-node job.

    Raises ClientException where an override does not fit the definition or a parameter is missing.
    """
    if not definition.is_multinode:
        if request.get("nodeOverrides"):
            raise ClientException("Node overrides should not be set for jobs that are not multi-node parallel jobs.")
        properties = {
            name: definition.properties[name]
            for name in ("containerProperties", "ecsProperties")
            if definition.properties.get(name)
        }
        properties = _override(
            properties, request.get("containerOverrides"), request.get("ecsPropertiesOverride"), "containerProperties"
        )
        return (_node(0, properties, parameters),), None
    for name in ("containerOverrides", "ecsPropertiesOverride"):
        if request.get(name):
            raise ClientException(f"{name} should not be set for multi-node parallel jobs, use nodeOverrides.")
    nodes = _override_nodes(definition.properties["nodeProperties"], request.get("nodeOverrides") or {})
    return tuple(_node(index, _range_of(nodes, index), parameters) for index in range(nodes["numNodes"])), nodes


def _override_nodes(nodes: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    result = copy.deepcopy(dict(nodes))
    count = overrides.get("numNodes")
    if count is not None:
        open_ranges = [item for item in result["nodeRangeProperties"] if item["targetNodes"].endswith(":")]
        if not open_ranges:
            raise ClientException(
                "numNodes can only be overridden where a node range of the job definition has an open upper boundary, "
                "such as 0:"
            )
        if any(parse_targets(item["targetNodes"], 10**9).start >= count for item in open_ranges):
            raise ClientException("The lower boundary of an open node range must be fewer than the numNodes override")
        if result["mainNode"] >= count:
            raise ClientException("mainNode of the job definition must be fewer than the numNodes override")
        result["numNodes"] = count
    by_targets = {
        parse_targets(item["targetNodes"], result["numNodes"]): item for item in result["nodeRangeProperties"]
    }
    for override in overrides.get("nodePropertyOverrides") or ():
        target = by_targets.get(parse_targets(override["targetNodes"], result["numNodes"]))
        if target is None:
            raise ClientException(
                f"NodeOverride targets should match job definition. Non matching targets - {override['targetNodes']}"
            )
        target.update(
            _override(target, override.get("containerOverrides"), override.get("ecsPropertiesOverride"), "container")
        )
        if override.get("instanceTypes"):
            target["instanceTypes"] = override["instanceTypes"]
    return result


def _range_of(nodes: Mapping[str, Any], index: int) -> dict[str, Any]:
    """The properties of a node: those of the narrowest range that holds it, since nested ranges override."""
    ranges = [(parse_targets(item["targetNodes"], nodes["numNodes"]), item) for item in nodes["nodeRangeProperties"]]
    _, item = min((pair for pair in ranges if index in pair[0]), key=lambda pair: len(pair[0]))
    if item.get("container"):
        return {"containerProperties": item["container"]}
    return {"ecsProperties": item["ecsProperties"]}


def _override(
    properties: Mapping[str, Any],
    container: Mapping[str, Any] | None,
    ecs: Mapping[str, Any] | None,
    container_key: str,
) -> dict[str, Any]:
    """Return `properties` (a definition's, or a node range's) with overrides applied to its containers."""
    result = copy.deepcopy(dict(properties))
    if container:
        if not result.get(container_key):
            raise ClientException("Container overrides should not be set for jobs that use ecsProperties.")
        _override_container(result[container_key], container)
    if ecs:
        if not result.get("ecsProperties"):
            raise ClientException("ecsPropertiesOverride should not be set for jobs that do not use ecsProperties.")
        tasks = ecs.get("taskProperties") or []
        if len(tasks) > 1:
            raise ClientException("ecsPropertiesOverride: taskProperties is limited to one element.")
        by_name = {item.get("name"): item for item in result["ecsProperties"]["taskProperties"][0]["containers"]}
        for override in (override for task in tasks for override in task.get("containers") or ()):
            if override.get("name") not in by_name:
                raise ClientException(
                    f"ecsPropertiesOverride: container {override.get('name')} does not exist in the job definition. "
                    f"It has: {', '.join(str(name) for name in by_name)}."
                )
            _override_container(by_name[override["name"]], override)
    return result


def _override_container(container: dict[str, Any], override: Mapping[str, Any]) -> None:
    if override.get("command"):
        if "" in override["command"]:
            raise ClientException("Container overrides: command can't contain an empty string.")
        container["command"] = list(override["command"])
    environment = {item["name"]: item.get("value", "") for item in container.get("environment") or ()}
    for item in override.get("environment") or ():
        if item.get("name", "").startswith("AWS_BATCH"):
            raise ClientException(
                f"Environment variable {item['name']}: names that start with AWS_BATCH are reserved for Batch."
            )
        environment[item["name"]] = item.get("value", "")
    container["environment"] = [{"name": name, "value": value} for name, value in environment.items()]
    requirements = {item["type"]: item["value"] for item in container.get("resourceRequirements") or ()}
    for item in override.get("resourceRequirements") or ():
        requirements[item["type"]] = item["value"]
    container["resourceRequirements"] = [{"type": kind, "value": value} for kind, value in requirements.items()]
    for old in ("vcpus", "memory"):
        # Deprecated, and without effect on what resourceRequirements says.
        if override.get(old) is not None:
            container[old] = override[old]


def _node(index: int, properties: Mapping[str, Any], parameters: Mapping[str, str]) -> Node:
    ecs = properties.get("ecsProperties")
    containers: Sequence[Mapping[str, Any]] = (
        ecs["taskProperties"][0]["containers"] if ecs else [properties["containerProperties"]]
    )
    return Node(
        index=index,
        properties=properties,
        containers=tuple(
            Container(
                name=container.get("name") or DEFAULT_CONTAINER,
                properties=container,
                command=tuple(_substitute(part, parameters) for part in container.get("command") or ()),
            )
            for container in containers
        ),
    )


def _substitute(text: str, parameters: Mapping[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        try:
            return parameters[match[1]]
        except KeyError:
            raise ClientException(f"Unable to substitute value. No parameter found for reference {match[1]}") from None

    return _REFERENCE.sub(value, text)
