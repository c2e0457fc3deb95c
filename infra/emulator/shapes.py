"""Properties of CloudFormation templates as the API of their service takes them.

Both have the same structures in most services; a template capitalises the names and may give numbers and booleans as
text. The API's own model (botocore's) says which is which, so maps of the user's (tags, log options) stay as they are.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

import botocore.session
from botocore.model import ListShape, MapShape, Shape, StructureShape
from moto.core.exceptions import ServiceException


class PropertyError(ServiceException):
    """A property that the API of its service does not know, or takes in another shape."""

    code = "ValidationError"


def to_api(service: str, operation: str, properties: Mapping[str, Any]) -> dict[str, Any]:
    """Return `properties` as the request of `operation`. Raises PropertyError on what the API does not know."""
    shape = _service_model(service).operation_model(operation).input_shape
    converted: dict[str, Any] = _convert(shape, properties, "#")
    return converted


@cache
def _service_model(service: str) -> Any:
    return botocore.session.get_session().get_service_model(service)


def _convert(shape: Shape, value: Any, path: str) -> Any:
    if isinstance(shape, StructureShape) and isinstance(value, Mapping):
        members = {name.lower(): name for name in shape.members}
        result = {}
        for name, item in value.items():
            if name.lower() not in members:
                raise PropertyError(f"{path}: extraneous key [{name}] is not permitted")
            member = members[name.lower()]
            result[member] = _convert(shape.members[member], item, f"{path}/{name}")
        return result
    if isinstance(shape, ListShape) and isinstance(value, list):
        return [_convert(shape.member, item, f"{path}/{index}") for index, item in enumerate(value)]
    if isinstance(shape, MapShape) and isinstance(value, Mapping):
        return {name: _convert(shape.value, item, f"{path}/{name}") for name, item in value.items()}
    if isinstance(value, (Mapping, list)):
        raise PropertyError(f"{path}: expected type {shape.type_name.capitalize()}")
    return _scalar(shape.type_name, value, path)


def _scalar(type_name: str, value: Any, path: str) -> Any:
    try:
        if type_name in ("integer", "long"):
            return int(value)
        if type_name in ("float", "double"):
            return float(value)
        if type_name == "boolean" and isinstance(value, str):
            return {"true": True, "false": False}[value.lower()]
    except (ValueError, TypeError, KeyError):
        raise PropertyError(f"{path}: {value!r} is no {type_name}") from None
    if type_name == "string" and isinstance(value, bool):
        return str(value).lower()
    return str(value) if type_name == "string" else value
