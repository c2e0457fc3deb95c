import base64
import email
from collections.abc import Callable
from typing import Any

import pytest

from infra.settings import Team
from jobs.instance_types import INSTANCE_TYPES
from tests.infra.synthesis import Templates, only, resources

Synthesised = Callable[..., Templates]

ACCELERATED, CPU = "Accelerated36B3EAF4", "CpuE6EA7902"


@pytest.fixture(scope="module")
def compute(templates: Templates) -> dict[str, Any]:
    return templates["dev/compute"]


@pytest.fixture(scope="module")
def environments(compute: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return resources(compute, "AWS::Batch::ComputeEnvironment")


@pytest.fixture(scope="module")
def launch_templates(compute: dict[str, Any]) -> dict[str, dict[str, Any]]:
    found = resources(compute, "AWS::EC2::LaunchTemplate")
    assert len(found) == 2
    return {name: template["LaunchTemplateData"] for name, template in found.items()}


def test_compute_environments_keep_their_logical_ids(environments: dict[str, dict[str, Any]]) -> None:
    # A new logical id is a new compute environment, and running jobs die with the old one.
    assert set(environments) == {ACCELERATED, CPU}


def test_instances_are_exactly_the_stages_types(environments: dict[str, dict[str, Any]]) -> None:
    # Trap: the L2 adds the "optimal" classes by default, CPU instances among the accelerators.
    types = {name: environment["ComputeResources"]["InstanceTypes"] for name, environment in environments.items()}
    assert types == {ACCELERATED: ["dl1.24xlarge"], CPU: ["m6i.4xlarge"]}


def test_spot_instances_come_and_go_up_to_the_limit(synthesised: Synthesised) -> None:
    compute = synthesised(max_nodes=3, max_cpu_nodes=5)["compute"]
    environments = resources(compute, "AWS::Batch::ComputeEnvironment")
    for name, limit in ((ACCELERATED, 3 * 96), (CPU, 5 * 16)):
        capacity = environments[name]["ComputeResources"]
        assert capacity["Type"] == "SPOT"
        assert capacity["AllocationStrategy"] == "SPOT_PRICE_CAPACITY_OPTIMIZED"
        assert (capacity["MinvCpus"], capacity["MaxvCpus"]) == (0, limit)
        # Traps: a bid below On-Demand only adds reclaims; the fleet role belongs to BEST_FIT; a desired count
        # would be set back at each deployment.
        assert not {"BidPercentage", "SpotIamFleetRole", "DesiredvCpus"} & capacity.keys()


def test_updates_happen_in_place(environments: dict[str, dict[str, Any]]) -> None:
    # Trap: a name, a service role of one's own or ReplaceComputeEnvironment make each change a replacement, which
    # takes the queue's compute environment away under it.
    for environment in environments.values():
        assert environment["ReplaceComputeEnvironment"] is False
        assert not {"ComputeEnvironmentName", "ServiceRole"} & environment.keys()
        assert environment["UpdatePolicy"] == {"TerminateJobsOnUpdate": False, "JobExecutionTimeoutMinutes": 360}
        assert environment["State"] == "ENABLED"


def test_the_launch_template_is_pinned_to_its_newest_version(
    environments: dict[str, dict[str, Any]], launch_templates: dict[str, dict[str, Any]]
) -> None:
    # Trap: without a version Batch takes $Default, which stays the first one for ever.
    pinned = [environment["ComputeResources"]["LaunchTemplate"] for environment in environments.values()]
    assert {item["LaunchTemplateId"]["Ref"] for item in pinned} == set(launch_templates)
    for item in pinned:
        assert item["Version"] == {"Fn::GetAtt": [item["LaunchTemplateId"]["Ref"], "LatestVersionNumber"]}


def test_instances_stand_in_private_subnets_behind_the_job_security_group(
    environments: dict[str, dict[str, Any]], templates: Templates
) -> None:
    network = templates["dev/network"]
    for environment in environments.values():
        capacity = environment["ComputeResources"]
        subnets = {_exported(network, subnet) for subnet in capacity["Subnets"]}
        assert subnets == {name for name in resources(network, "AWS::EC2::Subnet") if "private" in name}
        (group,) = capacity["SecurityGroupIds"]
        assert _exported(network, group) in resources(network, "AWS::EC2::SecurityGroup")


def test_launch_templates_leave_to_batch_what_is_batchs(launch_templates: dict[str, dict[str, Any]]) -> None:
    # Traps: network interfaces would exclude the compute environment's security groups; the rest Batch ignores.
    ignored = {"NetworkInterfaces", "SecurityGroupIds", "InstanceType", "InstanceMarketOptions", "IamInstanceProfile"}
    for data in launch_templates.values():
        assert not ignored & data.keys()


def test_metadata_wants_a_token_and_reaches_no_further_than_the_host(
    launch_templates: dict[str, dict[str, Any]],
) -> None:
    for data in launch_templates.values():
        assert data["MetadataOptions"] == {
            "HttpEndpoint": "enabled",
            "HttpTokens": "required",
            "HttpPutResponseHopLimit": 1,
        }


def test_root_volumes_are_encrypted_and_as_large_as_the_settings_say(synthesised: Synthesised) -> None:
    compute = synthesised(root_volume_gib=700, cpu_root_volume_gib=300, root_device_name="/dev/xvdb")["compute"]
    volumes = {
        name[:3]: template["LaunchTemplateData"]["BlockDeviceMappings"]
        for name, template in resources(compute, "AWS::EC2::LaunchTemplate").items()
    }
    volume = {"VolumeType": "gp3", "Encrypted": True, "DeleteOnTermination": True}
    assert volumes == {
        "Acc": [{"DeviceName": "/dev/xvdb", "Ebs": {**volume, "VolumeSize": 700}}],
        "Cpu": [{"DeviceName": "/dev/xvda", "Ebs": {**volume, "VolumeSize": 300}}],
    }


def test_user_data_is_mime_multipart(launch_templates: dict[str, dict[str, Any]]) -> None:
    # Trap: Batch refuses a bare script, and skips a part whose boundary is followed by a blank line.
    for data in launch_templates.values():
        text = _decoded(data["UserData"])
        message = email.message_from_string(text)
        assert message.get_content_type() == "multipart/mixed"
        boundary = f"--{message.get_boundary()}\n"
        assert boundary in text
        assert boundary + "\n" not in text
        assert [part.get_content_type() for part in _parts(text)] == ["text/x-shellscript"]


def test_the_ecs_agent_gives_jobs_the_notices_time_to_stop(launch_templates: dict[str, dict[str, Any]]) -> None:
    # Traps: 30 s between SIGTERM and SIGKILL, and no draining at a Spot notice, are the agent's defaults.
    for data in launch_templates.values():
        script = _script(data)
        configuration = script.split("<<'CONFIGURATION'\n")[1].split("\nCONFIGURATION")[0]
        values = dict(line.split("=", 1) for line in configuration.splitlines())
        assert 30 < int(values["ECS_CONTAINER_STOP_TIMEOUT"].removesuffix("s")) < 120
        assert values["ECS_ENABLE_SPOT_INSTANCE_DRAINING"] == "true"
        # What Amazon Linux sets by itself and Ubuntu does not; without them a job has no role, or no log.
        assert values["ECS_ENABLE_TASK_IAM_ROLE"] == "true"
        assert values["ECS_ENABLE_TASK_IAM_ROLE_NETWORK_HOST"] == "true"
        assert values["ECS_ENABLE_AWSLOGS_EXECUTIONROLE_OVERRIDE"] == "true"
        assert "awslogs" in values["ECS_AVAILABLE_LOGGING_DRIVERS"]


def test_gaudi_instances_set_huge_pages_aside_and_cpu_instances_do_not(
    launch_templates: dict[str, dict[str, Any]],
) -> None:
    scripts = {name[:3]: _script(data) for name, data in launch_templates.items()}
    assert "vm.nr_hugepages=15000" in scripts["Acc"]
    assert "hugepages" not in scripts["Cpu"]


def test_the_gaudi_ami_is_read_from_its_parameter_at_each_deployment(
    compute: dict[str, Any], environments: dict[str, dict[str, Any]]
) -> None:
    (configuration,) = environments[ACCELERATED]["ComputeResources"]["Ec2Configuration"]
    parameter = compute["Parameters"][configuration["ImageIdOverride"]["Ref"]]
    assert parameter == {
        "Type": "AWS::SSM::Parameter::Value<AWS::EC2::Image::Id>",
        "Default": "/trainyard/machine-image/gaudi",
    }


def test_an_ami_can_be_given_by_id(synthesised: Synthesised) -> None:
    compute = synthesised(machine_image="ami-0123456789abcdef0")["compute"]
    capacity = resources(compute, "AWS::Batch::ComputeEnvironment")[ACCELERATED]["ComputeResources"]
    assert capacity["Ec2Configuration"] == [{"ImageType": "ECS_AL2023", "ImageIdOverride": "ami-0123456789abcdef0"}]


def test_cpu_instances_boot_the_newest_amazon_linux_2023(environments: dict[str, dict[str, Any]]) -> None:
    # Trap: Batch blocks new compute environments on its Amazon Linux 2 AMIs.
    capacity = environments[CPU]["ComputeResources"]
    assert capacity["Ec2Configuration"] == [{"ImageType": "ECS_AL2023"}]
    assert capacity["UpdateToLatestImageVersion"] is True


@pytest.mark.parametrize("name", ["gaudi-spot", "cpu-spot"])
def test_each_queue_feeds_its_own_instances_and_shares_them_fairly(compute: dict[str, Any], name: str) -> None:
    (published,) = (
        item["Value"]["Fn::GetAtt"]
        for item in resources(compute, "AWS::SSM::Parameter").values()
        if item["Name"] == f"/trainyard/dev/queue/{name}"
    )
    logical_id, attribute = published
    assert attribute == "JobQueueArn"
    queue = resources(compute, "AWS::Batch::JobQueue")[logical_id]
    environment = ACCELERATED if name == "gaudi-spot" else CPU
    assert queue["ComputeEnvironmentOrder"] == [
        {"Order": 1, "ComputeEnvironment": {"Fn::GetAtt": [environment, "ComputeEnvironmentArn"]}}
    ]
    assert queue["State"] == "ENABLED"
    assert "JobQueueName" not in queue
    # Trap: a queue that was made without a scheduling policy can never have one.
    (policy,) = resources(compute, "AWS::Batch::SchedulingPolicy")
    assert queue["SchedulingPolicyArn"] == {"Fn::GetAtt": [policy, "Arn"]}


def test_queues_keep_their_logical_ids(compute: dict[str, Any]) -> None:
    # A new logical id is a new queue: waiting jobs are lost.
    assert set(resources(compute, "AWS::Batch::JobQueue")) == {"Queuegaudispot", "Queuecpuspot"}


def test_twice_the_share_is_half_the_weight(synthesised: Synthesised) -> None:
    teams = (Team(name="nlp-core", share=2.0), Team(name="vision"), Team(name="interns", share=0.01))
    compute = synthesised(teams=teams, share_decay_hours=48)["compute"]
    policy = only(compute, "AWS::Batch::SchedulingPolicy")["FairsharePolicy"]
    assert policy["ShareDistribution"] == [
        # Trap: a share identifier takes letters and digits only.
        {"ShareIdentifier": "nlpcore", "WeightFactor": 0.5},
        {"ShareIdentifier": "vision", "WeightFactor": 1},
        {"ShareIdentifier": "interns", "WeightFactor": 100},
    ]
    assert policy["ShareDecaySeconds"] == 48 * 3600


def test_instances_and_volumes_are_tagged(
    environments: dict[str, dict[str, Any]], launch_templates: dict[str, dict[str, Any]]
) -> None:
    tags = {"trainyard:project": "trainyard", "trainyard:stage": "dev"}
    for environment in environments.values():
        assert tags.items() <= environment["ComputeResources"]["Tags"].items()
    for data in launch_templates.values():
        (volume,) = (item for item in data["TagSpecifications"] if item["ResourceType"] == "volume")
        assert {tag["Key"]: tag["Value"] for tag in volume["Tags"]} == tags


def test_the_command_line_finds_the_instance_types(compute: dict[str, Any]) -> None:
    published = {item["Name"]: item["Value"] for item in resources(compute, "AWS::SSM::Parameter").values()}
    assert published["/trainyard/dev/instance-type"] in INSTANCE_TYPES
    assert published["/trainyard/dev/cpu-instance-type"] in INSTANCE_TYPES


def _exported(template: dict[str, Any], imported: dict[str, str]) -> str:
    """Logical id of what `imported` stands for in the template that exports it."""
    (value,) = (
        output["Value"]
        for output in template["Outputs"].values()
        if output["Export"]["Name"] == imported["Fn::ImportValue"]
    )
    return str(value["Ref"] if "Ref" in value else value["Fn::GetAtt"][0])


def _decoded(value: Any) -> str:
    """User data as the instance gets it, once CloudFormation has evaluated the functions in it."""
    return base64.b64decode(_evaluated(value)).decode()


def _evaluated(value: Any) -> str:
    if isinstance(value, str):
        return value
    ((function, argument),) = value.items()
    if function == "Fn::Base64":
        return base64.b64encode(_evaluated(argument).encode()).decode()
    assert function == "Fn::Join"
    separator, parts = argument
    return str(separator).join(_evaluated(part) for part in parts)


def _parts(text: str) -> list[email.message.Message]:
    message = email.message_from_string(text)
    return [part for part in message.walk() if not part.is_multipart()]


def _script(data: dict[str, Any]) -> str:
    (part,) = _parts(_decoded(data["UserData"]))
    payload = part.get_payload(decode=True)
    assert isinstance(payload, bytes)
    return payload.decode()
