"""Checks of the network: services of endpoints in each zone; an existing VPC's subnets, routes and endpoints."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from botocore.exceptions import ClientError

from infra.preflight.account import Account, Finding, error_code, ok, problem
from infra.stages import ExistingVpc, Stage
from infra.stages.network_plan import (
    DEFAULT_ZONE_COUNT,
    ENDPOINT_SERVICES,
    egress_ports,
    endpoint_zone_count,
    has_interface_endpoints,
    uses_default_security_group,
    zone_ids,
)

VPC = "VPC"
ENDPOINTS = "VPC endpoints"

_ROUTES_OUT = ("NatGatewayId", "TransitGatewayId", "VpcPeeringConnectionId", "NetworkInterfaceId", "InstanceId")
"""Targets of a default route that work for instances without a public address."""


def subnet_zones(account: Account, stage: Stage) -> list[str]:
    """Return the ids of the zones of the stage's current or future subnets, in the subnets' order."""
    if stage.vpc is not None:
        ids = list(stage.vpc.private_subnet_ids)
        subnets = account.client("ec2").describe_subnets(Filters=[{"Name": "subnet-id", "Values": ids}])["Subnets"]
        ordered = sorted(subnets, key=lambda subnet: ids.index(subnet["SubnetId"]))
        return [subnet["AvailabilityZoneId"] for subnet in ordered]
    return list(zone_ids(stage) or list(_zone_names(account).values())[:DEFAULT_ZONE_COUNT])


def _zone_names(account: Account) -> dict[str, str]:
    """Return the region's zones: their names in this account (`us-east-1a`), in order, and their ids."""
    zones = account.client("ec2").describe_availability_zones(
        Filters=[{"Name": "zone-type", "Values": ["availability-zone"]}]
    )["AvailabilityZones"]
    return dict(sorted((zone["ZoneName"], zone["ZoneId"]) for zone in zones))


def endpoint_services(account: Account, stage: Stage) -> Iterator[Finding]:
    """Check that each endpoint's service exists in each zone, because the deployment fails at the first gap."""
    if not has_interface_endpoints(stage):
        yield ok(ENDPOINTS, "the stage creates no interface endpoints")
        return
    names, zones = _zone_names(account), Counter(subnet_zones(account, stage)[: endpoint_zone_count(stage)])
    found = account.pages(
        "ec2",
        "describe_vpc_endpoint_services",
        "ServiceDetails",
        Filters=[{"Name": "service-type", "Values": ["Interface"]}],
    )
    available = {_service(item): [names.get(zone) for zone in item["AvailabilityZones"]] for item in found}
    setting = "`availability_zone_ids`" if stage.vpc is None else "`private_subnet_ids`"
    lacking = {zone: [name for name in ENDPOINT_SERVICES if zone not in available.get(name, ())] for zone in zones}
    for zone, missing in lacking.items():
        if missing:
            yield problem(
                ENDPOINTS,
                f"{zone} has no endpoint services for {', '.join(missing)}, so the deployment would fail",
                f"list zones that have them in {setting} in infra/settings.py, or use NAT instead of endpoints",
            )
        if zones[zone] > 1:
            yield problem(
                ENDPOINTS,
                f"{zones[zone]} subnets are in {zone}, and an endpoint takes one per zone",
                f"list one subnet per zone in {setting} in infra/settings.py",
            )
    if not any(lacking.values()):
        yield ok(
            ENDPOINTS,
            f"{len(ENDPOINT_SERVICES)} services are available in {', '.join(zones)}, and paid in each zone "
            "(python -m infra.idle_costs)",
        )


def existing_vpc(account: Account, stage: Stage) -> Iterator[Finding]:
    vpc = stage.vpc
    if vpc is None:
        yield ok(VPC, "the stage creates its own")
        return
    try:
        account.client("ec2").describe_vpcs(VpcIds=[vpc.vpc_id])
    except ClientError as error:
        if not error_code(error).startswith("InvalidVpcID"):
            raise
        yield problem(VPC, f"{vpc.vpc_id} does not exist in {account.region}", "correct `vpc` in infra/settings.py")
        return
    endpoints = _foreign_endpoints(account, stage, vpc)
    yield from _subnets(account, stage, vpc, endpoints)
    if has_interface_endpoints(stage):
        yield from _dns_findings(account, vpc)
        yield from _conflicting_endpoints(vpc, endpoints)
    if vpc.private_route_table_ids:
        yield from _route_tables(account, vpc, endpoints)
    if uses_default_security_group(stage):
        yield from _default_group(account, stage, vpc)


