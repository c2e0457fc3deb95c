from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aws_cdk as cdk
import pytest

from infra.network.stack import NetworkStack
from infra.stages import ExistingVpc, Pool, Stage, Team
from infra.stages.network_plan import ENDPOINT_SERVICES
from jobs.contract.instance_types import INSTANCE_TYPES
from tests.support.infra.synthesis import new_app, only, read_assembly, resources

Template = dict[str, Any]
Made = Callable[..., Template]

EXISTING = ExistingVpc(
    vpc_id="vpc-0123456789abcdef0",
    private_subnet_ids=("subnet-0123456789abcdef0", "subnet-0123456789abcdef1"),
    private_route_table_ids=("rtb-0123456789abcdef0",),
    default_security_group_id="sg-0123456789abcdef0",
)
ZONES = ("use1-az2", "use1-az4", "use1-az6")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """The network stack of a stage with the given settings."""
    known: dict[str, Template] = {}

    def make(**settings: Any) -> Template:
        if repr(settings) not in known:
            directory = tmp_path_factory.mktemp("network")
            app = new_app(directory)
            _network(app, **settings)
            app.synth()
            known[repr(settings)] = read_assembly(directory)["test/network"]
        return known[repr(settings)]

    return make


def _network(app: cdk.App, **settings: Any) -> NetworkStack:
    row = Stage(**{"name": "test", "teams": (Team(name="research"),), **settings})
    scope = cdk.Stage(app, row.name, env=cdk.Environment(account=row.account, region=row.region))
    return NetworkStack(scope, stage=row)


def test_jobs_run_in_two_private_zones_that_reach_out_through_nat(made: Made) -> None:
    network = made()
    assert [subnet["AvailabilityZone"] for subnet in _subnets(network, "Private").values()] == [
        {"Fn::Select": [index, {"Fn::GetAZs": ""}]} for index in (0, 1)
    ]
    # One NAT gateway serves both; nothing but it is in a subnet with a way to the internet.
    assert len(resources(network, "AWS::EC2::NatGateway")) == 1
    routes = resources(network, "AWS::EC2::Route").values()
    to_nat = [route for route in routes if "NatGatewayId" in route]
    assert [route["DestinationCidrBlock"] for route in to_nat] == ["0.0.0.0/0", "0.0.0.0/0"]
    assert {route["RouteTableId"]["Ref"] for route in to_nat} == set(_route_tables(network, "Private"))
    to_internet = [route["RouteTableId"]["Ref"] for route in routes if "GatewayId" in route]
    assert to_internet == _route_tables(network, "Public")
    # S3 is reached without NAT.
    endpoint = only(network, "AWS::EC2::VPCEndpoint")
    assert (endpoint["VpcEndpointType"], endpoint["ServiceName"]["Fn::Join"][1][-1]) == ("Gateway", ".s3")
    assert [table["Ref"] for table in endpoint["RouteTableIds"]] == _route_tables(network, "Private")


