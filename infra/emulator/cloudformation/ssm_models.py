"""SSM parameters, changed in place and with tags; moto's model fails on tags and on a parameter without a name."""

from collections.abc import Mapping
from typing import Any

from moto.core.common_models import CloudFormationModel
from moto.ssm.models import ssm_backends


class Parameter(CloudFormationModel):
    """AWS::SSM::Parameter."""

    @staticmethod
    def cloudformation_name_type() -> str:
        return "Name"

    @staticmethod
    def cloudformation_type() -> str:
        return "AWS::SSM::Parameter"

    @classmethod
    def create_from_cloudformation_json(
        cls,
        resource_name: str,
        cloudformation_json: Mapping[str, Any],
        account_id: str,
        region_name: str,
        **_: Any,
    ) -> Any:
        return _put(resource_name, cloudformation_json["Properties"], account_id, region_name, overwrite=False)

    @classmethod
    def update_from_cloudformation_json(
        cls,
        original_resource: Any,
        new_resource_name: str,
        cloudformation_json: Mapping[str, Any],
        account_id: str,
        region_name: str,
    ) -> Any:
        renamed = new_resource_name != original_resource.name
        parameter = _put(
            new_resource_name, cloudformation_json["Properties"], account_id, region_name, overwrite=not renamed
        )
        if renamed:
            ssm_backends[account_id][region_name].delete_parameter(original_resource.name)
        return parameter

    @classmethod
    def delete_from_cloudformation_json(
        cls, resource_name: str, cloudformation_json: Mapping[str, Any], account_id: str, region_name: str
    ) -> None:
        del cloudformation_json
        ssm_backends[account_id][region_name].delete_parameter(resource_name)


def _put(name: str, properties: Mapping[str, Any], account_id: str, region: str, *, overwrite: bool) -> Any:
    ssm = ssm_backends[account_id][region]
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
    if tags:
        ssm.add_tags_to_resource("Parameter", name, tags)
    return parameter
