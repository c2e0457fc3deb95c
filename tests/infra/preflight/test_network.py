from dataclasses import dataclass
from typing import Any

import pytest

from infra.preflight.finding import Finding
from infra.preflight.network import existing_vpc
from infra.stages import ExistingVpc
from infra.stages.network_plan import ENDPOINT_SERVICES
from tests.infra.preflight.conftest import Ask
from tests.support.embedded_aws import EmbeddedAws

REGION = "us-east-1"


@dataclass(frozen=True)
class Vpc:
    """A VPC in the embedded AWS, to which tests add what a landing zone has."""

    ec2: Any
    id: str

    def subnet(self, block: str) -> str:
        made: str = self.ec2.create_subnet(VpcId=self.id, CidrBlock=block)["Subnet"]["SubnetId"]
        return made

    def route_table(self, *subnets: str, **target: str) -> str:
        """Add a route table, with a default route to `target` where one is given."""
        table: str = self.ec2.create_route_table(VpcId=self.id)["RouteTable"]["RouteTableId"]
        for subnet in subnets:
            self.ec2.associate_route_table(RouteTableId=table, SubnetId=subnet)
        if target:
            self.ec2.create_route(RouteTableId=table, DestinationCidrBlock="0.0.0.0/0", **target)
        return table

    def internet_gateway(self) -> str:
        gateway: str = self.ec2.create_internet_gateway()["InternetGateway"]["InternetGatewayId"]
        self.ec2.attach_internet_gateway(InternetGatewayId=gateway, VpcId=self.id)
        return gateway

    def nat_gateway(self, subnet: str) -> str:
        address = self.ec2.allocate_address(Domain="vpc")["AllocationId"]
        made = self.ec2.create_nat_gateway(SubnetId=subnet, AllocationId=address)
        gateway: str = made["NatGateway"]["NatGatewayId"]
        return gateway

    def endpoint(self, service: str, *, stage: str | None = None, **more: Any) -> None:
        tags = [{"Key": "trainyard:stage", "Value": stage}] if stage else []
        self.ec2.create_vpc_endpoint(
            VpcId=self.id,
            ServiceName=f"com.amazonaws.{REGION}.{service}",
            TagSpecifications=[{"ResourceType": "vpc-endpoint", "Tags": tags}] if tags else [],
            **more,
        )


@pytest.fixture
def vpc(connected: EmbeddedAws) -> Vpc:
    ec2 = connected.client("ec2")
    vpc_id = ec2.create_vpc(CidrBlock="10.20.0.0/16")["Vpc"]["VpcId"]
    ec2.modify_vpc_attribute(VpcId=vpc_id, EnableDnsHostnames={"Value": True})
    return Vpc(ec2, vpc_id)


def test_a_vpc_that_is_not_there_is_a_problem(asked: Ask) -> None:
    missing = ExistingVpc(vpc_id="vpc-00000000000000001", private_subnet_ids=("subnet-00000000000000001",))
    (found,) = asked(existing_vpc, vpc=missing)
    assert (found.verdict, found.text) == ("problem", f"there is no vpc-00000000000000001 in {REGION}")


def test_private_subnets_behind_nat_are_fine(asked: Ask, vpc: Vpc) -> None:
    public, private = vpc.subnet("10.20.0.0/24"), vpc.subnet("10.20.32.0/20")
    vpc.route_table(private, NatGatewayId=vpc.nat_gateway(public))
    (found,) = asked(existing_vpc, vpc=ExistingVpc(vpc_id=vpc.id, private_subnet_ids=(private,)))
    assert found.verdict == "ok"
    assert found.text.startswith(f"{private} (use1-az")


def test_a_public_subnet_is_a_problem_since_instances_get_no_address(asked: Ask, vpc: Vpc) -> None:
    public = vpc.subnet("10.20.0.0/24")
    vpc.route_table(public, GatewayId=vpc.internet_gateway())
    (found,) = asked(existing_vpc, vpc=ExistingVpc(vpc_id=vpc.id, private_subnet_ids=(public,)))
    assert found.verdict == "problem"
    assert "is a public subnet" in found.text


