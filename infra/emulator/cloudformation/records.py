"""What a stack keeps of itself: its resources, its outputs, the events of its history; and what EventBridge hears."""

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

from infra.emulator import events
from infra.emulator.cloudformation.resource_type import Made
from infra.emulator.cloudformation.resources import Place
from infra.emulator.cloudformation.template import TemplateError


@dataclass(kw_only=True)
class StackResource:
    """One resource of a stack."""

    logical_id: str
    resource_type: str
    properties: Mapping[str, Any]
    """As the template had them when it was last made or changed, references resolved."""
    declaration: Mapping[str, Any]
    """As the template has them now: its policies for deletion count."""
    made: Made
    status: str = "CREATE_COMPLETE"
    reason: str | None = None
    updated_at: datetime = field(default_factory=lambda: datetime.now(timezone.utc))

    @property
    def physical_id(self) -> str:
        return self.made.ref


@dataclass(frozen=True, kw_only=True)
class Output:
    """A value that a stack shows, and maybe exports."""

    key: str
    value: str
    description: str | None
    export_name: str | None


@dataclass(frozen=True, kw_only=True)
class Event:
    """A change of state of a stack or of one of its resources."""

    logical_id: str
    physical_id: str
    resource_type: str
    status: str
    reason: str | None
    client_request_token: str | None
    timestamp: datetime
    event_id: str = field(default_factory=lambda: str(uuid.uuid4()))


def attribute(resource: StackResource, name: str) -> Any:
    """Return what Fn::GetAtt gives. Raises TemplateError if the type has no such attribute."""
    if name not in resource.made.attributes:
        raise TemplateError(
            f"Template error: resource {resource.logical_id} ({resource.resource_type}) does not support attribute "
            f"type {name} in Fn::GetAtt on the embedded AWS"
        )
    return resource.made.attributes[name]


def tell_status(stack: Place, status: str, reason: str | None, client_request_token: str | None) -> None:
    """Tell the default bus of EventBridge that a stack's status has changed.

    Source: AWS CloudFormation user guide, "Stack Status Change event detail". Changes of single resources are not told.
    """
    if not events.has_rules(stack.account_id, stack.region):
        return
    events.emit(
        account_id=stack.account_id,
        region=stack.region,
        source="aws.cloudformation",
        detail_type="CloudFormation Stack Status Change",
        detail={
            "stack-id": stack.stack_id,
            "status-details": {"status": status, "status-reason": reason or ""},
            "client-request-token": client_request_token or "",
        },
        resources=(stack.stack_id,),
    )
