"""Security groups and their rules: moto's model drops egress rules, and replaces a group when a rule changes."""

from collections.abc import Mapping
from typing import Any

from moto.core.common_models import CloudFormationModel
from moto.ec2.models import ec2_backends

Rule = Mapping[str, Any]


class SecurityGroup(CloudFormationModel):
    """AWS::EC2::SecurityGroup."""

    @staticmethod
    def cloudformation_name_type() -> str:
        return "GroupName"

    @staticmethod
    def cloudformation_type() -> str:
        return "AWS::EC2::SecurityGroup"

    @classmethod
    def create_from_cloudformation_json(
        cls,
        resource_name: str,
        cloudformation_json: Mapping[str, Any],
        account_id: str,
        region_name: str,
        **_: Any,
    ) -> Any:
        ec2 = ec2_backends[account_id][region_name]
        properties = cloudformation_json["Properties"]
        group = ec2.create_security_group(
            name=resource_name, description=properties["GroupDescription"], vpc_id=properties.get("VpcId")
        )
        if properties.get("SecurityGroupEgress"):
            group.egress_rules.clear()  # the rule to everywhere is there only as long as no other is named
        for direction in _DIRECTIONS:
            for rule in properties.get(direction, []):
                _authorize(ec2, direction, group.id, rule)
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
        """In place: the rules of the template, and those of separate resources, which stay."""
        del new_resource_name
        ec2 = ec2_backends[account_id][region_name]
        properties = cloudformation_json["Properties"]
        group = original_resource
        for direction, rules in (
            ("SecurityGroupIngress", group.ingress_rules),
            ("SecurityGroupEgress", group.egress_rules),
        ):
            separate = [rule for rule in rules if rule.id in _separate_rules]
            rules[:] = separate
            for rule in properties.get(direction, []):
                _authorize(ec2, direction, group.id, rule)
        if not properties.get("SecurityGroupEgress"):
            _authorize(ec2, "SecurityGroupEgress", group.id, {"IpProtocol": "-1", "CidrIp": "0.0.0.0/0"})
        return group

    @classmethod
    def delete_from_cloudformation_json(
        cls, resource_name: str, cloudformation_json: Mapping[str, Any], account_id: str, region_name: str
    ) -> None:
        del cloudformation_json
        ec2_backends[account_id][region_name].delete_security_group(group_id=resource_name)


class _SeparateRule(CloudFormationModel):
    """A rule of a security group that is a resource of its own."""

    direction = ""

    def __init__(self, rule_id: str) -> None:
        self.physical_resource_id = rule_id

    def get_cfn_attribute(self, attribute: str) -> str:
        if attribute == "Id":
            return self.physical_resource_id
        raise NotImplementedError(attribute)

    @staticmethod
    def cloudformation_name_type() -> str:
        return ""

    @staticmethod
    def cloudformation_type() -> str:
        return ""  # of no resource: the two below are

    @classmethod
    def create_from_cloudformation_json(
        cls,
        resource_name: str,
        cloudformation_json: Mapping[str, Any],
        account_id: str,
        region_name: str,
        **_: Any,
    ) -> "_SeparateRule":
        del resource_name
        properties = cloudformation_json["Properties"]
        ec2 = ec2_backends[account_id][region_name]
        rule_id = _authorize(ec2, cls.direction, properties["GroupId"], properties)
        _separate_rules.add(rule_id)
        return cls(rule_id)

    @classmethod
    def delete_from_cloudformation_json(
        cls, resource_name: str, cloudformation_json: Mapping[str, Any], account_id: str, region_name: str
    ) -> None:
        ec2 = ec2_backends[account_id][region_name]
        group = ec2.get_security_group_from_id(cloudformation_json["Properties"]["GroupId"])
        for rules in (group.ingress_rules, group.egress_rules):
            rules[:] = [rule for rule in rules if rule.id != resource_name]
        _separate_rules.discard(resource_name)


class SecurityGroupIngress(_SeparateRule):
    """AWS::EC2::SecurityGroupIngress."""

    direction = "SecurityGroupIngress"

    @staticmethod
    def cloudformation_type() -> str:
        return "AWS::EC2::SecurityGroupIngress"


class SecurityGroupEgress(_SeparateRule):
    """AWS::EC2::SecurityGroupEgress."""

    direction = "SecurityGroupEgress"

    @staticmethod
    def cloudformation_type() -> str:
        return "AWS::EC2::SecurityGroupEgress"


_DIRECTIONS = ("SecurityGroupIngress", "SecurityGroupEgress")

_separate_rules: set[str] = set()
"""Ids of rules that are resources of their own: a change of their group leaves them."""


def _authorize(ec2: Any, direction: str, group_id: str, rule: Rule) -> str:
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
