"""Image repositories, build projects and file systems. Nothing is built and no file system is mounted here."""

from infra.emulator.cloudformation.api_model import Api, ApiModel, ApiResource, document, tag_changes, without
from infra.emulator.resource_model import Properties


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
