"""AWS::Lambda::* in CloudFormation templates: functions, their versions, permissions and settings of invocations."""

import base64
import io
import json
import zipfile
from typing import Any

from moto.awslambda.models import lambda_backends

from infra.emulator.functions.function import EVENT_INVOKE_SETTINGS, Function
from infra.emulator.resource_model import AccountRegion, ChangeableModel, Properties, ResourceModel

_INTEGERS = ("MemorySize", "Timeout", "ReservedConcurrentExecutions")


class FunctionModel(ChangeableModel):
    """AWS::Lambda::Function."""

    resource_type = "AWS::Lambda::Function"
    name_property = "FunctionName"

    @classmethod
    def create(cls, name: str, properties: Properties, place: AccountRegion) -> Any:
        return _lambda(place).create_function(_request(name, properties))

    @classmethod
    def update(cls, resource: Any, name: str, properties: Properties, place: AccountRegion) -> Any:
        function: Function = resource
        if name != function.function_name:
            replacement = cls.create(name, properties, place)
            cls.delete(function.function_name, place)
            return replacement
        request = _request(name, properties)
        defaults: dict[str, Any] = {
            "Description": "",
            "MemorySize": 128,
            "Timeout": 3,
            "Environment": {"Variables": {}},
        }
        cleared: dict[str, Any] = {"DeadLetterConfig": None, "LoggingConfig": None, "VpcConfig": None, "Layers": []}
        function.update_configuration({**defaults, **cleared, **request})
        function.update_function_code(request["Code"])
        function.reserved_concurrency = request.get("ReservedConcurrentExecutions")
        function.tags = request["Tags"]
        return function

    @classmethod
    def delete(cls, name: str, place: AccountRegion) -> None:
        _lambda(place).delete_function(name)


class _OfFunction:
    """A part of a function: its physical id holds all that is needed to find it again."""

    def __init__(self, physical_id: str, **attributes: str) -> None:
        self.physical_resource_id = physical_id
        self._attributes = attributes

    def get_cfn_attribute(self, attribute: str) -> str:
        if attribute not in self._attributes:
            raise NotImplementedError(attribute)
        return self._attributes[attribute]


class VersionModel(ResourceModel):
    """AWS::Lambda::Version."""

    resource_type = "AWS::Lambda::Version"

    @classmethod
    def create(cls, name: str, properties: Properties, place: AccountRegion) -> _OfFunction:
        del name
        version = _lambda(place).publish_version(properties["FunctionName"], properties.get("Description", ""))
        return _OfFunction(version.function_arn, FunctionArn=version.function_arn, Version=str(version.version))

    @classmethod
    def delete(cls, name: str, place: AccountRegion) -> None:
        _lambda(place).delete_function(name)


class PermissionModel(ResourceModel):
    """AWS::Lambda::Permission; its physical id is `<function>|<statement id>`."""

    resource_type = "AWS::Lambda::Permission"

    @classmethod
    def create(cls, name: str, properties: Properties, place: AccountRegion) -> _OfFunction:
        function = _lambda(place).get_function(properties["FunctionName"])
        statement = {key: value for key, value in properties.items() if key != "FunctionName"}
        function.policy.add_statement(json.dumps({**statement, "StatementId": name}))
        return _OfFunction(f"{function.function_name}|{name}")

    @classmethod
    def delete(cls, name: str, place: AccountRegion) -> None:
        function_name, _, statement_id = name.partition("|")
        _lambda(place).remove_permission(function_name, statement_id)


class EventInvokeConfigModel(ChangeableModel):
    """AWS::Lambda::EventInvokeConfig."""

    resource_type = "AWS::Lambda::EventInvokeConfig"

    @classmethod
    def create(cls, name: str, properties: Properties, place: AccountRegion) -> _OfFunction:
        del name
        function_name = properties["FunctionName"]
        settings = {key: properties[key] for key in EVENT_INVOKE_SETTINGS if key in properties}
        _lambda(place).put_function_event_invoke_config(function_name, settings)
        return _OfFunction(str(function_name))

    @classmethod
    def update(cls, resource: Any, name: str, properties: Properties, place: AccountRegion) -> _OfFunction:
        if properties["FunctionName"] != resource.physical_resource_id:
            cls.delete(resource.physical_resource_id, place)
        return cls.create(name, properties, place)

    @classmethod
    def delete(cls, name: str, place: AccountRegion) -> None:
        _lambda(place).delete_function_event_invoke_config(name)


def _lambda(place: AccountRegion) -> Any:
    return lambda_backends[place.account_id][place.region]


def _request(name: str, properties: Properties) -> dict[str, Any]:
    """CreateFunction's request."""
    request = {**properties, "FunctionName": name, "Code": dict(properties["Code"])}
    request["Tags"] = {tag["Key"]: tag["Value"] for tag in properties.get("Tags", [])}
    if "KmsKeyArn" in request:
        request["KMSKeyArn"] = request.pop("KmsKeyArn")
    for key in _INTEGERS:
        if key in request:
            request[key] = int(request[key])
    if "ZipFile" in request["Code"]:  # the source itself: a zip file is made of it
        request["Code"]["ZipFile"] = base64.b64encode(_zip(request["Code"]["ZipFile"]))
    return request


def _zip(source: str) -> bytes:
    whole = io.BytesIO()
    with zipfile.ZipFile(whole, "w") as archive:
        archive.writestr("index.py", source)
    return whole.getvalue()
