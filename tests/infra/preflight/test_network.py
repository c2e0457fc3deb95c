"""In an existing VPC, instances need a route to AWS, and the stage's endpoints must not conflict."""

from typing import Any

import pytest

from infra.preflight.account import Finding
from infra.preflight.network import endpoint_services, existing_vpc
from infra.stages import ExistingVpc
from infra.stages.network_plan import ENDPOINT_SERVICES
from tests.infra.preflight.conftest import REGION, findings, refusal

VPC, SUBNET, GROUP = "vpc-0123456789abcdef0", "subnet-0123456789abcdef0", "sg-0123456789abcdef0"
TABLE, TAKEN, MISSING = "rtb-0000000000000000a", "rtb-0000000000000000b", "rtb-0000000000000000c"
ITSELF = {"UserIdGroupPairs": [{"GroupId": GROUP}], "IpRanges": []}
EVERY_PORT = {"IpProtocol": "tcp", "FromPort": 0, "ToPort": 65535}
IN = {**EVERY_PORT, **ITSELF}
HTTPS = {
    "IpProtocol": "tcp",
    "FromPort": 443,
    "ToPort": 443,
    "IpRanges": [{"CidrIp": "0.0.0.0/0"}],
    "UserIdGroupPairs": [],
}
ALL_OUT = {"IpProtocol": "-1", "IpRanges": [{"CidrIp": "0.0.0.0/0"}], "UserIdGroupPairs": []}


def endpoint(service: str, **more: Any) -> dict[str, Any]:
    return {"ServiceName": f"com.amazonaws.{REGION}.{service}", "VpcEndpointType": "Interface", **more}


def find(
    *,
    route: dict[str, str] | None = None,
    endpoints: tuple[dict[str, Any], ...] = (),
    resolves: bool = True,
    rules: tuple[list[Any], list[Any]] = ([], []),
    vpc: dict[str, Any] | None = None,
    subnet: dict[str, Any] | None = None,
    **settings: Any,
) -> list[Finding]:
    """Return the findings for a VPC with one subnet, whose route table has a default route to `route`."""
    routes = [{"DestinationCidrBlock": "0.0.0.0/0", **route}] if route else []
    tables = [
        {"RouteTableId": TABLE, "VpcId": VPC, "Associations": [{"SubnetId": SUBNET}], "Routes": routes},
        {"RouteTableId": TAKEN, "VpcId": VPC, "Associations": [{"Main": True}], "Routes": []},
    ]
    existing_subnet = {"SubnetId": SUBNET, "VpcId": VPC, "AvailabilityZoneId": "use1-az1", **(subnet or {})}
    group = {"GroupId": GROUP, "IpPermissions": rules[0], "IpPermissionsEgress": rules[1]}
    answers: dict[str, Any] = {
        "describe_vpcs": {"Vpcs": [{"VpcId": VPC}]},
        "describe_subnets": {"Subnets": [existing_subnet]},
        "describe_route_tables": {"RouteTables": tables},
        "describe_vpc_endpoints": {"VpcEndpoints": endpoints},
        "describe_vpc_attribute": {name: {"Value": resolves} for name in ("EnableDnsSupport", "EnableDnsHostnames")},
        "describe_security_groups": {"SecurityGroups": [group]},
    }
    existing = ExistingVpc(**{"vpc_id": VPC, "private_subnet_ids": (SUBNET,), **(vpc or {})})
    return findings(existing_vpc, answers, vpc=existing, **settings)


NAT = {"NatGatewayId": "nat-1"}
ALL_ENDPOINTS = (*map(endpoint, ENDPOINT_SERVICES), endpoint("s3", VpcEndpointType="Gateway"))


@pytest.mark.parametrize(
    ("given", "verdict", "text"),
    [
        ({"route": NAT}, "ok", f"{SUBNET} (use1-az1) has a default route"),
        ({"route": {**NAT, "State": "blackhole"}}, "problem", f"{SUBNET} (use1-az1) has no default route"),
        # Instances have no public address.
        ({"route": {"GatewayId": "igw-1"}}, "problem", f"{SUBNET} (use1-az1) is a public subnet"),
        ({}, "problem", f"{VPC} lacks endpoints for {', '.join((*ENDPOINT_SERVICES, 's3'))}"),
        ({"endpoints": (endpoint("ecr.api"),)}, "problem", f"{VPC} lacks endpoints for ecr.dkr, ecs"),
        ({"interface_endpoints": True}, "ok", "through the endpoints that the stage creates"),
        ({"endpoints": ALL_ENDPOINTS}, "ok", "through the VPC's endpoints"),
        ({"subnet": {"VpcId": "vpc-other"}}, "problem", f"{SUBNET} is in vpc-other, not in {VPC}"),
        ({"subnet": {"SubnetId": "subnet-other"}}, "problem", f"{SUBNET} does not exist in {REGION}"),
    ],
)
def test_a_subnet_needs_a_route_to_aws(given: dict[str, Any], verdict: str, text: str) -> None:
    (found,) = find(**given)
    assert (found.verdict, text in found.text) == (verdict, True), found
    assert bool(found.next_step) is (verdict == "problem")


def test_a_missing_vpc_is_a_problem() -> None:
    vpc = ExistingVpc(vpc_id=VPC, private_subnet_ids=(SUBNET,))
    (found,) = findings(existing_vpc, {"describe_vpcs": refusal("InvalidVpcID.NotFound")}, vpc=vpc)
    assert (found.verdict, found.text) == ("problem", f"{VPC} does not exist in {REGION}")


