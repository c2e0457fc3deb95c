"""Rules for compute environments: capacity that Batch really gives, and changes that really reach instances."""

from collections.abc import Iterable

from infra.rules.rule import Finding, found, rule
from infra.rules.stage_templates import COMPUTE_ENVIRONMENT, StageTemplates
from jobs.contract.instance_types import INSTANCE_TYPES

_GUIDE = "AWS Batch User Guide"
_STRATEGIES = {
    "SPOT": {"SPOT_PRICE_CAPACITY_OPTIMIZED", "SPOT_CAPACITY_OPTIMIZED", "BEST_FIT_PROGRESSIVE"},
    "EC2": {"BEST_FIT_PROGRESSIVE"},
}
"""By the environment's type: the strategies with which Batch changes instances in place."""


@rule(
    "TY-ComputeEnvironment-NoBidPercentage",
    next_step="remove bidPercentage",
    source=f"{_GUIDE}, compute environment parameters: Spot never costs more than On-Demand without it",
)
def no_bid_percentage(stage: StageTemplates) -> Iterable[Finding]:
    """A bid below the On-Demand price saves nothing, since nobody pays their bid; it only adds interruptions."""
    for environment in stage.of_type(COMPUTE_ENVIRONMENT):
        if environment.get("ComputeResources.BidPercentage") is not None:
            yield found(environment, "ComputeResources.BidPercentage")


@rule(
    "TY-ComputeEnvironment-NoSpotFleetRole",
    next_step="remove spotIamFleetRole: all strategies but BEST_FIT go without one",
    source=f"{_GUIDE}, Amazon EC2 Spot Fleet role: needed with BEST_FIT only",
)
def no_spot_fleet_role(stage: StageTemplates) -> Iterable[Finding]:
    """A Spot Fleet role is read with the strategy BEST_FIT only; elsewhere it is a role with rights and no use."""
    for environment in stage.of_type(COMPUTE_ENVIRONMENT):
        strategy = environment.get("ComputeResources.AllocationStrategy")
        if strategy != "BEST_FIT" and environment.get("ComputeResources.SpotIamFleetRole") is not None:
            yield found(environment, "ComputeResources.SpotIamFleetRole")


@rule(
    "TY-ComputeEnvironment-InPlaceUpdates",
    next_step="set replaceComputeEnvironment to false and an allocation strategy of the environment's type, and leave "
    "serviceRole and computeEnvironmentName out",
    source=f"{_GUIDE}, Updating compute environments: what an infrastructure update needs",
)
def in_place_updates(stage: StageTemplates) -> Iterable[Finding]:
    """Batch changes instances in place only without BEST_FIT and with its service-linked role; else each edit makes a
    new compute environment, which fails for one with a name and cuts off running jobs for one without.
    """
    for environment in stage.of_type(COMPUTE_ENVIRONMENT):
        strategies = _STRATEGIES.get(environment.get("ComputeResources.Type"), {None})
        if environment.get("ComputeResources.AllocationStrategy") not in strategies:
            yield found(environment, "ComputeResources.AllocationStrategy")
        if environment.get("ReplaceComputeEnvironment") is not False:
            yield found(environment, "ReplaceComputeEnvironment")
        for name in ("ServiceRole", "ComputeEnvironmentName"):
            if environment.get(name) is not None:
                yield found(environment, name)


@rule(
    "TY-ComputeEnvironment-NothingIdle",
    next_step="set minvCpus to 0 and leave desiredvCpus to Batch",
    source=f"{_GUIDE}, compute environment parameters: minvCpus are kept running even where no job is",
)
def nothing_idle(stage: StageTemplates) -> Iterable[Finding]:
    """With minvCpus above 0 instances run, and are paid for, while no job does."""
    for environment in stage.of_type(COMPUTE_ENVIRONMENT):
        if environment.get("ComputeResources.MinvCpus") != 0:
            yield found(environment, "ComputeResources.MinvCpus")
        if environment.get("ComputeResources.DesiredvCpus") is not None:
            yield found(environment, "ComputeResources.DesiredvCpus")


@rule(
    "TY-ComputeEnvironment-ExplicitInstanceTypes",
    next_step="name instance types that have a row in jobs/contract/instance_types.py",
    source=f"{_GUIDE}, compute environment parameters: 'optimal' and families let Batch choose",
)
def explicit_instance_types(stage: StageTemplates) -> Iterable[Finding]:
    """'optimal' and bare families let Batch start instances without the accelerator, where jobs fail or never start."""
    for environment in stage.of_type(COMPUTE_ENVIRONMENT):
        names = environment.get("ComputeResources.InstanceTypes", [])
        if not names or any(name not in INSTANCE_TYPES for name in names):
            yield found(environment, "ComputeResources.InstanceTypes")


