"""Job definitions of every team and kind, on the template: what runs, with which rights, where it logs."""

import json
from pathlib import Path
from typing import Any

import aws_cdk as cdk
import pytest

from infra.image.stack import ImageStack
from infra.job.stack import JobStack
from infra.network.stack import NetworkStack
from infra.settings import STAGES, TEAMS
from infra.stages import Stage, Team
from infra.storage.stack import StorageStack
from jobs.contract.catalog import CATALOG
from jobs.contract.instance_types import instance_type
from jobs.contract.job_kind import JobKind
from jobs.contract.releases import release
from jobs.contract.retries import RETRY_RULES
from jobs.contract.stage import DeployedStage
from jobs.contract.submit_job import CONTAINER_NAME
from tests.support.infra.job_definitions import container_of, logical_id, logical_ids, logical_ids_with_several_nodes
from tests.support.infra.synthesis import Templates, flatten, new_app, read_assembly, resources

MAX_DEFINITION_BYTES = 24 * 1024
"""AWS Batch's limit."""


@pytest.fixture(scope="module")
def jobs(templates: Templates) -> dict[str, Any]:
    return templates["dev/jobs"]


@pytest.fixture(scope="module")
def definitions(jobs: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return resources(jobs, "AWS::Batch::JobDefinition")


@pytest.fixture(scope="module")
def container(definitions: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return container_of(definitions["Jobresearchfinetuneclassification"])


def test_each_team_has_a_definition_of_each_kind_and_the_command_line_finds_it(jobs: dict[str, Any]) -> None:
    published = {
        item["Name"]: item["Value"]
        for item in resources(jobs, "AWS::SSM::Parameter").values()
        if "/job-definition/" in item["Name"]
    }
    assert set(published) == {f"/trainyard/dev/job-definition/{team.name}/{kind}" for team in TEAMS for kind in CATALOG}
    referenced = {value["Ref"] for value in published.values()}
    assert referenced == set(resources(jobs, "AWS::Batch::JobDefinition"))


def test_what_the_stacks_publish_is_what_a_submission_reads(templates: Templates) -> None:
    prefix = "/trainyard/dev/"
    parameters = {
        item["Name"].removeprefix(prefix): item["Value"] if isinstance(item["Value"], str) else json.dumps(item)
        for path, template in templates.items()
        for item in resources(template, "AWS::SSM::Parameter").values()
        if path.startswith("dev/")
    }
    stage = DeployedStage.from_parameters("dev", parameters)
    assert set(stage.queues) == {"spot@research", "cpu-spot@research", "spot@product", "cpu-spot@product"}
    assert stage.teams == ("product", "research")
    assert stage.instance_type.name == STAGES["dev"].instance_type


def test_definitions_say_ecs_properties_with_the_container_that_an_override_names(
    definitions: dict[str, dict[str, Any]],
) -> None:
    # Trap: containerProperties knows no ipcMode, and a submission overrides ecsProperties by the container's name.
    for definition in definitions.values():
        assert definition["Type"] == "container"
        assert definition["PlatformCapabilities"] == ["EC2"]
        assert "ContainerProperties" not in definition
        assert container_of(definition)["Name"] == CONTAINER_NAME
        assert container_of(definition)["Essential"] is True


def test_hccl_gets_the_hosts_ipc_namespace_and_memory_that_may_be_pinned(
    definitions: dict[str, dict[str, Any]], container: dict[str, Any]
) -> None:
    for name in logical_ids(accelerated=True):
        (task,) = definitions[name]["EcsProperties"]["TaskProperties"]
        assert task["IpcMode"] == "host"
    assert container["Ulimits"] == [{"Name": "memlock", "SoftLimit": -1, "HardLimit": -1}]


def test_one_job_owns_the_node(container: dict[str, Any]) -> None:
    # Trap: there is no resource type for HPUs, and asking for all 768 GiB leaves a job waiting for ever.
    row = instance_type("dl1.24xlarge")
    asked = {item["Type"]: int(item["Value"]) for item in container["ResourceRequirements"]}
    assert asked == {"VCPU": 96, "MEMORY": 760_000}
    assert asked["VCPU"] == row.vcpus
    assert row.memory_mib / 2 < asked["MEMORY"] < row.memory_mib


def test_containers_get_no_more_rights_and_no_more_environment_than_they_need(
    definitions: dict[str, dict[str, Any]],
) -> None:
    for name, definition in definitions.items():
        container = container_of(definition)
        assert not {"Privileged", "Environment", "Secrets"} & container.keys()
        wanted = {"InitProcessEnabled"} | ({"SharedMemorySize"} if name in logical_ids(accelerated=False) else set())
        assert container["LinuxParameters"].keys() == wanted
        assert container["LinuxParameters"]["InitProcessEnabled"] is True


def test_a_definition_does_no_harm_when_submitted_as_it_is(container: dict[str, Any]) -> None:
    assert container["Command"] == ["python", "-m", "jobs.train.launch", "--help"]


def test_retries_are_those_of_a_submission(definitions: dict[str, dict[str, Any]]) -> None:
    # Trap: what no rule matches is started again, so the last rules must match everything.
    for definition in definitions.values():
        rules = [
            {key[0].lower() + key[1:]: value for key, value in rule.items()}
            for rule in definition["RetryStrategy"]["EvaluateOnExit"]
        ]
        assert rules == [dict(rule) for rule in RETRY_RULES]
        assert len(rules) <= 5
        assert definition["RetryStrategy"]["Attempts"] == 3


def test_the_timeout_is_the_kinds(definitions: dict[str, dict[str, Any]]) -> None:
    for kind in CATALOG.values():
        definition = definitions[logical_id(kind)]
        assert definition["Timeout"] == {"AttemptDurationSeconds": kind.timeout_hours * 3600}


def test_old_revisions_stay(definitions: dict[str, dict[str, Any]]) -> None:
    # Trap: CloudFormation deregisters the old revision at each change, and its waiting jobs fail.
    for definition in definitions.values():
        assert definition["ResourceRetentionPolicy"] == {"SkipDeregisterOnUpdate": True}
        assert "JobDefinitionName" not in definition


def test_fair_share_gets_a_priority_and_tags_reach_the_task(definitions: dict[str, dict[str, Any]]) -> None:
    for definition in definitions.values():
        assert definition["SchedulingPriority"] == 1
        assert definition["PropagateTags"] is True
    tags = definitions["Jobproductfinetuneclassification"]["Tags"]
    assert tags == {"trainyard:project": "trainyard", "trainyard:stage": "dev", "trainyard:team": "product"}


def test_definitions_fit_batchs_limit(definitions: dict[str, dict[str, Any]]) -> None:
    for definition in definitions.values():
        assert len(json.dumps(definition)) < MAX_DEFINITION_BYTES


def test_logs_go_to_the_stages_group(jobs: dict[str, Any], container: dict[str, Any]) -> None:
    (group,) = resources(jobs, "AWS::Logs::LogGroup")
    assert container["LogConfiguration"] == {
        "LogDriver": "awslogs",
        "Options": {
            "awslogs-group": {"Ref": group},
            "awslogs-region": {"Ref": "AWS::Region"},
            "awslogs-stream-prefix": "research/finetune-classification",
        },
    }
    (published,) = (
        item["Value"]
        for item in resources(jobs, "AWS::SSM::Parameter").values()
        if item["Name"] == "/trainyard/dev/log-group"
    )
    assert published == {"Ref": group}


def image_of(template: dict[str, Any], definition: dict[str, Any]) -> str:
    """Return the image of a definition's container, with the names of SSM parameters in place of CloudFormation's."""
    image = flatten(container_of(definition)["Image"])
    for name, item in template["Parameters"].items():
        image = image.replace(f"<{name}>", f"<{item.get('Default')}>")
    return image


@pytest.mark.parametrize(
    ("settings", "image"),
    [
        ({}, f"</trainyard/test/image/gaudi/{release().name}>"),
        ({"release": "1.20.0"}, "</trainyard/test/image/gaudi/1.20.0>"),
        ({"image_tag": "1.21.0-0123456789ab"}, "</trainyard/test/image-repository/gaudi>:1.21.0-0123456789ab"),
    ],
)
def test_jobs_run_what_was_pushed_last_for_the_release_or_a_tag(
    synthesised: Any, settings: dict[str, str], image: str
) -> None:
    template = synthesised(**settings)["jobs"]
    definitions = resources(template, "AWS::Batch::JobDefinition")
    assert image_of(template, definitions["Jobresearchfinetuneclassification"]) == image
    assert image_of(template, definitions["Jobresearchnotebook"]) == image.replace("gaudi", "gaudi-notebook")
    # What a submission compares with what was pushed since.
    published = {item["Name"]: item["Value"] for item in resources(template, "AWS::SSM::Parameter").values()}
    container = container_of(definitions["Jobresearchfinetuneclassification"])
    assert published["/trainyard/test/job-image/finetune-classification"] == container["Image"]
    assert published.get("/trainyard/test/image-tag") == settings.get("image_tag")


def test_a_deployment_after_a_push_reads_the_image_anew(jobs: dict[str, Any]) -> None:
    # A value in the template, or an export of another stack, would stay what it was at that stack's deployment.
    read = {item["Default"]: item["Type"] for item in jobs["Parameters"].values() if "/image/" in item["Default"]}
    assert set(read.values()) == {"AWS::SSM::Parameter::Value<String>"}
    assert any("gaudi-notebook" in name for name in read)


def test_cpu_kinds_run_the_cpu_image_on_cpu_instances_with_shared_memory(tmp_path: Path) -> None:
    # GIVEN a kind that needs no accelerator
    kind = JobKind(
        name="build-corpus",
        summary="",
        entrypoint="json",
        arguments=CATALOG["finetune-classification"].arguments,
        accelerated=False,
        timeout_hours=2.5,
    )
    row = Stage(name="test", teams=(Team(name="research"),), max_multinode_nodes=2, fsx_gib=1_200)
    app = new_app(tmp_path)
    scope = cdk.Stage(app, "test")
    storage = StorageStack(scope, stage=row, network=NetworkStack(scope, stage=row))
    # WHEN the job stack is made from a catalog that has it
    JobStack(
        scope,
        stage=row,
        storage=storage,
        image=ImageStack(scope, stage=row, storage=storage),
        catalog={**CATALOG, kind.name: kind},
    )
    app.synth()
    template = read_assembly(tmp_path)["test/jobs"]
    definitions = resources(template, "AWS::Batch::JobDefinition")
    # THEN it follows from the row of the CPU instance type, and has no definition for several nodes
    assert set(definitions) == {"Jobresearchbuildcorpus", *logical_ids_with_several_nodes()}
    definition = definitions["Jobresearchbuildcorpus"]
    (task,) = definition["EcsProperties"]["TaskProperties"]
    assert "IpcMode" not in task
    container = container_of(definition)
    assert image_of(template, definition) == f"</trainyard/test/image/cpu/{release().name}>"
    assert {item["Type"]: item["Value"] for item in container["ResourceRequirements"]} == {
        "VCPU": "16",
        "MEMORY": "60000",
    }
    assert container["LinuxParameters"]["SharedMemorySize"] == 15_000
    assert not {"Ulimits", "MountPoints"} & container.keys()
    assert "Volumes" not in task
    assert definition["Timeout"] == {"AttemptDurationSeconds": 9000}


def test_definitions_run_under_their_own_teams_role(definitions: dict[str, dict[str, Any]]) -> None:
    roles = {
        name: definition["EcsProperties"]["TaskProperties"][0]["TaskRoleArn"]["Fn::GetAtt"][0]
        for name, definition in definitions.items()
    }
    assert roles["Jobresearchfinetuneclassification"].startswith("Teamresearch")
    assert roles["Jobproductfinetuneclassification"].startswith("Teamproduct")


def test_roles_are_for_tasks_of_this_account(jobs: dict[str, Any]) -> None:
    for role in resources(jobs, "AWS::IAM::Role").values():
        (statement,) = role["AssumeRolePolicyDocument"]["Statement"]
        assert statement["Principal"] == {"Service": "ecs-tasks.amazonaws.com"}
        assert statement["Condition"]["StringEquals"] == {"aws:SourceAccount": {"Ref": "AWS::AccountId"}}
        assert flatten(statement["Condition"]["ArnLike"]["aws:SourceArn"]).endswith(":<AWS::AccountId>:*")


@pytest.mark.parametrize(("instance_type", "gpus"), [("g5.4xlarge", "1"), ("g6e.48xlarge", "8")])
def test_gpus_are_asked_for_by_their_number(synthesised: Any, instance_type: str, gpus: str) -> None:
    # Unlike HPUs they are a resource of Batch's: without asking, a container sees none.
    jobs = synthesised(instance_type=instance_type, machine_image=None)["jobs"]
    container = container_of(resources(jobs, "AWS::Batch::JobDefinition")["Jobresearchfinetuneclassification"])
    asked = {item["Type"]: item["Value"] for item in container["ResourceRequirements"]}
    assert asked["GPU"] == gpus
    assert "Environment" not in container


def test_shared_data_is_mounted_read_only_where_the_stage_has_a_file_system(synthesised: Any) -> None:
    stacks = synthesised(fsx_gib=1_200, instance_type="g5.4xlarge", machine_image=None)
    definition = resources(stacks["jobs"], "AWS::Batch::JobDefinition")["Jobresearchfinetuneclassification"]
    (task,) = definition["EcsProperties"]["TaskProperties"]
    (volume,) = (item for item in task["Volumes"] if item.get("Host") == {"SourcePath": "/fsx"})
    (mount,) = (item for item in task["Containers"][0]["MountPoints"] if item["SourceVolume"] == volume["Name"])
    assert mount == {"SourceVolume": volume["Name"], "ContainerPath": "/fsx", "ReadOnly": True}
    announced = {item["Name"]: item["Value"] for item in resources(stacks["storage"], "AWS::SSM::Parameter").values()}
    assert announced["/trainyard/test/shared-data-mount"] == mount["ContainerPath"]
    without = synthesised(instance_type="g5.4xlarge", machine_image=None)["jobs"]
    definition = resources(without, "AWS::Batch::JobDefinition")["Jobresearchfinetuneclassification"]
    (task,) = definition["EcsProperties"]["TaskProperties"]
    assert {"SourcePath": "/fsx"} not in [item.get("Host") for item in task.get("Volumes", [])]
    assert "/fsx" not in [item["ContainerPath"] for item in task["Containers"][0].get("MountPoints", [])]


def test_jobs_write_to_their_instances_own_disks_and_see_nothing_else_of_them(synthesised: Any) -> None:
    # GIVEN a type with disks, for jobs of one node and of several
    jobs = synthesised(max_multinode_nodes=2, fsx_gib=1_200)["jobs"]
    definitions = resources(jobs, "AWS::Batch::JobDefinition")
    on_cpus = {logical_id(kind) for kind in CATALOG.values() if not kind.accelerated}  # whose instances have none
    tasks = [
        task
        for name, definition in definitions.items()
        if name not in on_cpus
        for place in (definition, *definition.get("NodeProperties", {}).get("NodeRangeProperties", []))
        for task in place.get("EcsProperties", {}).get("TaskProperties", [])
    ]
    assert len(tasks) == len(logical_ids_with_several_nodes() - on_cpus)
    for task in tasks:
        (mount,) = (item for item in task["Containers"][0]["MountPoints"] if item["ContainerPath"] == "/scratch")
        assert not mount["ReadOnly"]
        (volume,) = (item for item in task["Volumes"] if item["Name"] == mount["SourceVolume"])
        # Trap: the host's /scratch holds Docker's images, which a container with it could change, and what jobs of
        # other teams left there. Without a path Docker makes a new volume for each job, on the same disks.
        assert volume.keys() == {"Name"}
