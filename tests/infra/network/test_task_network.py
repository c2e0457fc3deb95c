from collections.abc import Callable
from typing import Any

from infra.stages import ExistingVpc
from tests.support.infra.synthesis import Templates, resources

Synthesised = Callable[..., Templates]


def rules_of_the_default_group(network: dict[str, Any]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the group's rules for what comes in, and for what goes out."""
    incoming, outgoing = (
        [
            rule
            for rule in resources(network, f"AWS::EC2::SecurityGroup{direction}").values()
            if rule["GroupId"].get("Fn::GetAtt", ["", ""])[1] == "DefaultSecurityGroup"
        ]
        for direction in ("Ingress", "Egress")
    )
    return incoming, outgoing


def test_nodes_reach_each_other_over_the_interfaces_that_batch_gives_them(templates: Templates) -> None:
    # Trap: where the compute environment names no security group, the containers of a multi-node job get the VPC's
    # default one, which is empty.
    incoming, outgoing = rules_of_the_default_group(templates["prod/network"])
    (from_nodes,) = incoming
    assert from_nodes["SourceSecurityGroupId"] == from_nodes["GroupId"]
    assert (from_nodes["IpProtocol"], from_nodes["FromPort"], from_nodes["ToPort"]) == ("tcp", 0, 65535)
    assert "CidrIp" not in from_nodes
    (to_nodes,) = (rule for rule in outgoing if "DestinationSecurityGroupId" in rule)
    assert to_nodes["DestinationSecurityGroupId"] == to_nodes["GroupId"]
    assert (to_nodes["IpProtocol"], to_nodes["FromPort"], to_nodes["ToPort"]) == ("tcp", 0, 65535)
    (out,) = (rule for rule in outgoing if "CidrIp" in rule)
    assert (out["CidrIp"], out["IpProtocol"], out["FromPort"], out["ToPort"]) == ("0.0.0.0/0", "tcp", 443, 443)


def test_nodes_reach_the_vpc_endpoints_where_there_are_some(synthesised: Synthesised) -> None:
    network = synthesised(max_multinode_nodes=2, interface_endpoints=True)["network"]
    (default_group,) = {rule["GroupId"]["Fn::GetAtt"][0] for rule in rules_of_the_default_group(network)[0]}
    (to_endpoints,) = (
        rule
        for rule in resources(network, "AWS::EC2::SecurityGroupIngress").values()
        if rule["SourceSecurityGroupId"] == {"Fn::GetAtt": [default_group, "DefaultSecurityGroup"]}
        and rule["GroupId"] != rule["SourceSecurityGroupId"]
    )
    assert "EndpointSecurityGroup" in to_endpoints["GroupId"]["Fn::GetAtt"][0]
    assert (to_endpoints["IpProtocol"], to_endpoints["FromPort"], to_endpoints["ToPort"]) == ("tcp", 443, 443)


def test_the_default_group_stays_empty_where_nobody_gets_it(synthesised: Synthesised) -> None:
    for settings in (
        {"max_multinode_nodes": 0},
        # Without EFA the compute environment names the security group itself.
        {"max_multinode_nodes": 2, "instance_type": "g5.4xlarge", "machine_image": "ami-0123456789abcdef0"},
    ):
        assert rules_of_the_default_group(synthesised(**settings)["network"]) == ([], [])


def test_endpoints_in_someone_elses_vpc_admit_its_default_group(variants: dict[str, Any]) -> None:
    network = variants["existing/network"]
    (group,) = (name for name in resources(network, "AWS::EC2::SecurityGroup") if name.startswith("Endpoint"))
    rules = resources(network, "AWS::EC2::SecurityGroupIngress").values()
    (rule,) = (rule for rule in rules if rule["SourceSecurityGroupId"] == "sg-0123456789abcdef0")
    assert rule["GroupId"] == {"Fn::GetAtt": [group, "GroupId"]}
    assert (rule["IpProtocol"], rule["FromPort"], rule["ToPort"]) == ("tcp", 443, 443)


def test_the_default_group_of_someone_elses_vpc_is_left_alone(synthesised: Synthesised) -> None:
    vpc = ExistingVpc(vpc_id="vpc-0123456789abcdef0", private_subnet_ids=("subnet-0123456789abcdef0",))
    made = synthesised(vpc=vpc, max_multinode_nodes=2, machine_image="ami-0123456789abcdef0")
    for name in ("network", "compute"):
        assert rules_of_the_default_group(made[name]) == ([], [])
