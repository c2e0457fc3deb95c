from collections.abc import Callable
from typing import Any

import pytest

from tests.infra.synthesis import Templates, only, resources

Synthesised = Callable[..., Templates]


@pytest.fixture(scope="module")
def network(templates: Templates) -> dict[str, Any]:
    return templates["dev/network"]


def test_jobs_run_in_two_private_zones_that_reach_out_through_nat(network: dict[str, Any]) -> None:
    subnets = resources(network, "AWS::EC2::Subnet")
    private = [subnet for name, subnet in subnets.items() if "private" in name]
    assert [subnet["AvailabilityZone"] for subnet in private] == [
        {"Fn::Select": [0, {"Fn::GetAZs": ""}]},
        {"Fn::Select": [1, {"Fn::GetAZs": ""}]},
    ]
    # No instance gets a public address, not even in the NAT gateway's subnets.
    assert not any(subnet["MapPublicIpOnLaunch"] for subnet in subnets.values())
    assert len(resources(network, "AWS::EC2::NatGateway")) == 1
    to_nat = [route for route in resources(network, "AWS::EC2::Route").values() if "NatGatewayId" in route]
    assert [route["DestinationCidrBlock"] for route in to_nat] == ["0.0.0.0/0", "0.0.0.0/0"]


def test_s3_is_reached_without_nat(network: dict[str, Any]) -> None:
    endpoint = only(network, "AWS::EC2::VPCEndpoint")
    assert endpoint["VpcEndpointType"] == "Gateway"
    assert endpoint["ServiceName"]["Fn::Join"][1][-1] == ".s3"
    assert {table["Ref"] for table in endpoint["RouteTableIds"]} >= {
        name for name in resources(network, "AWS::EC2::RouteTable") if "private" in name
    }


def test_nothing_reaches_in(network: dict[str, Any]) -> None:
    groups = resources(network, "AWS::EC2::SecurityGroup")
    assert not any("SecurityGroupIngress" in group for group in groups.values())
    # The rules that stand alone name a group as their source, never an address.
    for rule in resources(network, "AWS::EC2::SecurityGroupIngress").values():
        assert "SourceSecurityGroupId" in rule
        assert not {"CidrIp", "CidrIpv6", "SourcePrefixListId"} & rule.keys()


def test_jobs_reach_https_and_each_other_only(network: dict[str, Any]) -> None:
    group = only(network, "AWS::EC2::SecurityGroup")
    assert [
        (rule["CidrIp"], rule["IpProtocol"], rule["FromPort"], rule["ToPort"]) for rule in group["SecurityGroupEgress"]
    ] == [("0.0.0.0/0", "tcp", 443, 443)]


@pytest.mark.parametrize(
    ("direction", "peer"), [("Ingress", "SourceSecurityGroupId"), ("Egress", "DestinationSecurityGroupId")]
)
def test_efa_rules_name_the_group_itself_both_ways(network: dict[str, Any], direction: str, peer: str) -> None:
    # Trap: with allow_all_outbound the L2 drops the egress rule, and EFA fails with "Unresponsive receiver".
    rule = only(network, f"AWS::EC2::SecurityGroup{direction}")
    (group,) = resources(network, "AWS::EC2::SecurityGroup")
    itself = {"Fn::GetAtt": [group, "GroupId"]}
    assert (rule["GroupId"], rule[peer], rule["IpProtocol"]) == (itself, itself, "-1")


def test_the_default_security_group_is_emptied(network: dict[str, Any]) -> None:
    (vpc,) = resources(network, "AWS::EC2::VPC")
    assert only(network, "Custom::VpcRestrictDefaultSG")["DefaultSecurityGroupId"] == {
        "Fn::GetAtt": [vpc, "DefaultSecurityGroup"]
    }


def test_all_traffic_is_logged(network: dict[str, Any]) -> None:
    log = only(network, "AWS::EC2::FlowLog")
    assert (log["ResourceType"], log["TrafficType"], log["LogDestinationType"]) == ("VPC", "ALL", "cloud-watch-logs")
    assert log["LogGroupName"]["Ref"] in resources(network, "AWS::Logs::LogGroup")


def test_without_nat_the_endpoints_that_an_instance_needs_take_its_place(synthesised: Synthesised) -> None:
    network = synthesised(nat_gateways=0)["network"]
    assert not resources(network, "AWS::EC2::NatGateway")
    assert not resources(network, "AWS::EC2::InternetGateway")
    assert all("private" in name for name in resources(network, "AWS::EC2::Subnet"))
    endpoints = [
        endpoint
        for endpoint in resources(network, "AWS::EC2::VPCEndpoint").values()
        if endpoint["VpcEndpointType"] == "Interface"
    ]
    assert {endpoint["ServiceName"]["Fn::Join"][1][-1] for endpoint in endpoints} == {
        f".{service}"
        for service in (
            *("ecr.api", "ecr.dkr", "ecs", "ecs-agent", "ecs-telemetry", "logs", "sts", "ssm", "ssmmessages"),
            *("secretsmanager", "batch"),
        )
    }
    (group,) = (name for name in resources(network, "AWS::EC2::SecurityGroup") if name.startswith("Endpoint"))
    assert all(endpoint["SecurityGroupIds"] == [{"Fn::GetAtt": [group, "GroupId"]}] for endpoint in endpoints)
    # Jobs get in, on one port; the VPC's other addresses do not.
    (rule,) = (
        rule
        for rule in resources(network, "AWS::EC2::SecurityGroupIngress").values()
        if rule["GroupId"] == {"Fn::GetAtt": [group, "GroupId"]}
    )
    assert (rule["FromPort"], rule["ToPort"]) == (443, 443)
    assert "JobSecurityGroup" in rule["SourceSecurityGroupId"]["Fn::GetAtt"][0]


def test_zones_are_named_by_id_since_letters_differ_between_accounts(synthesised: Synthesised) -> None:
    network = synthesised(availability_zone_ids=("use1-az2", "use1-az4", "use1-az6"))["network"]
    subnets = resources(network, "AWS::EC2::Subnet")
    assert not any("AvailabilityZone" in subnet for subnet in subnets.values())
    for kind in ("private", "public"):
        zones = [subnet["AvailabilityZoneId"] for name, subnet in sorted(subnets.items()) if kind in name]
        assert zones == ["use1-az2", "use1-az4", "use1-az6"]


@pytest.mark.parametrize(
    "changed",
    [
        {"nat_gateways": 0},
        {"availability_zone_ids": ("use1-az2",)},
        {"availability_zone_ids": ("use1-az2", "use1-az4", "use1-az6")},
    ],
    ids=["no NAT", "one zone", "three zones"],
)
def test_addresses_of_subnets_stay_when_the_network_changes(
    network: dict[str, Any], synthesised: Synthesised, changed: dict[str, Any]
) -> None:
    before = _addresses(network)
    after = _addresses(synthesised(**changed)["network"])
    assert any("private" in name for name in after)
    common = before.keys() & after.keys()
    assert {name: after[name] for name in common} == {name: before[name] for name in common}


def _addresses(network: dict[str, Any]) -> dict[str, str]:
    return {name: subnet["CidrBlock"] for name, subnet in resources(network, "AWS::EC2::Subnet").items()}
