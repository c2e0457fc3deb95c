"""Create, update, delete and roll back a stack like CloudFormation, with its resources in order of references.

An operation completes before its request is answered, so clients never see a stack in progress.
"""

import copy
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from typing import Any

from infra.emulator import events
from infra.emulator.cloudformation import resources
from infra.emulator.cloudformation.api import Account
from infra.emulator.cloudformation.resource_type import PhysicalResource
from infra.emulator.cloudformation.resources import ResourceError
from infra.emulator.cloudformation.template import Scope, TemplateError, parse_template

FINAL_FAILURES = ("CREATE_FAILED", "ROLLBACK_COMPLETE", "ROLLBACK_FAILED")
"""States in which a stack can only be deleted."""


@dataclass(kw_only=True)
class StackResource:
    """One resource of a stack."""

    logical_id: str
    resource_type: str
    properties: Mapping[str, Any]
    """Its properties at the last create or change, with references resolved."""
    declaration: Mapping[str, Any]
    """Its declaration in the current template, with the current deletion policies."""
    physical: PhysicalResource
    status: str = "CREATE_COMPLETE"
    reason: str | None = None
    updated_at: datetime = field(default_factory=lambda: datetime.now(timezone.utc))

    @property
    def physical_id(self) -> str:
        return self.physical.ref

    def attribute(self, name: str) -> Any:
        """Return an attribute for Fn::GetAtt. Raises TemplateError if the type does not have it."""
        if name not in self.physical.attributes:
            raise TemplateError(
                f"Template error: resource {self.logical_id} ({self.resource_type}) does not support attribute "
                f"type {name} in Fn::GetAtt on the emulator"
            )
        return self.physical.attributes[name]


