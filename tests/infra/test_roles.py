"""Roles of a stage, what they may do and may not: their policies evaluated, with all conditions and the boundary."""

import json
import re

import pytest

from infra.stages import Stage, Team
from jobs.contract.artifact import artifact_prefix
from tests.support.infra.deployed_roles import ACCOUNT, REGION, DeployedStage, Role
from tests.support.infra.synthesis import Templates, resources, stacks_of, templates_of

PEOPLE = "arn:aws:iam::123456789012:role/people"
TEAMS = tuple(Team(name=name, huggingface_token=True, member_principals=(PEOPLE,)) for name in ("research", "product"))
ROW = Stage(name="test", teams=TEAMS, max_multinode_nodes=2, max_on_demand_nodes=2, own_kms_key=True)


@pytest.fixture(scope="module")
def templates() -> Templates:
    return stacks_of(ROW)


@pytest.fixture(scope="module")
def stage(templates: Templates) -> DeployedStage:
    return DeployedStage(ROW.name, templates)


@pytest.fixture(scope="module")
def jobs_of_research(stage: DeployedStage) -> Role:
    return stage.role("jobs", "Teamresearch")


@pytest.fixture(scope="module")
def people_of_research(stage: DeployedStage) -> Role:
    return stage.role("jobs", "Membersresearch")


@pytest.fixture(scope="module")
def data(stage: DeployedStage) -> str:
    return stage.arn("storage", stage.only("storage", "AWS::S3::Bucket", "Data"))


@pytest.fixture(scope="module")
def runs(stage: DeployedStage) -> str:
    return stage.arn("storage", stage.only("storage", "AWS::S3::Bucket", "Runs"))


@pytest.fixture(scope="module")
def key(stage: DeployedStage) -> str:
    return stage.arn("storage", stage.only("storage", "AWS::KMS::Key"))


def secret(stage: DeployedStage, team: str) -> str:
    return stage.published(f"huggingface-secret/{team}")


def test_a_job_reads_what_is_shared_and_reads_and_writes_its_own(jobs_of_research: Role, data: str, runs: str) -> None:
    for key in ("shared/models/minilm/config.json", "research/reviews/train.jsonl"):
        assert jobs_of_research.may("s3:GetObject", f"{data}/{key}")
    assert jobs_of_research.may("s3:ListBucket", data, s3_prefix="shared/models/")
    assert jobs_of_research.may("s3:ListBucket", runs, s3_prefix="research/a-run/checkpoints/")
    for action in ("Get", "Put", "Delete"):
        assert jobs_of_research.may(f"s3:{action}Object", f"{runs}/research/a-run/checkpoints/step-1/manifest.json")
    assert jobs_of_research.may("s3:PutObjectTagging", f"{runs}/research/a-run/checkpoints/step-1/manifest.json")


def test_a_job_makes_and_reads_artifacts_of_its_team_which_its_people_read(
    jobs_of_research: Role, people_of_research: Role, runs: str
) -> None:
    shard = f"{runs}/{artifact_prefix('research', 'corpus', '0' * 64)}shard-00000.txt"
    theirs = f"{runs}/{artifact_prefix('product', 'corpus', '0' * 64)}shard-00000.txt"
    for action in ("s3:GetObject", "s3:PutObject", "s3:AbortMultipartUpload"):
        assert jobs_of_research.may(action, shard)
        assert not jobs_of_research.may(action, theirs)
    assert jobs_of_research.may("s3:ListBucket", runs, s3_prefix=artifact_prefix("research", "corpus", "0" * 64))
    assert people_of_research.may("s3:GetObject", shard)
    assert not people_of_research.may("s3:PutObject", shard)


@pytest.mark.parametrize("role", ["Teamresearch", "Membersresearch"])
@pytest.mark.parametrize("prefix", ["product/", "product/a-run/", "research-2/", "", "p", "research", None])
def test_no_one_of_a_team_lists_what_is_another_teams(
    stage: DeployedStage, data: str, runs: str, role: str, prefix: str | None
) -> None:
    asked = {} if prefix is None else {"s3_prefix": prefix}
    for bucket in (data, runs):
        assert not stage.role("jobs", role).may("s3:ListBucket", bucket, **asked)
        assert not stage.role("jobs", role).may("s3:ListBucketVersions", bucket, **asked)


