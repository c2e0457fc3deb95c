"""The security group of instances that run jobs: those of one team, or of all that share."""

from aws_cdk import aws_ec2 as ec2
from constructs import Construct

from infra.constructs.stage_stack import acknowledge


def job_security_group(scope: Construct, *, vpc: ec2.IVpc, of: str = "jobs") -> ec2.SecurityGroup:
    """Make a group whose members reach out by HTTPS and each other by anything; nobody else reaches them.

    `of`: whose jobs they are, for the description.
    """
    group = ec2.SecurityGroup(
        scope,
        "JobSecurityGroup",
        vpc=vpc,
        description=f"Instances that run {of}: HTTPS out, anything among themselves, nothing in",
        allow_all_outbound=False,
    )
    group.add_egress_rule(ec2.Peer.any_ipv4(), ec2.Port.tcp(443), "AWS, Hugging Face, package registries")
    # EFA's traffic is matched by rules that name the group, both ways, and never by 0.0.0.0/0. Written as bare
    # resources, since the L2 leaves the egress one out of a group that may reach everything, now or later.
    reason = "Ranks on other instances, over TCP and EFA"
    from_jobs = ec2.CfnSecurityGroupIngress(
        scope,
        "JobsFromJobs",
        group_id=group.security_group_id,
        source_security_group_id=group.security_group_id,
        ip_protocol="-1",
        description=reason,
    )
    acknowledge(
        from_jobs,
        "The rule lets in the members of this very group and no address; EFA demands that it names no port",
        "NIST.800.53.R5-EC2RestrictedCommonPorts",
    )
    ec2.CfnSecurityGroupEgress(
        scope,
        "JobsToJobs",
        group_id=group.security_group_id,
        destination_security_group_id=group.security_group_id,
        ip_protocol="-1",
        description=reason,
    )
    return group
