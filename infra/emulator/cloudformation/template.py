"""Parse a CloudFormation template, resolve its intrinsic functions, and order its resources by their references.

moto's resolver is not used, because it drops values it cannot resolve. This one raises `TemplateError` with AWS's
message instead.
"""

import base64
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from typing import Any

import yaml
from moto.cloudformation.utils import yaml_tag_constructor
from moto.core.exceptions import ServiceException
from moto.ssm.models import ssm_backends

AVAILABILITY_ZONES = "abcdef"
"""Letters of the zones in moto's us-east-1, and in Fn::GetAZs."""


class TemplateError(ServiceException):
    """A template or one of its parameters is wrong."""

    code = "ValidationError"

    def __str__(self) -> str:
        return str(self.message)


class _NoValue:
    """The value of `Ref: AWS::NoValue`. A property or list item with this value is dropped."""


NO_VALUE = _NoValue()


def parse_template(body: str) -> dict[str, Any]:
    """Parse a template in JSON, or in YAML with CloudFormation's short forms. Raises TemplateError."""
    try:
        # The CDK writes JSON. The YAML parser would read it too, but a hundred times slower.
        template = json.loads(body)
    except ValueError:
        yaml.add_multi_constructor("", yaml_tag_constructor, Loader=_TemplateLoader)
        try:
            template = yaml.load(body, Loader=_TemplateLoader)  # noqa: S506 - a subclass of SafeLoader
        except yaml.YAMLError as error:
            raise TemplateError(f"Template format error: {error}") from None
    if not isinstance(template, dict) or not isinstance(template.get("Resources"), dict) or not template["Resources"]:
        raise TemplateError("Template format error: At least one Resources member must be defined.")
    transforms = template.get("Transform", [])
    if set([transforms] if isinstance(transforms, str) else transforms) - {"AWS::LanguageExtensions"}:
        raise TemplateError(f"Template format error: the emulator does not implement the transform {transforms}")
    for logical_id, resource in template["Resources"].items():
        if not isinstance(resource, dict) or not isinstance(resource.get("Type"), str):
            raise TemplateError(f"Template format error: [/Resources/{logical_id}] Every resource needs a Type")
    return template


class _TemplateLoader(yaml.SafeLoader):
    """Keeps dates as strings: `AWSTemplateFormatVersion: 2010-09-09`, `Version: 2012-10-17` of a policy."""


