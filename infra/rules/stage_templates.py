"""The templates of one stage as rules read them: resources by type, and references followed from stack to stack."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

Template = Mapping[str, Any]

LAUNCH_TEMPLATE = "AWS::EC2::LaunchTemplate"
COMPUTE_ENVIRONMENT = "AWS::Batch::ComputeEnvironment"
JOB_QUEUE = "AWS::Batch::JobQueue"
JOB_DEFINITION = "AWS::Batch::JobDefinition"
SCHEDULING_POLICY = "AWS::Batch::SchedulingPolicy"
SECURITY_GROUP = "AWS::EC2::SecurityGroup"
PARAMETER = "AWS::SSM::Parameter"


@dataclass(frozen=True, kw_only=True, eq=False)
class Resource:
    """One resource of one stack."""

    stack: str
    """Construct path of its stack."""
    logical_id: str
    type: str
    properties: Mapping[str, Any] = field(repr=False)

    def get(self, path: str, default: Any = None) -> Any:
        """Return the property at a dotted path, or `default` where it, or something above it, is missing."""
        value: Any = self.properties
        for key in path.split("."):
            if not isinstance(value, Mapping) or key not in value:
                return default
            value = value[key]
        return value


class StageTemplates:
    """All templates of one stage, keyed by the construct paths of their stacks."""

    def __init__(self, templates: Mapping[str, Template]) -> None:
        self._templates = templates
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
        self._published = {
            parameter.get("Name"): parameter
            for parameter in self.of_type(PARAMETER)
            if isinstance(parameter.get("Name"), str)
        }

    def of_type(self, resource_type: str) -> Iterator[Resource]:
        return (resource for resource in self._resources.values() if resource.type == resource_type)

    def resource(self, stack: str, logical_id: str) -> Resource:
        return self._resources[stack, logical_id]

    def parameter(self, name: Any) -> Resource | None:
        """Return the parameter of that name, where a stack of the stage publishes it."""
        return self._published.get(name)

    def referred(self, stack: str, value: Any) -> Resource | None:
        """Return the resource that a property's value refers to; None where it is none of the stage's.

        It may be in the same stack, or found through an export or a parameter of another stack of the stage.
        """
        match value:
            case {"Ref": str(name)} if (stack, name) in self._resources:
                return self._resources[stack, name]
            case {"Ref": str(name)}:
                declared = self._templates[stack].get("Parameters", {}).get(name, {})
                is_read = str(declared.get("Type", "")).startswith("AWS::SSM::Parameter::Value")
                return self.published(declared.get("Default")) if is_read else None
            case {"Fn::GetAtt": [str(name), *_]}:
                return self._resources.get((stack, name))
            case {"Fn::ImportValue": str(name)} if name in self._exports:
                return self.referred(*self._exports[name])
            case str() if value.startswith("{{resolve:ssm:"):
                return self.published(value.removeprefix("{{resolve:ssm:").removesuffix("}}"))
        return None

    def published(self, name: Any) -> Resource | None:
        """Return the resource whose name the parameter called `name` holds."""
        parameter = self._published.get(name)
        return self.referred(parameter.stack, parameter.get("Value")) if parameter else None

    def published_names(self, resource: Resource) -> list[str]:
        """Return the parameters that hold the name of `resource`, without `/trainyard/<stage>/`."""
        return [name.split("/", 3)[-1] for name in self._published if self.published(name) is resource]

    def launch_template(self, environment: Resource) -> Resource | None:
        """Return the launch template of a compute environment's instances."""
        return self.referred(environment.stack, environment.get("ComputeResources.LaunchTemplate.LaunchTemplateId"))

    def compute_environments(self, queue: Resource) -> list[Resource]:
        """Return a queue's compute environments that are of this stage, in its order."""
        entries = sorted(queue.get("ComputeEnvironmentOrder", []), key=lambda entry: int(entry["Order"]))
        environments = (self.referred(queue.stack, entry["ComputeEnvironment"]) for entry in entries)
        return [environment for environment in environments if environment is not None]

    def security_groups(self, environment: Resource) -> list[Any]:
        """Return the security groups of a compute environment's instances, which it or its launch template names."""
        own = environment.get("ComputeResources.SecurityGroupIds", [])
        return [*own, *(group for interface in self.interfaces(environment) for group in interface.get("Groups", []))]

    def interfaces(self, environment: Resource) -> list[Mapping[str, Any]]:
        """Return the network interfaces that the launch template gives a compute environment's instances."""
        template = self.launch_template(environment)
        return list(template.get("LaunchTemplateData.NetworkInterfaces", [])) if template else []

    def is_capacity_block(self, environment: Resource) -> bool:
        """Return whether an environment's instances run in a Capacity Block."""
        template = self.launch_template(environment)
        market = template.get("LaunchTemplateData.InstanceMarketOptions") if template is not None else None
        return market == {"MarketType": "capacity-block"}

    def efa_interfaces(self, environment: Resource) -> int:
        """Return how many of them are EFA interfaces, and so how many devices a job finds."""
        return sum(
            str(interface.get("InterfaceType", "")).startswith("efa") for interface in self.interfaces(environment)
        )


def text(value: Any) -> str:
    """Return a value as one string; what only CloudFormation knows stands in angle brackets, and base64 is left out."""
    match value:
        case {"Fn::Join": [str(separator), list(parts)]}:
            return separator.join(text(part) for part in parts)
        case {"Fn::Base64": inner} | {"Fn::Sub": str(inner)} | {"Fn::Sub": [inner, _]}:
            return text(inner)
        case {"Ref": name} | {"Fn::ImportValue": name}:
            return f"<{name}>"
        case {"Fn::GetAtt": [name, attribute]}:
            return f"<{name}.{attribute}>"
        case dict():
            return "<…>"
    return str(value)
