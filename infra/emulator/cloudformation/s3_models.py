"""S3 buckets with the properties that moto's model loses, bucket policies, which it lacks, and true listings."""

import json
from collections.abc import Mapping
from typing import Any

from moto.iam.access_control import IAMPolicy, PermissionResult
from moto.s3.cloud_formation import cfn_to_api_encryption
from moto.s3.exceptions import BucketNotEmpty
from moto.s3.models import FakeBucket, FakeDeleteMarker, S3Backend, s3_backends

from infra.emulator.resource_model import AccountRegion, ChangeableModel, Properties

_list_objects_of_moto = S3Backend.list_objects


def install() -> None:
    """Let bucket policies be put without their conditions turning into denials, and deleted folders not be listed."""
    FakeBucket.get_permission = _get_permission
    S3Backend.list_objects = _list_objects


def _get_permission(bucket: Any, action: str, resource: str) -> Any:
    """The check of moto on a bucket's policy, without the statements that have a condition.

    It reads no conditions, so "deny what is not TLS" would deny every request here, all of which are plain http.
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
    """The objects and folders of a bucket, without the folders of which only delete markers are left."""
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


class Bucket(ChangeableModel):
    """AWS::S3::Bucket."""

    resource_type = "AWS::S3::Bucket"
    name_property = "BucketName"

    @classmethod
    def create(cls, name: str, properties: Properties, place: AccountRegion) -> Any:
        s3 = _s3(place)
        bucket = s3.create_bucket(name, place.region)
        _configure(s3, bucket, properties)
        return bucket

    @classmethod
    def update(cls, resource: Any, name: str, properties: Properties, place: AccountRegion) -> Any:
        if name != resource.name:
            bucket = cls.create(name, properties, place)
            cls.delete(resource.name, place)
            return bucket
        _configure(_s3(place), resource, properties)
        return resource

    @classmethod
    def delete(cls, name: str, place: AccountRegion) -> None:
        if _s3(place).delete_bucket(name) is None:
            raise BucketNotEmpty(name)


class BucketPolicy(ChangeableModel):
    """AWS::S3::BucketPolicy."""

    resource_type = "AWS::S3::BucketPolicy"

    def __init__(self, bucket_name: str) -> None:
        self.physical_resource_id = bucket_name

    @classmethod
    def create(cls, name: str, properties: Properties, place: AccountRegion) -> "BucketPolicy":
        del name
        _s3(place).put_bucket_policy(properties["Bucket"], json.dumps(properties["PolicyDocument"]).encode())
        return cls(properties["Bucket"])

    @classmethod
    def update(cls, resource: Any, name: str, properties: Properties, place: AccountRegion) -> "BucketPolicy":
        changed = cls.create(name, properties, place)
        if changed.physical_resource_id != resource.physical_resource_id:
            cls.delete(resource.physical_resource_id, place)
        return changed

    @classmethod
    def delete(cls, name: str, place: AccountRegion) -> None:
        _s3(place).delete_bucket_policy(name)


def _s3(place: AccountRegion) -> Any:
    return s3_backends[place.account_id]["aws"]


def _configure(s3: Any, bucket: Any, properties: Properties) -> None:
    """Bring a bucket to what its properties say; what they no longer say goes back to the default."""
    name = bucket.name
    encryption = properties.get("BucketEncryption")
    if encryption is not None:
        s3.put_bucket_encryption(name, cfn_to_api_encryption(encryption))
    versioning = properties.get("VersioningConfiguration")
    if versioning is not None:
        s3.put_bucket_versioning(name, versioning["Status"])
    elif bucket.versioning_status is not None:
        s3.put_bucket_versioning(name, "Suspended")  # what was versioned once can only be suspended
    access_block = properties.get("PublicAccessBlockConfiguration")
    if access_block is not None:
        # As strings: they come as XML where a client sets them.
        s3.put_public_access_block(name, {key: str(value).lower() for key, value in access_block.items()})
    else:
        s3.delete_public_access_block(name)
    ownership = properties.get("OwnershipControls")
    bucket.ownership_rule = ownership["Rules"][0]["ObjectOwnership"] if ownership else None
    logging = properties.get("LoggingConfiguration")
    # Not through put_bucket_logging, which wants the target's policy first; CloudFormation makes that afterwards.
    bucket.logging = (
        {
            "TargetBucket": logging.get("DestinationBucketName", name),
            "TargetPrefix": logging.get("LogFilePrefix", ""),
        }
        if logging
        else {}
    )
    rules = properties.get("LifecycleConfiguration", {}).get("Rules", [])
    s3.put_bucket_lifecycle_configuration(name, [_lifecycle_rule(rule) for rule in rules])
    s3.put_bucket_tagging(name, {tag["Key"]: tag["Value"] for tag in properties.get("Tags", [])})


def _lifecycle_rule(rule: Mapping[str, Any]) -> dict[str, Any]:
    """A rule of the template in the words of PutBucketLifecycleConfiguration."""
    tags = [{"Key": tag["Key"], "Value": tag["Value"]} for tag in rule.get("TagFilters", [])]
    prefix = rule.get("Prefix")
    if tags:
        rule_filter: dict[str, Any] = {"And": {"Tag": tags} | ({"Prefix": prefix} if prefix is not None else {})}
    else:
        rule_filter = {"Prefix": prefix or ""}
    expiration = {
        "Days": rule.get("ExpirationInDays"),
        "Date": rule.get("ExpirationDate"),
        "ExpiredObjectDeleteMarker": rule.get("ExpiredObjectDeleteMarker"),
    }
    translated = {
        "ID": rule.get("Id"),
        "Status": rule["Status"],
        "Filter": rule_filter,
        "Expiration": {key: _text(value) for key, value in expiration.items() if value is not None} or None,
        "NoncurrentVersionExpiration": rule.get("NoncurrentVersionExpiration"),
        "AbortIncompleteMultipartUpload": rule.get("AbortIncompleteMultipartUpload"),
        "Transition": [
            {"Days": item.get("TransitionInDays"), "StorageClass": item["StorageClass"]}
            for item in rule.get("Transitions", [])
        ]
        or None,
        "NoncurrentVersionTransition": [
            {"NoncurrentDays": item["TransitionInDays"], "StorageClass": item["StorageClass"]}
            for item in rule.get("NoncurrentVersionTransitions", [])
        ]
        or None,
    }
    return {key: value for key, value in translated.items() if value is not None}


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