def _subnets(
    account: Account, stage: Stage, vpc: ExistingVpc, endpoints: Sequence[Mapping[str, Any]]
) -> Iterator[Finding]:
    """Check that each subnet is in this VPC and has a route to AWS."""
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
            yield problem(VPC, f"{subnet_id} does not exist in {account.region}", correction)
        elif subnet["VpcId"] != vpc.vpc_id:
            yield problem(VPC, f"{subnet_id} is in {subnet['VpcId']}, not in {vpc.vpc_id}", correction)
        else:
            location = f"{subnet_id} ({subnet['AvailabilityZoneId']})"
            target = _default_route(subnet_id, tables)
            if target in _ROUTES_OUT:
                yield ok(VPC, f"{location} has a default route")
            elif has_interface_endpoints(stage):
                yield ok(VPC, f"{location} reaches AWS through the endpoints that the stage creates")
            elif not missing_services:
                yield ok(VPC, f"{location} reaches AWS through the VPC's endpoints")
            elif target == "GatewayId":
                yield problem(
                    VPC,
                    f"{location} is a public subnet: instances have no public address, so they cannot use its gateway",
                    f"name a private subnet, or set interface_endpoints=True in infra/settings.py for {vpc.vpc_id}",
                )
            else:
                yield problem(
                    VPC,
                    f"{location} has no default route; {vpc.vpc_id} lacks endpoints for {', '.join(missing_services)}",
                    "add a route to a NAT gateway, or set interface_endpoints=True in infra/settings.py",
                )


def _default_route(subnet_id: str, tables: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the kind of target of the subnet's default route, or None if it has no default route."""

    def is_of(table: Mapping[str, Any], key: str, value: object) -> bool:
        return any(association.get(key) == value for association in table["Associations"])

    # A subnet without an associated table uses the VPC's main table.
    table = next((item for item in tables if is_of(item, "SubnetId", subnet_id)), None) or next(
        (item for item in tables if is_of(item, "Main", True)), None
    )
    for route in table["Routes"] if table else ():
        if route.get("DestinationCidrBlock") == "0.0.0.0/0" and route.get("State") != "blackhole":
            return next((key for key in (*_ROUTES_OUT, "GatewayId") if route.get(key)), None)
    return None


def _foreign_endpoints(account: Account, stage: Stage, vpc: ExistingVpc) -> list[Mapping[str, Any]]:
    """Return the VPC's endpoints except the stage's own, which a deployment does not replace."""
    found = account.pages(
        "ec2", "describe_vpc_endpoints", "VpcEndpoints", Filters=[{"Name": "vpc-id", "Values": [vpc.vpc_id]}]
    )
    return [
        endpoint
        for endpoint in found
        if {"Key": "trainyard:stage", "Value": stage.name} not in endpoint.get("Tags", [])
    ]


def _service(endpoint: Mapping[str, Any]) -> str:
    """Return the short name of an endpoint's service: `ecr.api` for `com.amazonaws.us-east-1.ecr.api`."""
    return str(endpoint["ServiceName"]).split(".", 3)[-1]


def _missing_services(endpoints: Sequence[Mapping[str, Any]]) -> list[str]:
    existing = {_service(endpoint) for endpoint in endpoints}
    return [service for service in (*ENDPOINT_SERVICES, "s3") if service not in existing]


def _dns_findings(account: Account, vpc: ExistingVpc) -> Iterator[Finding]:
    """Check that the VPC resolves services' usual host names, without which clients do not find its endpoints."""
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
                f"{attribute} is off in {vpc.vpc_id}, so clients would not find its endpoints",
                f"aws ec2 modify-vpc-attribute --region {account.region} --vpc-id {vpc.vpc_id} --{option}",
            )


