import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aws_cdk as cdk
import pytest
from aws_cdk import aws_ec2 as ec2
from constructs import Construct

from infra.network.stack import NetworkStack
from infra.stages import ExistingVpc, Pool, Stage, Team
from jobs.contract.instance_types import INSTANCE_TYPES
from tests.support.infra.synthesis import new_app, only, read_assembly, resources

Template = dict[str, Any]
Made = Callable[..., Template]

EXISTING = ExistingVpc(
    vpc_id="vpc-0123456789abcdef0",
    private_subnet_ids=("subnet-0123456789abcdef0", "subnet-0123456789abcdef1"),
    private_route_table_ids=("rtb-0123456789abcdef0",),
)


@pytest.fixture
def made(tmp_path: Path) -> Made:
    """The network stack of a stage with the given settings."""
    count = iter(range(100))

    def make(**settings: Any) -> Template:
        directory = tmp_path / str(next(count))
        app = new_app(directory)
        _network(app, **settings)
        app.synth()
        return read_assembly(directory)["test/network"]

    return make


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Template:
    directory = tmp_path_factory.mktemp("network")
    app = new_app(directory)
    _network(app)
    app.synth()
    return read_assembly(directory)["test/network"]


def _network(app: cdk.App, **settings: Any) -> NetworkStack:
    row = Stage(**{"name": "test", "teams": (Team(name="research"),), **settings})
    scope = cdk.Stage(app, row.name, env=cdk.Environment(account=row.account, region=row.region))
    return NetworkStack(scope, stage=row)


def test_jobs_run_in_two_private_zones_that_reach_out_through_nat(network: Template) -> None:
    private = _subnets(network, "Private")
    assert [subnet["AvailabilityZone"] for subnet in private.values()] == [
        {"Fn::Select": [0, {"Fn::GetAZs": ""}]},
        {"Fn::Select": [1, {"Fn::GetAZs": ""}]},
    ]
    # One NAT gateway serves both; nothing but it is in a subnet with a way to the internet.
    assert len(resources(network, "AWS::EC2::NatGateway")) == 1
    routes = resources(network, "AWS::EC2::Route").values()
    to_nat = [route for route in routes if "NatGatewayId" in route]
    to_internet = [route for route in routes if "GatewayId" in route]
    assert [route["DestinationCidrBlock"] for route in to_nat] == ["0.0.0.0/0", "0.0.0.0/0"]
    assert {route["RouteTableId"]["Ref"] for route in to_nat} == set(_route_tables(network, "Private"))
    assert [route["RouteTableId"]["Ref"] for route in to_internet] == _route_tables(network, "Public")


@pytest.mark.parametrize("settings", [{}, {"nat_gateways": 2}, {"nat_gateways": 0}])
def test_no_instance_gets_a_public_address(made: Made, settings: dict[str, Any]) -> None:
    subnets = resources(made(**settings), "AWS::EC2::Subnet")
    # Not even in the NAT gateways' subnets; said, not left to a default.
    assert {subnet["MapPublicIpOnLaunch"] for subnet in subnets.values()} == {False}


def test_each_zone_leaves_by_its_own_nat_gateway_where_there_are_enough(made: Made) -> None:
    network = made(availability_zone_ids=("use1-az2", "use1-az4", "use1-az6"), nat_gateways=3)
    ways = {
        route["RouteTableId"]["Ref"][:8]: route["NatGatewayId"]["Ref"][:8]
        for route in resources(network, "AWS::EC2::Route").values()
        if "NatGatewayId" in route
    }
    assert ways == {zone: zone for zone in ("use1az2P", "use1az4P", "use1az6P")}


def test_s3_is_reached_without_nat(network: Template) -> None:
    endpoint = only(network, "AWS::EC2::VPCEndpoint")
    assert endpoint["VpcEndpointType"] == "Gateway"
    assert endpoint["ServiceName"]["Fn::Join"][1][-1] == ".s3"
    assert [table["Ref"] for table in endpoint["RouteTableIds"]] == _route_tables(network, "Private")


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
def test_nothing_reaches_in(made: Made, settings: dict[str, Any]) -> None:
    template = made(**settings)
    rules = list(_ingress(template))
    assert rules
    for rule in rules:
        # A group is the source, never an address; and nobody needs SSH: Session Manager comes from inside.
        assert "SourceSecurityGroupId" in rule
        assert not {"CidrIp", "CidrIpv6", "SourcePrefixListId"} & rule.keys()
    assert not {rule.get("FromPort") for rule in rules} & {22, 3389}
    assert "KeyName" not in json.dumps(template)


