"""Launch templates, compute environments and queues, of stages with teams of their own and teams that share."""

from typing import Any

import pytest

from infra.stages import CapacityReservation, ExistingVpc, Pool, Stage, Team
from jobs.contract.instance_types import INSTANCE_TYPES
from jobs.contract.queues import QUEUES, SPOT_WAITED_TOO_LONG
from tests.support.infra.deployed_roles import DeployedStage
from tests.support.infra.instances import (
    CPU,
    GAUDI,
    all_environments,
    capacity,
    environments,
    launch_data,
    queue_environments,
    queues,
)
from tests.support.infra.synthesis import Templates, only, resources, stacks_of

CUSTOM = Pool(instance_type="g5.4xlarge", machine_image="ami-0123456789abcdef0", root_device_name="/dev/xvdb")
"""A pool that retires, with an AMI of its own."""
MIXED = Stage(
    name="test",
    teams=(
        Team(name="research"),
        Team(name="nlp-core", share=2.0, shares_instances=True),
        Team(name="interns", share=0.01, shares_instances=True),
    ),
    region="us-east-1",
    availability_zone_ids=("use1-az1", "use1-az2"),
    retiring=(CUSTOM,),
    max_nodes=3,
    max_on_demand_nodes=2,
    max_multinode_nodes=5,
    max_cpu_nodes=7,
    root_volume_gib=700,
    cpu_root_volume_gib=300,
)
SPOT, ON_DEMAND = ("SPOT", "SPOT_PRICE_CAPACITY_OPTIMIZED"), ("EC2", "BEST_FIT_PROGRESSIVE")
OLD, NEW = CUSTOM.id, GAUDI


@pytest.fixture(scope="module")
def made() -> Templates:
    return stacks_of(MIXED)


@pytest.fixture(scope="module")
def compute(made: Templates) -> dict[str, Any]:
    return made["compute"]


def test_compute_environments_and_queues_keep_their_logical_ids(compute: dict[str, Any]) -> None:
    # A new logical id is a new resource: running and waiting jobs are lost with the old one.
    assert {
        "dl124xlarge1210spot65D0EA09",
        "dl124xlarge1210multinode5104F849",
        "cpum6i4xlargespot5B9D59F4",
    } <= set(resources(compute, "AWS::Batch::ComputeEnvironment"))
    assert {
        "dl124xlarge1210Queuespot2F90C4D8",
        "dl124xlarge1210QueuemultinodeB9002586",
        "cpum6i4xlargeQueuecpuspot54722874",
    } <= set(resources(compute, "AWS::Batch::JobQueue"))


def test_instances_are_exactly_the_stages_types_and_come_up_to_its_limits(compute: dict[str, Any]) -> None:
    # Traps: the L2 adds the "optimal" classes; jobs of several nodes wait for ever on Spot.
    made = {
        name: (*item["InstanceTypes"], item["Type"], item["AllocationStrategy"], item["MinvCpus"], item["MaxvCpus"])
        for name, item in ((name, item["ComputeResources"]) for name, item in environments(compute).items())
    }
    assert made == {
        f"{NEW}-spot": ("dl1.24xlarge", *SPOT, 0, 3 * 96),
        f"{NEW}-on-demand": ("dl1.24xlarge", *ON_DEMAND, 0, 2 * 96),
        f"{NEW}-multinode": ("dl1.24xlarge", *ON_DEMAND, 0, 5 * 96),
        f"{OLD}-spot": ("g5.4xlarge", *SPOT, 0, 3 * 16),
        f"{OLD}-on-demand": ("g5.4xlarge", *ON_DEMAND, 0, 2 * 16),
        f"{OLD}-multinode": ("g5.4xlarge", *ON_DEMAND, 0, 5 * 16),
        f"{CPU}-spot": ("m6i.4xlarge", *SPOT, 0, 7 * 16),
    }


def test_batch_changes_instances_in_place_and_adds_nothing_of_its_own(compute: dict[str, Any]) -> None:
    for environment in all_environments(compute).values():
        # Trap: a name, a service role or ReplaceComputeEnvironment make each change a replacement.
        assert environment["ReplaceComputeEnvironment"] is False
        assert not {"ComputeEnvironmentName", "ServiceRole"} & environment.keys()
        assert environment["UpdatePolicy"] == {"TerminateJobsOnUpdate": False, "JobExecutionTimeoutMinutes": 7200}
        assert (environment["State"], environment["Type"]) == ("ENABLED", "MANAGED")
        # Traps: a bid below On-Demand only adds reclaims; the fleet role belongs to BEST_FIT.
        assert not {"BidPercentage", "SpotIamFleetRole", "DesiredvCpus"} & environment["ComputeResources"].keys()


