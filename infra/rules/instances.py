"""Rules for instances and their network: EFA works, and nothing reaches instances from outside."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from infra.rules.templates import (
    COMPUTE_ENVIRONMENT,
    LAUNCH_TEMPLATE,
    SECURITY_GROUP,
    Finding,
    Resource,
    StageTemplates,
    found,
    is_efa,
    rule,
)
from jobs.core.instance_types import INSTANCE_TYPES

_GUIDE = "AWS Batch User Guide"


@rule(
    "TY-ComputeEnvironment-EfaPlacement",
    next_step="give it type EC2, one subnet and a cluster placement group",
    source=f"{_GUIDE}, Multi-node parallel jobs and EFA: On-Demand, one cluster placement group in one zone",
)
def efa_placement(stage: StageTemplates) -> Iterable[Finding]:
    """EFA traffic cannot leave a subnet, and is only fast within a cluster placement group, or a Capacity Block, which
    is one. Batch never starts multi-node jobs on Spot.
    """
    for environment in stage.of_type(COMPUTE_ENVIRONMENT):
        group = environment.get("ComputeResources.PlacementGroup")
        if group is None and not stage.efa_interfaces(environment):
            continue
        if environment.get("ComputeResources.Type") != "EC2":
            yield found(environment, "ComputeResources.Type")
        if len(environment.get("ComputeResources.Subnets", [])) != 1:
            yield found(environment, "ComputeResources.Subnets")
        if group is None and stage.is_capacity_block(environment):
            continue
        resource = stage.referred(environment.stack, group)
        if group is None or (resource is not None and resource.get("Strategy") != "cluster"):
            yield found(environment, "ComputeResources.PlacementGroup")


@rule(
    "TY-LaunchTemplate-EfaCards",
    next_step="give each network card of the type one interface, with EFA if it can have it: device index 0 on card 0, "
    "and 1 on the others",
    source="Amazon EC2 User Guide, Maximize network bandwidth on instances with multiple network cards",
)
def efa_cards(stage: StageTemplates) -> Iterable[Finding]:
    """EC2 starts no instance if two EFA interfaces are on one card, or one is on a card that the type lacks. With fewer
    interfaces than cards, paid bandwidth is unused.
    """
    for environment in stage.of_type(COMPUTE_ENVIRONMENT):
        template = stage.launch_template(environment)
        if template is None or not stage.efa_interfaces(environment):
            continue
        placed = sorted(
            (int(item.get("NetworkCardIndex", 0)), int(item.get("DeviceIndex", 0)), is_efa(item))
            for item in stage.interfaces(environment)
        )
        rows = [INSTANCE_TYPES.get(name) for name in environment.get("ComputeResources.InstanceTypes", [])]
        if any(row and placed != _interfaces(row.efa_cards) for row in rows):
            yield found(template, "LaunchTemplateData.NetworkInterfaces")


def _interfaces(efa_cards: Sequence[int]) -> list[tuple[int, int, bool]]:
    """Return the interfaces that an instance needs: network card, device index, and whether it has EFA."""
    return [(card, min(card, 1), card in efa_cards) for card in sorted({0, *efa_cards})]


@rule(
    "TY-LaunchTemplate-Imdsv2",
    next_step="set metadataOptions.httpTokens to 'required'",
    source="Amazon EC2 User Guide, Use the Instance Metadata Service: session tokens",
)
def imdsv2(stage: StageTemplates) -> Iterable[Finding]:
    """Without required session tokens, anyone who makes a job fetch a URL can read the instance's credentials."""
    for template in stage.of_type(LAUNCH_TEMPLATE):
        if template.get("LaunchTemplateData.MetadataOptions.HttpTokens") != "required":
            yield found(template, "LaunchTemplateData.MetadataOptions.HttpTokens")


@rule(
    "TY-LaunchTemplate-NoPublicAddress",
    next_step="remove associatePublicIpAddress; instances reach AWS through NAT or endpoints",
    source="Amazon EC2 User Guide, Elastic network interfaces: no public address with several interfaces",
)
def no_public_address(stage: StageTemplates) -> Iterable[Finding]:
    """With several interfaces, EC2 refuses a public address. With a single interface, the public address exposes the
    instance to the internet.
    """
    for template in stage.of_type(LAUNCH_TEMPLATE):
        for interface in template.get("LaunchTemplateData.NetworkInterfaces", []):
            if interface.get("AssociatePublicIpAddress"):
                yield found(template, "LaunchTemplateData.NetworkInterfaces")


