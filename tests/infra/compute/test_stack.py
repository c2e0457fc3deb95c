from collections.abc import Callable
from pathlib import Path
from typing import Any

import aws_cdk as cdk
import pytest

from infra.compute.stack import ComputeStack
from infra.network.stack import NetworkStack
from infra.stages import ExistingVpc, Pool, Stage, Team
from infra.storage.stack import StorageStack
from jobs.contract.instance_types import INSTANCE_TYPES
from jobs.contract.queues import QUEUES, SPOT_WAITED_TOO_LONG, Queue
from tests.support.infra.deployed_roles import DeployedStage
from tests.support.infra.instances import CPU, GAUDI, capacity, environments, queue_environments, queues
from tests.support.infra.synthesis import Templates, new_app, only, read_assembly, resources

Synthesised = Callable[..., Templates]
OLD_GAUDI = "dl1-24xlarge-1-20-0"
OLD_POOL = Pool(instance_type="dl1.24xlarge", release="1.20.0")


@pytest.fixture(scope="module")
def compute(templates: Templates) -> dict[str, Any]:
    return templates["dev/compute"]


@pytest.fixture(scope="module")
def large(templates: Templates) -> dict[str, Any]:
    """The compute stack of a stage with On-Demand instances and jobs of several nodes."""
    return templates["prod/compute"]


def test_compute_environments_and_queues_keep_their_logical_ids(synthesised: Synthesised) -> None:
    # A new logical id is a new resource: running and waiting jobs are lost with the old one.
    teams = (Team(name="own"), Team(name="other", shares_instances=True))
    large = synthesised(teams=teams, region="us-east-1", max_on_demand_nodes=1, max_multinode_nodes=2)["compute"]
    assert set(resources(large, "AWS::Batch::ComputeEnvironment")) == {
        "dl124xlarge1210spot65D0EA09",
        "dl124xlarge1210ondemandCD6451F1",
        "dl124xlarge1210multinode5104F849",
        "cpum6i4xlargespot5B9D59F4",
        "dl124xlarge1210ofownspot0DFE7B13",
        "dl124xlarge1210ofownondemandF08675CC",
        "dl124xlarge1210ofownmultinode176068B7",
        "cpum6i4xlargeofownspot3FFDB7CF",
    }
    assert set(resources(large, "AWS::Batch::JobQueue")) == {
        "dl124xlarge1210Queuespot2F90C4D8",
        "dl124xlarge1210Queueondemand195E0EB2",
        "dl124xlarge1210QueuemultinodeB9002586",
        "cpum6i4xlargeQueuecpuspot54722874",
        "dl124xlarge1210ofownQueuespotD8C8A44C",
        "dl124xlarge1210ofownQueueondemand42B2D3ED",
        "dl124xlarge1210ofownQueuemultinode52DFD8DB",
        "cpum6i4xlargeofownQueuecpuspot83E27BCB",
    }


def test_a_stage_has_the_queues_whose_capacity_it_allows(compute: dict[str, Any], large: dict[str, Any]) -> None:
    assert set(queues(compute)) == {"spot", "cpu-spot"}
    assert queue_environments(compute, "spot") == [f"{GAUDI}-spot"]
    assert queue_environments(compute, "cpu-spot") == [f"{CPU}-spot"]
    assert set(queues(large)) == set(QUEUES)
    # Spot first; Batch goes on to the next where it has none.
    assert queue_environments(large, "spot") == [f"{GAUDI}-spot", f"{GAUDI}-on-demand"]
    assert queue_environments(large, "on-demand") == [f"{GAUDI}-on-demand"]
    assert queue_environments(large, "multinode") == [f"{GAUDI}-multinode"]


def test_on_demand_instances_are_counted_once_over_the_queues_that_share_them(large: dict[str, Any]) -> None:
    assert capacity(large, f"{GAUDI}-on-demand")["MaxvCpus"] == 4 * 96
    # What was reclaimed too often goes before what Spot has no room for.
    assert queues(large)["on-demand"]["Priority"] > queues(large)["spot"]["Priority"]


