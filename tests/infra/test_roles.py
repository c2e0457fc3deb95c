"""Who may do what in a stage: a matrix of roles, their policies evaluated with all conditions and the boundary."""

import re

import pytest

from infra.stages import Stage, Team
from jobs.contract.artifact import artifact_prefix
from tests.support.infra.deployed_roles import ACCOUNT, REGION, DeployedStage
from tests.support.infra.synthesis import resources, stacks_of

PEOPLE = "arn:aws:iam::123456789012:role/people"
TEAMS = tuple(Team(name=name, huggingface_token=True, member_principals=(PEOPLE,)) for name in ("research", "product"))
ROW = Stage(name="test", teams=TEAMS, max_multinode_nodes=2, max_on_demand_nodes=2, own_kms_key=True)
JOBS, MEMBERS, AGENT, INSTANCES = (
    ("jobs", "Teamresearch"),
    ("jobs", "Membersresearch"),
    ("jobs", "Executionresearch"),
    ("compute", "isolatedresearchInstanceRole"),
)
ALL = (JOBS, MEMBERS, AGENT, INSTANCES)
PEOPLES_OR_JOBS = (JOBS, MEMBERS)
RUN = "research/a-run"


@pytest.fixture(scope="module")
def stage() -> DeployedStage:
    return DeployedStage(ROW.name, stacks_of(ROW))


def bucket(stage: DeployedStage, name: str) -> str:
    return stage.arn("storage", stage.only("storage", "AWS::S3::Bucket", name))


@pytest.mark.parametrize(
    ("name", "key", "actions", "able"),
    [
        ("Data", "shared/models/minilm/config.json", "Get", PEOPLES_OR_JOBS),
        ("Data", "research/reviews/train.jsonl", "Get", PEOPLES_OR_JOBS),
        ("Data", "research/reviews/train.jsonl", "Put Delete", (MEMBERS,)),
        ("Data", "shared/x", "Put Delete", ()),
        ("Runs", f"{RUN}/checkpoints/step-1/manifest.json", "Get", PEOPLES_OR_JOBS),
        ("Runs", f"{RUN}/checkpoints/step-1/manifest.json", "Put Delete", (JOBS,)),
        ("Runs", f"{RUN}/receipt.json", "Put Delete", (JOBS,)),
        ("Runs", f"{RUN}/spec.yaml", "Put", PEOPLES_OR_JOBS),
        ("Runs", f"{artifact_prefix('research', 'corpus', '0' * 64)}shard-00000.txt", "Get", PEOPLES_OR_JOBS),
        ("Runs", f"{artifact_prefix('research', 'corpus', '0' * 64)}shard-00000.txt", "Put", (JOBS,)),
        *(
            (name, key, "Get Put Delete", ())
            for name in ("Data", "Runs")
            for key in ("product/a-run/model/model.safetensors", "product/a-run/spec.yaml", "research-2/x", "x")
        ),
    ],
)
def test_who_gets_at_files(
    stage: DeployedStage, name: str, key: str, actions: str, able: tuple[tuple[str, str], ...]
) -> None:
    arn = f"{bucket(stage, name)}/{key}"
    for action in actions.split():
        assert [role for role in ALL if stage.role(*role).may(f"s3:{action}Object", arn)] == list(able), action


@pytest.mark.parametrize("role", PEOPLES_OR_JOBS)
def test_nobody_of_a_team_lists_another_teams_files_or_changes_a_bucket(
    stage: DeployedStage, role: tuple[str, str]
) -> None:
    may = stage.role(*role).may
    for name in ("Data", "Runs"):
        arn = bucket(stage, name)
        assert may("s3:ListBucket", arn, s3_prefix="research/a-run/checkpoints/")
        for prefix in ("product/", "product/a-run/", "research-2/", "", "p", "research"):
            assert not may("s3:ListBucket", arn, s3_prefix=prefix)
        assert not may("s3:ListBucket", arn)
        for action in ("PutBucketPolicy", "DeleteBucket", "PutLifecycleConfiguration", "PutBucketVersioning"):
            assert not may(f"s3:{action}", arn)
        for action in ("GetObjectVersion", "DeleteObjectVersion"):
            assert not may(f"s3:{action}", f"{arn}/{RUN}/spec.yaml")
    assert stage.role(*JOBS).may("s3:PutObjectTagging", f"{bucket(stage, 'Runs')}/{RUN}/x")


