"""What the interfaces of multi-node jobs may reach, where Batch gives them the VPC's default security group."""

from aws_cdk import aws_ec2 as ec2
from constructs import Construct

from infra.constructs.stage_stack import acknowledge


class TaskNetwork(Construct):
    """Rules of the VPC's default group by which the nodes of a job find each other and AWS.

    Every node's container has an interface of its own (ECS's awsvpc mode), and Batch puts it into the security groups
    of the compute environment. One whose launch template brings EFA interfaces cannot have any: then it is the VPC's
    default group (Batch's user guide, "Compute environment considerations for MNP"), which the network stack has
    emptied. EFA's own traffic does not pass these interfaces.
    """

    def __init__(
        self, scope: Construct, name: str, *, default_group_id: str, endpoint_group: ec2.ISecurityGroup | None
    ) -> None:
        """`endpoint_group`: that of the VPC's interface endpoints, where it has some."""
        super().__init__(scope, name)
        nodes = "Nodes of one job: rendezvous, and what is not sent over EFA"
        # TCP alone: the whole of it would be the very rule that the network stack has taken out of the group.
        from_nodes = ec2.CfnSecurityGroupIngress(
            self,
            "NodesFromNodes",
            group_id=default_group_id,
            source_security_group_id=default_group_id,
            ip_protocol="tcp",
            from_port=0,
            to_port=65535,
            description=nodes,
        )
        acknowledge(
            from_nodes,
            "The rule lets in the members of this very group and no address; ranks choose their ports themselves",
            "NIST.800.53.R5-EC2RestrictedCommonPorts",
        )
        ec2.CfnSecurityGroupEgress(
            self,
            "NodesToNodes",
            group_id=default_group_id,
            destination_security_group_id=default_group_id,
            ip_protocol="tcp",
            from_port=0,
            to_port=65535,
            description=nodes,
        )
        ec2.CfnSecurityGroupEgress(
            self,
            "NodesOut",
            group_id=default_group_id,
            cidr_ip="0.0.0.0/0",
            ip_protocol="tcp",
            from_port=443,
            to_port=443,
            description="AWS, Hugging Face, package registries",
        )
        if endpoint_group:
            admit_nodes(self, endpoint_group, default_group_id=default_group_id)


def admit_nodes(scope: Construct, endpoint_group: ec2.ISecurityGroup, *, default_group_id: str) -> None:
    """Let the nodes of a job into the VPC's interface endpoints."""
    ec2.CfnSecurityGroupIngress(
        scope,
        "EndpointsFromNodes",
        group_id=endpoint_group.security_group_id,
        source_security_group_id=default_group_id,
        ip_protocol="tcp",
        from_port=443,
        to_port=443,
        description="Nodes of multi-node jobs",
    )
