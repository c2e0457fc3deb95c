"""The network: the reviewed template, and variants of settings, which never replace existing subnets."""

from pathlib import Path
from typing import Any

import aws_cdk as cdk
import pytest

from infra.network.stack import NetworkStack
from infra.stages import CapacityReservation, Pool, Proxy, Stage, Team
from infra.stages.network_plan import ENDPOINT_SERVICES
from jobs.core.instance_types import INSTANCE_TYPES
from tests.support.infra.goldens import assert_as_reviewed
from tests.support.infra.synthesis import Templates, new_app, resources, up_to
from tests.support.infra.variants import EXISTING_VPC

Template = dict[str, Any]


def network_of(**settings: Any) -> Template:
    """Return the network stack of a stage with the given settings."""
    return up_to("network", stage_of(**settings))["network"]


def stage_of(**settings: Any) -> Stage:
    return Stage(**{"name": "test", "teams": (Team(name="research"),), **settings})


def test_the_template_is_as_reviewed(reviewed: Templates) -> None:
    assert_as_reviewed(reviewed, "network")


def test_by_default_jobs_use_two_zones_and_one_nat_gateway() -> None:
    network = network_of()
    assert [subnet["AvailabilityZone"] for subnet in _subnets(network, "Private").values()] == [
        {"Fn::Select": [index, {"Fn::GetAZs": ""}]} for index in (0, 1)
    ]
    (gateway,) = resources(network, "AWS::EC2::NatGateway")
    to_nat = [route for route in resources(network, "AWS::EC2::Route").values() if "NatGatewayId" in route]
    assert [route["NatGatewayId"]["Ref"] for route in to_nat] == [gateway, gateway]
    assert not _interface_endpoints(network)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"nat_gateways": 0}, True),
        ({"nat_gateways": 0, "interface_endpoints": False}, False),
        ({"interface_endpoints": True, "nat_gateways": 2}, True),
        ({"vpc": EXISTING_VPC.vpc}, False),
        ({"vpc": EXISTING_VPC.vpc, "interface_endpoints": True}, True),
    ],
)
def test_endpoints_exist_on_request_or_without_nat(settings: dict[str, Any], *, expected: bool) -> None:
    network = network_of(**settings)
    services = {endpoint["ServiceName"]["Fn::Join"][1][-1] for endpoint in _interface_endpoints(network)}
    assert services == ({f".{service}" for service in ENDPOINT_SERVICES} if expected else set())
    ways_out = [*resources(network, "AWS::EC2::NatGateway"), *resources(network, "AWS::EC2::InternetGateway")]
    assert bool(ways_out) is bool(settings.get("nat_gateways", 0))
    assert len(_subnets(network, "Public")) == settings.get("nat_gateways", 0)


def test_subnets_are_in_the_zones_that_offer_the_instance_type() -> None:
    # Each of DL1's regions offers it in one zone.
    for region, zones in INSTANCE_TYPES["dl1.24xlarge"].zone_ids.items():
        subnets = _subnets(network_of(region=region), "Private")
        assert [subnet["AvailabilityZoneId"] for subnet in subnets.values()] == list(zones)
    # If no zone is known, the region's first two are used.
    assert len(_subnets(network_of(region="eu-west-1"), "Private")) == 2


def test_endpoints_are_in_at_most_three_zones_unless_named() -> None:
    # Six zones offer p5, and every endpoint is paid in each zone.
    p5 = {"region": "us-east-1", "instance_types": ("p5.48xlarge",)}
    network = network_of(**p5, nat_gateways=0)
    first = list(_subnets(network, "Private"))[:3]
    for endpoint in _interface_endpoints(network):
        assert [subnet["Ref"] for subnet in endpoint["SubnetIds"]] == first
    named = network_of(**p5, nat_gateways=0, availability_zone_ids=tuple(f"use1-az{number}" for number in range(1, 7)))
    assert {len(endpoint["SubnetIds"]) for endpoint in _interface_endpoints(named)} == {6}
    assert len(resources(network_of(**p5, nat_gateways=3), "AWS::EC2::NatGateway")) == 3


def test_jobs_may_use_the_egress_ports_and_the_proxys() -> None:
    settings = {"egress_ports": (443, 5671), "egress_udp_ports": (53,), "proxy": Proxy(url="http://proxy.corp:3128")}
    network = network_of(max_multinode_nodes=2, region="us-east-1", **settings)
    expected = [("tcp", 443), ("tcp", 5671), ("udp", 53), ("tcp", 3128)]
    (group,) = resources(network, "AWS::EC2::SecurityGroup").values()
    assert [(rule["IpProtocol"], rule["ToPort"]) for rule in group["SecurityGroupEgress"]] == expected
    # Nodes of multi-node jobs are in the default group.
    rules = resources(network, "AWS::EC2::SecurityGroupEgress").values()
    assert [(rule["IpProtocol"], rule["ToPort"]) for rule in rules if "CidrIp" in rule] == expected
    # Other ports do not replace the group, which instances use.
    (before,) = resources(network_of(region="us-east-1"), "AWS::EC2::SecurityGroup").items()
    assert {"SecurityGroupEgress"} == {name for name, value in group.items() if before[1].get(name) != value}