_TemplateLoader.yaml_implicit_resolvers = {
    key: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for key, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


@dataclass(kw_only=True)
class Scope:
    """Resolves the intrinsic functions of a template for one stack."""

    template: Mapping[str, Any]
    account_id: str
    region: str
    stack_id: str
    stack_name: str
    given_parameters: Mapping[str, str]
    ref: Callable[[str], Any]
    """Returns the physical id of a resource by its logical id."""
    attribute: Callable[[str, str], Any]
    """Returns an attribute of a resource by its logical id. Raises TemplateError if it does not exist."""
    import_value: Callable[[str], Any]
    """Returns the value of another stack's export. Raises TemplateError."""
    parameters: dict[str, Any] = field(init=False)
    _conditions: dict[str, bool] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.parameters = self._resolve_parameters()
        self._check_rules()

    # Parameters, conditions, rules

    def _resolve_parameters(self) -> dict[str, Any]:
        declared = self.template.get("Parameters") or {}
        unknown = sorted(set(self.given_parameters) - set(declared))
        if unknown:
            raise TemplateError(f"Parameters: [{', '.join(unknown)}] do not exist in the template")
        values = {}
        missing = []
        for name, declaration in declared.items():
            value = self.given_parameters.get(name, declaration.get("Default"))
            if value is None:
                missing.append(name)
                continue
            allowed = declaration.get("AllowedValues")
            if allowed is not None and str(value) not in [str(item) for item in allowed]:
                raise TemplateError(f"Parameter {name} failed to satisfy constraint: one of {allowed}")
            if str(declaration.get("NoEcho")).lower() == "true":
                raise TemplateError(f"Parameter {name}: the emulator does not support NoEcho, and would show its value")
            kind = declaration.get("Type", "String")
            if kind.startswith("AWS::SSM::Parameter::Value<"):
                value = self._ssm_parameter(str(value))
            values[name] = str(value).split(",") if "List" in kind else str(value)
        if missing:
            raise TemplateError(f"Parameters: [{', '.join(missing)}] must have values")
        return values

    def _ssm_parameter(self, name: str) -> str:
        parameter = ssm_backends[self.account_id][self.region].get_parameter(name)
        if parameter is None:
            raise TemplateError(f"Unable to fetch parameters [{name}] from parameter store for this account.")
        return str(parameter.value)

    def _check_rules(self) -> None:
        for rule in (self.template.get("Rules") or {}).values():
            if "RuleCondition" in rule and not self._holds(rule["RuleCondition"]):
                continue
            for assertion in rule.get("Assertions", []):
                if not self._holds(assertion["Assert"]):
                    raise TemplateError(
                        f"Template validation error: {assertion.get('AssertDescription', 'rule failed')}"
                    )

    def condition(self, name: str) -> bool:
        """Return whether a condition of the template holds. Raises TemplateError if it does not exist."""
        if name not in self._conditions:
            try:
                declaration = self.template["Conditions"][name]
            except KeyError:
                raise TemplateError(f"Template error: unresolved condition dependency {name}") from None
            self._conditions[name] = self._holds(declaration)
        return self._conditions[name]

    def _holds(self, condition: Any) -> bool:
        if isinstance(condition, dict) and len(condition) == 1:
            ((function, operand),) = condition.items()
            match function:
                case "Condition":
                    return self.condition(operand)
                case "Fn::Equals":
                    left, right = self.resolve(operand)
                    return _text(left) == _text(right)
                case "Fn::Not":
                    return not self._holds(operand[0])
                case "Fn::And":
                    return all(self._holds(each) for each in operand)
                case "Fn::Or":
                    return any(self._holds(each) for each in operand)
                case "Fn::Contains":
                    values, value = self.resolve(operand)
                    return _text(value) in [_text(item) for item in values]
        raise TemplateError(f"Template error: {json.dumps(condition)} is not a condition that the emulator supports")

    def active_resources(self) -> dict[str, Any]:
        """Return the resources whose condition holds, dependencies first."""
        resources = {
            logical_id: resource
            for logical_id, resource in self.template["Resources"].items()
            if "Condition" not in resource or self.condition(resource["Condition"])
        }
        graph: TopologicalSorter[str] = TopologicalSorter()
        for logical_id, resource in resources.items():
            graph.add(logical_id, *(need for need in self._needs(logical_id, resource) if need in resources))
        try:
            return {logical_id: resources[logical_id] for logical_id in graph.static_order()}
        except CycleError as error:
            raise TemplateError(
                f"Circular dependency between resources: [{', '.join(sorted(set(error.args[1])))}]"
            ) from None

    def _needs(self, logical_id: str, resource: Mapping[str, Any]) -> Iterator[str]:
        depends_on = resource.get("DependsOn", [])
        yield from [depends_on] if isinstance(depends_on, str) else depends_on
        known = self.template["Resources"].keys() | (self.template.get("Parameters") or {}).keys()
        for name in references(resource.get("Properties", {})):
            if name not in known and not name.startswith("AWS::"):
                raise TemplateError(
                    f"Template format error: Unresolved resource dependencies [{name}] in the Resources block of the "
                    f"template (of {logical_id})"
                )
            yield name

    # Intrinsic functions

    def resolve(self, value: Any) -> Any:
        """Return `value` with all intrinsic functions resolved."""
        if isinstance(value, list):
            return [item for item in map(self.resolve, value) if item is not NO_VALUE]
        if isinstance(value, str) and "{{resolve:" in value:
            raise TemplateError(f"the emulator does not implement dynamic references: {value}")
        if not isinstance(value, dict):
            return value
        if len(value) == 1:
            ((function, operand),) = value.items()
            if function == "Ref" or function.startswith("Fn::"):
                return self._intrinsic(function, operand, value)
        resolved = {key: self.resolve(item) for key, item in value.items()}
        return {key: item for key, item in resolved.items() if item is not NO_VALUE}

    def _intrinsic(self, function: str, operand: Any, whole: dict[str, Any]) -> Any:
        match function:
            case "Ref":
                return self._ref(operand)
            case "Fn::GetAtt":
                name, attribute = operand.split(".", 1) if isinstance(operand, str) else (operand[0], operand[1:])
                return self._get_att(name, attribute if isinstance(attribute, str) else ".".join(attribute))
            case "Fn::Join":
                separator, items = operand
                return separator.join(_text(item) for item in self.resolve(items))
            case "Fn::Sub":
                return self._sub(operand)
            case "Fn::If":
                name, if_true, if_false = operand
                return self.resolve(if_true if self.condition(name) else if_false)
            case "Fn::Select":
                index, items = self.resolve(operand)
                if int(index) >= len(items):
                    raise TemplateError(f"Template error: Fn::Select cannot select nonexistent value at index {index}")
                return items[int(index)]
            case "Fn::Split":
                separator, text = self.resolve(operand)
                return _text(text).split(separator)
            case "Fn::ImportValue":
                return self.import_value(_text(self.resolve(operand)))
            case "Fn::GetAZs":
                return [f"{self.resolve(operand) or self.region}{letter}" for letter in AVAILABILITY_ZONES]
            case "Fn::Base64":
                return base64.b64encode(_text(self.resolve(operand)).encode()).decode()
        raise TemplateError(f"Template error: the emulator does not implement {function} (in {json.dumps(whole)})")

    def _ref(self, name: str) -> Any:
        if name in self.parameters:
            return self.parameters[name]
        pseudo = {
            "AWS::AccountId": self.account_id,
            "AWS::NoValue": NO_VALUE,
            "AWS::NotificationARNs": [],
            "AWS::Partition": "aws",
            "AWS::Region": self.region,
            "AWS::StackId": self.stack_id,
            "AWS::StackName": self.stack_name,
            "AWS::URLSuffix": "amazonaws.com",
        }
        return pseudo[name] if name in pseudo else self.ref(name)

    def _get_att(self, name: str, attribute: str) -> Any:
        if name not in self.template["Resources"]:
            raise TemplateError(f"Template error: instance of Fn::GetAtt references undefined resource {name}")
        return self.attribute(name, attribute)

    def _sub(self, operand: Any) -> str:
        text, variables = (operand, {}) if isinstance(operand, str) else operand
        given = self.resolve(variables)

        def replace(match: re.Match[str]) -> str:
            name = match[1]
            if name.startswith("!"):
                return "${" + name[1:] + "}"
            if name in given:
                return _text(given[name])
            return _text(self._get_att(*name.split(".", 1)) if "." in name else self._ref(name))

        return _SUBSTITUTION.sub(replace, text)


_SUBSTITUTION = re.compile(r"\$\{(![^}]*|[A-Za-z0-9_:.]+)\}")


def references(value: Any) -> Iterator[str]:
    """Yield the names of resources, parameters and pseudo parameters that `value` refers to."""
    if isinstance(value, list):
        for item in value:
            yield from references(item)
    elif isinstance(value, dict):
        for key, item in value.items():
            if key == "Ref" and isinstance(item, str) and len(value) == 1:
                yield item
            elif key == "Fn::GetAtt" and len(value) == 1:
                yield item.split(".", 1)[0] if isinstance(item, str) else item[0]
            elif key == "Fn::Sub" and len(value) == 1:
                text, variables = (item, {}) if isinstance(item, str) else item
                for match in _SUBSTITUTION.finditer(text):
                    name = match[1].split(".", 1)[0]
                    if not name.startswith("!") and name not in variables:
                        yield name
                yield from references(variables)
            else:
                yield from references(item)


def _text(value: Any) -> str:
    """Return a scalar as CloudFormation inserts it into a string."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)
