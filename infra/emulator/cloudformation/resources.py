"""Create, change and delete one resource of a stack, and decide whether a change replaces it.

Whether a changed property replaces a resource comes from CloudFormation's schemas, which cfn-lint ships. Source:
CloudFormation CLI user guide, "Resource type schema": `createOnlyProperties` and `conditionalCreateOnlyProperties`.
"""

import copy
import hashlib
import importlib.util
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from botocore.exceptions import ClientError, ParamValidationError
from moto.cloudformation.utils import random_suffix
from moto.core.exceptions import ServiceException
from werkzeug.exceptions import HTTPException

from infra.emulator import REGION, s3
from infra.emulator.cloudformation.api import Account, Api, Properties
from infra.emulator.cloudformation.resource_type import RECORDED, TYPES, PhysicalResource, ResourceType, without
from infra.emulator.errors import ConfigurationError, record_exception


class ResourceError(Exception):
    """A service refused a resource. The stack fails with the service's message as the reason."""


_BUCKET = "AWS::S3::Bucket"
NAME_LIMITS = {
    "AWS::Events::Rule": 64,
    "AWS::IAM::Role": 64,
    "AWS::Lambda::Function": 64,
    _BUCKET: 63,
    "AWS::SQS::Queue": 80,
}
"""Maximum lengths of names, if shorter than the 128 characters that most services allow."""
LOWER_CASE_NAMES = frozenset({_BUCKET, "AWS::ECR::Repository"})


class _Recorded(ResourceType):
    """A type without a service. Its resources have a name and an ARN, which never change."""

    def __init__(self, name: str) -> None:
        _, self.service, self._kind = (*name.lower().split("::"), "")[:3]

    def create(self, api: Api, name: str, properties: Properties) -> PhysicalResource:
        ref = str(properties.get("Name", name))
        return PhysicalResource(ref, {"Arn": api.arn(f"{self._kind}/{ref}")}, name)

    def change(self, api: Api, physical: PhysicalResource, old: Properties, new: Properties) -> PhysicalResource:
        del api, old, new
        return physical

    def delete(self, api: Api, physical: PhysicalResource, properties: Properties) -> None:
        """Do nothing: there is only the record."""


def is_recorded(resource_type: str) -> bool:
    """Return whether resources of a type are only recorded. Functions of custom resources do not run."""
    return resource_type in RECORDED or resource_type.startswith("Custom::")


def create(
    resource_type: str, logical_id: str, properties: Properties, account: Account, *, stack_name: str
) -> PhysicalResource:
    """Create a resource. Raises ResourceError if its service refuses it."""
    found = _type(resource_type)
    name = properties.get(found.name_property) or _generated_name(resource_type, stack_name, logical_id)
    with _service_errors(f"creating {logical_id} ({resource_type})"):
        return found.create(Api(found.service, account), str(name), copy.deepcopy(properties))


def check_replaceable(resource_type: str, old: Properties, new: Properties) -> None:
    """Raise ResourceError if a resource cannot be replaced, because the new one would have the same name."""
    name_property = _type(resource_type).name_property
    name = new.get(name_property)
    if name is not None and name == old.get(name_property):
        raise ResourceError(
            "CloudFormation cannot update a stack when a custom-named resource requires replacing. Rename "
            f"{name} and update the stack again."
        )


def change(
    physical: PhysicalResource, resource_type: str, *, old: Properties, new: Properties, account: Account
) -> PhysicalResource:
    """Change a resource in place. Raises ResourceError if its service refuses the change."""
    found = _type(resource_type)
    with _service_errors(f"updating {physical.ref} ({resource_type})"):
        api = Api(found.service, account)
        if found.tagging is None:
            return found.change(api, physical, old, copy.deepcopy(new))
        changed, before, after = physical, without(old, "Tags"), without(new, "Tags")
        if before != after:
            changed = found.change(api, physical, before, copy.deepcopy(after))
        if old.get("Tags") != new.get("Tags"):
            found.change_tags(api, changed, old, new)
        return changed


def delete(physical: PhysicalResource, resource_type: str, properties: Properties, account: Account) -> None:
    """Delete a resource. Raises ResourceError if its service refuses, for example a bucket that is not empty."""
    found = _type(resource_type)
    with _service_errors(f"deleting {physical.ref} ({resource_type})"):
        found.delete(Api(found.service, account), physical, properties)