class Stack:
    """A stack with its outputs and events, which have the shape of the API."""

    def __init__(self, name: str, account: Account, *, neighbours: Callable[[], Iterable["Stack"]]) -> None:
        """`neighbours` returns all stacks of the account and region, which share exports."""
        self.name = name
        self.account = account
        self.stack_id = f"arn:aws:cloudformation:{account.region}:{account.id}:stack/{name}/{uuid.uuid4()}"
        self.created_at = datetime.now(timezone.utc)
        self.updated_at: datetime | None = None
        self.deleted_at: datetime | None = None
        self.status = "REVIEW_IN_PROGRESS"
        self.reason: str | None = None
        self.template_body = ""
        self.template: Mapping[str, Any] = {}
        self.given_parameters: Mapping[str, str] = {}
        self.parameters: Mapping[str, Any] = {}
        self.tags: Mapping[str, str] = {}
        self.role_arn: str | None = None
        self.termination_protection = False
        self.change_set_id: str | None = None
        self.resources: dict[str, StackResource] = {}
        self.outputs: list[dict[str, Any]] = []
        self.imports: set[str] = set()
        self.events: list[dict[str, Any]] = []
        self.drifts: list[dict[str, Any]] = []
        """Result of the last drift detection, with the shape of the API."""
        self.client_request_token: str | None = None
        self._neighbours = neighbours
        self._importing: set[str] = set()

    @property
    def exports(self) -> dict[str, str]:
        """Return the values that other stacks may import, by name."""
        return _exports(self.outputs)

    # Operations

    def create(self, template_body: str, parameters: Mapping[str, str], *, rolls_back: bool) -> None:
        """Create the resources of the stack. If one fails, delete them again if `rolls_back` is set.

        Raises TemplateError and does nothing if the template or a parameter is wrong. If a service refuses a resource,
        `status` and `reason` show it.
        """
        template = parse_template(template_body)
        scope = self.scope(template, parameters)
        order = scope.active_resources()
        self._remember(template_body, template, parameters, scope)
        self._enter("CREATE_IN_PROGRESS", "User Initiated")
        try:
            for logical_id, declaration in order.items():
                self._create_resource(logical_id, declaration, self._properties(declaration, scope))
            self.outputs = self._resolve_outputs(scope)
        except (ResourceError, TemplateError) as error:
            self._fail_create(str(error), rolls_back=rolls_back)
        else:
            self.imports = self._importing
            self._enter("CREATE_COMPLETE")

    def update(self, template_body: str, parameters: Mapping[str, str]) -> None:
        """Change the stack to another template, and back to the old one if that fails.

        Raises TemplateError and does nothing if the template or a parameter is wrong.
        """
        template = parse_template(template_body)
        scope = self.scope(template, parameters)
        order = scope.active_resources()
        before = (self.template_body, self.template, self.given_parameters, self.parameters)
        undo: list[Callable[[], None]] = []
        replaced: list[StackResource] = []
        self._remember(template_body, template, parameters, scope)
        self.updated_at = datetime.now(timezone.utc)
        self._enter("UPDATE_IN_PROGRESS", "User Initiated")
        try:
            for logical_id, declaration in order.items():
                self._apply(logical_id, declaration, scope, undo, replaced)
            outputs = self._resolve_outputs(scope)
            self._check_exports_in_use(_exports(outputs))
        except (ResourceError, TemplateError) as error:
            self.template_body, self.template, self.given_parameters, self.parameters = before
            self._roll_update_back(str(error), undo)
            return
        self.outputs = outputs
        self.imports = self._importing
        self._enter("UPDATE_COMPLETE_CLEANUP_IN_PROGRESS")
        removed = [resource for key, resource in self.resources.items() if key not in order]
        gone = [
            *(resource for resource in removed if not self._retained(resource)),
            *(resource for resource in replaced if resource.declaration.get("UpdateReplacePolicy") != "Retain"),
        ]
        for resource in reversed(gone):
            self._delete_resource(resource, must=False)
        self.resources = {logical_id: self.resources[logical_id] for logical_id in order}
        self._enter("UPDATE_COMPLETE")

    def delete(self) -> None:
        """Delete the resources, dependents first. The status is DELETE_FAILED if one cannot be deleted."""
        self._enter("DELETE_IN_PROGRESS", "User Initiated")
        try:
            self._check_exports_in_use({})
            self._delete_all(must=True)
        except (ResourceError, TemplateError) as error:
            self._enter("DELETE_FAILED", str(error))
            return
        self.resources.clear()
        self.outputs = []
        self.deleted_at = datetime.now(timezone.utc)
        self._enter("DELETE_COMPLETE")

    def is_same(self, template_body: str, parameters: Mapping[str, str], tags: Mapping[str, str]) -> bool:
        """Return whether an update to these values would change nothing."""
        template = parse_template(template_body)
        resolved = self.scope(template, parameters).parameters
        return template == self.template and resolved == self.parameters and dict(tags) == dict(self.tags)

    # Resources

    def _properties(self, declaration: Mapping[str, Any], scope: Scope) -> Mapping[str, Any]:
        """Return the properties of a declaration, with references resolved and the stack's tags."""
        return resources.with_stack_tags(
            declaration["Type"], scope.resolve(declaration.get("Properties", {})), self.tags
        )

    def _create_resource(self, logical_id: str, declaration: Mapping[str, Any], properties: Mapping[str, Any]) -> None:
        resource_type = declaration["Type"]
        self._event(logical_id, "", resource_type, "CREATE_IN_PROGRESS")
        try:
            physical = resources.create(resource_type, logical_id, properties, self.account, stack_name=self.name)
        except (ResourceError, TemplateError) as error:
            self._event(logical_id, "", resource_type, "CREATE_FAILED", str(error))
            raise ResourceError(f"{logical_id} ({resource_type}): {error}") from None
        self.resources[logical_id] = StackResource(
            logical_id=logical_id,
            resource_type=resource_type,
            properties=copy.deepcopy(properties),
            declaration=declaration,
            physical=physical,
        )
        self._event_of(self.resources[logical_id], "CREATE_COMPLETE")

    def _apply(
        self,
        logical_id: str,
        declaration: Mapping[str, Any],
        scope: Scope,
        undo: list[Callable[[], None]],
        replaced: list[StackResource],
    ) -> None:
        """Change one resource to its new declaration.

        Adds the steps that revert it to `undo`, and the old resource to `replaced` if a new one takes its place.
        """
        properties = self._properties(declaration, scope)
        resource = self.resources.get(logical_id)
        if resource is None:
            self._create_resource(logical_id, declaration, properties)
            created = self.resources[logical_id]
            undo.append(lambda: self._undo_create(created))
            return
        if resource.resource_type != declaration["Type"]:
            raise ResourceError(
                f"{logical_id}: Update of resource type is not permitted. The new template modifies resource type of "
                f"the following resources: [{logical_id}]"
            )
        old_properties, old_declaration = resource.properties, resource.declaration
        resource.declaration = declaration
        undo.append(lambda: setattr(resource, "declaration", old_declaration))
        # Compare after references are resolved, so that dependents of a replaced resource change too.
        if properties == old_properties:
            return
        if resources.replacing_properties(resource.resource_type, old_properties, properties):
            resources.check_replaceable(resource.resource_type, old_properties, properties)
            self._create_resource(logical_id, declaration, properties)
            replacement = self.resources[logical_id]
            replaced.append(resource)
            undo.append(lambda: self.resources.__setitem__(logical_id, resource))
            undo.append(lambda: self._undo_create(replacement))
        else:
            undo.append(lambda: self._change(resource, old_properties))
            self._change(resource, properties)

    def _change(self, resource: StackResource, properties: Mapping[str, Any]) -> None:
        self._event_of(resource, "UPDATE_IN_PROGRESS")
        kind, logical_id = resource.resource_type, resource.logical_id
        try:
            old = resource.properties
            physical = resources.change(resource.physical, kind, old=old, new=properties, account=self.account)
        except (ResourceError, TemplateError) as error:
            self._event_of(resource, "UPDATE_FAILED", str(error))
            raise ResourceError(f"{logical_id} ({kind}): {error}") from None
        resource.physical = physical
        resource.properties = copy.deepcopy(properties)
        self._event_of(resource, "UPDATE_COMPLETE")

    def _undo_create(self, resource: StackResource) -> None:
        self._delete_resource(resource, must=False)
        del self.resources[resource.logical_id]

    def _delete_resource(self, resource: StackResource, *, must: bool) -> None:
        self._event_of(resource, "DELETE_IN_PROGRESS")
        try:
            resources.delete(resource.physical, resource.resource_type, resource.properties, self.account)
        except ResourceError as error:
            self._event_of(resource, "DELETE_FAILED", str(error))
            if must:
                raise ResourceError(
                    f"The following resource(s) failed to delete: [{resource.logical_id}]. {error}"
                ) from None
        else:
            self._event_of(resource, "DELETE_COMPLETE")

    def _delete_all(self, *, must: bool) -> None:
        for resource in reversed(list(self.resources.values())):
            if self._retained(resource):
                self._event_of(resource, "DELETE_SKIPPED")
            else:
                self._delete_resource(resource, must=must)
            del self.resources[resource.logical_id]

    def _retained(self, resource: StackResource) -> bool:
        policy = resource.declaration.get("DeletionPolicy")
        # RetainExceptOnCreate deletes the resource only if the creation of the stack is rolled back.
        return policy == "Retain" or (policy == "RetainExceptOnCreate" and not self.status.startswith("ROLLBACK"))

    # Failure

    def _fail_create(self, reason: str, *, rolls_back: bool) -> None:
        if not rolls_back:
            self._enter("CREATE_FAILED", reason)
            return
        self._enter("ROLLBACK_IN_PROGRESS", f"{reason}. Rollback requested by user.")
        self._delete_all(must=False)
        self._enter("ROLLBACK_COMPLETE")
        self.reason = reason

    def _roll_update_back(self, reason: str, undo: list[Callable[[], None]]) -> None:
        self._enter("UPDATE_ROLLBACK_IN_PROGRESS", reason)
        failed = None
        for step in reversed(undo):
            try:
                step()
            except ResourceError as error:  # noqa: PERF203 - the other steps must still run
                failed = str(error)
        if failed is not None:
            self._enter("UPDATE_ROLLBACK_FAILED", failed)
        else:
            self._enter("UPDATE_ROLLBACK_COMPLETE")
        self.reason = reason

    # Outputs

    def _resolve_outputs(self, scope: Scope) -> list[dict[str, Any]]:
        outputs = []
        for key, declaration in (scope.template.get("Outputs") or {}).items():
            if "Condition" in declaration and not scope.condition(declaration["Condition"]):
                continue
            export = declaration.get("Export")
            name = str(scope.resolve(export["Name"])) if export else None
            for stack in self._neighbours():
                if name and stack is not self and name in stack.exports:
                    raise TemplateError(f"Export with name {name} is already exported by stack {stack.name}")
            outputs.append(
                {
                    "OutputKey": key,
                    "OutputValue": str(scope.resolve(declaration["Value"])),
                    "Description": declaration.get("Description"),
                    "ExportName": name,
                }
            )
        return outputs

    def _check_exports_in_use(self, kept: Mapping[str, str]) -> None:
        """Raise ResourceError if an export that another stack imports would be deleted or changed."""
        for name, value in self.exports.items():
            if kept.get(name) == value:
                continue
            users = sorted(stack.name for stack in self._neighbours() if stack is not self and name in stack.imports)
            if users:
                what = "updated" if name in kept else "deleted"
                raise ResourceError(f"Export {name} cannot be {what} as it is in use by {', '.join(users)}")

    # Shared by the operations

    def scope(self, template: Mapping[str, Any], parameters: Mapping[str, str]) -> Scope:
        """Return a template's scope in this stack. Raises TemplateError if the template or a parameter is wrong."""
        self._importing = set()
        return Scope(
            template=template,
            account_id=self.account.id,
            region=self.account.region,
            stack_id=self.stack_id,
            stack_name=self.name,
            given_parameters=parameters,
            ref=lambda name: self._resource(name).physical_id,
            attribute=lambda name, attribute: self._resource(name).attribute(attribute),
            import_value=self._import_value,
        )

    def _resource(self, logical_id: str) -> StackResource:
        try:
            return self.resources[logical_id]
        except KeyError:
            raise TemplateError(f"Template format error: Unresolved resource dependencies [{logical_id}]") from None

    def _import_value(self, name: str) -> str:
        for stack in self._neighbours():
            if name in stack.exports:
                self._importing.add(name)
                return stack.exports[name]
        raise TemplateError(f"No export named {name} found.")

    def _remember(self, body: str, template: Mapping[str, Any], parameters: Mapping[str, str], scope: Scope) -> None:
        self.template_body = body
        self.template = template
        self.given_parameters = parameters
        self.parameters = scope.parameters

    def _enter(self, status: str, reason: str | None = None) -> None:
        """Change the status, and emit an event. Resources emit none.

        Source: AWS CloudFormation user guide, "Stack Status Change event detail".
        """
        self.status, self.reason = status, reason
        if events.has_rules(self.account.id, self.account.region):
            events.emit(
                account_id=self.account.id,
                region=self.account.region,
                source="aws.cloudformation",
                detail_type="CloudFormation Stack Status Change",
                detail={
                    "stack-id": self.stack_id,
                    "status-details": {"status": status, "status-reason": reason or ""},
                    "client-request-token": self.client_request_token or "",
                },
                resources=(self.stack_id,),
            )
        self._event(self.name, self.stack_id, "AWS::CloudFormation::Stack", status, reason)

    def _event_of(self, resource: StackResource, status: str, reason: str | None = None) -> None:
        resource.status, resource.reason, resource.updated_at = status, reason, datetime.now(timezone.utc)
        self._event(resource.logical_id, resource.physical_id, resource.resource_type, status, reason)

    def _event(
        self, logical_id: str, physical_id: str, resource_type: str, status: str, reason: str | None = None
    ) -> None:
        now = datetime.now(timezone.utc)
        if self.events:
            # Clients sort by time in milliseconds, and many events happen within a millisecond.
            now = max(now, self.events[-1]["Timestamp"] + timedelta(milliseconds=1))
        self.events.append(
            {
                "StackId": self.stack_id,
                "StackName": self.name,
                "EventId": str(uuid.uuid4()),
                "LogicalResourceId": logical_id,
                "PhysicalResourceId": physical_id,
                "ResourceType": resource_type,
                "Timestamp": now,
                "ResourceStatus": status,
                "ResourceStatusReason": reason,
                "ClientRequestToken": self.client_request_token,
            }
        )


def _exports(outputs: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Return the values of exported outputs by the names of their exports."""
    return {output["ExportName"]: output["OutputValue"] for output in outputs if output["ExportName"]}
