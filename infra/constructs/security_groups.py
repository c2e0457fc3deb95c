"""Security group rules: the group of instances that run jobs, and the ports of Lustre."""

from collections.abc import Iterable, Mapping

from aws_cdk import CfnResource
from aws_cdk import aws_ec2 as ec2
from constructs import Construct

from infra.constructs.stage_stack import acknowledge


def job_security_group(scope: Construct, *, vpc: ec2.IVpc, workload: str = "jobs") -> ec2.SecurityGroup:
    """Create a group whose members reach out over HTTPS and reach each other freely; nobody else reaches them.

    `workload` completes the description "Instances that run …".
    """
    group = ec2.SecurityGroup(
        scope,
        "JobSecurityGroup",
        vpc=vpc,
        description=f"Instances that run {workload}: HTTPS out, anything among themselves, nothing in",
        allow_all_outbound=False,
    )
    group.add_egress_rule(ec2.Peer.any_ipv4(), ec2.Port.tcp(443), "AWS, Hugging Face, package registries")
    # EFA traffic only matches rules that name the group, in both directions, never 0.0.0.0/0. These are bare resources,
    # because the L2 drops the egress rule from a group that may reach everything, now or later.
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
        "The rule admits only members of this group and no address; EFA requires a rule without ports",
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
"""TCP port ranges between Lustre clients and file servers, in both directions (FSx user guide, access control with
VPC)."""

BOTH_WAYS = (("Servers", "Jobs"), ("Jobs", "Servers"))
"""Pairs for `lustre_rules`: both directions between file servers and instances."""


def lustre_rules(scope: Construct, groups: Mapping[str, str], pairs: Iterable[tuple[str, str]]) -> list[CfnResource]:
    """Create the rules that allow Lustre traffic from the first to the second group of each pair.

    `groups` maps the names in `pairs` to security group ids.
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
