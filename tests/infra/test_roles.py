"""The permissions of every role of a stage, with its boundary and with an account's boundary that admits everything.

The stage is ALL in variants.py: team `research` shares instances, team `product` has its own.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from infra.observability.functions.stop_at_budget import STOP_TAG
from infra.stages import Stage, Team
from jobs.core.artifact import artifact_prefix
from jobs.core.images import images
from jobs.core.stage import (
    IMAGE_BUILD_PROJECT,
    IMAGES,
    image_parameter,
    image_repository_parameter,
    release_parameter,
)
from jobs.runs.connect import DOCUMENT
from jobs.spec.submit_job import JOB_TAGS
from tests.support.infra.calls import permissions_of
from tests.support.infra.deployed_roles import ACCOUNT, REGION, DeployedStage, statements
from tests.support.infra.policy_evaluation import as_list
from tests.support.infra.synthesis import ROOT, Templates, up_to

Context = Mapping[str, str | list[str]]
Row = tuple[str, str, Context, str]
"""Actions, resource, condition keys of the request, and all roles that are allowed."""

JOBS, PEOPLE, AGENT = "jobs/Teamresearch", "jobs/Membersresearch", "jobs/Executionresearch"
THEIR_JOBS, THEIR_PEOPLE, THEIR_AGENT = "jobs/Teamproduct", "jobs/Membersproduct", "jobs/Executionproduct"
SHARED_INSTANCES, THEIR_INSTANCES = "compute/InstanceRole", "compute/isolatedproductInstanceRole"
CI, IMAGE_BUILD, AMI_BUILD = "access/Deploy", "image/BuildRole", "machine-image/BuildRole"
PULL_REQUESTS = "access/Diff"
MOVE, REPORT, TAG, WATCH, END, BUDGETS = (
    f"observability/{name}Role"
    for name in ("MoveToOnDemand", "ReportJob", "TagInstances", "WatchInstances", "EndSweep", "BudgetsFunction")
)
DRIFT = "observability/ReportDriftRole"
"""The only role that reads the configuration of everything, but no file and no secret. It may list buckets."""
ALL_PEOPLE, ALL_INSTANCES = f"{PEOPLE} {THEIR_PEOPLE}", f"{SHARED_INSTANCES} {THEIR_INSTANCES}"
ALL_PULLERS = f"{AGENT} {THEIR_AGENT} {IMAGE_BUILD} {AMI_BUILD} {ALL_INSTANCES}"
NOBODY = ""
CDKS = "network/CustomVpcRestrictDefaultSGCustomResourceProviderRole"
"""Role of the CDK's function that empties the VPC's default group. AWS's policy for functions lets it write any log."""

STAGE, TEAM = "aws:ResourceTag/trainyard:stage", "aws:ResourceTag/trainyard:team"
OURS: Context = {STAGE: "all"}
RESEARCH: Context = {**OURS, TEAM: "research"}
PRODUCT: Context = {**OURS, TEAM: "product"}
FOREIGN: tuple[Context, ...] = ({}, {**RESEARCH, STAGE: "prod"})
REQUESTED: Context = {"aws:RequestTag/trainyard:stage": "all", "aws:RequestTag/trainyard:team": "research"}
SHARE: Context = {"batch:ShareIdentifier": "research"}
TAGGING: Context = {"aws:TagKeys": list(JOB_TAGS)}
CHECKED: Context = {"ssm:SessionDocumentAccessCheck": "true"}
OWN_TASK: Context = {key.replace("aws:", "ecs:"): value for key, value in RESEARCH.items()}
SESSION = "ssm:resourceTag/aws:ssmmessages:session-id"


def arn(service: str, resource: str, account: str = ACCOUNT) -> str:
    return f"arn:aws:{service}:{REGION}:{account}:{resource}"


def stack_arn(name: str) -> str:
    return arn("cloudformation", f"stack/trainyard-{name}/0f0f")


def role_arn(name: str) -> str:
    return f"arn:aws:iam::{ACCOUNT}:role/{name}"


JOB, INSTANCE, ENVIRONMENT = arn("batch", "job/0f0f"), arn("ec2", "instance/i-0"), arn("batch", "compute-environment/x")
MEMBER, TASK, CLUSTER = (arn("ecs", f"{kind}/AWSBatch-x/0f0f") for kind in ("container-instance", "task", "cluster"))
DEFINITION = arn("batch", "job-definition/x:17")
PARAMETER = arn("ssm", "parameter/trainyard/all")
RUN = "{runs}/research/a-run"
SHARD = f"{{runs}}/{artifact_prefix('research', 'corpus', '0' * 64)}shard-00000.txt"

