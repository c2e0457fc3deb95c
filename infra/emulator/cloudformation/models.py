"""Between the stack and the services: makes, changes and deletes one resource through the model of its type.

A model is a class with moto's `CloudFormationModel` interface: moto's own, or one of this package where moto's loses or
refuses what the stacks need. `find_model` prefers ours.
"""

import copy
import inspect
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import moto.cloudformation.parsing  # noqa: F401 - defines the models of all services that have any
from botocore.exceptions import ClientError, ParamValidationError
from moto.cloudformation.exceptions import UnformattedGetAttTemplateException
from moto.cloudformation.utils import random_suffix
from moto.core.common_models import CloudFormationModel
from moto.core.exceptions import ServiceException
from moto.ec2.models import ec2_backends
from moto.ec2.models.core import TaggedEC2Resource
from werkzeug.exceptions import HTTPException

from infra.emulator import kept_objects
from infra.emulator.cloudformation import ec2_models
from infra.emulator.cloudformation.template import TemplateError
from infra.emulator.cloudformation.unproven import UnprovenResource
from infra.emulator.server_errors import record_exception

logger = logging.getLogger(__name__)


class ResourceError(Exception):
    """A service refused a resource: the stack fails with its words as the reason."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a stack's resources are made."""

    account_id: str
    region: str
    stack_id: str
    stack_name: str
    tags: Mapping[str, str]


NAME_LIMITS = {
    "AWS::Events::Rule": 64,
    "AWS::IAM::Role": 64,
    "AWS::IAM::User": 64,
    "AWS::Lambda::Function": 64,
    "AWS::S3::Bucket": 63,
    "AWS::SQS::Queue": 80,
    "AWS::Scheduler::Schedule": 64,
    "AWS::Scheduler::ScheduleGroup": 64,
}
"""Longest names, where it is less than the 128 characters most services take."""

_BUCKET = "AWS::S3::Bucket"

LOWER_CASE_NAMES = frozenset({_BUCKET, "AWS::ECR::Repository"})


def find_model(resource_type: str) -> Any | None:
    """The class that makes resources of a type, or None where there is no service behind it."""
    if resource_type.startswith(("Custom::", "AWS::CloudFormation::")):
        return None  # what a custom resource's function would do is not done here, nor are nested stacks made
    found = None
    pending = [CloudFormationModel]
    while pending:
        model = pending.pop()
        pending.extend(model.__subclasses__())
        if model.cloudformation_type() == resource_type:
            if model.__module__.startswith("infra.emulator."):
                return model
            found = found or model
    return found


def _model(resource_type: str) -> Any:
    """The class that made a resource, which is there: a resource without one is a UnprovenResource."""
    model = find_model(resource_type)
    if model is None:
        raise ResourceError(f"{resource_type} has no model")
    return model


def generate_name(resource_type: str, stack_name: str, logical_id: str) -> str:
    """A physical name as CloudFormation makes them: stack, logical id, something random."""
    suffix = random_suffix()
    name = f"{f'{stack_name}-{logical_id}'[: NAME_LIMITS.get(resource_type, 128) - 13]}-{suffix}"
    name = name.lower() if resource_type in LOWER_CASE_NAMES else name
    return kept_objects.lasting_name(name, f"{stack_name}/{logical_id}") if resource_type == _BUCKET else name


def create(resource_type: str, logical_id: str, properties: Mapping[str, Any], place: Place) -> Any:
    """Make a resource. Raises ResourceError where its service refuses it."""
    model = find_model(resource_type)
    if model is None:
        return UnprovenResource(
            resource_type,
            stack_name=place.stack_name,
            logical_id=logical_id,
            properties=properties,
            account_id=place.account_id,
            region=place.region,
        )
    name = _given_name(model, properties) or generate_name(resource_type, place.stack_name, logical_id)
    with _reasons(f"creating {logical_id} ({resource_type})"):
        resource = model.create_from_cloudformation_json(
            name,
            _json(resource_type, properties),
            place.account_id,
            place.region,
            LogicalId=logical_id,
            StackId=place.stack_id,
            ResourceType=resource_type,
        )
        _tag(resource, logical_id, properties, place)
    return resource


