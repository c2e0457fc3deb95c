"""Launch templates, compute environments and queues: the reviewed template, and variants of settings."""

from dataclasses import replace
from typing import Any

import pytest

from infra.emulator.cloudformation.resources import replacing_properties
from infra.stages import CapacityReservation, ExistingVpc, Stage, Team
from infra.stages.network_plan import environment_count
from jobs.core.instance_types import instance_type
from jobs.core.queues import SPOT_WAITED_TOO_LONG
from jobs.core.stage import RESERVED_INSTANCE_TYPE, parameter_path
from tests.support.infra.goldens import assert_as_reviewed
from tests.support.infra.instances import environments, launch_data
from tests.support.infra.synthesis import Templates, resources, up_to

PLAIN = Stage(name="test", teams=(Team(name="research", shares_instances=True),))
MACHINE_IMAGES = "/aws/service/ecs/optimized-ami/amazon-linux-2023"


def test_the_template_is_as_reviewed(reviewed: Templates) -> None:
    # A new logical id means a new resource: running and waiting jobs are lost with the old one.
    assert_as_reviewed(reviewed, "compute")


@pytest.mark.parametrize(
    ("settings", "family", "ami", "device"),
    [
        ({}, "ECS_AL2023", "/imagebuilder/trainyard-test/machine-image/dl1-24xlarge-1-21-0", "/dev/sda1"),
        (
            {"instance_types": ("g5.4xlarge",)},
            "ECS_AL2023_NVIDIA",
            f"{MACHINE_IMAGES}/gpu/recommended/image_id",
            "/dev/xvda",
        ),
        (
            {"instance_types": ("g5.4xlarge",), "machine_image": "ssm:/our/gpu", "root_device_name": "/dev/xvdb"},
            *("ECS_AL2023_NVIDIA", "/our/gpu", "/dev/xvdb"),
        ),
        ({"machine_image": "ami-0123456789abcdef0"}, "ECS_AL2023", "ami-0123456789abcdef0", "/dev/sda1"),
    ],
)
def test_a_pool_boots_its_own_ami(settings: dict[str, Any], family: str, ami: str, device: str) -> None:
    row = replace(PLAIN, **settings)
    compute = up_to("compute", row)["compute"]
    # Without an override, Batch keeps the AMI of the day on which the compute environment was created.
    (configuration,) = environments(compute)[f"{row.pool.id}-spot"]["Ec2Configuration"]
    found = configuration["ImageIdOverride"]
    if isinstance(found, dict):
        parameter = compute["Parameters"][found["Ref"]]
        assert parameter["Type"] == "AWS::SSM::Parameter::Value<AWS::EC2::Image::Id>"
        found = parameter["Default"]
    assert (configuration["ImageType"], found) == (family, ami)
    # With another device name, this would be a second volume, and the root volume would keep the AMI's size.
    (mapping,) = launch_data(compute, f"{row.pool.id}-spot")["BlockDeviceMappings"]
    assert mapping["DeviceName"] == device


def test_a_single_interface_declines_a_public_address() -> None:
    # With several interfaces, EC2 refuses this option, even if it is False.
    row = replace(PLAIN, instance_types=("g5.48xlarge",), max_multinode_nodes=2)
    (interface,) = launch_data(up_to("compute", row)["compute"], f"{row.pool.id}-multinode")["NetworkInterfaces"]
    assert interface["AssociatePublicIpAddress"] is False


def test_multinode_jobs_have_an_environment_in_each_of_three_subnets() -> None:
    # GIVEN four subnets of an existing VPC
    ids = tuple(f"subnet-{number:017}" for number in range(4))
    vpc = ExistingVpc(vpc_id="vpc-0123456789abcdef0", private_subnet_ids=ids)
    row = replace(PLAIN, vpc=vpc, max_multinode_nodes=2)
    compute = up_to("compute", row)["compute"]
    # THEN the queue tries the first three, each with a separate placement group, and the first without a zone's name
    made = environments(compute)
    assert made["dl1-24xlarge-1-21-0-spot"]["Subnets"] == list(ids)
    tried = queues(compute)["multinode"][0]
    assert [name.removeprefix("dl1-24xlarge-1-21-0-") for name in tried] == [
        "multinode",
        *(f"multinode-{subnet}" for subnet in ids[1:3]),
    ]
    assert [made[name]["Subnets"] for name in tried] == [[subnet] for subnet in ids[:3]]
    assert len({made[name]["PlacementGroup"]["Ref"] for name in tried}) == 3
    assert {made[name]["MaxvCpus"] for name in tried} == {2 * instance_type("dl1.24xlarge").vcpus}
    assert len(made) == environment_count(row)