FILES: list[Row] = [
    ("s3:GetObject", "{data}/shared/models/x", {}, f"{JOBS} {PEOPLE} {THEIR_JOBS} {THEIR_PEOPLE}"),
    ("s3:GetObject", "{data}/research/train.jsonl", {}, f"{JOBS} {PEOPLE}"),
    ("s3:GetObject", "{data}/research/disk.iso", {}, f"{JOBS} {PEOPLE}"),
    ("s3:PutObject s3:DeleteObject", "{data}/research/train.jsonl", {}, PEOPLE),
    ("s3:PutObject s3:DeleteObject", "{data}/shared/x", {}, NOBODY),
    ("s3:GetObject", f"{RUN}/model/model.safetensors", {}, f"{JOBS} {PEOPLE}"),
    ("s3:PutObject s3:DeleteObject s3:PutObjectTagging", f"{RUN}/receipt.json", {}, JOBS),
    *(
        ("s3:PutObject s3:DeleteObject", f"{RUN}/{name}", {}, f"{JOBS} {PEOPLE}")
        for name in ("spec.yaml", "arguments/0f.json", "sweep.json", "member-of.json")
    ),
    ("s3:GetObject s3:PutObject", f"{RUN}/moves/1.json", {}, f"{JOBS} {PEOPLE} {MOVE}"),
    ("s3:GetObject", SHARD, {}, f"{JOBS} {PEOPLE}"),
    ("s3:PutObject", SHARD, {}, JOBS),
    ("s3:GetObjectVersion s3:DeleteObjectVersion", f"{RUN}/spec.yaml", {}, NOBODY),
    ("s3:GetObject s3:PutObject", "{runs}/research-2/x", {}, NOBODY),
    ("s3:GetObject s3:PutObject", "{runs}/x", {}, NOBODY),
    *(
        ("s3:ListBucket", bucket, {"s3:prefix": "research/a-run/"}, f"{JOBS} {PEOPLE} {DRIFT}")
        for bucket in ("{data}", "{runs}")
    ),
    ("s3:ListBucketVersions", "{runs}", {"s3:prefix": "research/a-run/"}, PEOPLE),
    ("s3:ListBucketVersions", "{data}", {"s3:prefix": "research/a-run/"}, NOBODY),
    *(
        (f"s3:{action}", "{runs}", {"s3:prefix": prefix}, roles)
        for action, roles in (("ListBucket", DRIFT), ("ListBucketVersions", NOBODY))
        for prefix in ("research-2/", "", "p", "research")
    ),
    ("s3:PutBucketPolicy s3:DeleteBucket s3:PutLifecycleConfiguration", "{runs}", {}, NOBODY),
    ("s3:GetBucketPolicy s3:GetLifecycleConfiguration", "{runs}", {}, DRIFT),
    ("s3:GetBucketPolicy s3:ListBucket", "arn:aws:s3:::another", {}, NOBODY),
    ("kms:PutKeyPolicy kms:CreateGrant kms:ScheduleKeyDeletion", "{key}", {}, NOBODY),
    # Only the team's execution role reads its secrets, and no role within reach of a job reads a parameter.
    ("secretsmanager:GetSecretValue", "{token}", {}, AGENT),
    ("secretsmanager:GetSecretValue", "{variables}", {}, AGENT),
    ("secretsmanager:GetSecretValue", "{their_token}", {}, THEIR_AGENT),
    ("secretsmanager:DescribeSecret", "{token}", OURS, DRIFT),
    (
        "secretsmanager:GetSecretValue secretsmanager:DescribeSecret",
        arn("secretsmanager", "secret:somebody-elses-AbCdEf"),
        {},
        NOBODY,
    ),
    ("ssm:GetParameter", f"{PARAMETER}/huggingface-secret/research", {}, ALL_PEOPLE),
    *(
        ("ssm:GetParameter ssm:GetParameters ssm:GetParametersByPath ssm:PutParameter", arn("ssm", name), {}, NOBODY)
        for name in ("parameter/password", "parameter/trainyard/all-2/bucket/run")
    ),
    ("ssm:GetParametersByPath", PARAMETER, {}, f"{ALL_PEOPLE} {BUDGETS}"),
    ("ssm:GetParametersByPath", f"{PARAMETER}/queue", {}, f"{ALL_PEOPLE} {BUDGETS} {REPORT} {MOVE}"),
    ("ssm:GetParametersByPath", f"{PARAMETER}/team-queue", {}, f"{ALL_PEOPLE} {BUDGETS} {REPORT} {MOVE}"),
    ("ssm:PutParameter", f"{PARAMETER}/queue/spot", {}, NOBODY),
]