def test_each_zone_is_named_by_id_and_leaves_by_its_own_nat_gateway(made: Made) -> None:
    network = made(availability_zone_ids=ZONES, nat_gateways=3, vpc_cidr="172.20.0.0/16")
    # Letters differ between accounts, ids do not.
    for kind in ("Private", "Public"):
        assert [subnet["AvailabilityZoneId"] for subnet in _subnets(network, kind).values()] == list(ZONES)
    assert not any("AvailabilityZone" in subnet for subnet in resources(network, "AWS::EC2::Subnet").values())
    ways = {
        route["RouteTableId"]["Ref"][:8]: route["NatGatewayId"]["Ref"][:8]
        for route in resources(network, "AWS::EC2::Route").values()
        if "NatGatewayId" in route
    }
    assert ways == {zone: zone for zone in ("use1az2P", "use1az4P", "use1az6P")}
    assert only(network, "AWS::EC2::VPC")["CidrBlock"] == "172.20.0.0/16"
    first = next(iter(_subnets(network, "Private").values())), next(iter(_subnets(network, "Public").values()))
    assert [subnet["CidrBlock"] for subnet in first] == ["172.20.16.0/20", "172.20.241.0/24"]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"nat_gateways": 0},
        {"interface_endpoints": True, "nat_gateways": 2},
        {"vpc": EXISTING, "interface_endpoints": True},
    ],
    ids=["NAT", "endpoints", "both", "existing VPC"],
)
def test_nothing_reaches_in_and_jobs_reach_https_and_each_other(made: Made, settings: dict[str, Any]) -> None:
    network = made(**settings)
    assert all(subnet["MapPublicIpOnLaunch"] is False for subnet in resources(network, "AWS::EC2::Subnet").values())
    rules = list(_ingress(network))
    assert rules
    for rule in rules:
        # A group is the source, never an address; and nobody needs SSH: Session Manager comes from inside.
        assert "SourceSecurityGroupId" in rule
        assert not {"CidrIp", "CidrIpv6", "SourcePrefixListId"} & rule.keys()
        assert rule.get("FromPort") not in (22, 3389)
    group_id, group = next(
        (name, item) for name, item in resources(network, "AWS::EC2::SecurityGroup").items() if name.startswith("Job")
    )
    assert [
        (rule["CidrIp"], rule["IpProtocol"], rule["FromPort"], rule["ToPort"]) for rule in group["SecurityGroupEgress"]
    ] == [("0.0.0.0/0", "tcp", 443, 443)]
    # Trap: EFA's traffic is matched by rules that name the group itself, both ways, and by nothing else.
    itself = {"Fn::GetAtt": [group_id, "GroupId"]}
    for direction, peer in (("Ingress", "SourceSecurityGroupId"), ("Egress", "DestinationSecurityGroupId")):
        found = [
            rule for rule in resources(network, f"AWS::EC2::SecurityGroup{direction}").values() if rule[peer] == itself
        ]
        assert [rule["IpProtocol"] for rule in found if rule["GroupId"] == itself] == ["-1"]


def test_the_default_security_group_is_emptied_and_all_traffic_logged(made: Made) -> None:
    network = made()
    (vpc,) = resources(network, "AWS::EC2::VPC")
    emptied = only(network, "Custom::VpcRestrictDefaultSG")["DefaultSecurityGroupId"]
    assert emptied == {"Fn::GetAtt": [vpc, "DefaultSecurityGroup"]}
    log = only(network, "AWS::EC2::FlowLog")
    assert (log["ResourceId"], log["ResourceType"], log["TrafficType"]) == ({"Ref": vpc}, "VPC", "ALL")
    group = log["LogGroupName"]["Ref"]
    assert resources(network, "AWS::Logs::LogGroup")[group]["RetentionInDays"] == 90
    # The service writes there and nowhere else, and only for this account's flow logs.
    statements = only(network, "AWS::IAM::ManagedPolicy")["PolicyDocument"]["Statement"]
    assert [statement["Resource"] for statement in statements] == [{"Fn::GetAtt": [group, "Arn"]}]
    role = resources(network, "AWS::IAM::Role")[log["DeliverLogsPermissionArn"]["Fn::GetAtt"][0]]
    (trust,) = role["AssumeRolePolicyDocument"]["Statement"]
    assert trust["Condition"]["StringEquals"] == {"aws:SourceAccount": {"Ref": "AWS::AccountId"}}


@pytest.mark.parametrize(
    ("settings", "there"),
    [
        ({}, False),
        ({"nat_gateways": 0}, True),
        ({"nat_gateways": 0, "interface_endpoints": False}, False),
        ({"interface_endpoints": True, "nat_gateways": 2}, True),
        ({"vpc": EXISTING}, False),
        ({"vpc": EXISTING, "interface_endpoints": True}, True),
    ],
)
def test_endpoints_are_there_if_nothing_else_leads_to_aws_or_the_stage_asks(
    made: Made, settings: dict[str, Any], there: bool
) -> None:
    services = {endpoint["ServiceName"]["Fn::Join"][1][-1] for endpoint in _interface_endpoints(made(**settings))}
    assert services == ({f".{service}" for service in ENDPOINT_SERVICES} if there else set())


