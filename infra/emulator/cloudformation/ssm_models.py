"""SSM parameters, changed in place and with tags; moto's model fails on tags and on a parameter without a name."""

from typing import Any

from moto.ssm.models import ssm_backends

from infra.emulator.resource_model import AccountRegion, ChangeableModel, Properties


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
