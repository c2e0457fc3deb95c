"""The templates of a stage for rules (resources by type, references resolved across stacks), and the rule type."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

Template = Mapping[str, Any]

LAUNCH_TEMPLATE = "AWS::EC2::LaunchTemplate"
COMPUTE_ENVIRONMENT = "AWS::Batch::ComputeEnvironment"
JOB_DEFINITION = "AWS::Batch::JobDefinition"
SECURITY_GROUP = "AWS::EC2::SecurityGroup"


@dataclass(frozen=True, kw_only=True, eq=False)
class Resource:
    """A resource of a stack."""

    stack: str
    """Construct path of the stack."""
    logical_id: str
    type: str
    properties: Mapping[str, Any] = field(repr=False)

    def get(self, path: str, default: Any = None) -> Any:
        """Return the property at a dotted path, or `default` if it, or something above it, is missing."""
        value: Any = self.properties
        for key in path.split("."):
            if not isinstance(value, Mapping) or key not in value:
                return default
            value = value[key]
        return value


class StageTemplates:
    """The templates of a stage, by the construct paths of their stacks."""

    def __init__(self, templates: Mapping[str, Template]) -> None:
        self._resources = {
            (stack, logical_id): Resource(
                stack=stack,
                logical_id=logical_id,
                type=resource["Type"],
                properties=resource.get("Properties", {}),
            )
            for stack, template in templates.items()
            for logical_id, resource in template.get("Resources", {}).items()
        }
        self._exports = {
            output["Export"]["Name"]: (stack, output["Value"])
            for stack, template in templates.items()
            for output in template.get("Outputs", {}).values()
            if isinstance(output.get("Export", {}).get("Name"), str)
        }

    def of_type(self, resource_type: str) -> Iterator[Resource]:
        return (resource for resource in self._resources.values() if resource.type == resource_type)

    def referred(self, stack: str, value: Any) -> Resource | None:
        """Return the resource of the stage that a property's value refers to, or None if there is none.

        The resource is in the same stack, or in another stack of the stage that exports it.
        """
        match value:
            case {"Ref": str(name)} | {"Fn::GetAtt": [str(name), *_]}:
                return self._resources.get((stack, name))
            case {"Fn::ImportValue": str(name)} if name in self._exports:
                return self.referred(*self._exports[name])
        return None

    def launch_template(self, environment: Resource) -> Resource | None:
        """Return the launch template of a compute environment's instances."""
        return self.referred(environment.stack, environment.get("ComputeResources.LaunchTemplate.LaunchTemplateId"))

    def security_groups(self, environment: Resource) -> list[Any]:
        """Return the security groups of an environment's instances, from it or its launch template."""
        own = environment.get("ComputeResources.SecurityGroupIds", [])
        return [*own, *(group for interface in self.interfaces(environment) for group in interface.get("Groups", []))]

    def interfaces(self, environment: Resource) -> list[Mapping[str, Any]]:
        """Return the network interfaces in the launch template of a compute environment."""
        template = self.launch_template(environment)
        return list(template.get("LaunchTemplateData.NetworkInterfaces", [])) if template else []

    def is_capacity_block(self, environment: Resource) -> bool:
        """Return whether a compute environment's instances run in a Capacity Block."""
        template = self.launch_template(environment)
        market = template.get("LaunchTemplateData.InstanceMarketOptions") if template is not None else None
        return market == {"MarketType": "capacity-block"}

    def efa_interfaces(self, environment: Resource) -> int:
        """Return the number of EFA interfaces, which is the number of EFA devices in jobs."""
        return sum(is_efa(interface) for interface in self.interfaces(environment))


def is_efa(interface: Mapping[str, Any]) -> bool:
    """Return whether a network interface of a launch template has EFA."""
    return str(interface.get("InterfaceType", "")).startswith("efa")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A place where a template breaks a rule."""

    resource: Resource
    location: str
    """Path of the broken or missing property in the resource: `Properties.Timeout`."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A rule: its id, its reason, and the function that finds violations."""

    id: str
    """`TY-<resource>-<requirement>`."""
    reason: str
    """What happens on AWS if the rule is broken."""
    next_step: str
    source: str
    find: Callable[[StageTemplates], Iterable[Finding]]


Find = Callable[[StageTemplates], Iterable[Finding]]


def rule(id_: str, *, next_step: str, source: str) -> Callable[[Find], Rule]:
    """Turn a function into a rule, with its docstring as the reason."""

    def make(find: Find) -> Rule:
        assert find.__doc__ is not None, f"{id_} has no docstring"  # noqa: S101 - found on import
        return Rule(id=id_, reason=" ".join(find.__doc__.split()), next_step=next_step, source=source, find=find)

    return make


def rules_of(module: ModuleType) -> Iterable[Rule]:
    """Return the rules that a module defines, in order."""
    return (value for value in vars(module).values() if isinstance(value, Rule))


def found(resource: Resource, location: str) -> Finding:
    """Return a finding for a property of `resource`, by its path below `Properties`."""
    return Finding(resource=resource, location=f"Properties.{location}")
