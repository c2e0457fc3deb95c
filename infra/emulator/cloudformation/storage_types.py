"""Declare the types of buckets, secrets, keys, parameters, repositories and file systems."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from moto.iam.access_control import IAMPolicy, PermissionResult
from moto.s3.cloud_formation import cfn_to_api_encryption
from moto.s3.exceptions import BucketNotEmpty
from moto.s3.models import FakeBucket, FakeDeleteMarker, S3Backend, s3_backends
from moto.ssm.models import ParameterDict

from infra.emulator.cloudformation.api import Api, Properties, PropertyError
from infra.emulator.cloudformation.resource_type import (
    TYPES,
    PhysicalResource,
    ResourceType,
    Row,
    Tagging,
    is_true,
    without,
)

_list_objects_of_moto = S3Backend.list_objects


def install() -> None:
    """Ignore conditions of bucket policies, and list neither deleted folders nor deleted parameters."""
    FakeBucket.get_permission = _get_permission
    S3Backend.list_objects = _list_objects
    ParameterDict.__iter__ = _parameter_names


def _parameter_names(parameters: dict[str, Any]) -> Iterator[str]:
    """Yield names while other threads add and delete parameters, for which moto's GetParametersByPath fails."""
    return (name for name in tuple(parameters.keys()) if dict.__contains__(parameters, name))


def _get_permission(bucket: Any, action: str, resource: str) -> Any:
    """Check a bucket's policy like moto, but without statements that have a condition.

    moto ignores conditions, so "deny requests without TLS" would deny every request, because all requests use HTTP.
    """
    if bucket.policy is None:
        return PermissionResult.NEUTRAL
    policy = json.loads(bucket.policy)
    statements = policy.get("Statement", [])
    statements = statements if isinstance(statements, list) else [statements]
    policy["Statement"] = [statement for statement in statements if "Condition" not in statement]
    return IAMPolicy(json.dumps(policy)).is_action_permitted(action, resource)


def _list_objects(
    backend: Any, bucket: Any, prefix: str | None, delimiter: str | None, **page: Any
) -> tuple[Any, list[str], bool, str | None]:
    """List a bucket, without folders that have only delete markers."""
    keys, folders, is_truncated, next_marker = _list_objects_of_moto(backend, bucket, prefix, delimiter, **page)
    if delimiter:
        start = len(prefix or "")
        live = {
            name[: name.index(delimiter, start) + len(delimiter)]
            for name, key in bucket.keys.items()
            if name.startswith(prefix or "") and delimiter in name[start:] and not isinstance(key, FakeDeleteMarker)
        }
        folders = [folder for folder in folders if folder in live]
    return keys, folders, is_truncated, next_marker


class Bucket(ResourceType):
    """AWS::S3::Bucket."""

    service = "s3"
    name_property = "BucketName"

    def create(self, api: Api, name: str, properties: Properties) -> PhysicalResource:
        bucket = _s3(api).create_bucket(name, api.account.region)
        _configure(_s3(api), bucket, properties)
        domain = f"{name}.s3.{api.account.region}.amazonaws.com"
        return PhysicalResource(name, {"Arn": f"arn:aws:s3:::{name}", "RegionalDomainName": domain}, name)

    def change(self, api: Api, physical: PhysicalResource, old: Properties, new: Properties) -> PhysicalResource:
        _configure(_s3(api), _s3(api).get_bucket(physical.name), new)
        return physical

    def delete(self, api: Api, physical: PhysicalResource, properties: Properties) -> None:
        if _s3(api).delete_bucket(physical.name) is None:
            raise BucketNotEmpty(physical.name)


def _s3(api: Api) -> Any:
    return s3_backends[api.account.id]["aws"]


_CONFIGURED = frozenset(
    {
        "AccessControl",  # always Private; the CDK bootstrap sets it
        "BucketEncryption",
        "BucketName",
        "LifecycleConfiguration",
        "LoggingConfiguration",
        "OwnershipControls",
        "PublicAccessBlockConfiguration",
        "Tags",
        "VersioningConfiguration",
    }
)


