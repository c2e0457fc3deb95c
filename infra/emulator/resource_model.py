"""The interface of moto's CloudFormation models, reduced to what differs between types of resources.

`infra.emulator.cloudformation.models` finds a subclass by its `resource_type`, and puts it before moto's own.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from moto.core.common_models import CloudFormationModel

Properties = Mapping[str, Any]
"""The properties of a resource, as its template has them once references are resolved."""


@dataclass(frozen=True)
class AccountRegion:
    """What a backend is found by."""

    account_id: str
    region: str


class ResourceModel(CloudFormationModel):
    """A type of resource that is created and deleted; a change replaces it."""

    resource_type: ClassVar[str] = ""
    """As templates call it; empty for a class that several types share."""
    name_property: ClassVar[str] = ""
    """The property with the physical name; empty where the resource has none of its own."""

    @classmethod
    def create(cls, name: str, properties: Properties, place: AccountRegion) -> Any:
        """Make one, with this physical name unless its service makes up another."""
        raise NotImplementedError

    @classmethod
    def delete(cls, name: str, place: AccountRegion) -> None:
        """Delete the one of this physical name or id."""
        raise NotImplementedError

    @classmethod
    def cloudformation_type(cls) -> str:
        return cls.resource_type

    @classmethod
    def cloudformation_name_type(cls) -> str:
        return cls.name_property

    @classmethod
    def create_from_cloudformation_json(
        cls, resource_name: str, cloudformation_json: Mapping[str, Any], account_id: str, region_name: str, **_: Any
    ) -> Any:
        return cls.create(resource_name, cloudformation_json["Properties"], AccountRegion(account_id, region_name))

    @classmethod
    def delete_from_cloudformation_json(
        cls, resource_name: str, cloudformation_json: Mapping[str, Any], account_id: str, region_name: str
    ) -> None:
        del cloudformation_json
        cls.delete(resource_name, AccountRegion(account_id, region_name))


class ChangeableModel(ResourceModel):
    """A type of resource that can be changed in place as well."""

    @classmethod
    def update(cls, resource: Any, name: str, properties: Properties, place: AccountRegion) -> Any:
        """Bring a resource to these properties; the resource afterwards, another one where that takes one."""
        raise NotImplementedError

    @classmethod
    def update_from_cloudformation_json(
        cls,
        original_resource: Any,
        new_resource_name: str,
        cloudformation_json: Mapping[str, Any],
        account_id: str,
        region_name: str,
    ) -> Any:
        place = AccountRegion(account_id, region_name)
        return cls.update(original_resource, new_resource_name, cloudformation_json["Properties"], place)