def _type(resource_type: str) -> ResourceType:
    if is_recorded(resource_type):
        return _Recorded(resource_type)
    if resource_type not in TYPES:
        raise ResourceError(f"the emulator does not support {resource_type}")
    return TYPES[resource_type]


def _generated_name(resource_type: str, stack_name: str, logical_id: str) -> str:
    """Return a physical name as CloudFormation generates it: stack, logical id, random suffix."""
    suffix = random_suffix()
    if is_recorded(resource_type):
        suffix = hashlib.sha256(f"{stack_name}/{logical_id}".encode()).hexdigest()[:12]
    name = f"{f'{stack_name}-{logical_id}'[: NAME_LIMITS.get(resource_type, 128) - 13]}-{suffix}"
    name = name.lower() if resource_type in LOWER_CASE_NAMES else name
    return s3.kept_name(name, f"{stack_name}/{logical_id}") if resource_type == _BUCKET else name


@contextmanager
def _service_errors(operation: str) -> Iterator[None]:
    """Turn a service's error into a ResourceError, and also record any other exception as a server error."""
    try:
        yield
    except (ServiceException, HTTPException) as error:
        raise ResourceError(getattr(error, "message", None) or str(error)) from error
    except ClientError as error:
        raise ResourceError(error.response["Error"].get("Message") or str(error)) from error
    except ParamValidationError as error:
        raise ResourceError(str(error)) from error
    except Exception as error:
        record_exception("CloudFormation", operation, error)
        raise ResourceError(f"{type(error).__name__}: {error} (an error of the emulator; see its log)") from error


_CONDITIONAL = "conditionalCreateOnlyProperties"
_REPLACE = "ReplaceComputeEnvironment"
"""Compute environments set this property to false to change conditional properties in place; other types cannot."""


def replacing_properties(resource_type: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return the names of changed properties that AWS changes only by replacing the resource."""
    known = schema(resource_type)
    paths = list(known.get("createOnlyProperties", []))
    if str(new.get(_REPLACE, True)).lower() != "false":
        paths += known.get(_CONDITIONAL, [])
    steps = [path.removeprefix("/properties/").split("/") for path in paths]
    return sorted({step[0] for step in steps if _at(old, step) != _at(new, step)})


def with_stack_tags(resource_type: str, properties: Mapping[str, Any], tags: Mapping[str, str]) -> Mapping[str, Any]:
    """Return properties with the stack's tags, which CloudFormation gives every taggable resource.

    A tag of the resource itself takes precedence. Sources: CloudFormation template reference, "Resource tagging"; the
    registry's schemas, `tagging`.
    """
    known = schema(resource_type)
    tagging = known.get("tagging", {})
    name = tagging.get("tagProperty", "/properties/Tags").removeprefix("/properties/")
    declared = known.get("properties", {}).get(name)
    if not tags or declared is None or not tagging.get("taggable", True):
        return properties
    if declared["type"] == "object":
        return {**properties, name: {**tags, **properties.get(name, {})}}
    listed = properties.get(name, [])
    keys = {tag["Key"] for tag in listed}
    return {**properties, name: [*listed, *({"Key": key, "Value": tags[key]} for key in tags if key not in keys)]}


def _at(value: Any, steps: Sequence[str]) -> Any:
    for step in steps:
        if not isinstance(value, Mapping):
            return value  # a list counts as a whole
        value = value.get(step)
    return value


@cache
def schema(resource_type: str) -> Mapping[str, Any]:
    """Return CloudFormation's schema of a type, or an empty one for a type without."""
    digest = _digests().get(resource_type)
    if digest is None:
        return {}
    found: Mapping[str, Any] = json.loads((_folder() / "resources" / f"{digest}.json").read_text())
    return found


@cache
def _digests() -> Mapping[str, str]:
    digests: Mapping[str, str] = json.loads((_folder() / "providers" / f"{REGION}.json").read_text())
    return digests


@cache
def _folder() -> Path:
    """Find the schemas without importing cfn-lint, because the import takes a second."""
    spec = importlib.util.find_spec("cfnlint")
    if spec is None or spec.origin is None:
        raise ConfigurationError("cfn-lint is not installed", next_step="pip install -e '.[infra]'")
    return Path(spec.origin).parent / "data" / "schemas"