@pytest.mark.parametrize("role", ["Teamresearch", "Membersresearch"])
@pytest.mark.parametrize("action", ["GetObject", "GetObjectVersion", "PutObject", "DeleteObject", "PutObjectTagging"])
def test_no_one_of_a_team_gets_at_another_teams_files(
    stage: DeployedStage, data: str, runs: str, role: str, action: str
) -> None:
    for bucket in (data, runs):
        for file in ("product/a-run/model/model.safetensors", "product/a-run/spec.yaml", "research-2/x", "x"):
            assert not stage.role("jobs", role).may(f"s3:{action}", f"{bucket}/{file}")


@pytest.mark.parametrize("action", ["PutObject", "DeleteObject"])
def test_jobs_change_no_data_and_people_none_that_others_read(
    jobs_of_research: Role, people_of_research: Role, data: str, action: str
) -> None:
    assert not jobs_of_research.may(f"s3:{action}", f"{data}/research/x")
    assert people_of_research.may(f"s3:{action}", f"{data}/research/x")
    for role in (jobs_of_research, people_of_research):
        assert not role.may(f"s3:{action}", f"{data}/shared/x")


def test_people_read_runs_and_write_the_spec_only(people_of_research: Role, runs: str) -> None:
    assert people_of_research.may("s3:GetObject", f"{runs}/research/a-run/model/model.safetensors")
    assert people_of_research.may("s3:PutObject", f"{runs}/research/a-run/spec.yaml")
    assert not people_of_research.may("s3:PutObject", f"{runs}/research/a-run/receipt.json")
    assert not people_of_research.may("s3:DeleteObject", f"{runs}/research/a-run/model/model.safetensors")


@pytest.mark.parametrize("role", ["Teamresearch", "Membersresearch"])
def test_no_role_of_a_team_changes_a_bucket_or_what_versions_keep(
    stage: DeployedStage, data: str, runs: str, role: str
) -> None:
    for bucket in (data, runs):
        for action in ("PutBucketPolicy", "DeleteBucket", "PutLifecycleConfiguration", "PutBucketVersioning"):
            assert not stage.role("jobs", role).may(f"s3:{action}", bucket)
        assert not stage.role("jobs", role).may("s3:DeleteObjectVersion", f"{bucket}/research/a-run/spec.yaml")


@pytest.mark.parametrize("role", ["Teamresearch", "Membersresearch"])
def test_the_key_is_used_through_s3_and_for_the_two_buckets_only(
    stage: DeployedStage, data: str, runs: str, key: str, role: str
) -> None:
    def may(action: str, via: str, arn: str) -> bool:
        context = {"kms:ViaService": via, "kms:EncryptionContext:aws:s3:arn": arn}
        return stage.role("jobs", role).decide_in(action, key, context) == "allowed"

    via_s3 = f"s3.{REGION}.amazonaws.com"
    logs = stage.arn("storage", stage.only("storage", "AWS::S3::Bucket", "AccessLogs"))
    for action in ("kms:Decrypt", "kms:GenerateDataKey"):
        assert may(action, via_s3, data)
        assert may(action, via_s3, runs)
        assert not may(action, via_s3, logs)
        assert not may(action, f"secretsmanager.{REGION}.amazonaws.com", data)
        assert stage.role("jobs", role).decide(action, key) == "implicitly denied"
    for action in ("kms:PutKeyPolicy", "kms:CreateGrant", "kms:ScheduleKeyDeletion"):
        assert not may(action, via_s3, data)