def test_jobs_reach_https_and_each_other_only(network: Template) -> None:
    group = only(network, "AWS::EC2::SecurityGroup")
    assert [
        (rule["CidrIp"], rule["IpProtocol"], rule["FromPort"], rule["ToPort"]) for rule in group["SecurityGroupEgress"]
    ] == [("0.0.0.0/0", "tcp", 443, 443)]


@pytest.mark.parametrize(
    ("direction", "peer"), [("Ingress", "SourceSecurityGroupId"), ("Egress", "DestinationSecurityGroupId")]
)
@pytest.mark.parametrize("settings", [{}, {"vpc": EXISTING}], ids=["own VPC", "existing VPC"])
def test_efa_rules_name_the_group_itself_both_ways(
    made: Made, settings: dict[str, Any], direction: str, peer: str
) -> None:
    # Trap: with allow_all_outbound the L2 drops the egress rule, and EFA fails with "Unresponsive receiver".
    template = made(**settings)
    rule = only(template, f"AWS::EC2::SecurityGroup{direction}")
    (group,) = resources(template, "AWS::EC2::SecurityGroup")
    itself = {"Fn::GetAtt": [group, "GroupId"]}
    assert (rule["GroupId"], rule[peer], rule["IpProtocol"]) == (itself, itself, "-1")


def test_efa_egress_survives_a_group_that_may_reach_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # GIVEN someone opens the group's egress, as public templates do
    original = ec2.SecurityGroup

    def opened(scope: Construct, name: str, **properties: Any) -> ec2.SecurityGroup:
        return original(scope, name, **{**properties, "allow_all_outbound": True})

    monkeypatch.setattr(ec2, "SecurityGroup", opened)
    app = new_app(tmp_path)
    _network(app)
    app.synth()
    network = read_assembly(tmp_path)["test/network"]
    (rule,) = only(network, "AWS::EC2::SecurityGroup")["SecurityGroupEgress"]
    assert (rule["CidrIp"], rule["IpProtocol"]) == ("0.0.0.0/0", "-1")
    # THEN the rule that EFA needs is there nevertheless: 0.0.0.0/0 does not stand for it
    egress = only(network, "AWS::EC2::SecurityGroupEgress")
    assert egress["DestinationSecurityGroupId"] == egress["GroupId"]


def test_the_default_security_group_is_emptied(network: Template) -> None:
    (vpc,) = resources(network, "AWS::EC2::VPC")
    assert only(network, "Custom::VpcRestrictDefaultSG")["DefaultSecurityGroupId"] == {
        "Fn::GetAtt": [vpc, "DefaultSecurityGroup"]
    }


def test_all_traffic_is_logged(network: Template) -> None:
    log = only(network, "AWS::EC2::FlowLog")
    (vpc,) = resources(network, "AWS::EC2::VPC")
    assert log["ResourceId"] == {"Ref": vpc}
    assert (log["ResourceType"], log["TrafficType"], log["LogDestinationType"]) == ("VPC", "ALL", "cloud-watch-logs")
    group = log["LogGroupName"]["Ref"]
    assert resources(network, "AWS::Logs::LogGroup")[group]["RetentionInDays"] == 90
    # The service writes there and nowhere else, and only for this account's flow logs.
    statements = only(network, "AWS::IAM::ManagedPolicy")["PolicyDocument"]["Statement"]
    assert [statement["Resource"] for statement in statements] == [{"Fn::GetAtt": [group, "Arn"]}]
    role = resources(network, "AWS::IAM::Role")[log["DeliverLogsPermissionArn"]["Fn::GetAtt"][0]]
    (trust,) = role["AssumeRolePolicyDocument"]["Statement"]
    assert trust["Condition"]["StringEquals"] == {"aws:SourceAccount": {"Ref": "AWS::AccountId"}}


SERVICES = (
    *("ecr.api", "ecr.dkr", "ecs", "ecs-agent", "ecs-telemetry", "logs", "sts", "ssm", "ssmmessages"),
    *("secretsmanager", "batch"),
)