SUBMISSIONS: list[Row] = [
    # Members submit to their team's own or shared queues, with the team's own share.
    ("batch:SubmitJob", "{spot}", {**OURS, **SHARE}, PEOPLE),
    ("batch:SubmitJob", "{spot}", OURS, NOBODY),
    ("batch:SubmitJob", "{spot}", {**OURS, "batch:ShareIdentifier": "product"}, NOBODY),
    ("batch:SubmitJob", "{spot}", {**SHARE, STAGE: "prod"}, NOBODY),
    ("batch:SubmitJob", "{their_spot}", {**PRODUCT, "batch:ShareIdentifier": "product"}, THEIR_PEOPLE),
    ("batch:SubmitJob", "{their_spot}", {**PRODUCT, **SHARE}, NOBODY),
    ("batch:SubmitJob", "{on_demand}", {**OURS, **SHARE}, f"{PEOPLE} {MOVE}"),
    ("batch:SubmitJob", "{definition}", RESEARCH, f"{PEOPLE} {MOVE}"),
    ("batch:SubmitJob", DEFINITION, RESEARCH, f"{PEOPLE} {MOVE}"),
    *(("batch:SubmitJob", DEFINITION, context, NOBODY) for context in FOREIGN),
    ("batch:SubmitJob", JOB, {**REQUESTED, **SHARE}, PEOPLE),
    *(("batch:SubmitJob", JOB, {**REQUESTED, **SHARE, key: "other"}, NOBODY) for key in (*REQUESTED, *SHARE)),
    ("batch:SubmitJob", JOB, SHARE, NOBODY),
    # Tagging is allowed on queues and definitions, never on jobs: anyone who could tag a job could end it.
    ("batch:TagResource", "{spot}", {**OURS, **REQUESTED, **TAGGING}, PEOPLE),
    ("batch:TagResource", "{on_demand}", {**OURS, **REQUESTED, **TAGGING}, f"{PEOPLE} {MOVE}"),
    ("batch:TagResource", "{definition}", {**RESEARCH, **REQUESTED, **TAGGING}, f"{PEOPLE} {MOVE}"),
    ("batch:TagResource", "{spot}", {**OURS, **REQUESTED, "aws:TagKeys": [*JOB_TAGS, "trainyard:role"]}, NOBODY),
    (
        "batch:TagResource",
        "{spot}",
        {**OURS, **REQUESTED, **TAGGING, "aws:RequestTag/trainyard:team": "theirs"},
        NOBODY,
    ),
    ("batch:TagResource", "{definition}", {**OURS, **TAGGING}, NOBODY),
    *(("batch:TagResource", JOB, {**REQUESTED, **TAGGING, **tags}, NOBODY) for tags in (*FOREIGN, PRODUCT)),
    # A used-up budget only stops submissions, even if the tag's value is empty.
    ("batch:SubmitJob", "{spot}", {**OURS, **SHARE, f"aws:PrincipalTag/{STOP_TAG}": ""}, NOBODY),
    ("batch:TerminateJob", JOB, {**RESEARCH, f"aws:PrincipalTag/{STOP_TAG}": "2026-12-01"}, f"{PEOPLE} {MOVE}"),
    (
        "iam:TagRole iam:UntagRole",
        "{people}",
        {**RESEARCH, "aws:ResourceTag/trainyard:role": "member", "aws:TagKeys": [STOP_TAG]},
        BUDGETS,
    ),
    (
        "iam:TagRole",
        "{people}",
        {**RESEARCH, "aws:ResourceTag/trainyard:role": "member", "aws:TagKeys": [STOP_TAG, "trainyard:team"]},
        NOBODY,
    ),
    ("iam:TagRole", role_arn("trainyard-all-observability-x"), {**OURS, "aws:TagKeys": [STOP_TAG]}, NOBODY),
    ("iam:TagRole iam:AttachRolePolicy iam:PassRole", role_arn("admin"), {"aws:TagKeys": [STOP_TAG]}, NOBODY),
    ("ssm:PutParameter", f"{PARAMETER}/budget-stop/research", {}, BUDGETS),
    ("ssm:PutParameter", f"{PARAMETER}/hourly-stop/product", {}, BUDGETS),
    ("ssm:PutParameter", f"{PARAMETER}/hourly-limit/product", {}, NOBODY),
    (
        "cloudwatch:DescribeAlarms",
        arn("cloudwatch", "alarm:trainyard-all-observability-x"),
        {},
        f"{BUDGETS} {DRIFT}",
    ),
    ("cloudwatch:DescribeAlarms cloudwatch:SetAlarmState", arn("cloudwatch", "alarm:x"), {}, NOBODY),
    # Running jobs, waiting jobs, and workers of a sweep.
    ("batch:TerminateJob", JOB, RESEARCH, f"{PEOPLE} {MOVE}"),
    ("batch:TerminateJob", JOB, PRODUCT, f"{THEIR_PEOPLE} {MOVE}"),
    *(("batch:TerminateJob batch:CancelJob", JOB, context, NOBODY) for context in FOREIGN),
    ("batch:CancelJob", JOB, RESEARCH, f"{PEOPLE} {BUDGETS}"),
    ("batch:CancelJob", f"{JOB}:7", {}, END),
    ("batch:CancelJob", f"{JOB}:7", {STAGE: "prod"}, NOBODY),
    ("batch:TerminateJob", f"{JOB}:7", OURS, MOVE),
    ("batch:DescribeJobs batch:ListJobs", "*", {}, f"{ALL_PEOPLE} {REPORT} {TAG} {END} {MOVE} {BUDGETS}"),
    ("batch:DescribeComputeEnvironments", "*", {}, f"{ALL_PEOPLE} {WATCH} {BUDGETS} {DRIFT}"),
    ("batch:DescribeJobQueues", "*", {}, f"{ALL_PEOPLE} {BUDGETS} {DRIFT}"),
    ("batch:GetJobQueueSnapshot", "{spot}", OURS, ALL_PEOPLE),
    *(
        (action, "*", {}, ALL_PEOPLE)
        for action in (
            "ec2:DescribeSpotPriceHistory",
            "ec2:GetSpotPlacementScores",
            "pricing:GetProducts",
            "servicequotas:GetServiceQuota",
        )
    ),
    ("ec2:DescribeSubnets", "*", {}, f"{ALL_PEOPLE} {DRIFT}"),
    ("ec2:DescribeInstanceTypeOfferings", "*", {}, f"{ALL_PEOPLE} access/OfferFunctionRole"),
    ("batch:RegisterJobDefinition batch:UpdateJobQueue batch:UntagResource", "*", RESEARCH, NOBODY),
    ("batch:UpdateComputeEnvironment", ENVIRONMENT, OURS, f"{WATCH} {BUDGETS}"),
    *(("batch:UpdateComputeEnvironment", ENVIRONMENT, context, NOBODY) for context in FOREIGN),
]