@pytest.mark.parametrize(
    ("given", "problems"),
    [
        # Endpoints of this stage, and endpoints that clients do not find by name, do not conflict.
        (
            {
                "endpoints": (
                    endpoint("sts", PrivateDnsEnabled=True, Tags=[{"Key": "trainyard:stage", "Value": "test"}]),
                    endpoint("logs", PrivateDnsEnabled=False),
                )
            },
            [],
        ),
        (
            {"endpoints": (endpoint("batch", PrivateDnsEnabled=True),)},
            [f"{VPC} already has endpoints for batch, and EC2 allows only one per name"],
        ),
        (
            {"resolves": False},
            [
                f"{name} is off in {VPC}, so clients would not find its endpoints"
                for name in ("EnableDnsSupport", "EnableDnsHostnames")
            ],
        ),
    ],
    ids=["own", "clash", "names"],
)
def test_the_stages_endpoints_must_resolve_and_not_conflict(given: dict[str, Any], problems: list[str]) -> None:
    assert [one.text for one in find(interface_endpoints=True, **given) if one.verdict == "problem"] == problems


def test_every_zone_needs_every_endpoint_service() -> None:
    # GIVEN a region whose third zone lacks a service
    letters = {"us-east-1a": "use1-az4", "us-east-1b": "use1-az1", "us-east-1c": "use1-az3"}
    services = [
        {**endpoint(name), "AvailabilityZones": [zone for zone in letters if (name, zone) != ("sts", "us-east-1c")]}
        for name in ENDPOINT_SERVICES
    ]
    answers: dict[str, Any] = {
        "describe_vpc_endpoint_services": {"ServiceDetails": [*services, {**endpoint("ec2"), "AvailabilityZones": []}]},
        "describe_availability_zones": {
            "AvailabilityZones": [{"ZoneName": n, "ZoneId": z} for n, z in letters.items()]
        },
        "describe_subnets": {
            "Subnets": [{"SubnetId": name, "AvailabilityZoneId": "use1-az1"} for name in (SUBNET, SUBNET[:-1] + "1")]
        },
    }
    # THEN a stage with a subnet there is refused, and one without is not
    found = {
        zones: [
            (one.verdict, one.text.partition(",")[0])
            for one in findings(endpoint_services, answers, nat_gateways=0, availability_zone_ids=zones)
        ]
        for zones in (("use1-az1", "use1-az3"), ("use1-az1", "use1-az4"))
    }
    assert found[("use1-az1", "use1-az3")] == [("problem", "use1-az3 has no endpoint services for sts")]
    assert found[("use1-az1", "use1-az4")] == [("ok", "11 services are available in use1-az1")]
    # AND an existing VPC needs one subnet per zone
    vpc = ExistingVpc(vpc_id=VPC, private_subnet_ids=(SUBNET, SUBNET[:-1] + "1"))
    twice, _ = findings(endpoint_services, answers, vpc=vpc, interface_endpoints=True)
    assert (twice.verdict, twice.text.partition(",")[0]) == ("problem", "2 subnets are in use1-az1")
    # AND a stage without endpoints needs none
    (none,) = findings(endpoint_services, {})
    assert none.verdict == "ok"


def test_a_route_table_allows_only_one_route_to_s3() -> None:
    s3 = endpoint("s3", VpcEndpointType="Gateway", RouteTableIds=[TAKEN])
    _, *found = find(route=NAT, endpoints=(s3,), vpc={"private_route_table_ids": (TABLE, TAKEN, MISSING)})
    assert [(one.verdict, one.text) for one in found] == [
        ("ok", f"{TABLE} will get a route to the S3 gateway endpoint"),
        ("problem", f"{TAKEN} already has a route to an S3 gateway endpoint, and allows only one"),
        ("problem", f"{MISSING} does not exist in {VPC}"),
    ]


@pytest.mark.parametrize(
    ("rules", "missing"),
    [
        (([], []), ["receive from its members", "send to its members", "send over HTTPS"]),
        (([IN], []), ["send to its members", "send over HTTPS"]),
        (([IN], [HTTPS]), ["send to its members"]),
        (([{**IN, "FromPort": 1}], [HTTPS, IN]), ["receive from its members"]),
        (([IN], [HTTPS, IN]), []),
        (([IN], [ALL_OUT]), []),
    ],
)
def test_the_default_group_must_let_nodes_reach_each_other(rules: Any, missing: list[str]) -> None:
    _, *found = find(route=NAT, rules=rules, max_multinode_nodes=2)
    assert [one.text.partition("nodes of a job ")[2] for one in found if one.verdict == "problem"] == missing
    assert all(GROUP in one.next_step for one in found if one.verdict == "problem")
    # Ports of the settings count too.
    _, *found = find(route=NAT, rules=([IN], [HTTPS, IN]), max_multinode_nodes=2, egress_udp_ports=(53,))
    assert [one.next_step.partition(f"{GROUP} ")[2] for one in found] == ["--protocol udp --port 53 --cidr 0.0.0.0/0"]
    # A group other than the default group is refused.
    _, wrong, *_ = find(
        route=NAT, rules=rules, max_multinode_nodes=2, vpc={"default_security_group_id": "sg-0000000000000000f"}
    )
    assert wrong.text == f"the default group of {VPC} is {GROUP}, not sg-0000000000000000f"
