"""Checks of an existing VPC: its subnets, their way to AWS, and nothing that the stage's endpoints clash with."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from botocore.exceptions import ClientError

from infra.preflight.account import Account, Finding, error_code, ok, problem
from infra.stages import ExistingVpc, Stage
from infra.stages.network_plan import ENDPOINT_SERVICES, has_interface_endpoints, uses_default_security_group

VPC = "VPC"

_WAYS_OUT = ("NatGatewayId", "TransitGatewayId", "VpcPeeringConnectionId", "NetworkInterfaceId", "InstanceId")
"""Targets of a default route by which an instance without a public address gets out."""


def existing_vpc(account: Account, stage: Stage) -> Iterator[Finding]:
    vpc = stage.vpc
    if vpc is None:
        yield ok(VPC, "the stage makes its own")
        return
    try:
        account.client("ec2").describe_vpcs(VpcIds=[vpc.vpc_id])
    except ClientError as error:
        if not error_code(error).startswith("InvalidVpcID"):
            raise
        yield problem(VPC, f"there is no {vpc.vpc_id} in {account.region}", "correct `vpc` in infra/settings.py")
        return
    endpoints = _endpoints_of_others(account, stage, vpc)
    yield from _subnets(account, stage, vpc, endpoints)
    if has_interface_endpoints(stage):
        yield from _names(account, vpc)
        yield from _clashes(vpc, endpoints)
    if vpc.private_route_table_ids:
        yield from _route_tables(account, vpc, endpoints)
    if uses_default_security_group(stage):
        yield from _default_group(account, vpc)


def _subnets(
    account: Account, stage: Stage, vpc: ExistingVpc, endpoints: Sequence[Mapping[str, Any]]
) -> Iterator[Finding]:
    """Check that each subnet is in this VPC and has a way to AWS."""
    found = {
        subnet["SubnetId"]: subnet
        for subnet in account.pages(
            "ec2",
            "describe_subnets",
            "Subnets",
            Filters=[{"Name": "subnet-id", "Values": list(vpc.private_subnet_ids)}],
        )
    }
    tables = list(
        account.pages(
            "ec2", "describe_route_tables", "RouteTables", Filters=[{"Name": "vpc-id", "Values": [vpc.vpc_id]}]
        )
    )
    missing_services = _missing_services(endpoints)
    correction = "correct `private_subnet_ids` in infra/settings.py"
    for subnet_id in vpc.private_subnet_ids:
        subnet = found.get(subnet_id)
        if subnet is None:
            yield problem(VPC, f"there is no {subnet_id} in {account.region}", correction)
        elif subnet["VpcId"] != vpc.vpc_id:
            yield problem(VPC, f"{subnet_id} is in {subnet['VpcId']}, not in {vpc.vpc_id}", correction)
        else:
            where = f"{subnet_id} ({subnet['AvailabilityZoneId']})"
            target = _default_route(subnet_id, tables)
            if target in _WAYS_OUT:
                yield ok(VPC, f"{where} has a default route")
            elif has_interface_endpoints(stage):
                yield ok(VPC, f"{where} reaches AWS by the endpoints that the stage makes")
            elif not missing_services:
                yield ok(VPC, f"{where} reaches AWS by the VPC's endpoints")
            elif target == "GatewayId":
                yield problem(
                    VPC,
                    f"{where} is a public subnet: instances, which get no public address, cannot leave by its gateway",
                    f"name a private subnet; or interface_endpoints=True in infra/settings.py for {vpc.vpc_id}",
                )
            else:
                yield problem(
                    VPC,
                    f"{where} has no default route, and {vpc.vpc_id} no endpoint of {', '.join(missing_services)}",
                    "a route to a NAT gateway, or interface_endpoints=True in infra/settings.py",
                )


def _default_route(subnet_id: str, tables: Sequence[Mapping[str, Any]]) -> str | None:
    """Return what the subnet's default route leads to; None where it has none."""

    def is_of(table: Mapping[str, Any], key: str, value: object) -> bool:
        return any(association.get(key) == value for association in table["Associations"])

    # A subnet without a table of its own has the VPC's main one.
    table = next((item for item in tables if is_of(item, "SubnetId", subnet_id)), None) or next(
        (item for item in tables if is_of(item, "Main", True)), None
    )
    for route in table["Routes"] if table else ():
        if route.get("DestinationCidrBlock") == "0.0.0.0/0" and route.get("State") != "blackhole":
            return next((key for key in (*_WAYS_OUT, "GatewayId") if route.get(key)), None)
    return None


def _endpoints_of_others(account: Account, stage: Stage, vpc: ExistingVpc) -> list[Mapping[str, Any]]:
    """Return the VPC's endpoints but for the stage's own, which a deployment leaves as they are."""
    found = account.pages(
        "ec2", "describe_vpc_endpoints", "VpcEndpoints", Filters=[{"Name": "vpc-id", "Values": [vpc.vpc_id]}]
    )
    return [
        endpoint
        for endpoint in found
        if {"Key": "trainyard:stage", "Value": stage.name} not in endpoint.get("Tags", [])
    ]


def _service(endpoint: Mapping[str, Any]) -> str:
    """Return a service's short name: `ecr.api` of `com.amazonaws.us-east-1.ecr.api`."""
    return str(endpoint["ServiceName"]).split(".", 3)[-1]