def must_replace(resource: Any, resource_type: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Say whether another resource must take its place: nothing here can change it, and there is a name for two."""
    model = find_model(resource_type)
    if isinstance(resource, UnprovenResource) or model is None:
        return False
    name = _given_name(model, new)
    return not _implements(model, "update_from_cloudformation_json") and (
        name is None or name != _given_name(model, old)
    )


def will_replace(resource: Any, resource_type: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Say whether a change makes another resource, here or in its own service: what a change set tells beforehand."""
    model = find_model(resource_type)
    if isinstance(resource, UnprovenResource) or model is None:
        return False
    own = getattr(resource, "must_replace", None)  # of those that replace themselves
    return (
        must_replace(resource, resource_type, old, new)
        or _given_name(model, old) != _given_name(model, new)
        or bool(own is not None and own(new))
    )


def makes_revisions(resource: Any) -> bool:
    """Say whether each change of it gives it another id, although it is not replaced."""
    return bool(getattr(resource, "makes_revisions", False))


def update(
    resource: Any,
    resource_type: str,
    logical_id: str,
    *,
    old: Mapping[str, Any],
    new: Mapping[str, Any],
    physical_id: str,
    place: Place,
) -> Any:
    """Change a resource in place; the resource afterwards, maybe another object.

    Raises ResourceError where its service refuses the change.
    """
    if isinstance(resource, UnprovenResource):
        resource.update(new)
        return resource
    model = _model(resource_type)
    if not _implements(model, "update_from_cloudformation_json"):
        # It keeps its name, so the old one has to go first. Under a new name it would have been replaced.
        delete(resource, resource_type, old, physical_id, place)
        return create(resource_type, logical_id, new, place)
    with _reasons(f"updating {logical_id} ({resource_type})"):
        changed = model.update_from_cloudformation_json(
            original_resource=resource,
            new_resource_name=_given_name(model, new) or physical_id,
            cloudformation_json=_json(resource_type, new),
            account_id=place.account_id,
            region_name=place.region,
        )
        _tag(changed, logical_id, new, place)
    return changed


def delete(
    resource: Any, resource_type: str, properties: Mapping[str, Any], physical_id: str, place: Place
) -> str | None:
    """Delete a resource. What to tell where it stays behind, since nothing here can delete one of its type.

    Raises ResourceError where its service refuses: a bucket that is not empty, say.
    """
    if isinstance(resource, UnprovenResource):
        return None
    model = _model(resource_type)
    with _reasons(f"deleting {physical_id} ({resource_type})"):
        if ec2_models.delete(
            resource,
            resource_type,
            properties=properties,
            physical_id=physical_id,
            account_id=place.account_id,
            region=place.region,
        ):
            return None
        if "account_id" in _parameters(getattr(resource, "delete", None)):
            resource.delete(place.account_id, place.region)
        elif _implements(model, "delete_from_cloudformation_json"):
            model.delete_from_cloudformation_json(
                physical_id, _json(resource_type, properties), place.account_id, place.region
            )
        else:
            return f"the embedded AWS cannot delete {resource_type}; it stays until the server stops"
    return None


def attribute(resource: Any, resource_type: str, logical_id: str, name: str) -> Any:
    """Return what Fn::GetAtt gives. Raises TemplateError where there is no such attribute."""
    try:
        value = resource.get_cfn_attribute(name)
    except (AttributeError, NotImplementedError, UnformattedGetAttTemplateException):
        value = None
    if value is None:
        raise TemplateError(
            f"Template error: resource {logical_id} ({resource_type}) does not support attribute type {name} in "
            "Fn::GetAtt on the embedded AWS"
        )
    return value


class _reasons:  # noqa: N801 - used like a function
    """Turns what a model raises into a ResourceError; what is no service's answer also goes on record as a crash."""

    def __init__(self, doing: str) -> None:
        self.doing = doing

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None or not isinstance(error, Exception) or isinstance(error, (ResourceError, TemplateError)):
            return
        if isinstance(error, (ServiceException, HTTPException)):
            raise ResourceError(getattr(error, "message", None) or str(error)) from error
        if isinstance(error, ClientError):
            raise ResourceError(error.response["Error"].get("Message") or str(error)) from error
        if isinstance(error, ParamValidationError):
            raise ResourceError(str(error)) from error
        record_exception("CloudFormation", self.doing, error)
        raise ResourceError(f"{type(error).__name__}: {error} (an error of the embedded AWS, see its log)") from error


def _json(resource_type: str, properties: Mapping[str, Any]) -> dict[str, Any]:
    # A copy: some models change what they are given, and the next update compares with what the template said.
    return {"Type": resource_type, "Properties": copy.deepcopy(dict(properties))}


def _given_name(model: Any, properties: Mapping[str, Any]) -> str | None:
    name_property = model.cloudformation_name_type()
    name = properties.get(name_property) if name_property else None
    return name if isinstance(name, str) else None


def _implements(model: Any, method: str) -> bool:
    return not hasattr(getattr(model, method), "__isabstractmethod__")


def _parameters(function: Any) -> Mapping[str, object]:
    return inspect.signature(function).parameters if callable(function) else {}


def _tag(resource: Any, logical_id: str, properties: Mapping[str, Any], place: Place) -> None:
    """EC2's models lose the tags of the template and of the stack."""
    if isinstance(resource, TaggedEC2Resource) and isinstance(getattr(resource, "id", None), str):
        own = {tag["Key"]: tag["Value"] for tag in properties.get("Tags", [])}
        stack = {
            "aws:cloudformation:logical-id": logical_id,
            "aws:cloudformation:stack-id": place.stack_id,
            "aws:cloudformation:stack-name": place.stack_name,
        }
        ec2_backends[place.account_id][place.region].create_tags([resource.id], {**place.tags, **own, **stack})