INSTANCES: list[Row] = [
    # An agent acts for shared instances or for its own team's, which tag themselves.
    ("ecs:Poll", MEMBER, {}, ALL_INSTANCES),
    ("ecs:Poll", MEMBER, {TEAM: "product"}, THEIR_INSTANCES),
    ("ecs:Poll", MEMBER, {TEAM: "finance"}, NOBODY),
    ("ecs:RegisterContainerInstance", CLUSTER, {}, ALL_INSTANCES),
    ("ssm:UpdateInstanceInformation", "*", {}, f"{ALL_INSTANCES} {AMI_BUILD}"),
    ("ecs:DescribeContainerInstances", MEMBER, {}, f"{ALL_PEOPLE} {TAG}"),
    ("ec2:CreateTags", INSTANCE, {**OURS, "aws:TagKeys": ["trainyard:team", "trainyard:run"]}, TAG),
    ("ec2:CreateTags", INSTANCE, {**OURS, "aws:TagKeys": ["trainyard:joined"]}, WATCH),
    ("ec2:CreateTags", INSTANCE, {**OURS, "aws:TagKeys": ["trainyard:stage"]}, NOBODY),
    ("ec2:CreateTags", INSTANCE, {"aws:TagKeys": ["trainyard:team"]}, NOBODY),
    ("ec2:TerminateInstances", INSTANCE, OURS, WATCH),
    *(("ec2:TerminateInstances", INSTANCE, context, NOBODY) for context in FOREIGN),
    # Members forward ports of instances that run their jobs, with the only document that opens no shell.
    ("ssm:StartSession", INSTANCE, {**RESEARCH, **CHECKED}, PEOPLE),
    *(("ssm:StartSession", INSTANCE, {**tags, **CHECKED}, NOBODY) for tags in (*FOREIGN, OURS)),
    ("ssm:StartSession", TASK, {**RESEARCH, **CHECKED}, NOBODY),
    ("ssm:StartSession", arn("ssm", f"document/{DOCUMENT}", ""), CHECKED, ALL_PEOPLE),
    *(
        ("ssm:StartSession", arn("ssm", f"document/{document}", account), CHECKED, NOBODY)
        for account in ("", ACCOUNT)
        for document in ("SSM-SessionManagerRunShell", "AWS-StartPortForwardingSessionToRemoteHost")
    ),
    (
        "ssm:TerminateSession ssm:ResumeSession",
        arn("ssm", "session/ada-0f"),
        {"aws:userid": "A:ada", SESSION: "A:ada"},
        ALL_PEOPLE,
    ),
    (
        "ssm:TerminateSession ssm:ResumeSession",
        arn("ssm", "session/ada-0f"),
        {"aws:userid": "A:bob", SESSION: "A:ada"},
        NOBODY,
    ),
    ("ecs:ExecuteCommand", TASK, OWN_TASK, PEOPLE),
    ("ecs:ExecuteCommand", CLUSTER, OWN_TASK, PEOPLE),
    *(("ecs:ExecuteCommand", TASK, {**OWN_TASK, key: "other"}, NOBODY) for key in OWN_TASK),
    ("ecs:ExecuteCommand", TASK, {}, NOBODY),
    # Logs of the boot, of a team's jobs, and of commands in containers.
    (
        "logs:CreateLogStream logs:PutLogEvents",
        "{boot_logs}:log-stream:i-0123/ecs-agent",
        {},
        f"{ALL_INSTANCES} {CDKS}",
    ),
    ("logs:CreateLogStream logs:PutLogEvents", "{boot_logs}:log-stream:another", {}, CDKS),
    ("logs:CreateLogStream logs:PutLogEvents", "{job_logs}:log-stream:research/script/main/1", {}, f"{AGENT} {CDKS}"),
    (
        "logs:CreateLogStream logs:PutLogEvents",
        "{job_logs}:log-stream:ecs-execute-command-1",
        {},
        f"{JOBS} {THEIR_JOBS} {CDKS}",
    ),
    ("logs:GetLogEvents", "{job_logs}:log-stream:research/script/main/1", {}, PEOPLE),
    ("logs:GetLogEvents logs:DeleteLogStream", "{boot_logs}:log-stream:i-0123/ecs-agent", {}, NOBODY),
    ("logs:DeleteLogGroup", "{job_logs}", {}, NOBODY),
]