def queues(compute: dict[str, Any]) -> dict[str, tuple[list[str], dict[str, int]]]:
    """Return each queue's environments in Batch's order, and its time limits in seconds by reason."""
    by_id = {
        name: item["ComputeResources"]["Tags"]["Name"].split("-compute-")[1]
        for name, item in resources(compute, "AWS::Batch::ComputeEnvironment").items()
    }
    made = resources(compute, "AWS::Batch::JobQueue")
    return {
        item["Name"].partition("/queue/")[2]: (
            [by_id[one["ComputeEnvironment"]["Fn::GetAtt"][0]] for one in queue["ComputeEnvironmentOrder"]],
            {action["Reason"]: action["MaxTimeSeconds"] for action in queue["JobStateTimeLimitActions"]},
        )
        for item in resources(compute, "AWS::SSM::Parameter").values()
        if "/queue/" in item["Name"] and (queue := made[item["Value"]["Fn::GetAtt"][0]])
    }


def test_cards_are_tried_in_order_and_equal_cards_share_an_environment() -> None:
    # GIVEN a pool of two cards, one of them in two sizes
    types = ("g6e.xlarge", "g5.xlarge", "g5.4xlarge")
    row = replace(PLAIN, instance_types=types, max_nodes=3, max_on_demand_nodes=2, max_multinode_nodes=2)
    pool = row.pool.id
    assert pool.startswith("g6e-xlarge-")
    templates = {**up_to("compute", row), **up_to("jobs", row)}
    # THEN Batch picks among the sizes of a card, and counts instances of the smallest
    found = {
        name.removeprefix(f"{pool}-"): (item["InstanceTypes"], item["MaxvCpus"])
        for name, item in environments(templates["compute"]).items()
        if name.startswith(pool)
    }
    assert found == {
        "spot": (["g6e.xlarge"], 12),
        "spot-g5.xlarge": (["g5.xlarge", "g5.4xlarge"], 12),
        "on-demand": (["g6e.xlarge"], 8),
        "on-demand-g5.xlarge": (["g5.xlarge", "g5.4xlarge"], 8),
        "multinode": (["g6e.xlarge"], 8),
    }
    # AND queues try the cards in order, and each card has its own Spot queue
    made = queues(templates["compute"])
    assert {name: [each.removeprefix(f"{pool}-") for each in tried] for name, (tried, _) in made.items()} == {
        "spot": ["spot", "spot-g5.xlarge", "on-demand"],
        "on-demand": ["on-demand", "on-demand-g5.xlarge"],
        "multinode": ["multinode"],
        "cpu-spot": ["cpu-m6i-4xlarge-spot"],
        "spot-g6e.xlarge": ["spot"],
        "spot-g5.xlarge": ["spot-g5.xlarge"],
    }
    assert (len(made), len(environments(templates["compute"]))) == (row.queue_count, environment_count(row))
    # AND a job asks for what the smallest type has
    [train] = [
        each
        for name, each in resources(templates["jobs"], "AWS::Batch::JobDefinition").items()
        if name.startswith("Jobresearchfinetuneclassification") and each["Type"] == "container"
    ]
    [container] = train["EcsProperties"]["TaskProperties"][0]["Containers"]
    needs = {item["Type"]: item["Value"] for item in container["ResourceRequirements"]}
    assert needs == {"VCPU": "4", "MEMORY": str(instance_type("g5.xlarge").job_memory_mib), "GPU": "1"}
    # AND reserved capacity is of the first type only
    reserved = CapacityReservation(target="cr-0123456789abcdef0", zone_id="use1-az2")
    row = replace(row, capacity_reservation=reserved, region="us-east-1", availability_zone_ids=("use1-az2",))
    compute = up_to("compute", row)["compute"]
    assert queues(compute)["on-demand"][0] == [f"{pool}-on-demand"]
    published = {item["Name"]: item["Value"] for item in resources(compute, "AWS::SSM::Parameter").values()}
    assert published[parameter_path(row.name) + RESERVED_INSTANCE_TYPE] == "g6e.xlarge"
    assert len(environments(compute)) == environment_count(row)


def test_jobs_without_spot_capacity_start_on_demand_or_wait() -> None:
    row = replace(PLAIN, max_on_demand_nodes=1)
    pool = row.pool.id
    assert queues(up_to("compute", row)["compute"])["spot"][0] == [f"{pool}-spot", f"{pool}-on-demand"]
    # Batch reports missing capacity only if all environments of a queue lack it. With On-Demand as the second
    # environment, the wait would never end, and no job would be moved.
    waiting = queues(up_to("compute", replace(row, spot_wait_hours=1.5))["compute"])
    assert waiting["spot"][0] == [f"{pool}-spot"]
    assert waiting["spot"][1][SPOT_WAITED_TOO_LONG.rpartition(": ")[2]] == 5400
    assert waiting.keys() == {"spot", "on-demand", "cpu-spot"}


