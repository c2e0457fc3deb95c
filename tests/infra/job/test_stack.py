"""Job definitions of every team and kind, on the template: what runs, with which rights, where it logs."""

import json
from typing import Any

import pytest

from infra.settings import STAGES, TEAMS
from infra.stages import Stage, Team
from jobs.contract.catalog import CATALOG
from jobs.contract.releases import release
from jobs.contract.retries import RETRY_RULES
from jobs.contract.stage import DeployedStage, job_definition_parameter
from jobs.contract.submit_job import CONTAINER_NAME
from tests.support.infra.synthesis import Templates, flatten, resources, stacks_of

Properties = dict[str, Any]
DEFINITION = "Jobresearchfinetuneclassification"
FULL = Stage(
    name="test",
    teams=(
        Team(name="research", huggingface_token=True, secret_variables=("WANDB_API_KEY", "MLFLOW_TRACKING_URI")),
        Team(name="product"),
    ),
    max_multinode_nodes=4,
    region="us-east-1",
    fsx_gib=1_200,
)


@pytest.fixture(scope="module")
def full() -> Templates:
    return stacks_of(FULL)


@pytest.fixture(scope="module")
def definitions(full: Templates) -> dict[str, Properties]:
    return resources(full["jobs"], "AWS::Batch::JobDefinition")


def logical_id(team: str, kind: str) -> str:
    return f"Job{team}{kind.replace('-', '')}"


def task_of(definition: Properties) -> Properties:
    (place,) = definition.get("NodeProperties", {}).get("NodeRangeProperties", [definition])
    (task,) = place["EcsProperties"]["TaskProperties"]
    return dict(task)


def container_of(definition: Properties) -> Properties:
    (container,) = task_of(definition)["Containers"]
    return dict(container)


def published(template: Properties) -> dict[str, Any]:
    return {item["Name"]: item["Value"] for item in resources(template, "AWS::SSM::Parameter").values()}


def asked(definition: Properties) -> dict[str, str]:
    return {item["Type"]: item["Value"] for item in container_of(definition)["ResourceRequirements"]}


def test_each_team_has_a_definition_of_each_kind_and_the_command_line_finds_it(templates: Templates) -> None:
    jobs = templates["dev/jobs"]
    found = {name: value["Ref"] for name, value in published(jobs).items() if "/job-definition/" in name}
    assert found == {
        f"/trainyard/dev/job-definition/{team.name}/{kind}": logical_id(team.name, kind)
        for team in TEAMS
        for kind in CATALOG
    }
    assert set(found.values()) == set(resources(jobs, "AWS::Batch::JobDefinition"))


def test_what_the_stacks_publish_is_what_a_submission_reads(templates: Templates) -> None:
    parameters = {
        name.removeprefix("/trainyard/dev/"): value if isinstance(value, str) else json.dumps(value)
        for path, template in templates.items()
        for name, value in published(template).items()
        if path.startswith("dev/")
    }
    stage = DeployedStage.from_parameters("dev", parameters)
    assert set(stage.queues) == {"spot@research", "cpu-spot@research", "spot@product", "cpu-spot@product"}
    assert stage.teams == ("product", "research")
    assert stage.instance_type.name == STAGES["dev"].instance_type


def test_all_definitions_have_in_common_what_batch_and_a_submission_want(definitions: dict[str, Properties]) -> None:
    for name, definition in definitions.items():
        container = container_of(definition)
        assert definition["PlatformCapabilities"] == ["EC2"]
        # Trap: containerProperties knows no ipcMode, and a submission overrides ecsProperties by the container's name.
        assert "ContainerProperties" not in definition
        assert (container["Name"], container["Essential"]) == (CONTAINER_NAME, True)
        # Submitted as it is, it does no harm.
        assert container["Command"] == ["python", "-m", "jobs.train.launch", "--help"]
        # Trap: what no rule matches is started again, so the last rules must match everything.
        rules = [
            {key[0].lower() + key[1:]: value for key, value in rule.items()}
            for rule in definition["RetryStrategy"]["EvaluateOnExit"]
        ]
        assert rules == [dict(rule) for rule in RETRY_RULES]
        assert definition["RetryStrategy"]["Attempts"] == 3
        # Trap: CloudFormation deregisters the old revision at each change, and its waiting jobs fail.
        assert definition["ResourceRetentionPolicy"] == {"SkipDeregisterOnUpdate": True}
        assert "JobDefinitionName" not in definition
        assert (definition["SchedulingPriority"], definition["PropagateTags"]) == (1, True)
        assert not {"Privileged", "Environment"} & container.keys()
        assert container["LinuxParameters"]["InitProcessEnabled"] is True
        assert len(json.dumps(definition)) < 24 * 1024
        team = "research" if name.startswith("Jobresearch") else "product"
        tags = {"trainyard:project": "trainyard", "trainyard:stage": "test", "trainyard:team": team}
        assert definition["Tags"] == tags
        roles = (task_of(definition)[f"{kind}RoleArn"]["Fn::GetAtt"][0] for kind in ("Task", "Execution"))
        assert [role.rstrip("0123456789ABCDEF") for role in roles] == [f"Team{team}", f"Execution{team}"]