_ANYWHERE = {"0.0.0.0/0", "::/0"}


def _rules_of_group(
    stage: StageTemplates, group: Resource, direction: str, peer: str
) -> Iterable[tuple[Mapping[str, Any], Resource | None]]:
    """Yield a group's inline and separate rules in a direction, each with the stage's group that it refers to."""
    for inline in group.get(f"SecurityGroup{direction}", []):
        yield inline, stage.referred(group.stack, inline.get(peer))
    for separate in stage.of_type(f"AWS::EC2::SecurityGroup{direction}"):
        if stage.referred(separate.stack, separate.get("GroupId")) is group:
            yield separate.properties, stage.referred(separate.stack, separate.get(peer))


@rule(
    "TY-SecurityGroup-EfaAmongItself",
    next_step="add an ingress and an egress rule with protocol -1 that refer to the group itself",
    source="AWS Elastic Fabric Adapter, Get started: a security group that allows all traffic to and from itself",
)
def efa_among_itself(stage: StageTemplates) -> Iterable[Finding]:
    """EFA traffic has no address, so 0.0.0.0/0 does not match it. Without rules for the group itself in both
    directions, ranks fail with 'Unresponsive receiver' after minutes of paid waiting.
    """
    for environment in stage.of_type(COMPUTE_ENVIRONMENT):
        if not stage.efa_interfaces(environment):
            continue
        groups = [stage.referred(environment.stack, value) for value in stage.security_groups(environment)]
        # The ingress and the egress rule may be in different groups.
        for direction, peer in (("Ingress", "SourceSecurityGroupId"), ("Egress", "DestinationSecurityGroupId")):
            ours = [group for group in groups if group is not None]
            matching = [
                group
                for group in ours
                for entry, named in _rules_of_group(stage, group, direction, peer)
                if named is group and str(entry.get("IpProtocol")) == "-1"
            ]
            if ours and not matching:
                yield found(ours[0], f"SecurityGroup{direction}")


@rule(
    "TY-SecurityGroup-NothingFromOutside",
    next_step="use a security group as the source; people connect through Session Manager",
    source="Amazon VPC User Guide, Security group rules",
)
def nothing_from_outside(stage: StageTemplates) -> Iterable[Finding]:
    """A rule that admits any address exposes instances with data and tokens to the whole internet."""
    for group in stage.of_type(SECURITY_GROUP):
        if any(
            {rule.get("CidrIp"), rule.get("CidrIpv6")} & _ANYWHERE for rule in group.get("SecurityGroupIngress", [])
        ):
            yield found(group, "SecurityGroupIngress")
    for separate in stage.of_type("AWS::EC2::SecurityGroupIngress"):
        if {separate.get("CidrIp"), separate.get("CidrIpv6")} & _ANYWHERE:
            yield found(separate, "CidrIp")


@rule(
    "TY-Subnet-Private",
    next_step="set mapPublicIpOnLaunch to false, and start instances in private subnets",
    source="AWS Batch User Guide, Multi-node parallel jobs: no public addresses; NAT or endpoints instead",
)
def private_subnets(stage: StageTemplates) -> Iterable[Finding]:
    """Multi-node jobs have no public address, so in a public subnet they reach nothing and hang in STARTING.
    Single-node jobs would be reachable from outside.
    """
    for environment in stage.of_type(COMPUTE_ENVIRONMENT):
        for value in environment.get("ComputeResources.Subnets", []):
            subnet = stage.referred(environment.stack, value)
            if subnet is not None and subnet.get("MapPublicIpOnLaunch") is not False:
                yield found(subnet, "MapPublicIpOnLaunch")
            elif subnet is not None and _has_internet_gateway(stage, subnet):
                yield found(environment, "ComputeResources.Subnets")


def _has_internet_gateway(stage: StageTemplates, subnet: Resource) -> bool:
    """Return whether the route table leads to an internet gateway, which only serves public addresses."""
    tables = {
        stage.referred(link.stack, link.get("RouteTableId"))
        for link in stage.of_type("AWS::EC2::SubnetRouteTableAssociation")
        if stage.referred(link.stack, link.get("SubnetId")) is subnet
    }
    return any(
        route.get("GatewayId") is not None and stage.referred(route.stack, route.get("RouteTableId")) in tables
        for route in stage.of_type("AWS::EC2::Route")
    )