def test_each_pool_boots_its_own_ami_with_its_own_root_volume(compute: dict[str, Any]) -> None:
    volume = {"VolumeType": "gp3", "Throughput": 500, "Encrypted": True, "DeleteOnTermination": True}
    for name, family, ami, device, gib in (
        (f"{NEW}-spot", "ECS_AL2023", f"/imagebuilder/trainyard-test/machine-image/{NEW}", "/dev/sda1", 700),
        (f"{OLD}-spot", "ECS_AL2023_NVIDIA", "ami-0123456789abcdef0", "/dev/xvdb", 700),
        (
            f"{CPU}-spot",
            "ECS_AL2023",
            "/aws/service/ecs/optimized-ami/amazon-linux-2023/recommended/image_id",
            "/dev/xvda",
            300,
        ),
    ):
        assert booted(compute, name) == (family, ami)
        # Trap: a device of another name would be a second volume, and leave the root as small as the AMI's.
        mapping = {"DeviceName": device, "Ebs": {**volume, "VolumeSize": gib}}
        assert launch_data(compute, name)["BlockDeviceMappings"] == [mapping]


@pytest.mark.parametrize(
    ("image", "ami"),
    [
        (None, "/aws/service/ecs/optimized-ami/amazon-linux-2023/gpu/recommended/image_id"),
        ("ssm:/organisation/gpu", "/organisation/gpu"),
    ],
)
def test_cuda_instances_boot_the_gpu_ami(image: str | None, ami: str) -> None:
    row = Stage(name="test", teams=MIXED.teams[:1], instance_type="g5.4xlarge", machine_image=image)
    assert booted(stacks_of(row)["compute"], f"{row.pool.id}-spot") == ("ECS_AL2023_NVIDIA", ami)


def booted(compute: dict[str, Any], environment: str) -> tuple[str, str]:
    """Return the family of an environment's AMI, and its id or the parameter in which CloudFormation finds it."""
    # Trap: without an override Batch keeps the AMI of the day on which the compute environment was made.
    (configuration,) = capacity(compute, environment)["Ec2Configuration"]
    ami = configuration["ImageIdOverride"]
    if isinstance(ami, dict):
        parameter = compute["Parameters"][ami["Ref"]]
        assert parameter["Type"] == "AWS::SSM::Parameter::Value<AWS::EC2::Image::Id>"
        ami = parameter["Default"]
    return configuration["ImageType"], ami


def test_launch_templates_say_what_batch_leaves_to_them(compute: dict[str, Any]) -> None:
    for name in all_environments(compute):
        data = launch_data(compute, name)
        # Trap: Batch ignores these, and a reader of the template believes them.
        ignored = {"InstanceType", "InstanceMarketOptions", "IamInstanceProfile", "SecurityGroupIds", "Placement"}
        assert not (ignored | {"KeyName", "ImageId"}) & data.keys()
        # Only the host itself reaches the metadata service.
        metadata = {"HttpEndpoint": "enabled", "HttpTokens": "required", "HttpPutResponseHopLimit": 1}
        assert data["MetadataOptions"] == metadata
        (volume,) = (item for item in data["TagSpecifications"] if item["ResourceType"] == "volume")
        tags = {"trainyard:project": "trainyard", "trainyard:stage": "test"}
        if "-of-research-" in name:
            tags["trainyard:team"] = "research"
        assert {tag["Key"]: tag["Value"] for tag in volume["Tags"]} == tags
        # Traps: CloudFormation does not tag what Batch starts, and watch_instances knows environments by these names.
        assert capacity(compute, name)["Tags"].items() >= tags.items()