def test_without_nat_the_endpoints_that_an_instance_needs_take_its_place(made: Made) -> None:
    network = made(nat_gateways=0)
    assert not resources(network, "AWS::EC2::NatGateway")
    assert not resources(network, "AWS::EC2::InternetGateway")
    assert not _subnets(network, "Public")
    (group,) = (name for name in resources(network, "AWS::EC2::SecurityGroup") if name.startswith("Endpoint"))
    for endpoint in _interface_endpoints(network):
        # Clients find them by the services' usual names, from every subnet that jobs run in.
        assert endpoint["PrivateDnsEnabled"] is True
        assert [subnet["Ref"] for subnet in endpoint["SubnetIds"]] == list(_subnets(network, "Private"))
        assert endpoint["SecurityGroupIds"] == [{"Fn::GetAtt": [group, "GroupId"]}]
    (rule,) = _admitted(network, group)
    assert (rule["FromPort"], rule["ToPort"]) == (443, 443)
    assert "JobSecurityGroup" in rule["SourceSecurityGroupId"]["Fn::GetAtt"][0]


def test_subnets_are_in_the_zones_that_offer_the_instance_type(made: Made) -> None:
    # DL1 is in one zone of each of its regions.
    for region, zones in INSTANCE_TYPES["dl1.24xlarge"].zone_ids.items():
        subnets = _subnets(made(region=region), "Private")
        assert [subnet["AvailabilityZoneId"] for subnet in subnets.values()] == list(zones)
    # What the stage names goes before what the row knows; if nobody knows, the region's first two are taken.
    subnets = _subnets(made(region="us-east-1", availability_zone_ids=("use1-az5",)), "Private")
    assert [subnet["AvailabilityZoneId"] for subnet in subnets.values()] == ["use1-az5"]
    assert len(_subnets(made(region="eu-west-1"), "Private")) == 2


def test_several_nodes_run_in_a_zone_that_offers_the_instance_type(tmp_path: Path) -> None:
    # GIVEN a stage whose first zone does not offer DL1
    stack = _network(new_app(tmp_path), region="us-east-1", availability_zone_ids=("use1-az6", "use1-az2"))
    # THEN jobs of several nodes are placed in the one that does
    assert stack.multinode_subnet is stack.job_subnets[1]
    assert stack.subnets_offering(INSTANCE_TYPES["dl1.24xlarge"]) == [stack.job_subnets[1]]
    # AND what is offered everywhere, or nobody knows where, may run in all
    assert stack.subnets_offering(INSTANCE_TYPES["m6i.4xlarge"]) == list(stack.job_subnets)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, {"nat_gateways": 0}),
        ({}, {"interface_endpoints": True, "nat_gateways": 2}),
        ({"availability_zone_ids": ("use1-az2",)}, {"availability_zone_ids": ("use1-az4", "use1-az2")}),
        (
            # P4d is in more zones than DL1.
            {"region": "us-east-1", "instance_type": "p4d.24xlarge"},
            {"region": "us-east-1", "retiring": (Pool(instance_type="p4d.24xlarge"),)},
        ),
    ],
    ids=["no NAT", "endpoints and more NAT", "zone added in front", "other instance type"],
)
def test_subnets_stay_as_they_are_when_the_network_changes(
    made: Made, before: dict[str, Any], after: dict[str, Any]
) -> None:
    # Instances run in them, and compute environments name them: a subnet that is replaced stops the deployment.
    old, new = _subnets(made(**before), "Private"), _subnets(made(**after), "Private")
    assert old
    assert old.items() <= new.items()


def test_zones_that_get_names_make_room_for_the_new_subnets_before_the_old_are_gone(made: Made) -> None:
    # CloudFormation makes new resources first, and EC2 refuses a subnet whose addresses are taken.
    zones = tuple(f"use1-az{number}" for number in range(1, 9))
    subnets = [
        resources(made(**settings), "AWS::EC2::Subnet")
        for settings in ({"nat_gateways": 2}, {"nat_gateways": 8, "availability_zone_ids": zones})
    ]
    assert not subnets[0].keys() & subnets[1].keys()
    blocks = [subnet["CidrBlock"] for made in subnets for subnet in made.values()]
    assert len(set(blocks)) == len(blocks) == 20


def test_what_other_stacks_import_is_exported_while_none_does(made: Made) -> None:
    # Trap: an export that is deleted stops the deployment in which its last user stops using it.
    network = made()
    (vpc,), (group,) = resources(network, "AWS::EC2::VPC"), resources(network, "AWS::EC2::SecurityGroup")
    exported = [output["Value"] for output in network["Outputs"].values() if "Export" in output]
    private = [{"Ref": name} for name in _subnets(network, "Private")]
    for value in ({"Ref": vpc}, {"Fn::GetAtt": [group, "GroupId"]}, *private):
        assert value in exported