def test_a_subnet_without_a_way_to_aws_is_a_problem_that_names_what_is_missing(asked: Ask, vpc: Vpc) -> None:
    private = vpc.subnet("10.20.32.0/20")
    vpc.route_table(private)
    vpc.endpoint("ecr.api", VpcEndpointType="Interface", SubnetIds=[private])
    (found,) = asked(existing_vpc, vpc=ExistingVpc(vpc_id=vpc.id, private_subnet_ids=(private,)))
    assert found.verdict == "problem"
    missing = [service for service in (*ENDPOINT_SERVICES, "s3") if service != "ecr.api"]
    assert found.text.endswith(f"{vpc.id} no endpoint of {', '.join(missing)}")
    assert "interface_endpoints=True" in found.next_step


def test_endpoints_are_a_way_to_aws_the_vpcs_or_the_stages_own(asked: Ask, vpc: Vpc) -> None:
    private = vpc.subnet("10.20.32.0/20")
    vpc.route_table(private)
    existing = ExistingVpc(vpc_id=vpc.id, private_subnet_ids=(private,))
    # Those that the stage would make.
    (found,) = asked(existing_vpc, vpc=existing, interface_endpoints=True)
    assert (found.verdict, found.text[-37:]) == ("ok", "by the endpoints that the stage makes")
    # Those of the landing zone.
    for service in ENDPOINT_SERVICES:
        vpc.endpoint(service, VpcEndpointType="Interface", SubnetIds=[private])
    vpc.endpoint("s3", VpcEndpointType="Gateway")
    (found,) = asked(existing_vpc, vpc=existing)
    assert (found.verdict, found.text[-22:]) == ("ok", "by the VPC's endpoints")


def test_subnets_that_are_not_there_or_elsewhere_are_problems(asked: Ask, vpc: Vpc) -> None:
    other = vpc.ec2.create_vpc(CidrBlock="10.30.0.0/16")["Vpc"]["VpcId"]
    elsewhere = Vpc(vpc.ec2, other).subnet("10.30.0.0/20")
    missing = "subnet-00000000000000001"
    found = asked(existing_vpc, vpc=ExistingVpc(vpc_id=vpc.id, private_subnet_ids=(missing, elsewhere)))
    assert _problems(found) == [f"there is no {missing} in {REGION}", f"{elsewhere} is in {other}, not in {vpc.id}"]


def test_endpoints_that_would_clash_are_a_problem_but_the_stages_own_are_none(asked: Ask, vpc: Vpc) -> None:
    private = vpc.subnet("10.20.32.0/20")
    existing = ExistingVpc(vpc_id=vpc.id, private_subnet_ids=(private,))
    interface: dict[str, Any] = {"VpcEndpointType": "Interface", "SubnetIds": [private]}
    # GIVEN what a deployment of this stage made, and an endpoint that no client finds by name
    vpc.endpoint("sts", stage="test", PrivateDnsEnabled=True, **interface)
    vpc.endpoint("logs", PrivateDnsEnabled=False, **interface)
    assert _problems(asked(existing_vpc, vpc=existing, interface_endpoints=True)) == []
    # WHEN there is one of somebody else's
    vpc.endpoint("batch", PrivateDnsEnabled=True, **interface)
    # THEN it is in the way
    (text,) = _problems(asked(existing_vpc, vpc=existing, interface_endpoints=True))
    assert text == f"{vpc.id} has endpoints of batch already, and EC2 takes no second one of a name"


def test_endpoints_need_names_that_the_vpc_resolves(asked: Ask, vpc: Vpc) -> None:
    vpc.ec2.modify_vpc_attribute(VpcId=vpc.id, EnableDnsHostnames={"Value": False})
    existing = ExistingVpc(vpc_id=vpc.id, private_subnet_ids=(vpc.subnet("10.20.32.0/20"),))
    found = asked(existing_vpc, vpc=existing, interface_endpoints=True)
    assert _problems(found) == [f"EnableDnsHostnames is off in {vpc.id}: its endpoints would not be found"]
    assert found[-1].next_step == (
        f"aws ec2 modify-vpc-attribute --region {REGION} --vpc-id {vpc.id} --enable-dns-hostnames"
    )


