"""What a change set shows: which resources come, go or change, property by property, with nothing done yet.

Properties are compared once references are resolved, as an update compares them. What the update itself will make (the
id of a new resource, say) is not known before; a value with such a part counts as changed, and shows AWS's own words.

Source: CloudFormation API reference, "ResourceChange", "ResourceChangeDetail" and "ResourceTargetDefinition".
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from infra.emulator.cloudformation import models
from infra.emulator.cloudformation.records import StackResource
from infra.emulator.cloudformation.stack import Stack
from infra.emulator.cloudformation.template import TemplateError, no_echo_parameters, references

KNOWN_AFTER_APPLY = "{{changeSet:KNOWN_AFTER_APPLY}}"
"""What AWS shows in place of a value that only the execution makes."""

NOT_SHOWN = "****"
"""In place of a value that a parameter with NoEcho is part of."""

_OTHER_ATTRIBUTES = ("CreationPolicy", "DeletionPolicy", "Metadata", "UpdatePolicy", "UpdateReplacePolicy")
"""The attributes of a resource beside its properties; Scope and Target.Attribute have the same names."""

_ONLY_WITH_VALUES = frozenset(
    {"AfterContext", "AfterValue", "AttributeChangeType", "BeforeContext", "BeforeValue", "Path"}
)
"""Parts of an answer to a request with IncludePropertyValues."""


def changes_of(stack: Stack, template: Mapping[str, Any], parameters: Mapping[str, str]) -> list[dict[str, Any]]:
    """The changes that bring a stack to a template, with all their values.

    Raises TemplateError where the template or a parameter is wrong.
    """
    preview = _Preview(stack, template, parameters)
    return [{"Type": "Resource", "ResourceChange": change} for change in preview.resource_changes()]


def without_values(shown: Any) -> Any:
    """Changes as they are described where nobody asked for the values of properties."""
    if isinstance(shown, list):
        return [without_values(item) for item in shown]
    if isinstance(shown, dict):
        return {key: without_values(item) for key, item in shown.items() if key not in _ONLY_WITH_VALUES}
    return shown


class _Preview:
    """One stack on its way to another template."""

    def __init__(self, stack: Stack, template: Mapping[str, Any], parameters: Mapping[str, str]) -> None:
        self._stack = stack
        self._scope = replace(stack.scope(template, parameters), ref=self._ref, attribute=self._attribute)
        self._order = self._scope.active_resources()
        self._secret = no_echo_parameters(stack.template) | no_echo_parameters(template)
        self._changed: set[str] = set()
        """Logical ids of resources that change and stay what they are."""
        self._renewed: set[str] = set()
        """The resources that will have another physical id."""

    def resource_changes(self) -> list[dict[str, Any]]:
        """Return the changes of resources by their logical ids."""
        found = []
        for logical_id, declaration in self._order.items():  # those first that others refer to
            resource = self._stack.resources.get(logical_id)
            change = (
                self._addition(logical_id, declaration) if resource is None else self._change(resource, declaration)
            )
            if change is not None:
                found.append(change)
        gone = [resource for logical_id, resource in self._stack.resources.items() if logical_id not in self._order]
        found.extend(map(self._removal, gone))
        return sorted(found, key=lambda change: str(change["LogicalResourceId"]))

    # What becomes of one resource

    def _addition(self, logical_id: str, declaration: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "Action": "Add",
            "LogicalResourceId": logical_id,
            "ResourceType": declaration["Type"],
            "Scope": [],
            "Details": [],
            "AfterContext": self._context(declaration, self._resolved(declaration)),
        }

    def _removal(self, resource: StackResource) -> dict[str, Any]:
        retained = str(resource.declaration.get("DeletionPolicy")).startswith("Retain")
        return {
            "Action": "Remove",
            "PolicyAction": "Retain" if retained else "Delete",
            **_identity(resource),
            "Scope": [],
            "Details": [],
            "BeforeContext": self._context(resource.declaration, resource.properties),
        }

    def _change(self, resource: StackResource, declaration: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the change of one resource; None where nothing of it changes."""
        old, new = resource.properties, self._resolved(declaration)
        details = [
            self._property_detail(resource, declaration, name, new)
            for name in sorted({**old, **new})
            if name not in old or name not in new or old[name] != new[name]
        ]
        retyped = resource.resource_type != declaration["Type"]
        recreating = [detail for detail in details if detail["Target"]["RequiresRecreation"] == "Always"]
        certain = retyped or any(detail["Evaluation"] == "Static" for detail in recreating)
        if recreating or retyped or (details and models.makes_revisions(resource.model)):
            self._renewed.add(resource.logical_id)
        elif details:
            self._changed.add(resource.logical_id)
        others = [name for name in _OTHER_ATTRIBUTES if resource.declaration.get(name) != declaration.get(name)]
        if not details and not others and not retyped:
            return None
        replacement = "True" if certain else "Conditional" if recreating else "False"
        retained = resource.declaration.get("UpdateReplacePolicy") == "Retain"
        return {
            "Action": "Modify",
            "PolicyAction": None if replacement == "False" else f"ReplaceAnd{'Retain' if retained else 'Delete'}",
            **_identity(resource),
            "ResourceType": declaration["Type"],
            "Replacement": replacement,
            "Scope": [*(["Properties"] if details or retyped else []), *others],
            "Details": [*details, *map(_other_detail, others)],
            "BeforeContext": self._context(resource.declaration, old),
            "AfterContext": self._context(declaration, new),
        }

    def _property_detail(
        self, resource: StackResource, declaration: Mapping[str, Any], name: str, new: Mapping[str, Any]
    ) -> dict[str, Any]:
        old = resource.properties
        alone = {key: value for key, value in old.items() if key != name}  # nothing else changes
        if name in new:
            alone[name] = new[name]
        recreates = models.will_replace(resource.model, resource.resource_type, old, alone)
        before, after = (
            _text(self._shown(declared, name, values[name])) if name in values else None
            for declared, values in ((resource.declaration, old), (declaration, new))
        )
        texts = [one.get("Properties", {}).get(name) for one in (resource.declaration, declaration)]
        return {
            "Target": {
                "Attribute": "Properties",
                "Name": name,
                "RequiresRecreation": "Always" if recreates else "Never",
                "Path": f"/Properties/{name}",
                "BeforeValue": before,
                "AfterValue": after,
                "AttributeChangeType": "Add" if name not in old else "Modify" if name in new else "Remove",
            },
            "Evaluation": "Dynamic" if KNOWN_AFTER_APPLY in json.dumps(new.get(name)) else "Static",
            "ChangeSource": "DirectModification" if texts[0] != texts[1] else None,
        }

    # Values

    def _resolved(self, declaration: Mapping[str, Any]) -> dict[str, Any]:
        """A resource's properties in the new template."""
        properties: dict[str, Any] = {}
        for name, value in declaration.get("Properties", {}).items():
            properties |= self._resolved_property(name, value)
        return properties

    def _resolved_property(self, name: str, value: Any) -> Any:
        """Itself by its name; nothing where it comes to AWS::NoValue."""
        try:
            return self._scope.resolve({name: value})
        except TemplateError:
            # Part of what is not there yet, another stack's export too: executing makes it, or tells what is wrong.
            return {name: KNOWN_AFTER_APPLY}

    def _ref(self, logical_id: str) -> Any:
        if logical_id in self._renewed or logical_id not in self._stack.resources:
            return KNOWN_AFTER_APPLY
        return self._stack.resources[logical_id].physical_id

    def _attribute(self, logical_id: str, name: str) -> Any:
        if logical_id in self._renewed or logical_id not in self._stack.resources:
            return KNOWN_AFTER_APPLY
        resource = self._stack.resources[logical_id]
        value = models.attribute(resource.model, resource.resource_type, logical_id, name)
        # What names a resource stays when it changes in place; the rest may not: a launch template's latest version.
        return KNOWN_AFTER_APPLY if logical_id in self._changed and resource.physical_id not in str(value) else value

    def _context(self, declaration: Mapping[str, Any], properties: Mapping[str, Any]) -> str:
        shown = {name: self._shown(declaration, name, value) for name, value in properties.items()}
        others = {name: declaration[name] for name in _OTHER_ATTRIBUTES if name in declaration}
        return json.dumps({"Properties": shown, **others})

    def _shown(self, declaration: Mapping[str, Any], name: str, value: Any) -> Any:
        declared = declaration.get("Properties", {}).get(name)
        return NOT_SHOWN if self._secret.intersection(references(declared)) else value


def _identity(resource: StackResource) -> dict[str, Any]:
    return {
        "LogicalResourceId": resource.logical_id,
        "PhysicalResourceId": resource.physical_id,
        "ResourceType": resource.resource_type,
    }


def _other_detail(attribute: str) -> dict[str, Any]:
    return {
        "Target": {"Attribute": attribute, "RequiresRecreation": "Never"},
        "Evaluation": "Static",
        "ChangeSource": "DirectModification",
    }


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
