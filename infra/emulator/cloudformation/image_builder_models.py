"""EC2 Image Builder, of which moto has nothing: versions that cannot be changed, and stand-ins for the AMIs.

No image is built here. What a stack's other parts see is as on AWS: an image has an AMI that EC2 knows, another one
once anything in it changed, and a component or recipe of a name and version that are taken is refused.
"""

from typing import Any, ClassVar

from moto.core.exceptions import JsonRESTError
from moto.ec2.models import ec2_backends

from infra.emulator.resource_model import AccountRegion, Properties, ResourceModel


class _Versioned(ResourceModel):
    """A resource whose name and version are its identity; any change of it makes another one."""

    kind: ClassVar[str] = ""
    """As ARNs call it."""
    _taken: ClassVar[set[str]] = set()

    def __init__(self, arn: str) -> None:
        self.physical_resource_id = arn

    def get_cfn_attribute(self, attribute: str) -> str:
        if attribute == "Arn":
            return self.physical_resource_id
        raise NotImplementedError(attribute)

    @classmethod
    def create(cls, name: str, properties: Properties, place: AccountRegion) -> "_Versioned":
        del name
        arn = _arn(place, cls.kind, properties["Name"], properties["Version"])
        if arn in cls._taken:
            raise JsonRESTError(
                "ResourceAlreadyExistsException",
                f"The following resource '{cls.kind}' already exists: '{arn}'. Change its version.",
            )
        cls._taken.add(arn)
        return cls(arn)

    @classmethod
    def delete(cls, name: str, place: AccountRegion) -> None:
        del place
        cls._taken.discard(name)


class Component(_Versioned):
    """AWS::ImageBuilder::Component."""

    resource_type = "AWS::ImageBuilder::Component"
    kind = "component"


class ImageRecipe(_Versioned):
    """AWS::ImageBuilder::ImageRecipe."""

    resource_type = "AWS::ImageBuilder::ImageRecipe"
    kind = "image-recipe"


class Image(ResourceModel):
    """AWS::ImageBuilder::Image: one AMI, made when the resource is, gone with it."""

    resource_type = "AWS::ImageBuilder::Image"

    def __init__(self, arn: str, ami_id: str) -> None:
        self.physical_resource_id = arn
        self._ami_id = ami_id

    def get_cfn_attribute(self, attribute: str) -> str:
        if attribute == "ImageId":
            return self._ami_id
        if attribute == "Arn":
            return self.physical_resource_id
        raise NotImplementedError(attribute)

    @classmethod
    def create(cls, name: str, properties: Properties, place: AccountRegion) -> "Image":
        del name
        recipe, version = properties["ImageRecipeArn"].split("/")[-2:]
        ec2 = _ec2(place)
        ami = ec2.register_image(name=f"{recipe} {version}", description="Stand-in for what Image Builder would make")
        ec2.create_tags([ami.id], properties.get("Tags", {}))
        return cls(_arn(place, "image", recipe, version, ami.id), ami.id)

    @classmethod
    def delete(cls, name: str, place: AccountRegion) -> None:
        _ec2(place).deregister_image(name.rpartition("/")[2])


def _arn(place: AccountRegion, kind: str, *path: str) -> str:
    return f"arn:aws:imagebuilder:{place.region}:{place.account_id}:{'/'.join((kind, *path))}"


def _ec2(place: AccountRegion) -> Any:
    return ec2_backends[place.account_id][place.region]