def test_instances_come_and_go_up_to_the_limits(synthesised: Synthesised) -> None:
    compute = synthesised(max_nodes=3, max_on_demand_nodes=2, max_multinode_nodes=5, max_cpu_nodes=7)["compute"]
    limits = {
        name: (item["ComputeResources"]["MinvCpus"], item["ComputeResources"]["MaxvCpus"])
        for name, item in environments(compute).items()
    }
    assert limits == {
        f"{GAUDI}-spot": (0, 3 * 96),
        f"{GAUDI}-on-demand": (0, 2 * 96),
        f"{GAUDI}-multinode": (0, 5 * 96),
        f"{CPU}-spot": (0, 7 * 16),
    }


def test_queues_share_fairly_from_the_first_day(large: dict[str, Any]) -> None:
    # Trap: a queue that was made without a scheduling policy can never have one.
    (policy,) = resources(large, "AWS::Batch::SchedulingPolicy")
    for queue in queues(large).values():
        assert queue["SchedulingPolicyArn"] == {"Fn::GetAtt": [policy, "Arn"]}
        assert queue["State"] == "ENABLED"
        assert "JobQueueName" not in queue
        # Trap: Batch takes three compute environments a queue at most.
        assert 1 <= len(queue["ComputeEnvironmentOrder"]) <= 3


def test_twice_the_share_is_half_the_weight(synthesised: Synthesised) -> None:
    teams = (
        Team(name="nlp-core", share=2.0, shares_instances=True),
        Team(name="vision"),
        Team(name="interns", share=0.01, shares_instances=True),
    )
    compute = synthesised(teams=teams)["compute"]
    policy = only(compute, "AWS::Batch::SchedulingPolicy")["FairsharePolicy"]
    assert policy["ShareDistribution"] == [
        # Trap: a share identifier takes letters and digits only.
        {"ShareIdentifier": "nlpcore", "WeightFactor": 0.5},
        {"ShareIdentifier": "vision", "WeightFactor": 1},
        {"ShareIdentifier": "interns", "WeightFactor": 100},
    ]
    assert policy["ShareDecaySeconds"] == 24 * 3600


def time_limits(queue: dict[str, Any]) -> dict[str, int]:
    for action in queue["JobStateTimeLimitActions"]:
        # All that Batch does for these queues.
        assert (action["Action"], action["State"]) == ("CANCEL", "RUNNABLE")
    return {action["Reason"]: action["MaxTimeSeconds"] for action in queue["JobStateTimeLimitActions"]}


def test_a_job_that_can_never_start_makes_way(synthesised: Synthesised) -> None:
    compute = synthesised(max_on_demand_nodes=1, max_multinode_nodes=2)
    for queue in queues(compute["compute"]).values():
        assert time_limits(queue) == {
            "MISCONFIGURATION:COMPUTE_ENVIRONMENT_MAX_RESOURCE": 3600,
            "MISCONFIGURATION:JOB_RESOURCE_REQUIREMENT": 3600,
        }


def test_a_job_waits_for_spot_capacity_as_long_as_the_stage_says(synthesised: Synthesised) -> None:
    stage = {"spot_wait_hours": 1.5, "max_on_demand_nodes": 1, "max_multinode_nodes": 2}
    compute = synthesised(**stage)["compute"]
    waiting = {
        name: [limit for reason, limit in time_limits(queue).items() if reason.startswith("CAPACITY:")]
        for name, queue in queues(compute).items()
    }
    assert waiting == {"spot": [5400], "on-demand": [], "multinode": [], "cpu-spot": []}
    # What Batch then says of the job names the reason that the queue matches: the one who moves it on knows it by that.
    (reason,) = (name for name in time_limits(queues(compute)["spot"]) if name.startswith("CAPACITY:"))
    assert SPOT_WAITED_TOO_LONG.endswith(f": {reason}")