@pytest.mark.parametrize("block", [True, False])
def test_on_demand_instances_run_in_reserved_capacity(*, block: bool) -> None:
    target = "cr-0123456789abcdef0" if block else "arn:aws:resource-groups:us-east-1:123456789012:group/promised"
    row = replace(
        PLAIN,
        instance_types=("p5.48xlarge",),
        max_on_demand_nodes=1,
        max_multinode_nodes=2,
        capacity_reservation=CapacityReservation(target=target, is_block=block),
    )
    compute, pool = up_to("compute", row)["compute"], row.pool.id
    for name in ("on-demand", "multinode"):
        data = launch_data(compute, f"{pool}-{name}")
        key = "CapacityReservationId" if block else "CapacityReservationResourceGroupArn"
        assert data["CapacityReservationSpecification"] == {"CapacityReservationTarget": {key: target}}
        assert data.get("InstanceMarketOptions") == ({"MarketType": "capacity-block"} if block else None)
        # A Capacity Block already is a placement group, and EC2 accepts no other.
        grouped = name == "multinode" and not block
        assert ("PlacementGroup" in environments(compute)[f"{pool}-{name}"]) is grouped
    spot = launch_data(compute, f"{pool}-spot")
    assert not {"CapacityReservationSpecification", "InstanceMarketOptions"} & spot.keys()


@pytest.mark.parametrize("own_vpc", [True, False])
def test_reserved_capacity_pins_instances_to_its_zone(*, own_vpc: bool) -> None:
    # A launch in another zone than the reservation's fails. `use1-az5` is not known to offer the type.
    ids = tuple(f"subnet-{number:017}" for number in range(3))
    place: dict[str, str] = {"zone_id": "use1-az5"} if own_vpc else {"subnet_id": ids[2]}
    row = replace(
        PLAIN,
        region="us-east-1",
        vpc=None if own_vpc else ExistingVpc(vpc_id="vpc-0123456789abcdef0", private_subnet_ids=ids),
        instance_types=("p5en.48xlarge",),
        max_on_demand_nodes=1,
        max_multinode_nodes=2,
        capacity_reservation=CapacityReservation(target="cr-0123456789abcdef0", is_block=True, **place),
    )
    stacks, pool = up_to("compute", row), row.pool.id
    subnets = {name: item["Subnets"] for name, item in environments(stacks["compute"]).items()}
    assert subnets[f"{pool}-on-demand"] == subnets[f"{pool}-multinode"]
    (only,) = subnets[f"{pool}-on-demand"]
    if own_vpc:
        assert "use1az5" in only["Fn::ImportValue"]
        # Spot does not move.
        assert only not in subnets[f"{pool}-spot"]
    else:
        assert only == ids[2]
    assert len(subnets[f"{pool}-spot"]) == (2 if own_vpc else 3)


def test_adding_a_teams_own_instances_keeps_the_shared_ones() -> None:
    # A new logical id or instance name would end waiting and running jobs.
    own = Team(name="health")
    before = up_to("compute", replace(PLAIN, teams=(*PLAIN.teams, replace(own, shares_instances=True))))["compute"][
        "Resources"
    ]
    after = up_to("compute", replace(PLAIN, teams=(*PLAIN.teams, own)))["compute"]["Resources"]
    changed = [name for name, item in before.items() if after[name].get("Properties") != item.get("Properties")]
    # Only one thing changes: shared instances may not act for that team's instances.
    assert [before[name]["Type"] for name in changed] == ["AWS::IAM::Policy"]
    assert not [name for name in after.keys() - before.keys() if "health" not in name]


def test_an_organisations_tag_replaces_nothing_and_reaches_instances() -> None:
    # GIVEN a stage, and the same stage with a tag that an organisation adds to everything
    row = replace(PLAIN, max_multinode_nodes=2)
    old, new = up_to("compute", row)["compute"], up_to("compute", row, ("cost-centre", "4711"))["compute"]
    # THEN no resource is replaced: a new compute environment would end all running jobs
    assert old["Resources"].keys() == new["Resources"].keys()
    for name, resource in old["Resources"].items():
        before, after = (item.get("Properties", {}) for item in (resource, new["Resources"][name]))
        assert replacing_properties(resource["Type"], before, after) == [], name
    # AND the stage's own tags stay, and instances and volumes get the tag
    own = {"trainyard:project": "trainyard", "trainyard:stage": "test"}
    assert all(item["Tags"] == own for item in resources(new, "AWS::Batch::ComputeEnvironment").values())
    (group,) = resources(new, "AWS::EC2::PlacementGroup").values()
    assert {tag["Key"] for tag in group["Tags"]} == own.keys()
    for name in environments(new):
        tags = {
            item["ResourceType"]: {tag["Key"]: tag["Value"] for tag in item["Tags"]}
            for item in launch_data(new, name)["TagSpecifications"]
        }
        assert tags == {"instance": {"cost-centre": "4711"}, "volume": {"cost-centre": "4711", **own}}