@pytest.mark.parametrize("kind", CATALOG.values(), ids=list(CATALOG))
def test_a_kind_fills_its_instances_and_ends_in_its_time(definitions: dict[str, Properties], kind: Any) -> None:
    definition = definitions[logical_id("research", kind.name)]
    container = container_of(definition)
    assert definition["Timeout"] == {"AttemptDurationSeconds": kind.timeout_hours * 3600}
    mounts = [item["ContainerPath"] for item in container.get("MountPoints", [])]
    if kind.accelerated:
        # Trap: there is no resource for HPUs, and asking for all 768 GiB leaves a job waiting for ever.
        assert asked(definition) == {"VCPU": "96", "MEMORY": "760000"}
        # HCCL wants the host's IPC namespace, and memory that may be pinned.
        assert task_of(definition)["IpcMode"] == "host"
        assert container["Ulimits"] == [{"Name": "memlock", "SoftLimit": -1, "HardLimit": -1}]
        assert "SharedMemorySize" not in container["LinuxParameters"]
        assert mounts == ["/fsx", "/scratch"]
    else:
        assert asked(definition) == {"VCPU": "16", "MEMORY": "60000"}
        assert container["LinuxParameters"]["SharedMemorySize"] == 15_000
        assert ("IpcMode" in task_of(definition), "Ulimits" in container, mounts) == (False, False, [])


def test_logs_go_to_the_stages_group(full: Templates, definitions: dict[str, Properties]) -> None:
    (group,) = resources(full["jobs"], "AWS::Logs::LogGroup")
    assert container_of(definitions[DEFINITION])["LogConfiguration"] == {
        "LogDriver": "awslogs",
        "Options": {
            "awslogs-group": {"Ref": group},
            "awslogs-region": "us-east-1",
            "awslogs-stream-prefix": "research/finetune-classification",
        },
    }
    assert published(full["jobs"])["/trainyard/test/log-group"] == {"Ref": group}


@pytest.mark.parametrize(
    ("settings", "image"),
    [
        ({}, f"</trainyard/test/image/gaudi/{release().name}>"),
        ({"image_tag": "1.21.0-0123456789ab"}, "</trainyard/test/image-repository/gaudi>:1.21.0-0123456789ab"),
    ],
)
def test_jobs_run_what_was_pushed_last_for_the_release_or_a_tag(settings: dict[str, str], image: str) -> None:
    template = stacks_of(Stage(name="test", teams=(Team(name="research"),), **settings))["jobs"]  # type: ignore[arg-type]
    found = resources(template, "AWS::Batch::JobDefinition")

    def image_of(definition: Properties) -> str:
        said = flatten(container_of(definition)["Image"])
        for name, item in template["Parameters"].items():
            # A value in the template, or an export, would stay what it was when it was deployed.
            assert item["Type"].startswith("AWS::SSM::Parameter::Value") or name == "BootstrapVersion"
            said = said.replace(f"<{name}>", f"<{item.get('Default')}>")
        return said

    assert image_of(found[DEFINITION]) == image
    assert image_of(found["Jobresearchnotebook"]) == image.replace("gaudi", "gaudi-notebook")
    # What a submission compares with what was pushed since.
    names = published(template)
    assert names["/trainyard/test/job-image/finetune-classification"] == container_of(found[DEFINITION])["Image"]
    assert names.get("/trainyard/test/image-tag") == settings.get("image_tag")


def test_jobs_write_to_their_instances_own_disks_and_read_shared_data(
    full: Templates, definitions: dict[str, Properties]
) -> None:
    task = task_of(definitions[DEFINITION])
    mounts = {
        item["SourceVolume"]: (item["ContainerPath"], item["ReadOnly"]) for item in task["Containers"][0]["MountPoints"]
    }
    assert mounts == {"shared-data": ("/fsx", True), "scratch": ("/scratch", False)}
    # Trap: the host's /scratch holds Docker's images, which a container with it could change, and what jobs of other
    # teams left there. Without a path Docker makes a new volume for each job, on the same disks.
    assert task["Volumes"] == [{"Name": "shared-data", "Host": {"SourcePath": "/fsx"}}, {"Name": "scratch"}]
    assert published(full["storage"])["/trainyard/test/shared-data-mount"] == "/fsx"