BUILDS: list[Row] = [
    *(
        ("sts:AssumeRole", role_arn(f"cdk-hnb659fds-{name}-role-{ACCOUNT}-{REGION}"), {}, CI)
        for name in ("deploy", "file-publishing", "image-publishing", "lookup")
    ),
    *(
        ("sts:AssumeRole", role_arn(name), {}, NOBODY)
        for name in (
            f"cdk-hnb659fds-cfn-exec-role-{ACCOUNT}-{REGION}",  # CloudFormation's role, which may do everything
            f"cdk-hnb659fds-deploy-role-{ACCOUNT}-eu-west-1",
            "trainyard-all-jobs-x",
        )
    ),
    ("cloudformation:DescribeStacks cloudformation:GetTemplate", stack_arn("all-machine-image"), {}, PULL_REQUESTS),
    *(
        ("cloudformation:DescribeStacks cloudformation:GetTemplate", stack_arn(name), {}, NOBODY)
        for name in ("all-2-storage", "prod-storage", "all-x")
    ),
    ("cloudformation:CreateChangeSet cloudformation:DeleteStack", stack_arn("all-storage"), {}, NOBODY),
    ("cloudformation:DetectStackDrift", stack_arn("all-storage"), {}, DRIFT),
    ("cloudformation:DetectStackDrift", stack_arn("prod-storage"), {}, NOBODY),
    ("cloudformation:DescribeStackDriftDetectionStatus", "*", {}, DRIFT),
    ("iam:GetRole", role_arn("trainyard-all-jobs-x"), {}, DRIFT),
    ("iam:GetRole", role_arn("admin"), {}, NOBODY),
    ("lambda:GetFunction", arn("lambda", "function:x"), {}, NOBODY),
    ("codebuild:StartBuild codebuild:BatchGetBuilds", "{project}", OURS, CI),
    *(("codebuild:StartBuild", "{project}", context, NOBODY) for context in FOREIGN),
    ("codebuild:UpdateProject cloudformation:CreateStack ec2:RunInstances iam:PassRole", "*", OURS, NOBODY),
    ("ssm:GetParameter", f"{PARAMETER}/{IMAGE_BUILD_PROJECT}", {}, f"{CI} {ALL_PEOPLE}"),
    ("ecr:BatchGetImage", "{gaudi}", {}, ALL_PULLERS),
    *(
        (f"ecr:{action}", "{gaudi}", {}, IMAGE_BUILD)
        for action in ("PutImage", "InitiateLayerUpload", "UploadLayerPart", "CompleteLayerUpload")
    ),
    ("ecr:GetAuthorizationToken", "*", {}, ALL_PULLERS),
    # The build also asks for images that the stage lacks, and SSM refuses the call if one name is not allowed.
    *(
        ("ssm:GetParameters", f"{PARAMETER}/{name}", {}, f"{IMAGE_BUILD} {ALL_PEOPLE} {DRIFT}")
        for image in images()
        for name in (image_repository_parameter(image), image_parameter(image, "1.0.0"))
    ),
    ("ssm:GetParameters", f"{PARAMETER}/{release_parameter('gaudi')}", {}, f"{IMAGE_BUILD} {ALL_PEOPLE} {DRIFT}"),
    ("ssm:GetParameters", f"{PARAMETER}/{IMAGES}", {}, f"{IMAGE_BUILD} {ALL_PEOPLE} {DRIFT}"),
    ("ssm:PutParameter", f"{PARAMETER}/{image_parameter('gaudi', '1.21.0')}", {}, IMAGE_BUILD),
]