def test_multinode_jobs_use_a_zone_that_offers_the_type(tmp_path: Path) -> None:
    # GIVEN a stage whose first zone does not offer DL1
    row = stage_of(region="us-east-1", availability_zone_ids=("use1-az6", "use1-az2"))
    stack = NetworkStack(cdk.Stage(new_app(tmp_path), row.name), stage=row)
    # THEN multi-node jobs use the zone that does
    assert stack.fsx_subnet is stack.job_subnets[1]
    assert stack.subnets_offering([INSTANCE_TYPES["dl1.24xlarge"]]) == [stack.job_subnets[1]]
    # AND types without known zones may use all zones
    assert stack.subnets_offering([INSTANCE_TYPES["m6i.4xlarge"]]) == list(stack.job_subnets)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, {"nat_gateways": 0}),
        ({}, {"interface_endpoints": True, "nat_gateways": 2}),
        ({"availability_zone_ids": ("use1-az2",)}, {"availability_zone_ids": ("use1-az4", "use1-az2")}),
        (
            # More zones offer P4d than DL1.
            {"region": "us-east-1", "instance_types": ("p4d.24xlarge",)},
            {"region": "us-east-1", "retiring": (Pool(instance_types=("p4d.24xlarge",)),)},
        ),
        (
            {"region": "us-east-1", "instance_types": ("p5en.48xlarge",)},
            {
                "region": "us-east-1",
                "instance_types": ("p5en.48xlarge",),
                "capacity_reservation": CapacityReservation(target="cr-0123456789abcdef0", zone_id="use1-az4"),
            },
        ),
    ],
    ids=["no NAT", "endpoints and more NAT", "zone added in first place", "other instance type", "reservation"],
)
def test_subnets_do_not_change_when_the_network_does(before: dict[str, Any], after: dict[str, Any]) -> None:
    # Instances run in the subnets, and compute environments refer to them, so replacing one fails the deployment.
    old, new = _subnets(network_of(**before), "Private"), _subnets(network_of(**after), "Private")
    assert old
    assert old.items() <= new.items()


def test_subnets_of_named_zones_do_not_overlap_the_old_ones() -> None:
    # CloudFormation creates new resources first, and EC2 refuses a subnet whose addresses are taken.
    zones = tuple(f"use1-az{number}" for number in range(1, 9))
    subnets = [
        resources(network_of(**settings), "AWS::EC2::Subnet")
        for settings in ({"nat_gateways": 2}, {"nat_gateways": 8, "availability_zone_ids": zones})
    ]
    assert not subnets[0].keys() & subnets[1].keys()
    blocks = [subnet["CidrBlock"] for found in subnets for subnet in found.values()]
    assert len(set(blocks)) == len(blocks) == 20


def test_values_for_other_stacks_are_always_exported() -> None:
    # Deleting an export would fail the deployment in which its last importer stops using it.
    network = network_of()
    (vpc,), (group,) = resources(network, "AWS::EC2::VPC"), resources(network, "AWS::EC2::SecurityGroup")
    exported = [output["Value"] for output in network["Outputs"].values() if "Export" in output]
    private = [{"Ref": name} for name in _subnets(network, "Private")]
    for value in ({"Ref": vpc}, {"Fn::GetAtt": [group, "GroupId"]}, *private):
        assert value in exported


def test_an_existing_vpc_only_gets_security_groups_and_endpoints() -> None:
    assert EXISTING_VPC.vpc is not None
    network = network_of(vpc=EXISTING_VPC.vpc, interface_endpoints=True, max_multinode_nodes=2)
    assert {resource["Type"] for resource in network["Resources"].values()} == {
        "AWS::EC2::SecurityGroup",
        "AWS::EC2::SecurityGroupEgress",
        "AWS::EC2::SecurityGroupIngress",
        "AWS::EC2::VPCEndpoint",
        "AWS::SSM::Parameter",
    }
    for endpoint in _interface_endpoints(network):
        assert endpoint["SubnetIds"] == list(EXISTING_VPC.vpc.private_subnet_ids)
    (gateway,) = (item for item in resources(network, "AWS::EC2::VPCEndpoint").values() if "RouteTableIds" in item)
    assert gateway["RouteTableIds"] == list(EXISTING_VPC.vpc.private_route_table_ids)
    # The default group, which nodes of multi-node jobs use, does not change; the endpoints admit it.
    rules = resources(network, "AWS::EC2::SecurityGroupIngress").values()
    group = EXISTING_VPC.vpc.default_security_group_id
    assert [(rule["FromPort"], rule["ToPort"]) for rule in rules if rule["SourceSecurityGroupId"] == group] == [
        (443, 443)
    ]
    assert not [rule for rule in rules if rule["GroupId"] == group]


@pytest.mark.parametrize(
    ("settings", "has_rules"),
    [
        ({"max_multinode_nodes": 2}, True),
        ({}, False),
        ({"max_multinode_nodes": 2, "instance_types": ("g5.4xlarge",)}, False),
    ],
    ids=["several nodes with EFA", "one node with EFA", "several nodes without EFA"],
)
def test_only_several_nodes_with_efa_change_the_default_group(settings: dict[str, Any], *, has_rules: bool) -> None:
    # Other containers use the instance's network or the compute environment's security group.
    network = network_of(**settings)
    for direction in ("Ingress", "Egress"):
        rules = resources(network, f"AWS::EC2::SecurityGroup{direction}").values()
        groups = {rule["GroupId"]["Fn::GetAtt"][1] for rule in rules}
        assert groups == {"GroupId", *(["DefaultSecurityGroup"] if has_rules else [])}


def _subnets(network: Template, kind: str) -> dict[str, dict[str, Any]]:
    return {name: item for name, item in resources(network, "AWS::EC2::Subnet").items() if f"{kind}Subnet" in name}


def _interface_endpoints(network: Template) -> list[dict[str, Any]]:
    endpoints = resources(network, "AWS::EC2::VPCEndpoint").values()
    return [endpoint for endpoint in endpoints if endpoint["VpcEndpointType"] == "Interface"]