def test_an_existing_vpc_gets_security_groups_and_what_is_asked_for_and_nothing_else(made: Made) -> None:
    network = made(vpc=EXISTING, interface_endpoints=True, max_multinode_nodes=2)
    assert {resource["Type"] for resource in network["Resources"].values()} == {
        "AWS::EC2::SecurityGroup",
        "AWS::EC2::SecurityGroupEgress",
        "AWS::EC2::SecurityGroupIngress",
        "AWS::EC2::VPCEndpoint",
        "AWS::SSM::Parameter",
    }
    assert {group["VpcId"] for group in resources(network, "AWS::EC2::SecurityGroup").values()} == {EXISTING.vpc_id}
    for endpoint in _interface_endpoints(network):
        assert endpoint["SubnetIds"] == list(EXISTING.private_subnet_ids)
    (gateway,) = (item for item in resources(network, "AWS::EC2::VPCEndpoint").values() if "RouteTableIds" in item)
    assert gateway["RouteTableIds"] == list(EXISTING.private_route_table_ids)
    # Its default group, in which the nodes of a job are, stays as it is; the endpoints admit it.
    (group,) = (name for name in resources(network, "AWS::EC2::SecurityGroup") if name.startswith("Endpoint"))
    admitted = [rule for rule in _admitted(network, group) if rule["SourceSecurityGroupId"] == "sg-0123456789abcdef0"]
    assert [(rule["IpProtocol"], rule["FromPort"], rule["ToPort"]) for rule in admitted] == [("tcp", 443, 443)]
    assert _default_group_rules(network) == []


def test_nodes_reach_each_other_over_the_interfaces_that_batch_gives_them(made: Made) -> None:
    # Trap: if the compute environment names no security group, the containers of a multi-node job get the VPC's
    # default one, which is empty.
    network = made(region="us-east-1", max_multinode_nodes=2, interface_endpoints=True)
    rules = _default_group_rules(network)
    default = rules[0]["GroupId"]
    peers = ("SourceSecurityGroupId", "DestinationSecurityGroupId", "CidrIp")
    assert [[*(rule.get(peer) for peer in peers), rule["FromPort"], rule["ToPort"]] for rule in rules] == [
        [default, None, None, 0, 65535],
        [None, default, None, 0, 65535],
        [None, None, "0.0.0.0/0", 443, 443],
    ]
    assert {rule["IpProtocol"] for rule in rules} == {"tcp"}
    (group,) = (name for name in resources(network, "AWS::EC2::SecurityGroup") if name.startswith("Endpoint"))
    assert default in [rule["SourceSecurityGroupId"] for rule in _admitted(network, group)]
    # Without EFA the compute environment names the security group itself.
    assert _default_group_rules(made(max_multinode_nodes=2, instance_type="g5.4xlarge")) == []


def _default_group_rules(network: Template) -> list[dict[str, Any]]:
    return [
        rule
        for direction in ("Ingress", "Egress")
        for rule in resources(network, f"AWS::EC2::SecurityGroup{direction}").values()
        if rule["GroupId"].get("Fn::GetAtt", ["", ""])[1] == "DefaultSecurityGroup"
    ]


def _admitted(network: Template, group: str) -> list[dict[str, Any]]:
    ingress = resources(network, "AWS::EC2::SecurityGroupIngress").values()
    return [rule for rule in ingress if rule["GroupId"] == {"Fn::GetAtt": [group, "GroupId"]}]


def _subnets(network: Template, kind: str) -> dict[str, dict[str, Any]]:
    return {name: item for name, item in resources(network, "AWS::EC2::Subnet").items() if f"{kind}Subnet" in name}


def _route_tables(network: Template, kind: str) -> list[str]:
    return [name for name in resources(network, "AWS::EC2::RouteTable") if f"{kind}RouteTable" in name]


def _interface_endpoints(network: Template) -> list[dict[str, Any]]:
    endpoints = resources(network, "AWS::EC2::VPCEndpoint").values()
    return [endpoint for endpoint in endpoints if endpoint["VpcEndpointType"] == "Interface"]


def _ingress(network: Template) -> Iterator[dict[str, Any]]:
    yield from resources(network, "AWS::EC2::SecurityGroupIngress").values()
    for group in resources(network, "AWS::EC2::SecurityGroup").values():
        yield from group.get("SecurityGroupIngress", [])