MATRIX = [*FILES, *SUBMISSIONS, *INSTANCES, *BUILDS]


@pytest.fixture(scope="module")
def places(everything: DeployedStage) -> dict[str, str]:
    """The ARNs for the placeholders above."""
    stage = everything

    def only(stack: str, kind: str, beginning: str = "") -> str:
        return stage.arn(stack, stage.only(stack, kind, beginning)).removesuffix(":*")

    return {
        "data": only("storage", "AWS::S3::Bucket", "Data"),
        "runs": only("storage", "AWS::S3::Bucket", "Runs"),
        "key": only("storage", "AWS::KMS::Key"),
        "token": stage.published("huggingface-secret/research"),
        "variables": stage.published("variables-secret/research"),
        "their_token": stage.published("huggingface-secret/product"),
        "spot": stage.published("queue/spot"),
        "on_demand": stage.published("queue/on-demand"),
        "their_spot": stage.published("team-queue/product/spot"),
        "definition": stage.published("job-definition/research/finetune-classification"),
        "people": stage.published("member-role/research"),
        "boot_logs": only("compute", "AWS::Logs::LogGroup"),
        "job_logs": only("jobs", "AWS::Logs::LogGroup"),
        "project": only("image", "AWS::CodeBuild::Project"),
        "gaudi": only("image", "AWS::ECR::Repository", "GaudiD"),
    }


@pytest.mark.parametrize("rows", [FILES, SUBMISSIONS, INSTANCES, BUILDS], ids=["files", "jobs", "instances", "builds"])
def test_only_the_expected_roles_are_allowed(
    everything: DeployedStage, places: dict[str, str], rows: list[Row]
) -> None:
    wrong = []
    for actions, resource, context, expected in rows:
        for action in actions.split():
            for limited in (True, False):
                roles = [role if limited else replace(role, boundary=None) for role in everything.roles]
                request = (action, resource.format(**places), context)
                found = {role.name for role in roles if role.decide_in(*request) == "allowed"}
                if found != set(expected.split()):
                    wrong.append((request, "expected", expected, "found", " ".join(sorted(found))))
    assert wrong == []


def test_every_aws_call_of_our_programs_is_in_the_matrix() -> None:
    def allowed(role: str) -> set[str]:
        return {action for actions, _, _, roles in MATRIX if role in roles.split() for action in actions.split()}

    assert permissions_of(commands()) <= allowed(PEOPLE)
    assert permissions_of(pushes()) <= allowed(IMAGE_BUILD)
    assert calls_of_the_workflow() <= allowed(CI)


def commands() -> Iterator[Path]:
    """Yield the sources of `trainyard` that run with a member role: no containers, builds, deployments or cleaning, and
    not what writes instance_types.json.
    """
    ours = ("container", "images", "cli/acceptance", "money/instance_types.py", "money/leftovers.py", "runs/canary.py")
    others = {ROOT / "jobs" / name for name in ours}
    return (path for path in (ROOT / "jobs").rglob("*.py") if not others & {path, *path.parents})


def pushes() -> Iterator[Path]:
    yield ROOT / "jobs/cli/images.py"
    yield from (path for path in (ROOT / "jobs/images").rglob("*.py") if path.name != "inventory.py")


