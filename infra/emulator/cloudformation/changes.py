"""Preview an update for a change set: which resources are added, removed or modified, and by which properties.

Properties are compared after references are resolved, as in an update. A value that depends on something
the update creates, such as the id of a new resource, counts as changed.

Source: CloudFormation API reference, "ResourceChange", "ResourceChangeDetail" and "ResourceTargetDefinition".
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from typing import Any

from infra.emulator.cloudformation.resources import replacing_properties, with_stack_tags
from infra.emulator.cloudformation.stack import Stack, StackResource
from infra.emulator.cloudformation.template import TemplateError

KNOWN_AFTER_APPLY = "{{changeSet:KNOWN_AFTER_APPLY}}"
"""Replaces a value that is known only after the update."""
NO_CHANGES = "The submitted information didn't contain changes. Submit different information to create a change set."
"""AWS's message, by which the CDK CLI recognises an empty change set."""


@dataclass(kw_only=True)
class ChangeSet:
    """A previewed change of a stack, not executed yet."""

    name: str
    change_set_id: str
    stack: Stack
    template_body: str
    parameters: Mapping[str, str]
    tags: Mapping[str, str]
    role_arn: str | None
    description: str | None
    changes: list[dict[str, Any]] | None
    """None if nothing changes; such a change set cannot be executed."""
    created_at: datetime = field(default_factory=lambda: datetime.now(timezone.utc))

    def describe(self) -> dict[str, Any]:
        """Return it as DescribeChangeSet does."""
        failed = self.changes is None
        return {
            "ChangeSetName": self.name,
            "ChangeSetId": self.change_set_id,
            "StackId": self.stack.stack_id,
            "StackName": self.stack.name,
            "Description": self.description,
            "CreationTime": self.created_at,
            "ExecutionStatus": "UNAVAILABLE" if failed else "AVAILABLE",
            "Status": "FAILED" if failed else "CREATE_COMPLETE",
            "StatusReason": NO_CHANGES if failed else None,
            "Parameters": [{"ParameterKey": key, "ParameterValue": value} for key, value in self.parameters.items()],
            "Changes": self.changes or [],
            "Tags": [{"Key": key, "Value": value} for key, value in self.tags.items()],
        }


def changes_of(
    stack: Stack, template: Mapping[str, Any], parameters: Mapping[str, str], tags: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Return the changes from a stack to a template. Raises TemplateError if the template or a parameter is wrong."""
    preview = _Preview(stack, template, parameters, tags)
    return [{"Type": "Resource", "ResourceChange": change} for change in preview.all()]


class _Preview:
    """Compares a stack with a new template."""

    def __init__(
        self, stack: Stack, template: Mapping[str, Any], parameters: Mapping[str, str], tags: Mapping[str, str]
    ) -> None:
        self._stack = stack
        self._tags = tags
        self._scope = replace(stack.scope(template, parameters), ref=self._ref, attribute=self._attribute)
        self._changed: set[str] = set()
        """Logical ids of resources that change in place."""
        self._renewed: set[str] = set()
        """Logical ids of resources that will have a new physical id."""

    def all(self) -> list[dict[str, Any]]:
        order = self._scope.active_resources()
        found = []
        for logical_id, declaration in order.items():  # in order of references
            resource = self._stack.resources.get(logical_id)
            if resource is None:
                found.append({"Action": "Add", "LogicalResourceId": logical_id, "ResourceType": declaration["Type"]})
            elif (change := self._change(resource, declaration)) is not None:
                found.append(change)
        gone = [resource for logical_id, resource in self._stack.resources.items() if logical_id not in order]
        return found + [{"Action": "Remove", **_identity(resource)} for resource in gone]

    def _change(self, resource: StackResource, declaration: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the change of one resource, or None if it does not change."""
        old, new = resource.properties, self._resolved(declaration)
        changed = sorted(name for name in {*old, *new} if old.get(name) != new.get(name))
        if not changed:
            return None
        recreating = set(replacing_properties(resource.resource_type, old, new))
        revised = resource.resource_type == "AWS::Batch::JobDefinition"
        (self._renewed if recreating or revised else self._changed).add(resource.logical_id)
        details = [_detail(name, new.get(name), recreates=name in recreating) for name in changed]
        certain = any(detail["Evaluation"] == "Static" for detail in details if detail["Target"]["Name"] in recreating)
        return {
            "Action": "Modify",
            **_identity(resource),
            "Replacement": "True" if certain else "Conditional" if recreating else "False",
            "Scope": ["Properties"],
            "Details": details,
        }

    def _resolved(self, declaration: Mapping[str, Any]) -> Mapping[str, Any]:
        properties: dict[str, Any] = {}
        for name, value in declaration.get("Properties", {}).items():
            properties |= self._resolved_property(name, value)
        return with_stack_tags(declaration["Type"], properties, self._tags)

    def _resolved_property(self, name: str, value: Any) -> Any:
        """Return a property by its name, or an empty map if it resolves to AWS::NoValue."""
        try:
            return self._scope.resolve({name: value})
        except TemplateError:  # refers to something new: the update creates it, or reports the error
            return {name: KNOWN_AFTER_APPLY}

    def _ref(self, logical_id: str) -> Any:
        if logical_id in self._renewed or logical_id not in self._stack.resources:
            return KNOWN_AFTER_APPLY
        return self._stack.resources[logical_id].physical_id

    def _attribute(self, logical_id: str, name: str) -> Any:
        if logical_id in self._renewed or logical_id not in self._stack.resources:
            return KNOWN_AFTER_APPLY
        resource = self._stack.resources[logical_id]
        value = resource.attribute(name)
        # A change in place keeps values that contain the resource's id. Others may change, such as a latest version.
        return KNOWN_AFTER_APPLY if logical_id in self._changed and resource.physical_id not in str(value) else value


def _identity(resource: StackResource) -> dict[str, Any]:
    return {
        "LogicalResourceId": resource.logical_id,
        "PhysicalResourceId": resource.physical_id,
        "ResourceType": resource.resource_type,
    }


def _detail(name: str, value: Any, *, recreates: bool) -> dict[str, Any]:
    return {
        "Target": {
            "Attribute": "Properties",
            "Name": name,
            "RequiresRecreation": "Always" if recreates else "Never",
        },
        "Evaluation": "Dynamic" if KNOWN_AFTER_APPLY in json.dumps(value) else "Static",
    }
