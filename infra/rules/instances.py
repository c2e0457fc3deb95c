"""Rules for compute environments and launch templates: EFA works, and nobody gets in."""

from collections.abc import Iterable

from infra.rules.rule import Finding, found, rule
from infra.rules.stage_templates import COMPUTE_ENVIRONMENT, LAUNCH_TEMPLATE, StageTemplates
from jobs.core.instance_types import INSTANCE_TYPES

_GUIDE = "AWS Batch User Guide"


@rule(
    "TY-ComputeEnvironment-EfaPlacement",
    next_step="give it type EC2, one subnet and a cluster placement group",
    source=f"{_GUIDE}, Multi-node parallel jobs and EFA: On-Demand, one cluster placement group in one zone",
)
def efa_placement(stage: StageTemplates) -> Iterable[Finding]:
    """EFA's traffic does not leave a subnet, and is fast only within a cluster placement group, as which a Capacity
    Block counts; jobs of several nodes never start on Spot.
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
    next_step="give each network card of the type one EFA interface: device index 0 on card 0, and 1 on the others",
    source="Amazon EC2 User Guide, Maximize network bandwidth on instances with multiple network cards",
)
def efa_cards(stage: StageTemplates) -> Iterable[Finding]:
    """Two EFA interfaces on one card, or one on a card that the type lacks, and EC2 starts no instance; fewer than
    it has cards, and paid bandwidth is unused.
    """
    for environment in stage.of_type(COMPUTE_ENVIRONMENT):
        template = stage.launch_template(environment)
        if template is None or not stage.efa_interfaces(environment):
            continue
        placed = sorted(
            (int(item.get("NetworkCardIndex", 0)), int(item.get("DeviceIndex", 0)))
            for item in stage.interfaces(environment)
        )
        rows = [INSTANCE_TYPES.get(name) for name in environment.get("ComputeResources.InstanceTypes", [])]
        if any(row and placed != [(card, min(card, 1)) for card in range(row.network_cards)] for row in rows):
            yield found(template, "LaunchTemplateData.NetworkInterfaces")


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
    next_step="leave associatePublicIpAddress out, and let instances reach out through NAT or endpoints",
    source="Amazon EC2 User Guide, Elastic network interfaces: no public address with several interfaces",
)
def no_public_address(stage: StageTemplates) -> Iterable[Finding]:
    """EC2 refuses a public address if there is more than one interface, and with a single one it opens the instance to
    the internet.
    """
    for template in stage.of_type(LAUNCH_TEMPLATE):
        for interface in template.get("LaunchTemplateData.NetworkInterfaces", []):
            if interface.get("AssociatePublicIpAddress"):
                yield found(template, "LaunchTemplateData.NetworkInterfaces")