def test_jobs_that_wait_for_spot_are_moved_and_do_not_overflow(synthesised: Synthesised) -> None:
    # Trap: Batch says that capacity is missing when all environments of a queue lack it. With On-Demand behind Spot in
    # one queue no wait ever ends, and no job is moved.
    stage = {"max_on_demand_nodes": 1, "retiring": (OLD_POOL,)}
    overflowing, waiting = (synthesised(**stage, **wait)["compute"] for wait in ({}, {"spot_wait_hours": 2}))
    for pool, queue in ((GAUDI, "spot"), (OLD_GAUDI, f"spot/{OLD_GAUDI}")):
        assert queue_environments(overflowing, queue) == [f"{pool}-spot", f"{pool}-on-demand"]
        assert queue_environments(waiting, queue) == [f"{pool}-spot"]
    # Where it is moved to is there, all the same.
    assert queue_environments(waiting, "on-demand") == [f"{GAUDI}-on-demand"]
    assert environments(waiting).keys() == environments(overflowing).keys()


def test_retiring_pools_stand_beside_the_new_one_and_share_nothing_with_it(synthesised: Synthesised) -> None:
    compute = synthesised(retiring=(OLD_POOL,), machine_image=None, max_on_demand_nodes=1)["compute"]
    for capacities in ("spot", "on-demand"):
        old, new = (capacity(compute, f"{pool}-{capacities}") for pool in (OLD_GAUDI, GAUDI))
        assert old["LaunchTemplate"]["LaunchTemplateId"] != new["LaunchTemplate"]["LaunchTemplateId"]
        # Trap: a release's image on another's driver.
        amis = [item["Ec2Configuration"][0]["ImageIdOverride"]["Ref"] for item in (old, new)]
        parameters = [compute["Parameters"][ami]["Default"] for ami in amis]
        assert parameters == [f"/imagebuilder/trainyard-test/machine-image/{pool}" for pool in (OLD_GAUDI, GAUDI)]
    # New jobs find the current pool's queue; those submitted before are still found in theirs.
    assert queue_environments(compute, "spot") == [f"{GAUDI}-spot", f"{GAUDI}-on-demand"]
    assert queue_environments(compute, f"spot/{OLD_GAUDI}") == [f"{OLD_GAUDI}-spot", f"{OLD_GAUDI}-on-demand"]
    assert queue_environments(compute, f"on-demand/{OLD_GAUDI}") == [f"{OLD_GAUDI}-on-demand"]


def test_upgrading_a_release_leaves_the_old_pools_resources_as_they_are(synthesised: Synthesised) -> None:
    before = synthesised(release="1.20.0", machine_image=None)["compute"]
    after = synthesised(retiring=(OLD_POOL,), machine_image=None)["compute"]
    for kind in ("AWS::Batch::ComputeEnvironment", "AWS::Batch::JobQueue", "AWS::EC2::LaunchTemplate"):
        assert resources(before, kind).items() <= resources(after, kind).items()


def test_a_stage_can_move_to_another_instance_type(synthesised: Synthesised) -> None:
    gaudi = Pool(instance_type="dl1.24xlarge", machine_image="ami-0123456789abcdef0")
    compute = synthesised(instance_type="p4d.24xlarge", machine_image=None, retiring=(gaudi,))["compute"]
    assert queue_environments(compute, "spot") == ["p4d-24xlarge-1-21-0-spot"]
    assert queue_environments(compute, f"spot/{GAUDI}") == [f"{GAUDI}-spot"]
    assert capacity(compute, f"{GAUDI}-spot")["Ec2Configuration"][0]["ImageIdOverride"] == "ami-0123456789abcdef0"
    published = {item["Name"]: item["Value"] for item in resources(compute, "AWS::SSM::Parameter").values()}
    assert published["/trainyard/test/instance-type"] == "p4d.24xlarge"


def test_instances_stand_in_private_subnets_behind_the_job_security_group(templates: Templates) -> None:
    network, compute = templates["prod/network"], templates["prod/compute"]
    private = {name for name in resources(network, "AWS::EC2::Subnet") if "Private" in name}
    for name, environment in environments(compute).items():
        subnets = {exported(network, subnet) for subnet in environment["ComputeResources"]["Subnets"]}
        assert subnets <= private
        # Trap: EFA and a placement group do not span zones.
        assert len(subnets) == (1 if name.endswith("multinode") else len(private))
        for group in environment["ComputeResources"].get("SecurityGroupIds", []):
            assert group["Fn::GetAtt"][0] in resources(compute, "AWS::EC2::SecurityGroup")


