"""EC2 Image Builder, of which moto has nothing. No image is built.

What a stack's other parts see is as on AWS: an image has an AMI that EC2 knows, another one once anything in it has
changed; a component or recipe whose name and version are taken is refused.
"""

from dataclasses import dataclass
from typing import ClassVar

from moto.core.exceptions import JsonRESTError

from infra.emulator.cloudformation.api import Api, Properties
from infra.emulator.cloudformation.resource_type import TYPES, Fixed, Made


@dataclass(frozen=True)
class Versioned(Fixed):
    """A type whose name and version are its identity."""

    service = "imagebuilder"
    kind: str
    """As ARNs call it."""
    _taken: ClassVar[set[str]] = set()

    def create(self, api: Api, name: str, properties: Properties) -> Made:
        arn = api.arn(f"{self.kind}/{properties['Name']}/{properties['Version']}")
        if arn in self._taken:
            raise JsonRESTError(
                "ResourceAlreadyExistsException",
                f"The following resource '{self.kind}' already exists: '{arn}'. Change its version.",
            )
        self._taken.add(arn)
        return Made(arn, {"Arn": arn}, name)

    def delete(self, api: Api, made: Made, properties: Properties) -> None:
        self._taken.discard(made.ref)


class Image(Fixed):
    """AWS::ImageBuilder::Image: one AMI, made and gone with the resource."""

    service = "ec2"

    def create(self, api: Api, name: str, properties: Properties) -> Made:
        recipe, version = properties["ImageRecipeArn"].split("/")[-2:]
        ami = api("RegisterImage", Name=f"{recipe} {version}")["ImageId"]
        if properties.get("Tags"):
            api("CreateTags", Resources=[ami], Tags=properties["Tags"])
        arn = api.arn(f"image/{recipe}/{version}/{ami}", service="imagebuilder")
        return Made(arn, {"Arn": arn, "ImageId": ami}, name)

    def delete(self, api: Api, made: Made, properties: Properties) -> None:
        api("DeregisterImage", ImageId=made.attributes["ImageId"])


TYPES |= {
    "AWS::ImageBuilder::Component": Versioned("component"),
    "AWS::ImageBuilder::Image": Image(),
    "AWS::ImageBuilder::ImageRecipe": Versioned("image-recipe"),
}
