"""Security groups, their rules, and subnets.

moto's model of a group drops egress rules and replaces the group when a rule changes; that of a subnet loses the id of
its zone, and whether instances get public addresses.
"""

from collections.abc import Mapping
from typing import Any

from moto.ec2.models import ec2_backends

from infra.emulator.resource_model import AccountRegion, ChangeableModel, Properties, ResourceModel


class SecurityGroup(ChangeableModel):
    """AWS::EC2::SecurityGroup."""

    resource_type = "AWS::EC2::SecurityGroup"
    name_property = "GroupName"

    @classmethod
    def create(cls, name: str, properties: Properties, place: AccountRegion) -> Any:
        ec2 = _ec2(place)
        group = ec2.create_security_group(
            name=name, description=properties["GroupDescription"], vpc_id=properties.get("VpcId")
        )
        if properties.get("SecurityGroupEgress"):
            group.egress_rules.clear()  # the rule to everywhere is there only as long as no other is named
        for direction in _DIRECTIONS:
            for rule in properties.get(direction, []):
                _authorize(ec2, direction, group.id, rule)
        return group

    @classmethod
    def update(cls, resource: Any, name: str, properties: Properties, place: AccountRegion) -> Any:
        """In place: the rules of the template, and those of separate resources, which stay."""
        del name
        ec2 = _ec2(place)
        group = resource
        for direction, rules in (
            ("SecurityGroupIngress", group.ingress_rules),
            ("SecurityGroupEgress", group.egress_rules),
        ):
            separate = [rule for rule in rules if rule.id in _group_of_separate_rule]
            rules[:] = separate
            for rule in properties.get(direction, []):
                _authorize(ec2, direction, group.id, rule)
        if not properties.get("SecurityGroupEgress"):
            _authorize(ec2, "SecurityGroupEgress", group.id, {"IpProtocol": "-1", "CidrIp": "0.0.0.0/0"})
        return group

    @classmethod
    def delete(cls, name: str, place: AccountRegion) -> None:
        _ec2(place).delete_security_group(group_id=name)


class Subnet(ResourceModel):
    """AWS::EC2::Subnet."""

    resource_type = "AWS::EC2::Subnet"

    @classmethod
    def create(cls, name: str, properties: Properties, place: AccountRegion) -> Any:
        del name
        subnet = _ec2(place).create_subnet(
            vpc_id=properties["VpcId"],
            cidr_block=properties["CidrBlock"],
            availability_zone=properties.get("AvailabilityZone"),
            availability_zone_id=properties.get("AvailabilityZoneId"),
        )
        subnet.map_public_ip_on_launch = str(properties.get("MapPublicIpOnLaunch", "false")).lower()
        for tag in properties.get("Tags", []):
            subnet.add_tag(tag["Key"], tag["Value"])
        return subnet

    @classmethod
    def delete(cls, name: str, place: AccountRegion) -> None:
        _ec2(place).delete_subnet(name)


class _SeparateRule(ResourceModel):
    """A rule of a security group that is a resource of its own."""

    direction = ""

    def __init__(self, rule_id: str) -> None:
        self.physical_resource_id = rule_id

    def get_cfn_attribute(self, attribute: str) -> str:
        if attribute == "Id":
            return self.physical_resource_id
        raise NotImplementedError(attribute)

    @classmethod
    def create(cls, name: str, properties: Properties, place: AccountRegion) -> "_SeparateRule":
        del name
        rule_id = _authorize(_ec2(place), cls.direction, properties["GroupId"], properties)
        _group_of_separate_rule[rule_id] = properties["GroupId"]
        return cls(rule_id)

    @classmethod
    def delete(cls, name: str, place: AccountRegion) -> None:
        group = _ec2(place).get_security_group_from_id(_group_of_separate_rule[name])
        for rules in (group.ingress_rules, group.egress_rules):
            rules[:] = [rule for rule in rules if rule.id != name]
        del _group_of_separate_rule[name]


class SecurityGroupIngress(_SeparateRule):
    """AWS::EC2::SecurityGroupIngress."""

    resource_type = "AWS::EC2::SecurityGroupIngress"
    direction = "SecurityGroupIngress"


class SecurityGroupEgress(_SeparateRule):
    """AWS::EC2::SecurityGroupEgress."""

    resource_type = "AWS::EC2::SecurityGroupEgress"
    direction = "SecurityGroupEgress"


_DIRECTIONS = ("SecurityGroupIngress", "SecurityGroupEgress")

_group_of_separate_rule: dict[str, str] = {}
"""By the ids of rules that are resources of their own: a change of their group leaves them."""


def _ec2(place: AccountRegion) -> Any:
    return ec2_backends[place.account_id][place.region]


def _authorize(ec2: Any, direction: str, group_id: str, rule: Mapping[str, Any]) -> str:
    """Add a rule of a template to a group; its id."""
    peer = "Source" if direction == "SecurityGroupIngress" else "Destination"
    address = {"CidrIp": rule.get("CidrIp"), "CidrIpv6": rule.get("CidrIpv6"), "Description": rule.get("Description")}
    peer_group = {"GroupId": rule.get(f"{peer}SecurityGroupId"), "Description": rule.get("Description")}
    prefix_list = rule.get(f"{peer}PrefixListId")
    authorize = ec2.authorize_security_group_ingress if peer == "Source" else ec2.authorize_security_group_egress
    rules, _ = authorize(
        group_id,
        str(rule["IpProtocol"]),
        rule.get("FromPort"),
        rule.get("ToPort"),
        [{key: value for key, value in address.items() if value is not None}]
        if address["CidrIp"] or address["CidrIpv6"]
        else [],
        source_groups=[{key: value for key, value in peer_group.items() if value is not None}]
        if peer_group["GroupId"]
        else [],
        prefix_list_ids=[{"PrefixListId": prefix_list}] if prefix_list else None,
    )
    return str(rules[0].id)
