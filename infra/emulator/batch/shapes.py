"""Properties of CloudFormation templates as the Batch API takes them.

Both have the same structures; a template capitalises the names and may give numbers and booleans as text. The API's own
model (botocore's) says which is which, so maps of the user's (tags, parameters, log options) stay as they are.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

import botocore.session
from botocore.model import ListShape, MapShape, Shape, StructureShape
from moto.batch.exceptions import ClientException


def to_api(operation: str, properties: Mapping[str, Any]) -> dict[str, Any]:
    """`properties` as the request of `operation`. Raises ClientException on what the API does not know."""
    shape = _service_model().operation_model(operation).input_shape
    converted: dict[str, Any] = _convert(shape, properties, "#")
    return converted


@cache
def _service_model() -> Any:
    return botocore.session.get_session().get_service_model("batch")


def _convert(shape: Shape, value: Any, path: str) -> Any:
    if isinstance(shape, StructureShape) and isinstance(value, Mapping):
        members = {name.lower(): name for name in shape.members}
        result = {}
        for name, item in value.items():
            if name.lower() not in members:
                raise ClientException(f"{path}: extraneous key [{name}] is not permitted")
            member = members[name.lower()]
            result[member] = _convert(shape.members[member], item, f"{path}/{name}")
        return result
    if isinstance(shape, ListShape) and isinstance(value, list):
        return [_convert(shape.member, item, f"{path}/{index}") for index, item in enumerate(value)]
    if isinstance(shape, MapShape) and isinstance(value, Mapping):
        return {name: _convert(shape.value, item, f"{path}/{name}") for name, item in value.items()}
    if isinstance(value, (Mapping, list)):
        raise ClientException(f"{path}: expected type {shape.type_name.capitalize()}")
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
        raise ClientException(f"{path}: {value!r} is no {type_name}") from None
    if type_name == "string" and isinstance(value, bool):
        return str(value).lower()
    return str(value) if type_name == "string" else value
