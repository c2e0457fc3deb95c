"""Call the API of a service with properties of a template.

Like CloudFormation, this package creates resources through the API of their service. It sends the requests to the
emulator over HTTP, and a stack fails with the service's message.

Templates capitalise names, and may give numbers and booleans as text. botocore's model of the API defines what a
request needs. User-defined maps (tags, log options) are not converted.
"""

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import botocore.session
from botocore import xform_name
from botocore.model import ListShape, MapShape, Shape, StructureShape
from moto.core.exceptions import ServiceException

from infra.emulator.credentials import Credentials, session

Properties = Mapping[str, Any]
"""Properties of a resource, with references resolved."""


class PropertyError(ServiceException):
    """A property that the service's API does not have, or that has the wrong type."""

    code = "ValidationError"


@dataclass(frozen=True)
class Account:
    """The account and region of a stack."""

    id: str
    region: str


class Api:
    """The API of one service, in the account and region of a stack."""

    endpoint: ClassVar[str]
    """Address of the server; set by `install`."""
    credentials: ClassVar[Credentials]
    """Credentials of the server; set by `install`."""

    def __init__(self, service: str, account: Account) -> None:
        self.service = service
        self.account = account

    def __call__(self, operation: str, /, **properties: Any) -> dict[str, Any]:
        """Call an operation with properties of a template. Properties that are None are left out.

        Raises botocore's ClientError if the service refuses, PropertyError if the operation does not have a property.
        """
        given = {name: item for name, item in properties.items() if item is not None}
        shape = _service_model(self.service).operation_model(operation).input_shape
        client = _client(self.endpoint, self.credentials, self.service, self.account)
        answer: dict[str, Any] = getattr(client, xform_name(operation))(**_converted(shape, given, "#"))
        return answer

    def arn(self, resource: str, *, service: str | None = None) -> str:
        return f"arn:aws:{service or self.service}:{self.account.region}:{self.account.id}:{resource}"


def has_parameter(service: str, operation: str, parameter: str) -> bool:
    """Return whether an operation has a parameter, in any capitalisation."""
    members = _service_model(service).operation_model(operation).input_shape.members
    return parameter.lower() in {name.lower() for name in members}


@functools.cache
def _service_model(service: str) -> Any:
    return botocore.session.get_session().get_service_model(service)


@functools.cache
def _client(endpoint: str, credentials: Credentials, service: str, account: Account) -> Any:
    make: Any = session(credentials).client  # the stubs type it by the name of the service
    client = make(service, region_name=account.region, endpoint_url=endpoint)

    def as_account(request: Any, **_: Any) -> None:
        request.headers["x-moto-account-id"] = account.id

    client.meta.events.register("before-sign", as_account)
    return client


def _converted(shape: Shape, value: Any, path: str) -> Any:
    if path.lower().endswith("tags") and (tags := _tags(shape, value)) is not None:
        return tags
    if isinstance(shape, StructureShape) and isinstance(value, Mapping):
        members = {name.lower(): name for name in shape.members}
        unknown = [name for name in value if name.lower() not in members]
        if unknown:
            raise PropertyError(f"{path}: extraneous key [{unknown[0]}] is not permitted")
        named = {members[name.lower()]: (name, item) for name, item in value.items()}
        return {key: _converted(shape.members[key], item, f"{path}/{name}") for key, (name, item) in named.items()}
    if isinstance(shape, ListShape) and isinstance(value, list):
        return [_converted(shape.member, item, f"{path}/{index}") for index, item in enumerate(value)]
    if isinstance(shape, MapShape) and isinstance(value, Mapping):
        return {name: _converted(shape.value, item, f"{path}/{name}") for name, item in value.items()}
    if isinstance(value, Mapping) and shape.type_name == "string":
        return json.dumps(value)  # a policy
    if isinstance(value, (Mapping, list)):
        raise PropertyError(f"{path}: expected type {shape.type_name.capitalize()}")
    return _scalar(shape.type_name, value, path)


def _tags(shape: Shape, value: Any) -> Any:
    """Return tags as a map or as a list with the service's key names, or None if the shape is neither."""
    if isinstance(shape, MapShape) and isinstance(value, list):
        return {tag["Key"]: tag["Value"] for tag in value}
    if not isinstance(shape, ListShape) or not isinstance(shape.member, StructureShape):
        return None
    names = {kind: name for name in shape.member.members for kind in ("key", "value") if name.lower().endswith(kind)}
    given = [{"Key": key, "Value": text} for key, text in value.items()] if isinstance(value, Mapping) else value
    return [{names[kind.lower()]: text for kind, text in tag.items()} for tag in given]


def _scalar(type_name: str, value: Any, path: str) -> Any:
    try:
        if type_name in ("integer", "long"):
            return int(value)
        if type_name in ("float", "double"):
            return float(value)
        if type_name == "boolean" and isinstance(value, str):
            return {"true": True, "false": False}[value.lower()]
    except (ValueError, TypeError, KeyError):
        raise PropertyError(f"{path}: {value!r} is not of type {type_name}") from None
    if type_name == "string" and isinstance(value, bool):
        return str(value).lower()
    return str(value) if type_name == "string" else value