def test_several_nodes_have_efa_on_each_card_side_by_side_in_one_subnet(compute: dict[str, Any]) -> None:
    for name, item in environments(compute).items():
        interfaces = launch_data(compute, name).get("NetworkInterfaces", [])
        assert bool(interfaces) is (name == f"{NEW}-multinode")
        # Trap: Batch takes security groups from the environment or from the template's interfaces, and refuses both.
        assert ("SecurityGroupIds" in item["ComputeResources"]) is not bool(interfaces)
        assert ("PlacementGroup" in item["ComputeResources"]) is name.endswith("multinode")
        assert len(item["ComputeResources"]["Subnets"]) == (1 if name.endswith("multinode") or NEW in name else 2)
    interfaces = launch_data(compute, f"{NEW}-multinode")["NetworkInterfaces"]
    assert [
        (item["NetworkCardIndex"], item["DeviceIndex"], item["InterfaceType"], item.get("AssociatePublicIpAddress"))
        for item in interfaces
    ] == [(0, 0, "efa", None), (1, 1, "efa", None), (2, 1, "efa", None), (3, 1, "efa", None)]
    groups = resources(compute, "AWS::EC2::PlacementGroup")
    assert [group["Strategy"] for group in groups.values()] == ["cluster"] * 4


def test_one_card_says_that_it_wants_no_public_address() -> None:
    # Trap: EC2 refuses the question if there are several interfaces, even if the answer is no.
    row = Stage(name="test", teams=MIXED.teams[:1], instance_type="g5.48xlarge", max_multinode_nodes=2)
    (interface,) = launch_data(stacks_of(row)["compute"], f"{row.pool.id}-multinode")["NetworkInterfaces"]
    assert interface["AssociatePublicIpAddress"] is False


def test_accelerators_start_in_the_zones_that_offer_them(made: Templates, compute: dict[str, Any]) -> None:
    zones = {
        name: subnet["AvailabilityZoneId"]
        for name, subnet in resources(made["network"], "AWS::EC2::Subnet").items()
        if "Private" in name
    }
    of_pool = {
        name: {zones[exported(made["network"], subnet)] for subnet in item["ComputeResources"]["Subnets"]}
        for name, item in environments(compute).items()
    }
    assert of_pool[f"{NEW}-spot"] == of_pool[f"{NEW}-multinode"] == {"use1-az2"}
    assert of_pool[f"{CPU}-spot"] == {"use1-az1", "use1-az2"}


def test_existing_subnets_are_used_and_several_nodes_run_in_the_first() -> None:
    ids = ("subnet-0123456789abcdef0", "subnet-0123456789abcdef1")
    vpc = ExistingVpc(vpc_id="vpc-0123456789abcdef0", private_subnet_ids=ids)
    compute = stacks_of(Stage(name="test", teams=MIXED.teams[:1], vpc=vpc, max_multinode_nodes=2))["compute"]
    assert capacity(compute, f"{GAUDI}-spot")["Subnets"] == list(ids)
    assert capacity(compute, f"{GAUDI}-multinode")["Subnets"] == [ids[0]]


def test_a_stage_has_the_queues_whose_capacity_it_allows(templates: Templates, compute: dict[str, Any]) -> None:
    small = templates["dev/compute"]
    assert set(queues(small)) == {"spot", "cpu-spot"}
    assert queue_environments(small, "spot") == [f"{GAUDI}-spot"]
    retiring = {f"{name}/{OLD}" for name, queue in QUEUES.items() if queue.accelerated}
    assert set(queues(compute)) == set(queues(compute, None)) == QUEUES.keys() | retiring
    # Spot first; Batch takes the next environment if it has none.
    for queue, used in {
        "spot": [f"{NEW}-spot", f"{NEW}-on-demand"],
        "on-demand": [f"{NEW}-on-demand"],
        "multinode": [f"{NEW}-multinode"],
        "cpu-spot": [f"{CPU}-spot"],
        # Trap: a release's image on another's driver. Pools have nothing in common.
        f"spot/{OLD}": [f"{OLD}-spot", f"{OLD}-on-demand"],
    }.items():
        assert queue_environments(compute, queue) == used
    # What was reclaimed too often goes before what Spot has no room for.
    assert queues(compute)["on-demand"]["Priority"] > queues(compute)["spot"]["Priority"]
    published = {item["Name"]: item["Value"] for item in resources(compute, "AWS::SSM::Parameter").values()}
    assert published["/trainyard/test/instance-type"] == "dl1.24xlarge"
    assert published["/trainyard/test/cpu-instance-type"] in INSTANCE_TYPES