def _configure(s3: Any, bucket: Any, properties: Properties) -> None:
    """Configure a bucket by its properties. Missing properties return to their default."""
    if unknown := sorted(properties.keys() - _CONFIGURED):
        raise PropertyError(f"the emulator does not support {', '.join(unknown)} of buckets")
    name = bucket.name
    if encryption := properties.get("BucketEncryption"):
        s3.put_bucket_encryption(name, cfn_to_api_encryption(encryption))
    if versioning := properties.get("VersioningConfiguration"):
        s3.put_bucket_versioning(name, versioning["Status"])
    elif bucket.versioning_status is not None:
        s3.put_bucket_versioning(name, "Suspended")  # versioning can be suspended, not removed
    if access_block := properties.get("PublicAccessBlockConfiguration"):
        # As strings, because clients send XML.
        s3.put_public_access_block(name, {key: str(value).lower() for key, value in access_block.items()})
    else:
        s3.delete_public_access_block(name)
    ownership = properties.get("OwnershipControls")
    bucket.ownership_rule = ownership["Rules"][0]["ObjectOwnership"] if ownership else None
    logging = properties.get("LoggingConfiguration")
    # Not with put_bucket_logging, which requires the target's policy; CloudFormation creates that later.
    target = logging and {
        "TargetBucket": logging.get("DestinationBucketName", name),
        "TargetPrefix": logging.get("LogFilePrefix", ""),
    }
    bucket.logging = target or {}
    rules = properties.get("LifecycleConfiguration", {}).get("Rules", [])
    s3.put_bucket_lifecycle_configuration(name, [_lifecycle_rule(rule) for rule in rules])
    s3.put_bucket_tagging(name, {tag["Key"]: tag["Value"] for tag in properties.get("Tags", [])})


_RULE = frozenset(
    {
        "AbortIncompleteMultipartUpload",
        "ExpirationInDays",
        "ExpiredObjectDeleteMarker",
        "Id",
        "NoncurrentVersionExpiration",
        "Status",
        "TagFilters",
    }
)


def _lifecycle_rule(rule: Mapping[str, Any]) -> dict[str, Any]:
    """Return a rule of the template as PutBucketLifecycleConfiguration takes it."""
    if unknown := sorted(rule.keys() - _RULE):
        raise PropertyError(f"the emulator does not support {', '.join(unknown)} of lifecycle rules")
    tags = [{"Key": tag["Key"], "Value": tag["Value"]} for tag in rule.get("TagFilters", [])]
    known = {
        "ID": rule.get("Id"),
        "Status": rule["Status"],
        "Filter": {"And": {"Tag": tags, "Prefix": ""}} if tags else {"Prefix": ""},
        "Expiration": {"Days": str(rule["ExpirationInDays"])} if "ExpirationInDays" in rule else None,
        "NoncurrentVersionExpiration": rule.get("NoncurrentVersionExpiration"),
        "AbortIncompleteMultipartUpload": rule.get("AbortIncompleteMultipartUpload"),
    }
    return {key: value for key, value in known.items() if value is not None}


class Key(Row):
    """AWS::KMS::Key."""

    def delete(self, api: Api, physical: PhysicalResource, properties: Properties) -> None:
        days = properties.get("PendingWindowInDays", 30)
        api("ScheduleKeyDeletion", KeyId=physical.ref, PendingWindowInDays=days)


class Parameter(Row):
    """AWS::SSM::Parameter; any change, even to tags, overwrites a value written in the meantime with the template's."""

    def change(self, api: Api, physical: PhysicalResource, old: Properties, new: Properties) -> PhysicalResource:
        api("PutParameter", **{**without(new, "Tags"), "Name": physical.name}, Overwrite=True)
        resource = {"ResourceType": "Parameter", "ResourceId": physical.name}
        if gone := sorted(set(old.get("Tags", {})) - set(new.get("Tags", {}))):
            api("RemoveTagsFromResource", **resource, TagKeys=gone)
        if new.get("Tags"):
            api("AddTagsToResource", **resource, Tags=new["Tags"])
        return physical