@pytest.mark.parametrize(
    ("settings", "there"),
    [
        ({}, False),
        ({"nat_gateways": 0}, True),
        ({"nat_gateways": 0, "interface_endpoints": False}, False),
        ({"interface_endpoints": True}, True),
        ({"vpc": EXISTING}, False),
        ({"vpc": EXISTING, "interface_endpoints": True}, True),
    ],
)
def test_endpoints_are_there_where_nothing_else_leads_to_aws_or_the_stage_asks(
    made: Made, settings: dict[str, Any], there: bool
) -> None:
    services = {endpoint["ServiceName"]["Fn::Join"][1][-1] for endpoint in _interface_endpoints(made(**settings))}
    assert services == ({f".{service}" for service in SERVICES} if there else set())


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
    # Jobs get in, on one port; the VPC's other addresses do not.
    (rule,) = (
        rule
        for rule in resources(network, "AWS::EC2::SecurityGroupIngress").values()
        if rule["GroupId"] == {"Fn::GetAtt": [group, "GroupId"]}
    )
    assert (rule["FromPort"], rule["ToPort"]) == (443, 443)
    assert "JobSecurityGroup" in rule["SourceSecurityGroupId"]["Fn::GetAtt"][0]


def test_the_vpc_and_its_subnets_have_the_addresses_that_the_stage_is_given(made: Made) -> None:
    network = made(vpc_cidr="172.20.0.0/16", availability_zone_ids=("use1-az2",))
    assert only(network, "AWS::EC2::VPC")["CidrBlock"] == "172.20.0.0/16"
    addresses = {subnet["CidrBlock"] for subnet in resources(network, "AWS::EC2::Subnet").values()}
    assert addresses == {"172.20.16.0/20", "172.20.241.0/24"}


def test_zones_are_named_by_id_since_letters_differ_between_accounts(made: Made) -> None:
    network = made(availability_zone_ids=("use1-az2", "use1-az4", "use1-az6"), nat_gateways=3)
    assert not any("AvailabilityZone" in subnet for subnet in resources(network, "AWS::EC2::Subnet").values())
    for kind in ("Private", "Public"):
        zones = [subnet["AvailabilityZoneId"] for subnet in _subnets(network, kind).values()]
        assert zones == ["use1-az2", "use1-az4", "use1-az6"]


def test_subnets_are_in_the_zones_that_offer_the_instance_type_where_they_are_known(made: Made) -> None:
    # DL1 is in one zone of each of its regions.
    for region, zones in INSTANCE_TYPES["dl1.24xlarge"].zone_ids.items():
        subnets = _subnets(made(region=region), "Private")
        assert [subnet["AvailabilityZoneId"] for subnet in subnets.values()] == list(zones)


def test_what_the_stage_names_goes_before_what_the_row_knows(made: Made) -> None:
    subnets = _subnets(made(region="us-east-1", availability_zone_ids=("use1-az5",)), "Private")
    assert [subnet["AvailabilityZoneId"] for subnet in subnets.values()] == ["use1-az5"]


def test_where_nobody_knows_the_zones_the_regions_first_two_are_taken(made: Made) -> None:
    assert len(_subnets(made(region="eu-west-1"), "Private")) == 2


def test_several_nodes_run_in_a_zone_that_offers_the_instance_type(tmp_path: Path) -> None:
    # GIVEN a stage whose first zone does not offer DL1
    app = new_app(tmp_path)
    stack = _network(app, region="us-east-1", availability_zone_ids=("use1-az6", "use1-az2"))
    # THEN jobs of several nodes are placed in the one that does
    assert stack.multinode_subnet is stack.job_subnets[1]
    assert stack.subnets_offering(INSTANCE_TYPES["dl1.24xlarge"]) == [stack.job_subnets[1]]
    # AND what is offered everywhere, or nobody knows where, may run in all
    assert stack.subnets_offering(INSTANCE_TYPES["m6i.4xlarge"]) == list(stack.job_subnets)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, {"nat_gateways": 0}),
        ({}, {"nat_gateways": 2}),
        ({}, {"interface_endpoints": True}),
        ({"availability_zone_ids": ("use1-az2",)}, {"availability_zone_ids": ("use1-az4", "use1-az2")}),
        ({"availability_zone_ids": ("use1-az2", "use1-az4")}, {"availability_zone_ids": ("use1-az4",)}),
        (
            # P4d is in more zones than DL1.
            {"region": "us-east-1", "instance_type": "p4d.24xlarge"},
            {"region": "us-east-1", "retiring": (Pool(instance_type="p4d.24xlarge"),)},
        ),
    ],
    ids=["no NAT", "more NAT", "endpoints", "zone added in front", "zone removed", "other instance type"],
)
def test_subnets_stay_as_they_are_when_the_network_changes(
    made: Made, before: dict[str, Any], after: dict[str, Any]
) -> None:
    # Instances run in them, and compute environments name them: a subnet that is replaced stops the deployment.
    old, new = _subnets(made(**before), "Private"), _subnets(made(**after), "Private")
    common = old.keys() & new.keys()
    assert common
    assert {name: new[name] for name in common} == {name: old[name] for name in common}
    if before.get("availability_zone_ids") is None:
        assert common == old.keys()