def test_queues_share_fairly_from_the_first_day(compute: dict[str, Any]) -> None:
    # Trap: a queue that was made without a scheduling policy can never have one.
    (policy,) = resources(compute, "AWS::Batch::SchedulingPolicy")
    for queue in queues(compute).values():
        assert queue["SchedulingPolicyArn"] == {"Fn::GetAtt": [policy, "Arn"]}
        assert (queue["State"], "JobQueueName" in queue) == ("ENABLED", False)
    properties = only(compute, "AWS::Batch::SchedulingPolicy")["FairsharePolicy"]
    assert properties["ShareDistribution"] == [
        {"ShareIdentifier": "research", "WeightFactor": 1},
        # Traps: a share identifier takes letters and digits only, and twice the share is half the weight.
        {"ShareIdentifier": "nlpcore", "WeightFactor": 0.5},
        {"ShareIdentifier": "interns", "WeightFactor": 100},
    ]
    assert (properties["ShareDecaySeconds"], properties["ComputeReservation"]) == (24 * 3600, 0)


def time_limits(queue: dict[str, Any]) -> dict[str, int]:
    for action in queue["JobStateTimeLimitActions"]:
        assert (action["Action"], action["State"]) == ("CANCEL", "RUNNABLE")
    return {action["Reason"]: action["MaxTimeSeconds"] for action in queue["JobStateTimeLimitActions"]}


@pytest.mark.parametrize("block", [True, False])
def test_jobs_wait_for_spot_and_on_demand_instances_run_in_promised_capacity(*, block: bool) -> None:
    group = "arn:aws:resource-groups:us-east-1:123456789012:group/promised"
    row = Stage(
        name="test",
        teams=MIXED.teams[:1],
        instance_type="p5.48xlarge",
        max_on_demand_nodes=1,
        max_multinode_nodes=2,
        spot_wait_hours=1.5,
        capacity_reservation=CapacityReservation(target="cr-0123456789abcdef0" if block else group, is_block=block),
    )
    compute, pool = stacks_of(row)["compute"], row.pool.id
    # Trap: Batch says that capacity is missing when all environments of a queue lack it. With On-Demand behind Spot in
    # one queue no wait ever ends, and no job is moved.
    assert queue_environments(compute, "spot") == [f"{pool}-spot"]
    assert queue_environments(compute, "on-demand") == [f"{pool}-on-demand"]
    never = dict.fromkeys(
        ("MISCONFIGURATION:COMPUTE_ENVIRONMENT_MAX_RESOURCE", "MISCONFIGURATION:JOB_RESOURCE_REQUIREMENT"), 3600
    )
    reason = SPOT_WAITED_TOO_LONG.rpartition(": ")[2]
    for name, queue in queues(compute).items():
        assert time_limits(queue) == {**never, **({reason: 5400} if name == "spot" else {})}
    for name in ("on-demand", "multinode"):
        data = launch_data(compute, f"{pool}-{name}")
        key = "CapacityReservationId" if block else "CapacityReservationResourceGroupArn"
        assert row.capacity_reservation is not None
        target = {key: row.capacity_reservation.target}
        assert data["CapacityReservationSpecification"] == {"CapacityReservationTarget": target}
        assert data.get("InstanceMarketOptions") == ({"MarketType": "capacity-block"} if block else None)
        # A block is side by side already, and EC2 refuses a placement group around it.
        assert ("PlacementGroup" in capacity(compute, f"{pool}-{name}")) is (name == "multinode" and not block)
    spot = launch_data(compute, f"{pool}-spot")
    assert not {"CapacityReservationSpecification", "InstanceMarketOptions"} & spot.keys()


def test_logs_of_instances_are_kept_for_their_time_and_nothing_on_them_reads_any(made: Templates) -> None:
    stage = DeployedStage("test", made)
    name = stage.only("compute", "AWS::Logs::LogGroup")
    group = made["compute"]["Resources"][name]
    assert (group["DeletionPolicy"], group["Properties"]["RetentionInDays"]) == ("Retain", 90)
    arn = stage.arn("compute", name).removesuffix(":*")
    assert stage.published("instance-log-group") == arn.rpartition(":")[2]
    role = stage.role("compute", "isolatedresearchInstanceRole")
    stream = f"{arn}:log-stream:i-0123456789abcdef0/cloud-init-output"
    allowed = ("CreateLogStream", "PutLogEvents", "GetLogEvents", "DeleteLogStream", "CreateLogGroup")
    assert [action for action in allowed if role.may(f"logs:{action}", stream)] == ["CreateLogStream", "PutLogEvents"]


def exported(template: dict[str, Any], imported: dict[str, str]) -> str:
    """Return the logical id of what `imported` stands for in the template that exports it."""
    (value,) = (
        output["Value"]
        for output in template["Outputs"].values()
        if output["Export"]["Name"] == imported["Fn::ImportValue"]
    )
    return str(value["Ref"])
