"""S3 buckets with the properties that moto's model loses, bucket policies, which it lacks, and true listings."""

import json
from collections.abc import Mapping
from typing import Any

from moto.core.common_models import CloudFormationModel
from moto.iam.access_control import IAMPolicy, PermissionResult
from moto.s3.cloud_formation import cfn_to_api_encryption
from moto.s3.exceptions import BucketNotEmpty
from moto.s3.models import FakeBucket, FakeDeleteMarker, S3Backend, s3_backends

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


class Bucket(CloudFormationModel):
    """AWS::S3::Bucket."""

    @staticmethod
    def cloudformation_name_type() -> str:
        return "BucketName"

    @staticmethod
    def cloudformation_type() -> str:
        return "AWS::S3::Bucket"

    @classmethod
    def create_from_cloudformation_json(
        cls,
        resource_name: str,
        cloudformation_json: Mapping[str, Any],
        account_id: str,
        region_name: str,
        **_: Any,
    ) -> Any:
        backend = s3_backends[account_id]["aws"]
        bucket = backend.create_bucket(resource_name, region_name)
        _configure(backend, bucket, cloudformation_json["Properties"])
        return bucket

    @classmethod
    def update_from_cloudformation_json(
        cls,
        original_resource: Any,
        new_resource_name: str,
        cloudformation_json: Mapping[str, Any],
        account_id: str,
        region_name: str,
    ) -> Any:
        if new_resource_name != original_resource.name:
            bucket = cls.create_from_cloudformation_json(
                new_resource_name, cloudformation_json, account_id, region_name
            )
            _delete(original_resource.name, account_id)
            return bucket
        _configure(s3_backends[account_id]["aws"], original_resource, cloudformation_json["Properties"])
        return original_resource

    @classmethod
    def delete_from_cloudformation_json(
        cls, resource_name: str, cloudformation_json: Mapping[str, Any], account_id: str, region_name: str
    ) -> None:
        del cloudformation_json, region_name
        _delete(resource_name, account_id)


class BucketPolicy(CloudFormationModel):
    """AWS::S3::BucketPolicy."""

    def __init__(self, bucket_name: str) -> None:
        self.physical_resource_id = bucket_name

    @staticmethod
    def cloudformation_name_type() -> str:
        return ""

    @staticmethod
    def cloudformation_type() -> str:
        return "AWS::S3::BucketPolicy"

    @classmethod
    def create_from_cloudformation_json(
        cls,
        resource_name: str,
        cloudformation_json: Mapping[str, Any],
        account_id: str,
        region_name: str,
        **_: Any,
    ) -> "BucketPolicy":
        del resource_name, region_name
        properties = cloudformation_json["Properties"]
        policy = json.dumps(properties["PolicyDocument"]).encode()
        s3_backends[account_id]["aws"].put_bucket_policy(properties["Bucket"], policy)
        return cls(properties["Bucket"])

    @classmethod
    def update_from_cloudformation_json(
        cls,
        original_resource: "BucketPolicy",
        new_resource_name: str,
        cloudformation_json: Mapping[str, Any],
        account_id: str,
        region_name: str,
    ) -> "BucketPolicy":
        changed = cls.create_from_cloudformation_json(new_resource_name, cloudformation_json, account_id, region_name)
        if changed.physical_resource_id != original_resource.physical_resource_id:
            s3_backends[account_id]["aws"].delete_bucket_policy(original_resource.physical_resource_id)
        return changed

    @classmethod
    def delete_from_cloudformation_json(
        cls, resource_name: str, cloudformation_json: Mapping[str, Any], account_id: str, region_name: str
    ) -> None:
        del cloudformation_json, region_name
        s3_backends[account_id]["aws"].delete_bucket_policy(resource_name)


def _delete(name: str, account_id: str) -> None:
    if s3_backends[account_id]["aws"].delete_bucket(name) is None:
        raise BucketNotEmpty(name)


def _configure(backend: Any, bucket: Any, properties: Mapping[str, Any]) -> None:
    """Bring a bucket to what its properties say; what they no longer say goes back to the default."""
    name = bucket.name
    encryption = properties.get("BucketEncryption")
    if encryption is not None:
        backend.put_bucket_encryption(name, cfn_to_api_encryption(encryption))
    versioning = properties.get("VersioningConfiguration")
    if versioning is not None:
        backend.put_bucket_versioning(name, versioning["Status"])
    elif bucket.versioning_status is not None:
        backend.put_bucket_versioning(name, "Suspended")  # what was versioned once can only be suspended
    access_block = properties.get("PublicAccessBlockConfiguration")
    if access_block is not None:
        # As strings: they come as XML where a client sets them.
        backend.put_public_access_block(name, {key: str(value).lower() for key, value in access_block.items()})
    else:
        backend.delete_public_access_block(name)
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
    backend.put_bucket_lifecycle_configuration(name, [_lifecycle_rule(rule) for rule in rules])
    backend.put_bucket_tagging(name, {tag["Key"]: tag["Value"] for tag in properties.get("Tags", [])})


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