def _conflicting_endpoints(vpc: ExistingVpc, endpoints: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    taken = sorted({_service(item) for item in endpoints if item.get("PrivateDnsEnabled")} & set(ENDPOINT_SERVICES))
    if taken:
        yield problem(
            VPC,
            f"{vpc.vpc_id} already has endpoints for {', '.join(taken)}, and EC2 allows only one per name",
            "omit interface_endpoints in infra/settings.py, and let the endpoints' security groups admit the subnets",
        )


def _route_tables(account: Account, vpc: ExistingVpc, endpoints: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """Check that the route tables exist, and have no S3 route yet."""
    table_ids = list(vpc.private_route_table_ids)
    found = {
        table["RouteTableId"]: table
        for table in account.pages(
            "ec2", "describe_route_tables", "RouteTables", Filters=[{"Name": "route-table-id", "Values": table_ids}]
        )
    }
    with_s3 = {
        table
        for item in endpoints
        if _service(item) == "s3" and item["VpcEndpointType"] == "Gateway"
        for table in item.get("RouteTableIds", [])
    }
    for table_id in table_ids:
        table = found.get(table_id)
        correction = "correct `private_route_table_ids` in infra/settings.py"
        if table is None or table["VpcId"] != vpc.vpc_id:
            yield problem(VPC, f"{table_id} does not exist in {vpc.vpc_id}", correction)
        elif table_id in with_s3:
            yield problem(
                VPC,
                f"{table_id} already has a route to an S3 gateway endpoint, and allows only one",
                f"remove {table_id} from `private_route_table_ids` in infra/settings.py",
            )
        else:
            yield ok(VPC, f"{table_id} will get a route to the S3 gateway endpoint")


def _default_group(account: Account, stage: Stage, vpc: ExistingVpc) -> Iterator[Finding]:
    """Check that the VPC's default group, which nodes of multi-node jobs use, lets them reach each other and AWS."""
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
        for what, command, rule, exists in (
            (
                "receive from its members",
                "ingress",
                f"--source-group {group_id} --protocol tcp --port 0-65535",
                any(_covers(rule, all_ports) and _names_group(rule, group_id) for rule in incoming),
            ),
            (
                "send to its members",
                "egress",
                f"--ip-permissions IpProtocol=tcp,FromPort=0,ToPort=65535,UserIdGroupPairs=[{{GroupId={group_id}}}]",
                any(
                    _covers(rule, all_ports) and (_names_group(rule, group_id) or _allows_any_address(rule))
                    for rule in outgoing
                ),
            ),
            *(
                (
                    "send over HTTPS" if port == 443 else f"send to {protocol} port {port}",
                    "egress",
                    f"--protocol {protocol} --port {port} --cidr 0.0.0.0/0",
                    any(_covers(rule, (port, port), protocol) and _allows_any_address(rule) for rule in outgoing),
                )
                for protocol, port in egress_ports(stage)
            ),
        )
        if not exists
    ]
    for what, command in missing:
        yield problem(
            VPC, f"{group_id}, the default group of {vpc.vpc_id}, does not let nodes of a job {what}", command
        )
    if not missing:
        yield ok(VPC, f"{group_id}, the VPC's default group, lets nodes of a job reach each other and AWS")


def _covers(rule: Mapping[str, Any], ports: tuple[int, int], protocol: str = "tcp") -> bool:
    """Return whether a rule allows the protocol on all of these ports."""
    low, high = ports
    if rule["IpProtocol"] == "-1":
        return True
    return bool(rule["IpProtocol"] == protocol and rule["FromPort"] <= low and high <= rule["ToPort"])


def _names_group(rule: Mapping[str, Any], group_id: str) -> bool:
    return any(pair.get("GroupId") == group_id for pair in rule["UserIdGroupPairs"])


def _allows_any_address(rule: Mapping[str, Any]) -> bool:
    return any(addresses["CidrIp"] == "0.0.0.0/0" for addresses in rule["IpRanges"])
