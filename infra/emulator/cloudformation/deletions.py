"""How to delete what moto's CloudFormation models cannot: they leave these behind, and a VPC then never goes.

Each takes EC2's backend, the resource, its properties and its physical id.
"""

from collections.abc import Callable, Mapping
from typing import Any

from moto.ec2.models import ec2_backends

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
