"""Security group rules: the group of instances that run jobs, and the ports of Lustre."""

from collections.abc import Iterable, Mapping
from typing import Any

from aws_cdk import CfnResource
from aws_cdk import aws_ec2 as ec2
from constructs import Construct

from infra.constructs.stage_stack import acknowledge
from infra.stages import Stage
from infra.stages.network_plan import egress_ports


def job_security_group(scope: Construct, *, vpc: ec2.IVpc, stage: Stage, workload: str = "jobs") -> ec2.SecurityGroup:
    """Create a group whose members may use the stage's egress ports and reach each other; nothing else can reach them.

    `workload` completes the description "Instances that run …".
    """
    group = ec2.SecurityGroup(
        scope,
        "JobSecurityGroup",
        vpc=vpc,
        # Another description would replace the group, whichever ports the settings allow.
        description=f"Instances that run {workload}: HTTPS out, anything among themselves, nothing in",
        allow_all_outbound=False,
    )
    for (protocol, port), description in egress_ports(stage).items():
        allowed = ec2.Port.tcp(port) if protocol == "tcp" else ec2.Port.udp(port)
        group.add_egress_rule(ec2.Peer.any_ipv4(), allowed, description)
    # EFA traffic only matches rules that name the group, in both directions, never 0.0.0.0/0. These are bare rules,
    # because the L2 would drop the egress rule if the group ever allowed all outbound traffic.
    _, from_jobs = _rules(
        scope, {"Jobs": group.security_group_id}, "Jobs", "Jobs", "Ranks on other instances, over TCP and EFA"
    )
    acknowledge(
        from_jobs,
        "The rule admits only members of this group and no address; EFA requires a rule without ports",
        "NIST.800.53.R5-EC2RestrictedCommonPorts",
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
    return [
        rule
        for source, destination in pairs
        for ports in LUSTRE_PORTS
        for rule in _rules(scope, groups, source, destination, "Lustre", tcp_ports=ports)
    ]


def _rules(
    scope: Construct,
    groups: Mapping[str, str],
    source: str,
    destination: str,
    description: str,
    *,
    tcp_ports: tuple[int, int] | None = None,
) -> tuple[CfnResource, CfnResource]:
    """Create an egress rule of `source` and an ingress rule of `destination`, for `tcp_ports` or for all traffic."""
    low, high = tcp_ports or (None, None)
    traffic: dict[str, Any] = {
        "ip_protocol": "tcp" if tcp_ports else "-1",
        "from_port": low,
        "to_port": high,
        "description": description,
    }
    egress = ec2.CfnSecurityGroupEgress(
        scope,
        f"{source}To{destination}{low or ''}",
        group_id=groups[source],
        destination_security_group_id=groups[destination],
        **traffic,
    )
    ingress = ec2.CfnSecurityGroupIngress(
        scope,
        f"{destination}From{source}{low or ''}",
        group_id=groups[destination],
        source_security_group_id=groups[source],
        **traffic,
    )
    return egress, ingress