def test_only_the_agent_that_starts_a_teams_jobs_reads_its_secret(stage: DeployedStage, key: str) -> None:
    readers = {
        (role.logical_id.rstrip("0123456789ABCDEF"), team)
        for role in stage.roles
        for team in ("research", "product")
        if role.may("secretsmanager:GetSecretValue", secret(stage, team))
    }
    assert readers == {("Executionresearch", "research"), ("Executionproduct", "product")}
    for role, team, decision in (
        ("Executionresearch", "research", "allowed"),
        ("Executionresearch", "product", "implicitly denied"),
    ):
        context = {
            "kms:ViaService": f"secretsmanager.{REGION}.amazonaws.com",
            "kms:EncryptionContext:SecretARN": secret(stage, team),
        }
        assert stage.role("jobs", role).decide_in("kms:Decrypt", key, context) == decision


def test_the_agent_pulls_and_logs_for_its_team_and_does_nothing_else(
    templates: Templates, stage: DeployedStage, data: str, runs: str
) -> None:
    agent = stage.role("jobs", "Executionresearch")
    group = stage.arn("jobs", stage.only("jobs", "AWS::Logs::LogGroup")).removesuffix(":*")
    repositories = [stage.arn("image", name) for name in resources(templates["image"], "AWS::ECR::Repository")]
    pulled = [name for name in repositories if agent.may("ecr:BatchGetImage", name)]
    # Those that its kinds run in; none runs in a child of the CPU image.
    assert len(pulled) == 4 < len(repositories)
    for image in ("Cpu", "Gaudi", "GaudiNotebook"):
        assert any(re.search(rf"-{image}[0-9A-F]{{8}}-", name) for name in pulled), image
    assert not any(agent.may("ecr:PutImage", name) for name in repositories)
    for action in ("logs:CreateLogStream", "logs:PutLogEvents"):
        assert agent.may(action, f"{group}:log-stream:research/finetune-classification/main/1")
        assert not agent.may(action, f"{group}:log-stream:product/finetune-classification/main/1")
    for bucket in (data, runs):
        assert not agent.may("s3:GetObject", f"{bucket}/research/x")


def test_instances_read_no_bucket_and_no_secret(stage: DeployedStage, data: str, runs: str) -> None:
    instance = stage.role("compute", "isolatedresearchInstanceRole")
    assert instance.may("ecs:RegisterContainerInstance", f"arn:aws:ecs:{REGION}:{ACCOUNT}:cluster/x")
    for bucket in (data, runs):
        assert not instance.may("s3:ListBucket", bucket)
        assert not instance.may("s3:GetObject", f"{bucket}/shared/x")
        assert not instance.may("s3:GetObject", f"{bucket}/research/x")
    assert not instance.may("secretsmanager:GetSecretValue", secret(stage, "research"))
    assert not instance.may("sts:AssumeRole", stage.role("jobs", "Teamresearch").arn)


def test_only_ecs_becomes_the_roles_of_jobs_and_only_a_teams_people_its_members(stage: DeployedStage) -> None:
    for name in ("Teamresearch", "Executionresearch"):
        (statement,) = stage.role("jobs", name).trust["Statement"]
        assert statement["Principal"] == {"Service": "ecs-tasks.amazonaws.com"}
        assert statement["Condition"] == {
            "StringEquals": {"aws:SourceAccount": ACCOUNT},
            "ArnLike": {"aws:SourceArn": f"arn:aws:ecs:{REGION}:{ACCOUNT}:*"},
        }
    (statement,) = stage.role("jobs", "Membersresearch").trust["Statement"]
    assert (statement["Action"], statement["Principal"]) == ("sts:AssumeRole", {"AWS": PEOPLE})
    assert stage.published("member-role/research") == stage.role("jobs", "Membersresearch").arn


def test_a_team_without_people_or_token_gets_neither_role_nor_secret() -> None:
    made = templates_of(Stage(name="test", teams=(Team(name="research"),)))
    roles = resources(made["test/jobs"], "AWS::IAM::Role")
    assert not any(name.startswith("Members") for name in roles)
    assert not resources(made["test/storage"], "AWS::SecretsManager::Secret")
    assert "HF_TOKEN" not in json.dumps(made)