def calls_of_the_workflow() -> set[str]:
    """Return the permissions for the `aws` commands of the workflow that deploys."""
    workflow = (ROOT / ".github/workflows/deploy.yml").read_text()
    calls = re.findall(r"\baws ([a-z]+) ([a-z-]+)", workflow)
    return {f"{service}:{command.title().replace('-', '')}" for service, command in calls}


def test_the_key_is_only_used_through_s3_for_the_two_buckets(everything: DeployedStage, places: dict[str, str]) -> None:
    for role in (role for role in everything.roles if role.name in (JOBS, PEOPLE)):
        for via, bucket, allowed in (
            ("s3", "data", True),
            ("s3", "runs", True),
            ("s3", "token", False),
            ("secretsmanager", "data", False),
        ):
            service = f"{via}.{REGION}.amazonaws.com"
            context = {"kms:ViaService": service, "kms:EncryptionContext:aws:s3:arn": places[bucket]}
            decision = role.decide_in("kms:Decrypt", places["key"], context)
            assert (decision == "allowed") is allowed, (role.name, via, bucket)


def test_sessions_without_a_document_are_refused(everything: DeployedStage) -> None:
    # Without the check, StartSession without a document only needs the instance, and opens a shell.
    people = everything.role("jobs", "Membersresearch")
    starts = [item for item in statements(people) if "ssm:StartSession" in as_list(item["Action"])]
    assert [item["Condition"]["BoolIfExists"] for item in starts] == [{"ssm:SessionDocumentAccessCheck": "true"}] * 2


def test_every_role_is_denied_other_stages_resources(everything: DeployedStage) -> None:
    for role in everything.roles:
        for action in ("batch:TerminateJob", "ecr:BatchGetImage", "secretsmanager:GetSecretValue", "ecs:Poll"):
            other = replace(role, boundary=None).decide_in(action, "*", {STAGE: "another"})
            assert other == "explicitly denied", role.name


def in_west(service: str, resource: str) -> str:
    return f"arn:aws:{service}:us-west-2:{ACCOUNT}:{resource}"


