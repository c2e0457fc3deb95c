from collections.abc import Callable
from typing import Any

import pytest

from infra.stages import Pool
from tests.support.infra.instances import CPU, GAUDI, all_environments, capacity, environments, launch_data
from tests.support.infra.synthesis import Templates, resources

Synthesised = Callable[..., Templates]


@pytest.fixture(scope="module")
def compute(templates: Templates) -> dict[str, Any]:
    """The compute stack of a stage with every capacity that there is."""
    return templates["prod/compute"]


def test_instances_are_exactly_the_stages_types(compute: dict[str, Any]) -> None:
    # Trap: the L2 adds the "optimal" classes by default, CPU instances among the accelerators.
    types = {name: item["ComputeResources"]["InstanceTypes"] for name, item in environments(compute).items()}
    assert types == {
        f"{GAUDI}-spot": ["dl1.24xlarge"],
        f"{GAUDI}-on-demand": ["dl1.24xlarge"],
        f"{GAUDI}-multinode": ["dl1.24xlarge"],
        f"{CPU}-spot": ["m6i.4xlarge"],
    }


def test_spot_picks_what_is_cheap_and_lasts_and_on_demand_takes_the_zone_that_has_some(
    compute: dict[str, Any],
) -> None:
    strategies = {
        name: (item["ComputeResources"]["Type"], item["ComputeResources"]["AllocationStrategy"])
        for name, item in environments(compute).items()
    }
    spot, on_demand = ("SPOT", "SPOT_PRICE_CAPACITY_OPTIMIZED"), ("EC2", "BEST_FIT_PROGRESSIVE")
    assert strategies == {
        f"{GAUDI}-spot": spot,
        f"{GAUDI}-on-demand": on_demand,
        # Trap: jobs of several nodes wait for ever on Spot.
        f"{GAUDI}-multinode": on_demand,
        f"{CPU}-spot": spot,
    }


def test_nothing_runs_while_no_job_does(compute: dict[str, Any]) -> None:
    for environment in environments(compute).values():
        resource = environment["ComputeResources"]
        assert resource["MinvCpus"] == 0
        # Traps: a bid below On-Demand only adds reclaims; the fleet role belongs to BEST_FIT; a desired count would be
        # set back at each deployment.
        assert not {"BidPercentage", "SpotIamFleetRole", "DesiredvCpus"} & resource.keys()


def test_updates_happen_in_place(compute: dict[str, Any]) -> None:
    # Trap: a name, a service role of one's own or ReplaceComputeEnvironment make each change a replacement, which
    # takes the queue's compute environment away under it.
    for environment in environments(compute).values():
        assert environment["ReplaceComputeEnvironment"] is False
        assert not {"ComputeEnvironmentName", "ServiceRole"} & environment.keys()
        assert environment["UpdatePolicy"] == {"TerminateJobsOnUpdate": False, "JobExecutionTimeoutMinutes": 7200}
        assert (environment["State"], environment["Type"]) == ("ENABLED", "MANAGED")


def test_the_launch_template_is_pinned_to_its_newest_version(compute: dict[str, Any]) -> None:
    # Trap: without a version Batch takes $Default, which stays the first one for ever.
    pinned = [item["ComputeResources"]["LaunchTemplate"] for item in all_environments(compute).values()]
    assert {item["LaunchTemplateId"]["Ref"] for item in pinned} == set(resources(compute, "AWS::EC2::LaunchTemplate"))
    for item in pinned:
        assert item["Version"] == {"Fn::GetAtt": [item["LaunchTemplateId"]["Ref"], "LatestVersionNumber"]}


def test_security_groups_are_named_once(compute: dict[str, Any]) -> None:
    # Trap: with interfaces in the launch template Batch refuses security groups on the compute environment, and
    # without either instances get the VPC's default one.
    for name, environment in environments(compute).items():
        has_interfaces = "NetworkInterfaces" in launch_data(compute, name)
        assert has_interfaces == name.endswith("multinode")
        assert ("SecurityGroupIds" in environment["ComputeResources"]) != has_interfaces


def test_several_nodes_stand_side_by_side(compute: dict[str, Any]) -> None:
    groups = resources(compute, "AWS::EC2::PlacementGroup")
    assert [group["Strategy"] for group in groups.values()] == ["cluster", "cluster"]
    placed = {
        name: item["ComputeResources"]["PlacementGroup"]["Ref"]
        for name, item in all_environments(compute).items()
        if "PlacementGroup" in item["ComputeResources"]
    }
    assert placed.keys() == {f"{GAUDI}-of-{team}-multinode" for team in ("research", "product")}
    assert sorted(placed.values()) == sorted(groups), "a group of each team's own"


def test_instances_are_tagged_and_can_be_told_apart(compute: dict[str, Any]) -> None:
    for name, environment in all_environments(compute).items():
        # Trap: CloudFormation tags the compute environment, and not what Batch starts.
        assert environment["ComputeResources"]["Tags"] == {
            "trainyard:project": "trainyard",
            "trainyard:stage": "prod",
            "trainyard:team": "research" if "-of-research-" in name else "product",
            "Name": f"trainyard-prod-compute-{name}",
        }


