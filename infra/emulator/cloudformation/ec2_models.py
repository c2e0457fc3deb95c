"""Security groups, their rules, subnets, and how to delete what moto's models of EC2 leave behind.

moto's model of a group drops egress rules and replaces the group when a rule changes; that of a subnet loses the id of
its zone, and whether instances get public addresses. Without the deletions a VPC never goes.
"""

from collections.abc import Callable, Mapping
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
        """Change it in place: the rules of the template, and not those of separate resources, which stay."""
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


Deletion = Callable[[Any, Any, Mapping[str, Any], str], None]


def _elastic_ip(ec2: Any, address: Any, _properties: Mapping[str, Any], _physical_id: str) -> None:
    ec2.release_address(allocation_id=address.allocation_id)


def _flow_log(ec2: Any, _log: Any, _properties: Mapping[str, Any], physical_id: str) -> None:
    ec2.delete_flow_logs([physical_id])


def _gateway_attachment(ec2: Any, _attachment: Any, properties: Mapping[str, Any], _physical_id: str) -> None:
    if "InternetGatewayId" in properties:
        ec2.detach_internet_gateway(properties["InternetGatewayId"], properties["VpcId"])
    else:
        ec2.detach_vpn_gateway(properties["VpnGatewayId"], properties["VpcId"])


def _internet_gateway(ec2: Any, _gateway: Any, _properties: Mapping[str, Any], physical_id: str) -> None:
    ec2.delete_internet_gateway(physical_id)


def _nat_gateway(ec2: Any, _gateway: Any, _properties: Mapping[str, Any], physical_id: str) -> None:
    ec2.delete_nat_gateway(physical_id)


def _route(ec2: Any, _route: Any, properties: Mapping[str, Any], _physical_id: str) -> None:
    ec2.delete_route(
        properties["RouteTableId"],
        properties.get("DestinationCidrBlock"),
        properties.get("DestinationIpv6CidrBlock"),
        properties.get("DestinationPrefixListId"),
    )


def _route_table(ec2: Any, _table: Any, _properties: Mapping[str, Any], physical_id: str) -> None:
    ec2.delete_route_table(physical_id)


def _route_table_association(ec2: Any, _association: Any, properties: Mapping[str, Any], _physical_id: str) -> None:
    # moto gives the association the id of its route table; the true ids are keys of the table's associations.
    associations = ec2.get_route_table(properties["RouteTableId"])._associations  # noqa: SLF001 - no public way
    for association_id in [key for key, subnet_id in associations.items() if subnet_id == properties["SubnetId"]]:
        ec2.disassociate_route_table(association_id)


def _vpc_endpoint(ec2: Any, _endpoint: Any, _properties: Mapping[str, Any], physical_id: str) -> None:
    ec2.delete_vpc_endpoints([physical_id])


_DELETIONS: Mapping[str, Deletion] = {
    "AWS::EC2::EIP": _elastic_ip,
    "AWS::EC2::FlowLog": _flow_log,
    "AWS::EC2::InternetGateway": _internet_gateway,
    "AWS::EC2::NatGateway": _nat_gateway,
    "AWS::EC2::Route": _route,
    "AWS::EC2::RouteTable": _route_table,
    "AWS::EC2::SubnetRouteTableAssociation": _route_table_association,
    "AWS::EC2::VPCEndpoint": _vpc_endpoint,
    "AWS::EC2::VPCGatewayAttachment": _gateway_attachment,
}


def delete(
    resource: Any, resource_type: str, *, properties: Mapping[str, Any], physical_id: str, account_id: str, region: str
) -> bool:
    """Delete a resource of one of these types; False where it is none of them."""
    deletion = _DELETIONS.get(resource_type)
    if deletion is None:
        return False
    deletion(ec2_backends[account_id][region], resource, properties, physical_id)
    return True