def test_accelerators_start_in_the_zones_that_offer_them(synthesised: Synthesised) -> None:
    made = synthesised(region="us-east-1", availability_zone_ids=("use1-az1", "use1-az2"), max_multinode_nodes=2)
    zones = {
        name: subnet["AvailabilityZoneId"]
        for name, subnet in resources(made["network"], "AWS::EC2::Subnet").items()
        if "Private" in name
    }
    of_pool = {
        name: {zones[exported(made["network"], subnet)] for subnet in item["ComputeResources"]["Subnets"]}
        for name, item in environments(made["compute"]).items()
    }
    assert of_pool == {
        f"{GAUDI}-spot": {"use1-az2"},
        f"{GAUDI}-multinode": {"use1-az2"},
        f"{CPU}-spot": {"use1-az1", "use1-az2"},
    }


def test_existing_subnets_are_used_and_several_nodes_live_in_the_first(synthesised: Synthesised) -> None:
    ids = ("subnet-0123456789abcdef0", "subnet-0123456789abcdef1")
    vpc = ExistingVpc(vpc_id="vpc-0123456789abcdef0", private_subnet_ids=ids)
    compute = synthesised(vpc=vpc, max_multinode_nodes=2)["compute"]
    assert capacity(compute, f"{GAUDI}-spot")["Subnets"] == list(ids)
    assert capacity(compute, f"{GAUDI}-multinode")["Subnets"] == [ids[0]]


def test_the_command_line_finds_the_instance_types(compute: dict[str, Any]) -> None:
    published = {item["Name"]: item["Value"] for item in resources(compute, "AWS::SSM::Parameter").values()}
    assert published["/trainyard/dev/instance-type"] in INSTANCE_TYPES
    assert published["/trainyard/dev/cpu-instance-type"] in INSTANCE_TYPES


def test_logs_of_instances_are_kept_for_their_time_and_nothing_on_them_reads_any(templates: Templates) -> None:
    compute = templates["dev/compute"]
    (name, group), *others = (item for item in compute["Resources"].items() if item[1]["Type"] == "AWS::Logs::LogGroup")
    assert not others
    assert (group["DeletionPolicy"], group["Properties"]["RetentionInDays"]) == ("Retain", 90)
    stage = DeployedStage("dev", {path.split("/")[1]: item for path, item in templates.items() if "dev/" in path})
    arn = stage.arn("compute", name).removesuffix(":*")
    assert stage.published("instance-log-group") == arn.rpartition(":")[2]
    role = stage.role("compute", "isolatedresearchInstanceRole")
    stream = f"{arn}:log-stream:i-0123456789abcdef0/cloud-init-output"
    for action, allowed in (
        ("logs:CreateLogStream", True),
        ("logs:PutLogEvents", True),
        ("logs:GetLogEvents", False),
        ("logs:DeleteLogStream", False),
        ("logs:CreateLogGroup", False),
        ("logs:PutRetentionPolicy", False),
    ):
        assert role.may(action, stream) is allowed, action


def test_a_queue_is_a_row(tmp_path: Path) -> None:
    row = Queue(name="cpu-on-demand", accelerated=False, capacities=("on-demand",), purpose="corpora with a deadline")
    stage = Stage(name="test", teams=(Team(name="research"),))
    app = new_app(tmp_path)
    scope = cdk.Stage(app, stage.name)
    network = NetworkStack(scope, stage=stage)
    storage = StorageStack(scope, stage=stage, network=network)
    ComputeStack(scope, stage=stage, network=network, storage=storage, queues={**QUEUES, row.name: row})
    app.synth()
    compute = read_assembly(tmp_path)["test/compute"]
    assert queue_environments(compute, "cpu-on-demand") == [f"{CPU}-on-demand"]
    assert capacity(compute, f"{CPU}-on-demand")["Type"] == "EC2"


def exported(template: dict[str, Any], imported: dict[str, str]) -> str:
    """Return the logical id of what `imported` stands for in the template that exports it."""
    (value,) = (
        output["Value"]
        for output in template["Outputs"].values()
        if output["Export"]["Name"] == imported["Fn::ImportValue"]
    )
    return str(value["Ref"] if "Ref" in value else value["Fn::GetAtt"][0])
