"""Secrets, keys and parameters.

moto has no model of a secret, can neither change nor delete a key, and fails on parameters with tags or without a name.
"""

import json
from typing import Any

from moto.ssm.models import ssm_backends

from infra.emulator.cloudformation.api_model import Api, ApiModel, ApiResource, document, tag_changes, without
from infra.emulator.resource_model import AccountRegion, ChangeableModel, Properties


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


class Parameter(ChangeableModel):
    """AWS::SSM::Parameter."""

    resource_type = "AWS::SSM::Parameter"
    name_property = "Name"

    @classmethod
    def create(cls, name: str, properties: Properties, place: AccountRegion) -> Any:
        return _put(name, properties, place, overwrite=False)

    @classmethod
    def update(cls, resource: Any, name: str, properties: Properties, place: AccountRegion) -> Any:
        """Puts the template's value, whatever else changed: what somebody wrote meanwhile is lost, as on AWS."""
        renamed = name != resource.name
        parameter = _put(name, properties, place, overwrite=not renamed)
        if renamed:
            cls.delete(resource.name, place)
        return parameter

    @classmethod
    def delete(cls, name: str, place: AccountRegion) -> None:
        _ssm(place).delete_parameter(name)


def _ssm(place: AccountRegion) -> Any:
    return ssm_backends[place.account_id][place.region]


def _put(name: str, properties: Properties, place: AccountRegion, *, overwrite: bool) -> Any:
    ssm = _ssm(place)
    parameter = ssm.put_parameter(
        name=name,
        description=properties.get("Description"),
        value=properties["Value"],
        parameter_type=properties["Type"],
        allowed_pattern=properties.get("AllowedPattern"),
        keyid=None,
        overwrite=overwrite,
        tags=None,
        data_type=properties.get("DataType", "text"),
        tier=properties.get("Tier"),
        policies=properties.get("Policies"),
    )
    tags = properties.get("Tags", {})  # here, and almost nowhere else, a map
    gone = ssm.list_tags_for_resource("Parameter", name).keys() - tags.keys()
    ssm.remove_tags_from_resource("Parameter", name, sorted(gone))
    if tags:
        ssm.add_tags_to_resource("Parameter", name, tags)
    return parameter