WESTS: Context = {STAGE: "west", TEAM: "research"}
OWN_ACCOUNT: Context = {"aws:ResourceAccount": ACCOUNT}
WEST_RUNS, WEST_DATA = (f"arn:aws:s3:::trainyard-west-storage-{name}0f-0f" for name in ("runs", "data"))
WEST_LOGS = in_west("logs", "log-group:trainyard-west-jobs-JobLogs0F-0F:log-stream")
WEST_QUEUE, WEST_JOB = in_west("batch", "job-queue/x"), in_west("batch", "job/x")
TAGGED_FOR_WEST: Context = {**WESTS, "aws:RequestTag/trainyard:stage": "west"}
KEY_OF_WEST: Context = {
    **WESTS,
    "kms:ViaService": "s3.us-west-2.amazonaws.com",
    "kms:EncryptionContext:aws:s3:arn": WEST_RUNS,
}
BETWEEN_REGIONS: list[Row] = [
    # Jobs that moved from `home` to `west`: the function submits them, people see and stop their team's.
    ("batch:SubmitJob", WEST_QUEUE, WESTS, MOVE),
    ("batch:SubmitJob", in_west("batch", "job-definition/x:1"), WESTS, MOVE),
    ("batch:SubmitJob batch:TagResource", WEST_QUEUE, {**TAGGED_FOR_WEST, STAGE: "prod"}, NOBODY),
    ("batch:TagResource", WEST_QUEUE, TAGGED_FOR_WEST, MOVE),
    ("batch:TagResource", WEST_QUEUE, {**TAGGED_FOR_WEST, "aws:RequestTag/trainyard:stage": "home"}, NOBODY),
    ("ec2:DescribeSpotPriceHistory", "*", {}, f"{PEOPLE} {MOVE}"),
    ("ssm:GetParametersByPath", in_west("ssm", "parameter/trainyard/west"), {}, f"{PEOPLE} {MOVE}"),
    ("ssm:GetParametersByPath", in_west("ssm", "parameter/trainyard/prod"), {}, NOBODY),
    ("ssm:PutParameter", in_west("ssm", "parameter/trainyard/west/queue/spot"), {}, NOBODY),
    ("batch:DescribeJobs batch:ListJobs", "*", {}, f"{PEOPLE} {MOVE} {REPORT} {TAG} {END}"),
    ("batch:TerminateJob batch:CancelJob", WEST_JOB, WESTS, PEOPLE),
    ("batch:TerminateJob batch:CancelJob", WEST_JOB, {**WESTS, TEAM: "product"}, NOBODY),
    ("batch:TerminateJob batch:CancelJob", WEST_JOB, {**WESTS, STAGE: "prod"}, NOBODY),
    ("batch:GetJobQueueSnapshot", WEST_QUEUE, WESTS, PEOPLE),
    ("logs:GetLogEvents", f"{WEST_LOGS}:research/script/main/1", {}, PEOPLE),
    ("logs:GetLogEvents", f"{WEST_LOGS}:product/script/main/1", {}, NOBODY),
    (
        "ecs:ExecuteCommand",
        in_west("ecs", "task/x/0f"),
        {key.replace("aws:", "ecs:"): WESTS[key] for key in WESTS},
        PEOPLE,
    ),
    ("ssm:StartSession", in_west("ec2", "instance/i-0"), {**WESTS, **CHECKED}, PEOPLE),
    # Jobs that moved from `west` to `home` use their files there, and `home` may move them to On-Demand.
    ("s3:GetObject", f"{WEST_DATA}/research/train.jsonl", OWN_ACCOUNT, JOBS),
    ("s3:GetObject", f"{WEST_DATA}/shared/x", OWN_ACCOUNT, JOBS),
    ("s3:PutObject", f"{WEST_DATA}/research/train.jsonl", OWN_ACCOUNT, NOBODY),
    ("s3:GetObject s3:PutObject", f"{WEST_RUNS}/research/a-run/x", OWN_ACCOUNT, JOBS),
    ("s3:GetObject s3:PutObject", f"{WEST_RUNS}/research/a-run/moves/1.json", OWN_ACCOUNT, f"{JOBS} {MOVE}"),
    ("s3:GetObject s3:PutObject", f"{WEST_RUNS}/research/a-run/moves/1.json", {"aws:ResourceAccount": "1"}, NOBODY),
    ("s3:GetObject s3:PutObject", f"{WEST_RUNS}/product/a-run/x", OWN_ACCOUNT, NOBODY),
    ("s3:ListBucket", WEST_RUNS, {**OWN_ACCOUNT, "s3:prefix": "research/a-run/"}, JOBS),
    ("s3:ListBucket", WEST_RUNS, {**OWN_ACCOUNT, "s3:prefix": "product/"}, NOBODY),
    ("s3:GetObject", "arn:aws:s3:::trainyard-prod-storage-runs0f/research/a-run/x", OWN_ACCOUNT, NOBODY),
    ("kms:Decrypt kms:GenerateDataKey", in_west("kms", "key/0f"), KEY_OF_WEST, f"{JOBS} {MOVE}"),
    ("kms:Decrypt", in_west("kms", "key/0f"), {**KEY_OF_WEST, STAGE: "prod"}, NOBODY),
    ("kms:Decrypt", in_west("kms", "key/0f"), {**KEY_OF_WEST, "kms:ViaService": "secretsmanager"}, NOBODY),
]


def test_what_a_stage_and_its_fallback_may_do_in_each_other(variants: Templates) -> None:
    """`home` and `west` are each the fallback of the other; the roles are those of `home`."""
    named = {path.removeprefix("home/"): found for path, found in variants.items() if path.startswith("home/")}
    stage, wrong = DeployedStage("home", named), []
    for actions, resource, context, expected in BETWEEN_REGIONS:
        for action in actions.split():
            request = (action, resource, {"aws:RequestedRegion": "us-west-2", **context})
            found = {role.name for role in stage.roles if role.decide_in(*request) == "allowed"}
            if found != set(expected.split()):
                wrong.append((request, "expected", expected, "found", " ".join(sorted(found))))
            elsewhere = (action, resource, {**context, "aws:RequestedRegion": "eu-west-1"})
            if not action.startswith(("s3:", "ssm:")) and any(
                role.decide_in(*elsewhere) == "allowed" for role in stage.roles
            ):
                wrong.append((elsewhere, "expected", NOBODY, "found", "someone in a third region"))
    assert wrong == []


def test_without_commands_in_jobs_no_role_may_use_exec() -> None:
    row = Stage(name="test", commands_in_jobs=False, teams=(Team(name="research", member_principals=(role_arn("x"),)),))
    closed = DeployedStage("test", up_to("jobs", row))
    own_task = {**OWN_TASK, "ecs:ResourceTag/trainyard:stage": "test"}
    assert closed.role("jobs", "Membersresearch").decide_in("ecs:ExecuteCommand", TASK, own_task) != "allowed"
    jobs = closed.role("jobs", "Teamresearch")
    assert jobs.decide_in("ssmmessages:CreateControlChannel", "*", {}) != "allowed"