def test_zones_that_get_names_make_room_for_the_new_subnets_before_the_old_are_gone(made: Made) -> None:
    # CloudFormation makes new resources first, and EC2 refuses a subnet whose addresses are taken.
    unnamed = resources(made(nat_gateways=2), "AWS::EC2::Subnet")
    named = resources(
        made(nat_gateways=8, availability_zone_ids=tuple(f"use1-az{number}" for number in range(1, 9))),
        "AWS::EC2::Subnet",
    )
    assert not unnamed.keys() & named.keys()
    blocks = [subnet["CidrBlock"] for subnet in (*unnamed.values(), *named.values())]
    assert len(set(blocks)) == len(blocks) == 20


def test_what_other_stacks_import_is_exported_while_none_does(network: Template) -> None:
    # Trap: an export that is deleted stops the deployment in which its last user stops using it.
    (vpc,) = resources(network, "AWS::EC2::VPC")
    (group,) = resources(network, "AWS::EC2::SecurityGroup")
    exported = [output["Value"] for output in network["Outputs"].values() if "Export" in output]
    for value in (
        {"Ref": vpc},
        {"Fn::GetAtt": [group, "GroupId"]},
        *({"Ref": name} for name in _subnets(network, "Private")),
    ):
        assert value in exported


def test_an_existing_vpc_gets_security_groups_and_what_is_asked_for_and_nothing_else(made: Made) -> None:
    template = made(vpc=EXISTING, interface_endpoints=True)
    assert {resource["Type"] for resource in template["Resources"].values()} == {
        "AWS::EC2::SecurityGroup",
        "AWS::EC2::SecurityGroupEgress",
        "AWS::EC2::SecurityGroupIngress",
        "AWS::EC2::VPCEndpoint",
        "AWS::SSM::Parameter",
    }
    for group in resources(template, "AWS::EC2::SecurityGroup").values():
        assert group["VpcId"] == EXISTING.vpc_id
    for endpoint in _interface_endpoints(template):
        assert endpoint["SubnetIds"] == list(EXISTING.private_subnet_ids)
    (gateway,) = (item for item in resources(template, "AWS::EC2::VPCEndpoint").values() if "RouteTableIds" in item)
    assert gateway["RouteTableIds"] == list(EXISTING.private_route_table_ids)


def test_an_existing_vpc_is_looked_up_nowhere(tmp_path: Path) -> None:
    # GIVEN a stage of a fixed account, where CDK could ask
    app = new_app(tmp_path)
    stack = _network(app, vpc=EXISTING, account="123456789012", region="us-east-1")
    assert [subnet.subnet_id for subnet in stack.job_subnets] == list(EXISTING.private_subnet_ids)
    assert stack.multinode_subnet.subnet_id == EXISTING.private_subnet_ids[0]
    app.synth()
    # THEN it does not, and warns of nothing
    manifests = [json.loads(path.read_text()) for path in tmp_path.rglob("manifest.json")]
    assert not any(manifest.get("missing") for manifest in manifests)
    messages = [
        entry
        for path in tmp_path.rglob("*.metadata.json")
        for entries in json.loads(path.read_text()).values()
        for entry in entries
        if entry["type"] in {"aws:cdk:warning", "aws:cdk:error"}
    ]
    assert messages == []


def test_no_route_table_no_gateway_endpoint(made: Made) -> None:
    existing = ExistingVpc(vpc_id=EXISTING.vpc_id, private_subnet_ids=EXISTING.private_subnet_ids)
    assert not resources(made(vpc=existing), "AWS::EC2::VPCEndpoint")


def _subnets(network: Template, kind: str) -> dict[str, dict[str, Any]]:
    return {name: item for name, item in resources(network, "AWS::EC2::Subnet").items() if f"{kind}Subnet" in name}


def _route_tables(network: Template, kind: str) -> list[str]:
    return [name for name in resources(network, "AWS::EC2::RouteTable") if f"{kind}RouteTable" in name]


def _interface_endpoints(network: Template) -> list[dict[str, Any]]:
    return [
        endpoint
        for endpoint in resources(network, "AWS::EC2::VPCEndpoint").values()
        if endpoint["VpcEndpointType"] == "Interface"
    ]


def _ingress(network: Template) -> Iterator[dict[str, Any]]:
    yield from resources(network, "AWS::EC2::SecurityGroupIngress").values()
    for group in resources(network, "AWS::EC2::SecurityGroup").values():
        yield from group.get("SecurityGroupIngress", [])