def _missing_services(endpoints: Sequence[Mapping[str, Any]]) -> list[str]:
    there = {_service(endpoint) for endpoint in endpoints}
    return [service for service in (*ENDPOINT_SERVICES, "s3") if service not in there]


def _names(account: Account, vpc: ExistingVpc) -> Iterator[Finding]:
    """Check that the VPC resolves the services' usual names, by which alone endpoints are found."""
    for attribute, option in (
        ("EnableDnsSupport", "enable-dns-support"),
        ("EnableDnsHostnames", "enable-dns-hostnames"),
    ):
        answer = account.client("ec2").describe_vpc_attribute(
            VpcId=vpc.vpc_id, Attribute=attribute[0].lower() + attribute[1:]
        )
        if not answer[attribute]["Value"]:
            yield problem(
                VPC,
                f"{attribute} is off in {vpc.vpc_id}: its endpoints would not be found",
                f"aws ec2 modify-vpc-attribute --region {account.region} --vpc-id {vpc.vpc_id} --{option}",
            )


def _clashes(vpc: ExistingVpc, endpoints: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    taken = sorted({_service(item) for item in endpoints if item.get("PrivateDnsEnabled")} & set(ENDPOINT_SERVICES))
    if taken:
        yield problem(
            VPC,
            f"{vpc.vpc_id} has endpoints of {', '.join(taken)} already, and EC2 takes no second one of a name",
            "leave interface_endpoints out in infra/settings.py, and let their security groups admit the subnets",
        )


def _route_tables(account: Account, vpc: ExistingVpc, endpoints: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """Check that the route tables which get a route to S3 are there, and have none."""
    wanted = list(vpc.private_route_table_ids)
    found = {
        table["RouteTableId"]: table
        for table in account.pages(
            "ec2", "describe_route_tables", "RouteTables", Filters=[{"Name": "route-table-id", "Values": wanted}]
        )
    }
    with_s3 = {
        table
        for item in endpoints
        if _service(item) == "s3" and item["VpcEndpointType"] == "Gateway"
        for table in item.get("RouteTableIds", [])
    }
    for table_id in wanted:
        table = found.get(table_id)
        correction = "correct `private_route_table_ids` in infra/settings.py"
        if table is None or table["VpcId"] != vpc.vpc_id:
            yield problem(VPC, f"{vpc.vpc_id} has no {table_id}", correction)
        elif table_id in with_s3:
            yield problem(
                VPC,
                f"{table_id} has a route to S3's gateway endpoint already, and takes no second one",
                f"leave {table_id} out of `private_route_table_ids` in infra/settings.py",
            )
        else:
            yield ok(VPC, f"{table_id} gets a route to S3's gateway endpoint")


def _default_group(account: Account, vpc: ExistingVpc) -> Iterator[Finding]:
    """Check that the VPC's default group, in which the nodes of a job are, lets them reach each other and AWS."""
    filters = [{"Name": "vpc-id", "Values": [vpc.vpc_id]}, {"Name": "group-name", "Values": ["default"]}]
    (group,) = account.pages("ec2", "describe_security_groups", "SecurityGroups", Filters=filters)
    group_id = group["GroupId"]
    if vpc.default_security_group_id not in (None, group_id):
        yield problem(
            VPC,
            f"the default group of {vpc.vpc_id} is {group_id}, not {vpc.default_security_group_id}",
            "correct `default_security_group_id` in infra/settings.py",
        )
    incoming, outgoing = group["IpPermissions"], group["IpPermissionsEgress"]
    all_ports = (0, 65535)
    missing = [
        (what, f"aws ec2 authorize-security-group-{command} --region {account.region} --group-id {group_id} {rule}")
        for what, command, rule, there in (
            (
                "in from its own members",
                "ingress",
                f"--source-group {group_id} --protocol tcp --port 0-65535",
                any(_covers(rule, all_ports) and _names_group(rule, group_id) for rule in incoming),
            ),
            (
                "out to its own members",
                "egress",
                f"--ip-permissions IpProtocol=tcp,FromPort=0,ToPort=65535,UserIdGroupPairs=[{{GroupId={group_id}}}]",
                any(
                    _covers(rule, all_ports) and (_names_group(rule, group_id) or _leads_anywhere(rule))
                    for rule in outgoing
                ),
            ),
            (
                "out by HTTPS",
                "egress",
                "--protocol tcp --port 443 --cidr 0.0.0.0/0",
                any(_covers(rule, (443, 443)) and _leads_anywhere(rule) for rule in outgoing),
            ),
        )
        if not there
    ]
    for what, command in missing:
        yield problem(
            VPC, f"{group_id}, the default group of {vpc.vpc_id}, does not let nodes of a job {what}", command
        )
    if not missing:
        yield ok(VPC, f"{group_id}, the VPC's default group, lets nodes of a job reach each other and AWS")


def _covers(rule: Mapping[str, Any], ports: tuple[int, int]) -> bool:
    """Return whether a rule is for all these ports of TCP."""
    low, high = ports
    if rule["IpProtocol"] == "-1":
        return True
    return bool(rule["IpProtocol"] == "tcp" and rule["FromPort"] <= low and high <= rule["ToPort"])


def _names_group(rule: Mapping[str, Any], group_id: str) -> bool:
    return any(pair.get("GroupId") == group_id for pair in rule["UserIdGroupPairs"])


def _leads_anywhere(rule: Mapping[str, Any]) -> bool:
    return any(addresses["CidrIp"] == "0.0.0.0/0" for addresses in rule["IpRanges"])