class Repository(Row):
    """AWS::ECR::Repository."""

    def delete(self, api: Api, physical: PhysicalResource, properties: Properties) -> None:
        api("DeleteRepository", RepositoryName=physical.name, Force=is_true(properties.get("EmptyOnDelete")))


class FileSystem(Row):
    """AWS::FSx::FileSystem. Nothing is mounted."""

    def create(self, api: Api, name: str, properties: Properties) -> PhysicalResource:
        physical = super().create(api, name, properties)
        physical.attributes["LustreMountName"] = physical.attributes["LustreMountName"] or "fsx"
        return physical


TYPES |= {
    "AWS::ECR::Repository": Repository(
        service="ecr",
        name_property="RepositoryName",
        create_by="CreateRepository",
        attributes={"Arn": "repository.repositoryArn", "RepositoryUri": "repository.repositoryUri"},
        ignored=frozenset({"EmptyOnDelete"}),
        setters={
            "ImageScanningConfiguration": lambda scanning: (
                "PutImageScanningConfiguration",
                {"ImageScanningConfiguration": scanning or {"ScanOnPush": False}},
            ),
            "ImageTagMutability": lambda mutability: (
                "PutImageTagMutability",
                {"ImageTagMutability": mutability or "MUTABLE"},
            ),
            "LifecyclePolicy": lambda policy: (
                ("PutLifecyclePolicy", policy) if policy else ("DeleteLifecyclePolicy", {})
            ),
            "RepositoryPolicyText": lambda policy: (
                ("SetRepositoryPolicy", {"PolicyText": policy}) if policy else ("DeleteRepositoryPolicy", {})
            ),
        },
        tagging=Tagging(attribute="Arn"),
    ),
    "AWS::FSx::FileSystem": FileSystem(
        service="fsx",
        create_by="CreateFileSystem",
        ref="FileSystem.FileSystemId",
        attributes={
            "DNSName": "FileSystem.DNSName",
            "LustreMountName": "FileSystem.LustreConfiguration.MountName",
            "ResourceARN": "FileSystem.ResourceARN",
        },
        tagging=Tagging(resource="ResourceARN", attribute="ResourceARN"),
    ),
    "AWS::KMS::Key": Key(
        service="kms",
        create_by="CreateKey",
        renamed={"KeyPolicy": "Policy"},
        ref="KeyMetadata.KeyId",
        attributes={"Arn": "KeyMetadata.Arn", "KeyId": "KeyMetadata.KeyId"},
        ignored=frozenset({"PendingWindowInDays"}),
        setters={
            "Description": lambda text: ("UpdateKeyDescription", {"Description": text or ""}),
            "EnableKeyRotation": lambda on: ("EnableKeyRotation" if is_true(on) else "DisableKeyRotation", {}),
            "KeyPolicy": lambda policy: ("PutKeyPolicy", {"PolicyName": "default", "Policy": policy}),
        },
        delete_by="ScheduleKeyDeletion",
        tagging=Tagging(resource="KeyId"),
    ),
    "AWS::S3::Bucket": Bucket(),
    "AWS::S3::BucketPolicy": Row(
        service="s3",
        create_by="PutBucketPolicy",
        renamed={"PolicyDocument": "Policy"},
        update_by="PutBucketPolicy",
        ids=("Bucket",),
        delete_by="DeleteBucketPolicy",
    ),
    "AWS::SSM::Parameter": Parameter(
        service="ssm", name_property="Name", create_by="PutParameter", delete_by="DeleteParameter"
    ),
    "AWS::SecretsManager::Secret": Row(
        service="secretsmanager",
        name_property="Name",
        create_by="CreateSecret",
        ref="ARN",
        update_by="UpdateSecret",
        reset_values={"Description": ""},
        ids=("SecretId",),
        delete_by="DeleteSecret",  # can be restored for 30 days
        tagging=Tagging(resource="SecretId"),
    ),
}
