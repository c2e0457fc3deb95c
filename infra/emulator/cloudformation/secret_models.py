"""Secrets and keys: moto has no model of the one, and can neither change nor delete the other."""

import json
from typing import Any

from infra.emulator.cloudformation.api_model import Api, ApiModel, ApiResource, document, tag_changes, without
from infra.emulator.resource_model import Properties


class Secret(ApiModel):
    """AWS::SecretsManager::Secret; without a value where the template gives none."""

    resource_type = "AWS::SecretsManager::Secret"
    name_property = "Name"
    service = "secretsmanager"

    @classmethod
    def make(cls, api: Api, name: str, properties: Properties) -> ApiResource:
        request = without(properties, "GenerateSecretString", "ReplicaRegions")
        generated = properties.get("GenerateSecretString")
        if generated is not None:
            request["SecretString"] = _generate(api, generated)
        arn = api("CreateSecret", **{**request, "Name": name})["ARN"]
        return ApiResource(name, properties, ref=arn, Id=arn)

    @classmethod
    def change(cls, api: Api, resource: ApiResource, properties: Properties) -> None:
        secret = resource.physical_resource_id
        api(
            "UpdateSecret",
            SecretId=secret,
            Description=properties.get("Description", ""),
            KmsKeyId=properties.get("KmsKeyId"),
        )
        value = properties.get("SecretString")
        if value is not None and value != resource.properties.get("SecretString"):
            api("PutSecretValue", SecretId=secret, SecretString=value)
        added, gone = tag_changes(resource.properties, properties)
        if gone:
            api("UntagResource", SecretId=secret, TagKeys=gone)
        if added:
            api("TagResource", SecretId=secret, Tags=added)

    @classmethod
    def remove(cls, api: Api, resource: ApiResource) -> None:
        api("DeleteSecret", SecretId=resource.physical_resource_id)  # with the 30 days in which it can be had back


class Key(ApiModel):
    """AWS::KMS::Key."""

    resource_type = "AWS::KMS::Key"
    service = "kms"
    replaced_by = frozenset({"KeySpec", "KeyUsage", "MultiRegion", "Origin"})

    @classmethod
    def make(cls, api: Api, name: str, properties: Properties) -> ApiResource:
        request = without(
            properties,
            "Enabled",
            "EnableKeyRotation",
            "KeyPolicy",
            "PendingWindowInDays",
            "RotationPeriodInDays",
            "Tags",
        )
        policy, tags = document(properties.get("KeyPolicy")), _key_tags(properties)
        key = api("CreateKey", **request, Policy=policy, Tags=tags)["KeyMetadata"]
        resource = ApiResource(name, properties, ref=key["KeyId"], Arn=key["Arn"], KeyId=key["KeyId"])
        _set_switches(api, resource, properties)
        return resource

    @classmethod
    def change(cls, api: Api, resource: ApiResource, properties: Properties) -> None:
        key = resource.physical_resource_id
        api("UpdateKeyDescription", KeyId=key, Description=properties.get("Description", ""))
        if properties.get("KeyPolicy") is not None:
            api("PutKeyPolicy", KeyId=key, PolicyName="default", Policy=document(properties["KeyPolicy"]))
        _, gone = tag_changes(resource.properties, properties)
        if gone:
            api("UntagResource", KeyId=key, TagKeys=gone)
        if properties.get("Tags"):
            api("TagResource", KeyId=key, Tags=_key_tags(properties))
        _set_switches(api, resource, properties)

    @classmethod
    def remove(cls, api: Api, resource: ApiResource) -> None:
        api(
            "ScheduleKeyDeletion",
            KeyId=resource.physical_resource_id,
            PendingWindowInDays=resource.properties.get("PendingWindowInDays", 30),
        )


class Alias(ApiModel):
    """AWS::KMS::Alias."""

    resource_type = "AWS::KMS::Alias"
    name_property = "AliasName"
    service = "kms"

    @classmethod
    def make(cls, api: Api, name: str, properties: Properties) -> ApiResource:
        api("CreateAlias", AliasName=name, TargetKeyId=properties["TargetKeyId"])
        return ApiResource(name, properties)

    @classmethod
    def change(cls, api: Api, resource: ApiResource, properties: Properties) -> None:
        api("UpdateAlias", AliasName=resource.name, TargetKeyId=properties["TargetKeyId"])

    @classmethod
    def remove(cls, api: Api, resource: ApiResource) -> None:
        api("DeleteAlias", AliasName=resource.physical_resource_id)


def _generate(api: Api, wanted: Properties) -> str:
    password = api("GetRandomPassword", **without(wanted, "SecretStringTemplate", "GenerateStringKey"))[
        "RandomPassword"
    ]
    if "SecretStringTemplate" not in wanted:
        return str(password)
    return json.dumps({**json.loads(wanted["SecretStringTemplate"]), wanted["GenerateStringKey"]: password})


def _key_tags(properties: Properties) -> list[dict[str, Any]]:
    return [{"TagKey": tag["Key"], "TagValue": tag["Value"]} for tag in properties.get("Tags", [])]


def _set_switches(api: Api, resource: ApiResource, properties: Properties) -> None:
    for name, on, off in (
        ("EnableKeyRotation", "EnableKeyRotation", "DisableKeyRotation"),
        ("Enabled", "EnableKey", "DisableKey"),
    ):
        if name in properties:
            api(on if str(properties[name]).lower() == "true" else off, KeyId=resource.physical_resource_id)
