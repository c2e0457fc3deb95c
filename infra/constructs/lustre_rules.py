"""The rules by which the file servers of FSx for Lustre and the instances that mount it reach each other."""

from collections.abc import Iterable, Mapping

from aws_cdk import CfnResource
from aws_cdk import aws_ec2 as ec2
from constructs import Construct

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
