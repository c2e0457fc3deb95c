"""What no role of any stage reaches, under the stage's own boundary and under an account's that admits everything."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from infra.settings import STAGES
from infra.stages import Stage
from tests.support.infra.deployed_roles import ACCOUNT, REGION, DeployedStage, Role
from tests.support.infra.synthesis import Templates
from tests.support.infra.variants import ALL, CUDA, EXISTING_VPC, NO_WAY_OUT

ROWS = (*STAGES.values(), ALL, EXISTING_VPC, NO_WAY_OUT, next(row for row in CUDA if row.max_multinode_nodes))
"""Gaudi and CUDA, with and without nodes that work together, an account's boundary, CI, and what teams share."""

STRANGERS = "strangers"
JOB = f"arn:aws:batch:{REGION}:{ACCOUNT}:job/0f0f"

Context = dict[str, str | list[str]]
Asked = tuple[str, str, Context]


@pytest.fixture(params=[row.name for row in ROWS])
def row(request: pytest.FixtureRequest) -> Stage:
    return next(row for row in ROWS if row.name == request.param)


@pytest.fixture
def stage(row: Stage, templates: Templates, variants: Templates) -> DeployedStage:
    return DeployedStage(
        row.name,
        {
            path.removeprefix(f"{row.name}/"): template
            for path, template in {**templates, **variants}.items()
            if path.startswith(f"{row.name}/")
        },
    )


@pytest.fixture
def roles(stage: DeployedStage) -> list[Role]:
    """All roles twice: with their boundary, and as under an account's boundary that admits everything."""
    assert {role.stack for role in stage.roles} >= {"image", "compute", "jobs", "observability"}
    return [limited for role in stage.roles for limited in (role, replace(role, boundary=None))]


def test_no_role_reaches_files_of_another_team(row: Stage, stage: DeployedStage, roles: list[Role]) -> None:
    buckets = [stage.arn("storage", stage.only("storage", "AWS::S3::Bucket", name)) for name in ("Data", "Runs")]

    def files(role: Role) -> Iterator[Asked]:
        for team in {STRANGERS, *(team.name for team in row.teams)} - {role.tags.get("trainyard:team")}:
            for bucket in buckets:
                yield "s3:ListBucket", bucket, {"s3:prefix": f"{team}/"}
                for action in ("GetObject", "GetObjectVersion", "PutObject", "DeleteObject"):
                    yield f"s3:{action}", f"{bucket}/{team}/a-run/model/model.safetensors", {}
                    yield f"s3:{action}", f"{bucket}/{team}/disk.iso", {}
        for bucket in buckets:
            yield "s3:ListBucket", bucket, {}

    assert allowed(roles, files) == set()


def test_no_role_reads_parameters_beyond_the_stage(row: Stage, roles: list[Role]) -> None:
    def parameters(_: Role) -> Iterator[Asked]:
        for name in ("password", f"trainyard/{row.name}-2/bucket/run", f"imagebuilder/trainyard-{row.name}-2/x"):
            for action in ("GetParameter", "GetParameters", "GetParameterHistory", "GetParametersByPath"):
                yield f"ssm:{action}", parameter(name), {}
            yield "ssm:PutParameter", parameter(name), {}

    assert allowed(roles, parameters) == set()


def test_roles_that_jobs_reach_read_no_parameter_and_no_secret_at_all(row: Stage, roles: list[Role]) -> None:
    # A job of one node reaches its instance's role too.
    of_jobs = [role for role in roles if role.stack == "compute" or role.logical_id.startswith("Team")]
    assert {role.stack for role in of_jobs} == {"compute", "jobs"}

    def secrets(_: Role) -> Iterator[Asked]:
        yield "ssm:GetParameter", parameter(f"trainyard/{row.name}/huggingface-secret/{row.teams[0].name}"), {}
        yield "secretsmanager:GetSecretValue", secret("trainyard-x"), {}

    assert allowed(of_jobs, secrets) == set()


def test_only_a_teams_agent_reads_its_secret(row: Stage, stage: DeployedStage, roles: list[Role]) -> None:
    secrets = {
        arn: team.name
        for team in row.teams
        for name in (f"huggingface-secret/{team.name}", f"variables-secret/{team.name}")
        if (arn := stage.published(name)).startswith("arn:")
    }

    def all_secrets(role: Role) -> Iterator[Asked]:
        agent_of = role.tags.get("trainyard:team") if role.logical_id.startswith("Execution") else None
        for arn, team in secrets.items():
            if team != agent_of:
                yield "secretsmanager:GetSecretValue", arn, {}
        yield "secretsmanager:GetSecretValue", secret("somebody-elses"), {}

    assert allowed(roles, all_secrets) == set()


def test_every_role_is_denied_what_is_another_stages(roles: list[Role]) -> None:
    for role in roles:
        for action in ("batch:TerminateJob", "ecr:BatchGetImage", "secretsmanager:GetSecretValue", "ecs:Poll"):
            other: Context = {"aws:ResourceTag/trainyard:stage": "another"}
            assert role.decide_in(action, "*", other) == "explicitly denied", (role.stack, role.logical_id)


def test_no_role_takes_a_job_by_a_tag_or_ends_one_without(row: Stage, roles: list[Role]) -> None:
    def jobs(role: Role) -> Iterator[Asked]:
        tags = {"trainyard:stage": row.name, "trainyard:team": role.tags.get("trainyard:team", row.teams[0].name)}
        asked: Context = {f"aws:RequestTag/{key}": value for key, value in tags.items()}
        yield "batch:TagResource", JOB, {**asked, "aws:TagKeys": list(tags)}
        yield "batch:TerminateJob", JOB, {}
        yield "batch:CancelJob", JOB, {}

    assert allowed(roles, jobs) == set()


def test_instances_log_their_boot_and_nothing_in_the_name_of_jobs(stage: DeployedStage, roles: list[Role]) -> None:
    def group(stack: str) -> str:
        return stage.arn(stack, stage.only(stack, "AWS::Logs::LogGroup")).removesuffix(":*")

    for role in roles:
        if role.stack == "compute":
            for action in ("logs:CreateLogStream", "logs:PutLogEvents"):
                assert role.may(action, f"{group('compute')}:log-stream:i-0123456789abcdef0/ecs-agent")
                assert not role.may(action, f"{group('compute')}:log-stream:another")
                assert not role.may(action, f"{group('jobs')}:log-stream:research/finetune-classification/main/0f0f")
            assert role.may("ssm:UpdateInstanceInformation")
            for channel in ("CreateControlChannel", "CreateDataChannel", "OpenControlChannel", "OpenDataChannel"):
                assert role.may(f"ssmmessages:{channel}")


def allowed(roles: list[Role], asked: Callable[[Role], Iterator[Asked]]) -> set[str]:
    """Return what roles may do of what is asked of each, in words."""
    return {
        f"{role.stack} {role.logical_id}: {action} on {resource}"
        for role in roles
        for action, resource, context in asked(role)
        if role.decide_in(action, resource, context) == "allowed"
    }


def parameter(name: str) -> str:
    return f"arn:aws:ssm:{REGION}:{ACCOUNT}:parameter/{name}"


def secret(name: str) -> str:
    return f"arn:aws:secretsmanager:{REGION}:{ACCOUNT}:secret:{name}-AbCdEf"
