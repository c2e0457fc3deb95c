"""The security group of instances that run jobs: those of one team, or of all that share."""

from collections.abc import Iterable, Mapping

from aws_cdk import CfnResource
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


LUSTRE_PORTS = ((988, 988), (1018, 1023))
"""TCP, from and to: between clients and file servers, both ways (FSx's user guide on access control with a VPC)."""

BOTH_WAYS = (("Servers", "Jobs"), ("Jobs", "Servers"))
"""Who speaks to whom between file servers and instances."""


def lustre_rules(scope: Construct, groups: Mapping[str, str], pairs: Iterable[tuple[str, str]]) -> list[CfnResource]:
    """Make the rules that let Lustre's protocol pass from the first of each pair to the second.

    `groups`: the id of the security group that each name in `pairs` stands for.
    """
    rules: list[CfnResource] = []
    for source, destination in pairs:
        for low, high in LUSTRE_PORTS:
            rules += [
                ec2.CfnSecurityGroupEgress(
                    scope,
                    f"{source}To{destination}{low}",
                    group_id=groups[source],
                    destination_security_group_id=groups[destination],
                    ip_protocol="tcp",
                    from_port=low,
                    to_port=high,
                    description="Lustre",
                ),
                ec2.CfnSecurityGroupIngress(
                    scope,
                    f"{destination}From{source}{low}",
                    group_id=groups[destination],
                    source_security_group_id=groups[source],
                    ip_protocol="tcp",
                    from_port=low,
                    to_port=high,
                    description="Lustre",
                ),
            ]
    return rules