def test_route_tables_take_one_route_to_s3(asked: Ask, vpc: Vpc) -> None:
    public, private = vpc.subnet("10.20.0.0/24"), vpc.subnet("10.20.32.0/20")
    free = vpc.route_table(private, NatGatewayId=vpc.nat_gateway(public))
    taken = vpc.route_table()
    vpc.endpoint("s3", VpcEndpointType="Gateway", RouteTableIds=[taken])
    missing = "rtb-00000000000000001"
    existing = ExistingVpc(vpc_id=vpc.id, private_subnet_ids=(private,), private_route_table_ids=(free, taken, missing))
    found = asked(existing_vpc, vpc=existing)
    assert [finding.text for finding in found if finding.verdict == "ok"][1:] == [
        f"{free} gets a route to S3's gateway endpoint"
    ]
    assert _problems(found) == [
        f"{taken} has a route to S3's gateway endpoint already, and takes no second one",
        f"{vpc.id} has no {missing}",
    ]


def _problems(found: list[Finding]) -> list[str]:
    assert all(finding.next_step for finding in found if finding.verdict == "problem")
    # Subnets without any route are not what these tests are about.
    return [item.text for item in found if item.verdict == "problem" and "has no default route" not in item.text]


def test_the_default_group_has_to_let_nodes_of_a_job_through(asked: Ask, vpc: Vpc) -> None:
    # GIVEN a landing zone whose default group has been emptied, and a stage whose jobs are in it
    private = vpc.subnet("10.20.32.0/20")
    vpc.route_table(private, NatGatewayId=vpc.nat_gateway(vpc.subnet("10.20.0.0/24")))
    (group,) = vpc.ec2.describe_security_groups(
        Filters=[{"Name": "vpc-id", "Values": [vpc.id]}, {"Name": "group-name", "Values": ["default"]}]
    )["SecurityGroups"]
    group_id = group["GroupId"]
    itself = {"UserIdGroupPairs": [{"GroupId": group_id}]}
    vpc.ec2.revoke_security_group_egress(GroupId=group_id, IpPermissions=group["IpPermissionsEgress"])
    if group["IpPermissions"]:
        vpc.ec2.revoke_security_group_ingress(GroupId=group_id, IpPermissions=group["IpPermissions"])

    def found(named: str | None = None) -> list[Finding]:
        existing = ExistingVpc(vpc_id=vpc.id, private_subnet_ids=(private,), default_security_group_id=named)
        findings = asked(existing_vpc, vpc=existing, max_multinode_nodes=2)
        return [item for item in findings if "default group" in item.text]

    def problems() -> list[str]:
        return [item.text.partition("nodes of a job ")[2] for item in found() if item.verdict == "problem"]

    # THEN each rule that lacks is named, with the command that adds it
    assert problems() == ["in from its own members", "out to its own members", "out by HTTPS"]
    assert all(group_id in item.next_step for item in found())
    # WHEN they are added one by one, THEN no more than the others lack
    every_port = {"IpProtocol": "tcp", "FromPort": 0, "ToPort": 65535}
    vpc.ec2.authorize_security_group_ingress(GroupId=group_id, IpPermissions=[{**every_port, **itself}])
    assert problems() == ["out to its own members", "out by HTTPS"]
    https = {"IpProtocol": "tcp", "FromPort": 443, "ToPort": 443, "IpRanges": [{"CidrIp": "0.0.0.0/0"}]}
    vpc.ec2.authorize_security_group_egress(GroupId=group_id, IpPermissions=[https])
    assert problems() == ["out to its own members"]
    vpc.ec2.authorize_security_group_egress(GroupId=group_id, IpPermissions=[{**every_port, **itself}])
    assert [item.verdict for item in found(group_id)] == ["ok"]
    # AND another group is not taken for it
    (wrong, _) = found("sg-00000000000000001")
    assert (wrong.verdict, wrong.text) == (
        "problem",
        f"the default group of {vpc.id} is {group_id}, not sg-00000000000000001",
    )
