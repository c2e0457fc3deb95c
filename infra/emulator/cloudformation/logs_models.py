"""Log groups that keep their streams when the template changes them; moto's model can only make new ones."""

from typing import Any

from moto.logs.models import logs_backends

from infra.emulator.resource_model import AccountRegion, ChangeableModel, Properties


class LogGroup(ChangeableModel):
    """AWS::Logs::LogGroup."""

    resource_type = "AWS::Logs::LogGroup"
    name_property = "LogGroupName"

    @classmethod
    def create(cls, name: str, properties: Properties, place: AccountRegion) -> Any:
        group = _logs(place).create_log_group(name, _tags(properties), kmsKeyId=properties.get("KmsKeyId"))
        _set_retention(group, properties)
        return group

    @classmethod
    def update(cls, resource: Any, name: str, properties: Properties, place: AccountRegion) -> Any:
        if name != resource.name:
            group = cls.create(name, properties, place)
            cls.delete(resource.name, place)
            return group
        resource.kms_key_id = properties.get("KmsKeyId")
        _set_retention(resource, properties)
        logs = _logs(place)
        logs.tagger.delete_all_tags_for_resource(resource.arn)
        logs.tag_log_group(resource.name, _tags(properties))
        return resource

    @classmethod
    def delete(cls, name: str, place: AccountRegion) -> None:
        _logs(place).delete_log_group(name)


def _logs(place: AccountRegion) -> Any:
    return logs_backends[place.account_id][place.region]


def _set_retention(group: Any, properties: Properties) -> None:
    group.retention_in_days = properties.get("RetentionInDays")


def _tags(properties: Properties) -> dict[str, str]:
    return {tag["Key"]: tag["Value"] for tag in properties.get("Tags", [])}