def test_an_ami_is_read_from_its_parameter_at_each_deployment(synthesised: Synthesised) -> None:
    compute = synthesised(machine_image="ssm:/organisation/gaudi")["compute"]
    (configuration,) = capacity(compute, f"{GAUDI}-spot")["Ec2Configuration"]
    assert compute["Parameters"][configuration["ImageIdOverride"]["Ref"]] == {
        "Type": "AWS::SSM::Parameter::Value<AWS::EC2::Image::Id>",
        "Default": "/organisation/gaudi",
    }


def test_an_ami_can_be_given_by_id(synthesised: Synthesised) -> None:
    compute = synthesised(machine_image="ami-0123456789abcdef0")["compute"]
    assert capacity(compute, f"{GAUDI}-spot")["Ec2Configuration"] == [
        {"ImageType": "ECS_AL2023", "ImageIdOverride": "ami-0123456789abcdef0"}
    ]


def test_gaudi_instances_boot_what_the_stage_built_for_their_release(synthesised: Synthesised) -> None:
    compute = synthesised(machine_image=None, release="1.20.0")["compute"]
    (configuration,) = capacity(compute, "dl1-24xlarge-1-20-0-spot")["Ec2Configuration"]
    assert compute["Parameters"][configuration["ImageIdOverride"]["Ref"]] == {
        "Type": "AWS::SSM::Parameter::Value<AWS::EC2::Image::Id>",
        "Default": "/imagebuilder/trainyard-test/machine-image/dl1-24xlarge-1-20-0",
    }


@pytest.mark.parametrize("instance_type", ["p4d.24xlarge", "g5.48xlarge", "g6e.48xlarge"])
def test_cuda_instances_boot_the_gpu_ami_that_aws_recommends_for_ecs_on_the_day_of_the_deployment(
    synthesised: Synthesised, instance_type: str
) -> None:
    compute = synthesised(instance_type=instance_type, machine_image=None)["compute"]
    pool = Pool(instance_type=instance_type).id
    # Trap: the plain family has no driver; nor may the Amazon Linux 2 one be used for new compute environments.
    assert booted(compute, f"{pool}-spot") == (
        "ECS_AL2023_NVIDIA",
        "/aws/service/ecs/optimized-ami/amazon-linux-2023/gpu/recommended/image_id",
    )
    assert launch_data(compute, f"{pool}-spot")["BlockDeviceMappings"][0]["DeviceName"] == "/dev/xvda"


def test_cuda_instances_boot_the_ami_that_is_given(synthesised: Synthesised) -> None:
    parameter = "/aws/service/ecs/optimized-ami/amazon-linux-2023/gpu/recommended/image_id"
    compute = synthesised(instance_type="g5.4xlarge", machine_image=f"ssm:{parameter}", root_device_name="/dev/xvda")[
        "compute"
    ]
    (configuration,) = capacity(compute, "g5-4xlarge-1-21-0-spot")["Ec2Configuration"]
    assert configuration["ImageType"] == "ECS_AL2023_NVIDIA"
    assert compute["Parameters"][configuration["ImageIdOverride"]["Ref"]]["Default"] == parameter


def test_cpu_instances_boot_the_newest_amazon_linux_2023(compute: dict[str, Any]) -> None:
    assert booted(compute, f"{CPU}-spot") == (
        "ECS_AL2023",
        "/aws/service/ecs/optimized-ami/amazon-linux-2023/recommended/image_id",
    )


def booted(compute: dict[str, Any], environment: str) -> tuple[str, str]:
    """Return the family of an environment's AMI, and the parameter in which CloudFormation finds it."""
    # Trap: without an override Batch keeps the AMI of the day on which the compute environment was made.
    (configuration,) = capacity(compute, environment)["Ec2Configuration"]
    parameter = compute["Parameters"][configuration["ImageIdOverride"]["Ref"]]
    assert parameter["Type"] == "AWS::SSM::Parameter::Value<AWS::EC2::Image::Id>"
    return configuration["ImageType"], parameter["Default"]


def test_each_pools_root_volume_is_the_root_of_its_own_ami(synthesised: Synthesised) -> None:
    # GIVEN an AMI of Amazon Linux beside one of Ubuntu, one that the stage builds and one of Batch
    ami_id = "ami-0123456789abcdef0"
    compute = synthesised(
        instance_type="g5.4xlarge",
        machine_image=ami_id,
        root_device_name="/dev/xvda",
        retiring=(
            Pool(instance_type="dl1.24xlarge"),
            Pool(instance_type="dl1.24xlarge", release="1.20.0", machine_image=ami_id, root_device_name="/dev/sda1"),
            Pool(instance_type="g5.48xlarge", machine_image=ami_id),
            Pool(instance_type="p4d.24xlarge"),
        ),
    )["compute"]
    # THEN each gets its own: a device of another name would be a second volume, and leave the root as small as it is
    mapped = {
        name: launch_data(compute, name)["BlockDeviceMappings"][0]["DeviceName"]
        for name in environments(compute)
        if not name.startswith("cpu-")
    }
    assert mapped == {
        "g5-4xlarge-1-21-0-spot": "/dev/xvda",
        "dl1-24xlarge-1-21-0-spot": "/dev/sda1",
        "dl1-24xlarge-1-20-0-spot": "/dev/sda1",
        "g5-48xlarge-1-21-0-spot": "/dev/xvda",
        "p4d-24xlarge-1-21-0-spot": "/dev/xvda",
    }