@pytest.mark.parametrize("role", PEOPLES_OR_JOBS)
def test_the_key_is_used_through_s3_and_for_the_two_buckets_only(stage: DeployedStage, role: tuple[str, str]) -> None:
    key = stage.arn("storage", stage.only("storage", "AWS::KMS::Key"))

    def may(action: str, via: str, name: str) -> bool:
        context = {"kms:ViaService": f"{via}.{REGION}.amazonaws.com"}
        context["kms:EncryptionContext:aws:s3:arn"] = bucket(stage, name)
        return stage.role(*role).decide_in(action, key, context) == "allowed"

    for action in ("kms:Decrypt", "kms:GenerateDataKey"):
        assert may(action, "s3", "Data")
        assert may(action, "s3", "Runs")
        assert not may(action, "s3", "AccessLogs")
        assert not may(action, "secretsmanager", "Data")
        assert not stage.role(*role).may(action, key)
    for action in ("kms:PutKeyPolicy", "kms:CreateGrant", "kms:ScheduleKeyDeletion"):
        assert not may(action, "s3", "Data")


def test_only_the_agent_that_starts_a_teams_jobs_reads_its_secret(stage: DeployedStage) -> None:
    secrets = {team.name: stage.published(f"huggingface-secret/{team.name}") for team in TEAMS}
    readers = {
        (role.logical_id.rstrip("0123456789ABCDEF"), team)
        for role in stage.roles
        for team, secret in secrets.items()
        if role.may("secretsmanager:GetSecretValue", secret)
    }
    assert readers == {("Executionresearch", "research"), ("Executionproduct", "product")}
    key = stage.arn("storage", stage.only("storage", "AWS::KMS::Key"))
    for team, decision in (("research", "allowed"), ("product", "implicitly denied")):
        context = {
            "kms:ViaService": f"secretsmanager.{REGION}.amazonaws.com",
            "kms:EncryptionContext:SecretARN": secrets[team],
        }
        assert stage.role(*AGENT).decide_in("kms:Decrypt", key, context) == decision


def test_the_agent_pulls_and_logs_for_its_team(stage: DeployedStage) -> None:
    agent = stage.role(*AGENT)
    repositories = [stage.arn("image", name) for name in resources(stacks_of(ROW)["image"], "AWS::ECR::Repository")]
    pulled = [name for name in repositories if agent.may("ecr:BatchGetImage", name)]
    # Those that its kinds run in; none runs in a child of the CPU image.
    assert len(pulled) < len(repositories)
    for image in ("Cpu", "Gaudi", "GaudiNotebook"):
        assert any(re.search(rf"-{image}[0-9A-F]{{8}}-", name) for name in pulled), image
    assert not any(agent.may("ecr:PutImage", name) for name in repositories)
    group = stage.arn("jobs", stage.only("jobs", "AWS::Logs::LogGroup")).removesuffix(":*")
    for action in ("logs:CreateLogStream", "logs:PutLogEvents"):
        assert agent.may(action, f"{group}:log-stream:research/finetune-classification/main/1")
        assert not agent.may(action, f"{group}:log-stream:product/finetune-classification/main/1")


def test_instances_join_clusters_and_become_nobody(stage: DeployedStage) -> None:
    instance = stage.role(*INSTANCES)
    assert instance.may("ecs:RegisterContainerInstance", f"arn:aws:ecs:{REGION}:{ACCOUNT}:cluster/x")
    assert not instance.may("sts:AssumeRole", stage.role(*JOBS).arn)
    assert not instance.may("s3:ListBucket", bucket(stage, "Data"))


def test_only_ecs_becomes_the_roles_of_jobs_and_only_a_teams_people_its_members(stage: DeployedStage) -> None:
    for role in (JOBS, AGENT):
        (statement,) = stage.role(*role).trust["Statement"]
        assert statement["Principal"] == {"Service": "ecs-tasks.amazonaws.com"}
        assert statement["Condition"] == {
            "StringEquals": {"aws:SourceAccount": ACCOUNT},
            "ArnLike": {"aws:SourceArn": f"arn:aws:ecs:{REGION}:{ACCOUNT}:*"},
        }
    (statement,) = stage.role(*MEMBERS).trust["Statement"]
    assert (statement["Action"], statement["Principal"]) == ("sts:AssumeRole", {"AWS": PEOPLE})
    assert stage.published("member-role/research") == stage.role(*MEMBERS).arn