def test_several_nodes_are_one_open_range_that_shares_all_else_with_one_node(
    full: Templates, definitions: dict[str, Properties], templates: Templates
) -> None:
    one, several = definitions[DEFINITION], definitions[f"{DEFINITION}multinode"]
    own = {"Type", "EcsProperties", "NodeProperties"}
    assert {name: several[name] for name in several.keys() - own} == {name: one[name] for name in one.keys() - own}
    assert (one["Type"], several["Type"]) == ("container", "multinode")
    # Trap: with a range that ends (CDK renders `0:1`), a submission could not name another number of nodes.
    nodes = several["NodeProperties"]
    assert (nodes["NumNodes"], nodes["MainNode"], nodes["NodeRangeProperties"][0]["TargetNodes"]) == (2, 0, "0:")
    # Trap: the accelerator's container runtime does not hand on EFA's devices.
    task = json.loads(json.dumps(task_of(several)))
    assert task["Containers"][0]["LinuxParameters"].pop("Devices") == [
        {"HostPath": path, "ContainerPath": path, "Permissions": ["READ", "WRITE", "MKNOD"]}
        for path in (f"/dev/infiniband/uverbs{index}" for index in range(4))
    ]
    assert task == task_of(one)
    # It is published, for kinds of several processes, if the stage has capacity for it.
    name = job_definition_parameter("research", "finetune-classification", several_nodes=True)
    assert published(full["jobs"])[f"/trainyard/test/{name}"] == {"Ref": f"{DEFINITION}multinode"}
    assert f"/trainyard/dev/{name}" not in published(templates["dev/jobs"])
    assert "Jobresearchnotebookmultinode" not in definitions


def test_gpus_are_asked_for_by_their_number(variants: Templates) -> None:
    # Unlike HPUs they are a resource of Batch's: without asking, a container sees none.
    for stage, gpus in (("g5-4xlarge", "1"), ("p4d-24xlarge", "8")):
        definition = resources(variants[f"{stage}/jobs"], "AWS::Batch::JobDefinition")[DEFINITION]
        assert asked(definition)["GPU"] == gpus


def test_secrets_reach_the_teams_own_jobs_and_are_nowhere_in_a_template(
    full: Templates, definitions: dict[str, Properties]
) -> None:
    token, *variables = container_of(definitions[DEFINITION])["Secrets"]
    parameters = full["jobs"]["Parameters"]
    assert token["Name"] == "HF_TOKEN"
    assert parameters[token["ValueFrom"]["Ref"]]["Default"] == "/trainyard/test/huggingface-secret/research"
    for secret, name in zip(variables, ("WANDB_API_KEY", "MLFLOW_TRACKING_URI"), strict=True):
        # ECS takes the one key out of the object: `ARN:json-key:version-stage:version-id`.
        [_, [arn, rest]] = secret["ValueFrom"]["Fn::Join"]
        assert (secret["Name"], rest) == (name, f":{name}::")
        assert parameters[arn["Ref"]]["Default"] == "/trainyard/test/variables-secret/research"
    assert "Secrets" not in container_of(definitions["Jobproductfinetuneclassification"])
    names = published(full["storage"])
    assert names["/trainyard/test/secret-variables/research"] == "WANDB_API_KEY MLFLOW_TRACKING_URI"
    made = [item for item in full["storage"]["Resources"].values() if item["Type"] == "AWS::SecretsManager::Secret"]
    assert len(made) == 2
    for secret in made:
        # Made without a value, and kept whatever happens to the stack.
        assert not {"SecretString", "GenerateSecretString", "Name", "KmsKeyId"} & secret["Properties"].keys()
        assert (secret["DeletionPolicy"], secret["UpdateReplacePolicy"]) == ("Retain", "Retain")
        assert {"Key": "trainyard:team", "Value": "research"} in secret["Properties"]["Tags"]
        # How to put one in, so that it shows neither in a process list nor in a history.
        assert "put-secret-value --secret-string file:///dev/stdin" in secret["Properties"]["Description"]
    # An export that a definition imports could not be taken back: the secrets' ARNs go by SSM.
    assert not any("Secret" in name or "HuggingFace" in name for name in full["storage"].get("Outputs", {}))


def test_secrets_have_the_stages_own_key_if_there_is_one(variants: Templates) -> None:
    storage = variants["all/storage"]
    (key,) = resources(storage, "AWS::KMS::Key")
    for secret in resources(storage, "AWS::SecretsManager::Secret").values():
        assert secret["KmsKeyId"] == {"Fn::GetAtt": [key, "Arn"]}