@rule(
    "TY-ComputeEnvironment-RoomForAJob",
    next_step="raise maxvCpus to that of one instance at least",
    source=f"{_GUIDE}, Jobs stuck in RUNNABLE: MISCONFIGURATION:COMPUTE_ENVIRONMENT_MAX_RESOURCE",
)
def room_for_a_job(stage: StageTemplates) -> Iterable[Finding]:
    """A job asks for a whole instance; where maxvCpus are fewer than it has, every job waits in RUNNABLE for ever."""
    for environment in stage.of_type(COMPUTE_ENVIRONMENT):
        rows = [INSTANCE_TYPES.get(name) for name in environment.get("ComputeResources.InstanceTypes", [])]
        if any(row and int(environment.get("ComputeResources.MaxvCpus", 0)) < row.vcpus for row in rows):
            yield found(environment, "ComputeResources.MaxvCpus")


@rule(
    "TY-ComputeEnvironment-ImageType",
    next_step="say ECS_AL2023 or ECS_AL2023_NVIDIA in ec2Configuration; the Amazon Linux 2 families only beside an "
    "imageIdOverride",
    source=f"{_GUIDE}, Amazon Linux 2 deprecation: none of Batch's own can be used since 2026-06-30",
)
def image_type(stage: StageTemplates) -> Iterable[Finding]:
    """Batch refuses new compute environments on its own Amazon Linux 2 images, and its default has changed before."""
    for environment in stage.of_type(COMPUTE_ENVIRONMENT):
        entries = environment.get("ComputeResources.Ec2Configuration", [])
        if not entries or not all(
            str(entry.get("ImageType")).startswith("ECS_AL2023") or entry.get("ImageIdOverride") is not None
            for entry in entries
        ):
            yield found(environment, "ComputeResources.Ec2Configuration")


@rule(
    "TY-ComputeEnvironment-GpuImage",
    next_step="say ECS_AL2023_NVIDIA, or name an image by imageIdOverride",
    source=f"{_GUIDE}, Use a GPU workload AMI: the GPU image is chosen by itself only where no image type is said",
)
def gpu_image(stage: StageTemplates) -> Iterable[Finding]:
    """On the plain ECS image instances with CUDA cards have no driver, and a job that asks for GPUs never starts."""
    for environment in stage.of_type(COMPUTE_ENVIRONMENT):
        names = environment.get("ComputeResources.InstanceTypes", [])
        if not any(name in INSTANCE_TYPES and INSTANCE_TYPES[name].accelerator == "cuda" for name in names):
            continue
        for entry in environment.get("ComputeResources.Ec2Configuration", []):
            if entry.get("ImageIdOverride") is None and not str(entry.get("ImageType")).endswith("_NVIDIA"):
                yield found(environment, "ComputeResources.Ec2Configuration")


@rule(
    "TY-ComputeEnvironment-TaggedInstances",
    next_step="pass the stack's instance_tags to computeResources.tags",
    source=f"{_GUIDE}, Tag your resources: tags of a compute environment are not passed on to its instances",
)
def tagged_instances(stage: StageTemplates) -> Iterable[Finding]:
    """CloudFormation does not tag what Batch starts, so without tags of its own the dearest part of the bill is
    nobody's.
    """
    for environment in stage.of_type(COMPUTE_ENVIRONMENT):
        tags = environment.get("ComputeResources.Tags", {})
        if not {"trainyard:project", "trainyard:stage"} <= tags.keys():
            yield found(environment, "ComputeResources.Tags")


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
        template = stage.launch_template(environment)
        if group is None and template is not None:
            group = template.get("LaunchTemplateData.Placement.GroupName")
        if group is None and not stage.efa_interfaces(environment):
            continue
        if environment.get("ComputeResources.Type") != "EC2":
            yield found(environment, "ComputeResources.Type")
        if len(environment.get("ComputeResources.Subnets", [])) != 1:
            yield found(environment, "ComputeResources.Subnets")
        resource = stage.referred(environment.stack, group)
        if group is None and stage.is_capacity_block(environment):
            continue
        if group is None or (resource is not None and resource.get("Strategy") != "cluster"):
            yield found(environment, "ComputeResources.PlacementGroup")
