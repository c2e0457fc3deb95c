"""A stage's network and storage while both change: what moves, what stays, and what refuses."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aws_cdk as cdk
import pytest

from infra.network.stack import NetworkStack
from infra.stages import ExistingVpc, Stage, Team
from infra.storage.stack import StorageStack
from tests.support.embedded_aws import EmbeddedAws, run_embedded_aws
from tests.support.infra.synthesis import new_app

Deploy = Callable[..., str]


@pytest.fixture(scope="module")
def aws(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedAws]:
    folder = tmp_path_factory.mktemp("changes")
    with run_embedded_aws(folder) as aws:
        code, output = aws.cdk("bootstrap", "aws://123456789012/us-east-1", scratch=folder)
        assert code == 0, output
        yield aws
        assert aws.health()["server_errors"] == []


@pytest.fixture
def deploy(aws: EmbeddedAws, tmp_path: Path) -> Deploy:
    """Deploys network and storage of a stage; the CLI's output. `refused`: it has to fail."""
    count = iter(range(100))

    def run(*, refused: bool = False, **settings: Any) -> str:
        row = Stage(**{"name": "moves", "teams": (Team(name="research"),), "region": "us-east-1", **settings})
        folder = tmp_path / str(next(count))
        app = new_app(folder)
        scope = cdk.Stage(app, row.name, env=cdk.Environment(account="123456789012", region=row.region))
        StorageStack(scope, stage=row, network=NetworkStack(scope, stage=row))
        app.synth()
        arguments = ("deploy", f"{row.name}/*", "--app", str(folder), "--method=direct", "--require-approval", "never")
        code, output = aws.cdk(*arguments, scratch=tmp_path)
        assert (code != 0) == refused, output
        return output

    return run


def test_a_network_changes_and_what_runs_in_it_stays(aws: EmbeddedAws, deploy: Deploy) -> None:
    # GIVEN one zone with NAT, the stage's own key, and a file system
    deploy(availability_zone_ids=("use1-az2",), own_kms_key=True, fsx_gib=1_200)
    subnets, buckets, key = _subnets(aws), _resources(aws, "storage", "AWS::S3::Bucket"), _key(aws)
    assert set(subnets) == {("use1-az2", "10.0.16.0/20"), ("use1-az2", "10.0.241.0/24")}
    private = subnets["use1-az2", "10.0.16.0/20"]
    assert _parameter(aws, "fsx/dns-name")

    # WHEN a zone is added in front of it, and endpoints take NAT's place
    deploy(
        availability_zone_ids=("use1-az4", "use1-az2"),
        nat_gateways=0,
        own_kms_key=True,
        fsx_gib=1_200,
    )
    # THEN the subnet in which instances run is the same one
    subnets = _subnets(aws)
    assert set(subnets) == {("use1-az2", "10.0.16.0/20"), ("use1-az4", "10.0.48.0/20")}
    assert subnets["use1-az2", "10.0.16.0/20"] == private
    nat = aws.client("ec2").describe_nat_gateways()["NatGateways"]
    assert {gateway["State"] for gateway in nat} <= {"deleted"}
    assert len(_resources(aws, "network", "AWS::EC2::VPCEndpoint")) == 12
    assert _parameter(aws, "shared-data-mount") == "/fsx"

    # WHEN the zone that the file system is in is taken away, THEN that is refused and nothing has changed
    output = deploy(refused=True, availability_zone_ids=("use1-az4",), nat_gateways=0, own_kms_key=True, fsx_gib=1_200)
    assert "trainyard-moves-storage" in output
    assert _subnets(aws) == subnets

    # WHEN the file system goes first, THEN the zone can go, and is the only one to
    deploy(availability_zone_ids=("use1-az4", "use1-az2"), nat_gateways=0, own_kms_key=True)
    deploy(availability_zone_ids=("use1-az4",), nat_gateways=0, own_kms_key=True)
    assert _subnets(aws) == {("use1-az4", "10.0.48.0/20"): subnets["use1-az4", "10.0.48.0/20"]}
    assert _parameter(aws, "fsx/dns-name") is None

    # AND through all of it buckets and key were the same
    assert _resources(aws, "storage", "AWS::S3::Bucket") == buckets
    assert _key(aws) == key


def test_an_existing_vpc_is_used_as_it_is(aws: EmbeddedAws, deploy: Deploy) -> None:
    # GIVEN a landing zone
    ec2 = aws.client("ec2")
    vpc = ec2.create_vpc(CidrBlock="10.77.0.0/16")["Vpc"]["VpcId"]
    subnet = ec2.create_subnet(VpcId=vpc, CidrBlock="10.77.0.0/20")["Subnet"]["SubnetId"]
    existing = ExistingVpc(vpc_id=vpc, private_subnet_ids=(subnet,))
    before = len(ec2.describe_vpcs()["Vpcs"])
    # WHEN a stage is deployed into it
    deploy(name="guest", vpc=existing, interface_endpoints=True)
    # THEN it adds its security groups and the endpoints that it asks for, and no VPC
    assert len(ec2.describe_vpcs()["Vpcs"]) == before
    here = [{"Name": "vpc-id", "Values": [vpc]}]
    assert len(ec2.describe_subnets(Filters=here)["Subnets"]) == 1
    assert {tuple(item["SubnetIds"]) for item in ec2.describe_vpc_endpoints(Filters=here)["VpcEndpoints"]} == {
        (subnet,)
    }
    # AND nothing comes in from an address, as EC2 itself sees it
    groups = ec2.describe_security_groups(Filters=here)["SecurityGroups"]
    made = [group for group in groups if group["GroupName"] != "default"]
    # Of jobs and of the endpoints, and of file servers, which there are none of
    assert sorted(bool(group["IpPermissions"]) for group in made) == [False, True, True]
    for group in made:
        for rule in group["IpPermissions"]:
            assert (rule["IpRanges"], rule["Ipv6Ranges"], len(rule["UserIdGroupPairs"])) == ([], [], 1)


def _subnets(aws: EmbeddedAws) -> dict[tuple[str, str], str]:
    """Zone and addresses to id, of the stage's own subnets."""
    found = aws.client("ec2").describe_subnets(Filters=[{"Name": "tag:trainyard:stage", "Values": ["moves"]}])
    return {(item["AvailabilityZoneId"], item["CidrBlock"]): item["SubnetId"] for item in found["Subnets"]}


def _resources(aws: EmbeddedAws, stack: str, resource_type: str) -> set[str]:
    found = aws.client("cloudformation").describe_stack_resources(StackName=f"trainyard-moves-{stack}")
    return {item["PhysicalResourceId"] for item in found["StackResources"] if item["ResourceType"] == resource_type}


def _key(aws: EmbeddedAws) -> set[str]:
    keys = _resources(aws, "storage", "AWS::KMS::Key")
    assert len(keys) == 1
    return keys


def _parameter(aws: EmbeddedAws, name: str) -> str | None:
    found = aws.client("ssm").get_parameters(Names=[f"/trainyard/moves/{name}"])["Parameters"]
    return found[0]["Value"] if found else None
