"""Log groups that keep their streams when the template changes them; moto's model can only make new ones."""

from collections.abc import Mapping
from typing import Any

from moto.core.common_models import CloudFormationModel
from moto.logs.models import logs_backends


class LogGroup(CloudFormationModel):
    """AWS::Logs::LogGroup."""

    @staticmethod
    def cloudformation_name_type() -> str:
        return "LogGroupName"

    @staticmethod
    def cloudformation_type() -> str:
        return "AWS::Logs::LogGroup"

    @classmethod
    def create_from_cloudformation_json(
        cls,
        resource_name: str,
        cloudformation_json: Mapping[str, Any],
        account_id: str,
        region_name: str,
        **_: Any,
    ) -> Any:
        logs = logs_backends[account_id][region_name]
        properties = cloudformation_json["Properties"]
        group = logs.create_log_group(resource_name, _tags(properties), kmsKeyId=properties.get("KmsKeyId"))
        _set_retention(group, properties)
        return group

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
            group = cls.create_from_cloudformation_json(new_resource_name, cloudformation_json, account_id, region_name)
            logs_backends[account_id][region_name].delete_log_group(original_resource.name)
            return group
        properties = cloudformation_json["Properties"]
        original_resource.kms_key_id = properties.get("KmsKeyId")
        _set_retention(original_resource, properties)
        logs = logs_backends[account_id][region_name]
        logs.tagger.delete_all_tags_for_resource(original_resource.arn)
        logs.tag_log_group(original_resource.name, _tags(properties))
        return original_resource

    @classmethod
    def delete_from_cloudformation_json(
        cls, resource_name: str, cloudformation_json: Mapping[str, Any], account_id: str, region_name: str
    ) -> None:
        del cloudformation_json
        logs_backends[account_id][region_name].delete_log_group(resource_name)


def _set_retention(group: Any, properties: Mapping[str, Any]) -> None:
    group.retention_in_days = properties.get("RetentionInDays")


def _tags(properties: Mapping[str, Any]) -> dict[str, str]:
    return {tag["Key"]: tag["Value"] for tag in properties.get("Tags", [])}
