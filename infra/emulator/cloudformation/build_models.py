"""Image repositories, build projects, machine images and file systems. Nothing is built here, and nothing is mounted.

moto has nothing of EC2 Image Builder. What a stack's other parts see of it is as on AWS: an image has an AMI that EC2
knows, another one once anything in it changed; a component or recipe whose name and version are taken is refused.
"""

from typing import Any, ClassVar

from moto.core.exceptions import JsonRESTError
from moto.ec2.models import ec2_backends

from infra.emulator.cloudformation.api_model import Api, ApiModel, ApiResource, document, tag_changes, without
from infra.emulator.resource_model import AccountRegion, Properties, ResourceModel


class Repository(ApiModel):
    """AWS::ECR::Repository; moto's model loses scanning, lifecycle and policy."""

    resource_type = "AWS::ECR::Repository"
    name_property = "RepositoryName"
    service = "ecr"
    replaced_by = frozenset({"EncryptionConfiguration"})

    @classmethod
    def make(cls, api: Api, name: str, properties: Properties) -> ApiResource:
        request = without(properties, "EmptyOnDelete", "LifecyclePolicy", "RepositoryPolicyText", "RepositoryName")
        repository = api("CreateRepository", **request, RepositoryName=name)["repository"]
        resource = ApiResource(
            name, properties, Arn=repository["repositoryArn"], RepositoryUri=repository["repositoryUri"]
        )
        _set_policies(api, name, {}, properties)
        return resource

    @classmethod
    def change(cls, api: Api, resource: ApiResource, properties: Properties) -> None:
        api(
            "PutImageTagMutability",
            RepositoryName=resource.name,
            ImageTagMutability=properties.get("ImageTagMutability", "MUTABLE"),
        )
        scanning = properties.get("ImageScanningConfiguration", {"ScanOnPush": False})
        api("PutImageScanningConfiguration", RepositoryName=resource.name, ImageScanningConfiguration=scanning)
        _set_policies(api, resource.name, resource.properties, properties)
        added, gone = tag_changes(resource.properties, properties)
        if gone:
            api("UntagResource", ResourceArn=resource.attributes["Arn"], TagKeys=gone)
        if added:
            api("TagResource", ResourceArn=resource.attributes["Arn"], Tags=added)

    @classmethod
    def remove(cls, api: Api, resource: ApiResource) -> None:
        force = str(resource.properties.get("EmptyOnDelete", False)).lower() == "true"
        api("DeleteRepository", RepositoryName=resource.physical_resource_id, Force=force)


class Project(ApiModel):
    """AWS::CodeBuild::Project; moto can create and delete one, so a change does both."""

    resource_type = "AWS::CodeBuild::Project"
    name_property = "Name"
    service = "codebuild"

    @classmethod
    def make(cls, api: Api, name: str, properties: Properties) -> ApiResource:
        request = without(properties, "Name", "Triggers", "Visibility", "ResourceAccessRole")
        project = api("CreateProject", **request, Name=name)["project"]
        return ApiResource(name, properties, Arn=project["arn"])

    @classmethod
    def change(cls, api: Api, resource: ApiResource, properties: Properties) -> None:
        cls.remove(api, resource)
        cls.make(api, resource.name, properties)

    @classmethod
    def remove(cls, api: Api, resource: ApiResource) -> None:
        api("DeleteProject", Name=resource.physical_resource_id)


class FileSystem(ApiModel):
    """AWS::FSx::FileSystem; moto cannot change one."""

    resource_type = "AWS::FSx::FileSystem"
    service = "fsx"
    replaced_by = frozenset(
        {"FileSystemType", "KmsKeyId", "LustreConfiguration", "SecurityGroupIds", "StorageCapacity", "SubnetIds"}
    )

    @classmethod
    def make(cls, api: Api, name: str, properties: Properties) -> ApiResource:
        made = api("CreateFileSystem", **properties)["FileSystem"]
        return ApiResource(
            name,
            properties,
            ref=made["FileSystemId"],
            DNSName=made["DNSName"],
            LustreMountName=made["LustreConfiguration"].get("MountName", "fsx"),
            ResourceARN=made["ResourceARN"],
        )

    @classmethod
    def change(cls, api: Api, resource: ApiResource, properties: Properties) -> None:
        added, gone = tag_changes(resource.properties, properties)
        arn = resource.attributes["ResourceARN"]
        if gone:
            api("UntagResource", ResourceARN=arn, TagKeys=gone)
        if added:
            api("TagResource", ResourceARN=arn, Tags=added)

    @classmethod
    def remove(cls, api: Api, resource: ApiResource) -> None:
        api("DeleteFileSystem", FileSystemId=resource.physical_resource_id)


def _set_policies(api: Api, name: str, old: Properties, new: Properties) -> None:
    lifecycle = new.get("LifecyclePolicy", {}).get("LifecyclePolicyText")
    if lifecycle:
        api("PutLifecyclePolicy", RepositoryName=name, LifecyclePolicyText=lifecycle)
    elif old.get("LifecyclePolicy"):
        api("DeleteLifecyclePolicy", RepositoryName=name)
    if new.get("RepositoryPolicyText"):
        api("SetRepositoryPolicy", RepositoryName=name, PolicyText=document(new["RepositoryPolicyText"]))
    elif old.get("RepositoryPolicyText"):
        api("DeleteRepositoryPolicy", RepositoryName=name)


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
