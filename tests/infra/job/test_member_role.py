"""A team's people: whatever a `trainyard` command asks of AWS is allowed them, for their own team and stage."""

import re
from collections.abc import Iterator
from dataclasses import replace

import pytest

from infra.observability.functions.stop_at_budget import STOP_TAG
from infra.stages import Stage, Team
from jobs.client.port_forwarding import DOCUMENT
from jobs.contract.catalog import CATALOG
from jobs.contract.submit_job import JOB_TAGS
from tests.support.infra.calls import permissions_of
from tests.support.infra.deployed_roles import ACCOUNT, REGION, DeployedStage, Role, statements
from tests.support.infra.policy_evaluation import as_list
from tests.support.infra.synthesis import ROOT, Templates, resources, stacks_of

Context = dict[str, str | list[str]]

ROW = Stage(
    name="test",
    teams=tuple(
        Team(name=name, member_principals=("arn:aws:iam::123456789012:role/people",)) for name in ("our-team", "theirs")
    ),
    max_multinode_nodes=2,
    max_on_demand_nodes=2,
)
JOB = f"arn:aws:batch:{REGION}:{ACCOUNT}:job/0f0f"


TASK = f"arn:aws:ecs:{REGION}:{ACCOUNT}:task/AWSBatch-x/0f0f"
CLUSTER = f"arn:aws:ecs:{REGION}:{ACCOUNT}:cluster/AWSBatch-x"
OWN_TASK: Context = {"ecs:ResourceTag/trainyard:team": "our-team", "ecs:ResourceTag/trainyard:stage": "test"}


@pytest.fixture(scope="module")
def templates() -> Templates:
    return stacks_of(ROW)


@pytest.fixture(scope="module")
def stage(templates: Templates) -> DeployedStage:
    return DeployedStage(ROW.name, templates)


@pytest.fixture(scope="module")
def people(stage: DeployedStage) -> Role:
    return stage.role("jobs", "Membersourteam")


def test_every_call_of_the_command_line_is_allowed(stage: DeployedStage, people: Role, templates: Templates) -> None:
    # GIVEN for each permission what the command line needs it for
    buckets = {name: stage.arn("storage", stage.only("storage", "AWS::S3::Bucket", name)) for name in ("Data", "Runs")}
    run = f"{buckets['Runs']}/our-team/a-run"
    group = stage.arn("jobs", stage.only("jobs", "AWS::Logs::LogGroup")).removesuffix(":*")
    queue = stage.published("team-queue/our-team/spot")
    parameters = f"arn:aws:ssm:{REGION}:{ACCOUNT}:parameter/trainyard/test"
    own_job: Context = {"aws:ResourceTag/trainyard:team": "our-team", "aws:ResourceTag/trainyard:stage": "test"}
    needed: dict[str, list[tuple[str, Context]]] = {
        "batch:DescribeComputeEnvironments": [("*", {})],
        "batch:DescribeJobQueues": [("*", {})],
        "batch:DescribeJobs": [("*", {})],
        "batch:GetJobQueueSnapshot": [(queue, tags_of_queue(templates, "our-team"))],
        "batch:ListJobs": [("*", {})],
        "batch:SubmitJob": list(submission(stage, templates, "our-team")),
        "batch:TerminateJob": [(JOB, own_job)],
        "ec2:DescribeInstanceTypeOfferings": [("*", {})],
        "ec2:DescribeSpotPriceHistory": [("*", {})],
        "ec2:DescribeSubnets": [("*", {})],
        "ecs:ExecuteCommand": [(resource, OWN_TASK) for resource in (TASK, CLUSTER)],
        "ecs:DescribeContainerInstances": [(f"arn:aws:ecs:{REGION}:{ACCOUNT}:container-instance/AWSBatch-x/0f0f", {})],
        "logs:GetLogEvents": [(f"{group}:log-stream:our-team/finetune-classification/main/0f0f", {})],
        "pricing:GetProducts": [("*", {})],
        "s3:DeleteObject": [
            (f"{run}/spec.yaml", {}),
            (f"{run}/arguments/0f.json", {}),
            (f"{run}/moves/0f0f.json", {}),
            (f"{run}/sweep.json", {}),
            (f"{run}/member-of.json", {}),
            (f"{buckets['Data']}/our-team/train.jsonl", {}),
        ],
        "s3:GetObject": [
            (f"{run}/model/model.safetensors", {}),
            (f"{buckets['Data']}/shared/models/x/config.json", {}),
            (f"{buckets['Data']}/our-team/train.jsonl", {}),
        ],
        "s3:ListBucket": [
            (buckets["Runs"], {"s3:prefix": "our-team/a-run"}),
            (buckets["Runs"], {"s3:prefix": "our-team/"}),
            (buckets["Data"], {"s3:prefix": "shared/models/x/"}),
        ],
        "s3:PutObject": [
            (f"{run}/spec.yaml", {}),
            (f"{run}/arguments/0f.json", {}),
            (f"{run}/moves/0f0f.json", {}),
            (f"{run}/sweep.json", {}),
            (f"{run}/member-of.json", {}),
            (f"{buckets['Data']}/our-team/train.jsonl", {}),
        ],
        "servicequotas:GetServiceQuota": [("*", {})],
        "ssm:GetParametersByPath": [(parameters, {}), (f"{parameters}/queue", {})],
    }
    # WHEN a command makes a call, THEN its permission is among them
    assert permissions_of_commands() == needed.keys()
    # AND the role has it
    refused = [
        f"{action} on {resource}: {decision}"
        for action, requests in needed.items()
        for resource, context in requests
        if (decision := people.decide_in(action, resource, context)) != "allowed"
    ]
    assert refused == []
    # AND with SubmitJob, which tags the job, the permission to do that, on what it is submitted to and from
    for resource, context in submission(stage, templates, "our-team"):
        if resource != JOB:
            tags: Context = {**context, "aws:TagKeys": list(JOB_TAGS)}
            assert people.decide_in("batch:TagResource", resource, tags) == "allowed", resource


def test_people_submit_to_their_own_queues_only_or_to_those_that_teams_share() -> None:
    # Whoever got a job into another team's queue would share its instances, and their keys.
    teams = tuple(replace(team, shares_instances=team.name == "our-team") for team in ROW.teams)
    stage = DeployedStage("test", stacks_of(replace(ROW, teams=teams)))
    ours, theirs = stage.role("jobs", "Membersourteam"), stage.role("jobs", "Memberstheirs")
    shared, own = stage.published("queue/spot"), stage.published("team-queue/theirs/spot")
    tags: Context = {"aws:ResourceTag/trainyard:stage": "test"}
    own_tags: Context = {**tags, "aws:ResourceTag/trainyard:team": "theirs"}
    for role, share, queue, context, allowed in (
        (ours, "ourteam", shared, tags, True),
        (ours, "ourteam", own, own_tags, False),
        (theirs, "theirs", own, own_tags, True),
        (theirs, "theirs", shared, tags, False),
    ):
        decision = role.decide_in("batch:SubmitJob", queue, {**context, "batch:ShareIdentifier": share})
        assert (decision == "allowed") is allowed, (role.logical_id, queue)


@pytest.mark.parametrize("several_nodes", [False, True])
def test_people_submit_their_own_definitions_old_revisions_too(
    stage: DeployedStage, templates: Templates, people: Role, several_nodes: bool
) -> None:
    kind = next(kind for kind in CATALOG.values() if kind.accelerated)
    name = f"job-definition{'-multinode' if several_nodes else ''}/our-team/{kind.name}"
    definition = stage.published(name)
    context = tags_of(templates, "jobs", "AWS::Batch::JobDefinition", "Jobourteam")
    for revision in (definition, re.sub(r":\d+$", ":17", definition)):
        assert people.decide_in("batch:SubmitJob", revision, context) == "allowed"


INSTANCE = f"arn:aws:ec2:{REGION}:{ACCOUNT}:instance/i-0"
OWN_INSTANCE: Context = {"aws:ResourceTag/trainyard:team": "our-team", "aws:ResourceTag/trainyard:stage": "test"}
CHECKED: Context = {"ssm:SessionDocumentAccessCheck": "true"}


def test_people_forward_ports_of_instances_that_run_their_jobs(people: Role) -> None:
    # GIVEN what `trainyard connect` starts, and the two resources that Session Manager wants a permission on
    document = f"arn:aws:ssm:{REGION}::document/{DOCUMENT}"
    assert people.decide_in("ssm:StartSession", INSTANCE, {**OWN_INSTANCE, **CHECKED}) == "allowed"
    assert people.decide_in("ssm:StartSession", document, CHECKED) == "allowed"
    assert people.decide_in("ssmmessages:OpenDataChannel", "*", {}) == "allowed"
    # AND the end of a session of their own
    own = {"aws:userid": "AROA:ada", "ssm:resourceTag/aws:ssmmessages:session-id": "AROA:ada"}
    session = f"arn:aws:ssm:{REGION}:{ACCOUNT}:session/ada-0f0f"
    for action in ("ssm:TerminateSession", "ssm:ResumeSession"):
        assert people.decide_in(action, session, own) == "allowed"
        assert people.decide_in(action, session, {**own, "aws:userid": "AROA:bob"}) == "implicitly denied"


def test_a_document_that_is_not_allowed_is_refused_even_where_none_is_named(people: Role) -> None:
    # Without the check, StartSession with no document asks for the instance only, and gives a shell.
    starts = [s for s in statements(people) if "ssm:StartSession" in as_list(s["Action"])]
    assert len(starts) == 2
    for statement in starts:
        assert statement["Condition"]["BoolIfExists"] == {"ssm:SessionDocumentAccessCheck": "true"}


def foreign(service: str) -> list[Context]:
    """Return the tags of what is not the team's: without any, another team's, another stage's."""
    stage, team = f"{service}:ResourceTag/trainyard:stage", f"{service}:ResourceTag/trainyard:team"
    return [{}, {stage: "test"}, {stage: "test", team: "theirs"}, {stage: "prod", team: "our-team"}]


AS_OURS: Context = {
    "aws:RequestTag/trainyard:team": "our-team",
    "aws:RequestTag/trainyard:stage": "test",
    "aws:TagKeys": ["trainyard:stage", "trainyard:team"],
}


@pytest.mark.parametrize(
    ("action", "resource", "context"),
    [
        *(("ssm:StartSession", INSTANCE, {**tags, **CHECKED}) for tags in foreign("aws")),
        *(("ecs:ExecuteCommand", resource, tags) for resource in (TASK, CLUSTER) for tags in foreign("ecs")),
        # Not beside ECS either, where no log would tell of it.
        ("ssm:StartSession", TASK, {**OWN_INSTANCE, **CHECKED}),
        *(
            ("ssm:StartSession", f"arn:aws:ssm:{REGION}:{account}:document/{document}", {})
            for account in ("", ACCOUNT)
            for document in (
                *("SSM-SessionManagerRunShell", "AWS-StartSSHSession"),
                "AWS-StartPortForwardingSessionToRemoteHost",
            )
        ),
        *(("batch:TerminateJob", JOB, tags) for tags in foreign("aws")),
        # A job without tags belongs to others of the account: with the team's tag it could be ended.
        *(("batch:TagResource", JOB, {**AS_OURS, **tags}) for tags in foreign("aws")),
        ("batch:UntagResource", JOB, OWN_INSTANCE),
        ("batch:RegisterJobDefinition", f"arn:aws:batch:{REGION}:{ACCOUNT}:job-definition/x", {}),
        ("batch:UpdateJobQueue", f"arn:aws:batch:{REGION}:{ACCOUNT}:job-queue/x", {}),
        ("ec2:RunInstances", "*", {}),
        ("ecr:PutImage", f"arn:aws:ecr:{REGION}:{ACCOUNT}:repository/x", {}),
        ("iam:PassRole", f"arn:aws:iam::{ACCOUNT}:role/x", {}),
        ("logs:DeleteLogGroup", f"arn:aws:logs:{REGION}:{ACCOUNT}:log-group:x", {}),
        ("ssm:PutParameter", f"arn:aws:ssm:{REGION}:{ACCOUNT}:parameter/trainyard/test/budget-stop/our-team", {}),
        ("ssm:GetParameter", f"arn:aws:ssm:{REGION}:{ACCOUNT}:parameter/trainyard/testing/bucket/run", {}),
        ("sts:AssumeRole", f"arn:aws:iam::{ACCOUNT}:role/x", {}),
    ],
)
def test_people_may_not(people: Role, action: str, resource: str, context: Context) -> None:
    assert people.decide_in(action, resource, context) != "allowed"


def test_where_the_stage_lets_nobody_in_no_role_has_a_permission_for_it() -> None:
    closed = DeployedStage(ROW.name, stacks_of(replace(ROW, commands_in_jobs=False)))
    assert closed.role("jobs", "Membersourteam").decide_in("ecs:ExecuteCommand", TASK, OWN_TASK) != "allowed"
    assert not closed.role("jobs", "Teamourteam").may("ssmmessages:CreateControlChannel", "*")


def test_people_whose_budget_is_used_up_submit_nothing_and_still_watch_and_stop(
    stage: DeployedStage, templates: Templates, people: Role
) -> None:
    # GIVEN the tag that the function puts on their role
    stopped: Context = {f"aws:PrincipalTag/{STOP_TAG}": "2026-12-01T00:00:00+00:00"}
    # THEN a submission that was allowed is denied, for the queue
    queue, *others = submission(stage, templates, "our-team")
    assert people.decide_in("batch:SubmitJob", queue[0], {**queue[1], **stopped}) == "explicitly denied"
    for resource, context in others:
        assert people.decide_in("batch:SubmitJob", resource, {**context, **stopped}) == "allowed"
    # AND an empty value is a tag as well
    assert people.decide_in("batch:SubmitJob", queue[0], {**queue[1], **dict.fromkeys(stopped, "")}) != "allowed"
    # AND what runs can be looked at and stopped
    own: Context = {"aws:ResourceTag/trainyard:team": "our-team", "aws:ResourceTag/trainyard:stage": "test"}
    assert people.decide_in("batch:TerminateJob", JOB, {**own, **stopped}) == "allowed"
    assert people.decide_in("batch:DescribeJobs", "*", stopped) == "allowed"
    # AND nobody takes the tag off himself, or hides it behind one of his session
    assert not people.may("iam:UntagRole", people.arn)
    assert {action for s in people.trust["Statement"] for action in as_list(s["Action"])} == {"sts:AssumeRole"}


def test_no_one_gives_a_queue_or_a_definition_a_tag_that_means_something_else(
    stage: DeployedStage, templates: Templates, people: Role
) -> None:
    for resource, context in submission(stage, templates, "our-team"):
        for changed in (
            {"aws:RequestTag/trainyard:team": "theirs"},
            {"aws:RequestTag/trainyard:stage": "prod"},
            {"aws:ResourceTag/trainyard:team": "theirs"},
            {"aws:TagKeys": [*JOB_TAGS, "trainyard:role"]},
        ):
            request: Context = {"aws:TagKeys": list(JOB_TAGS), **context, **changed}
            assert people.decide_in("batch:TagResource", resource, request) != "allowed", (resource, changed)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("batch:ShareIdentifier", "theirs"),
        ("batch:ShareIdentifier", None),
        ("aws:RequestTag/trainyard:team", "theirs"),
        ("aws:RequestTag/trainyard:team", None),
        ("aws:RequestTag/trainyard:stage", "prod"),
        ("aws:RequestTag/trainyard:stage", None),
        ("aws:ResourceTag/trainyard:stage", "prod"),
        ("aws:ResourceTag/trainyard:stage", None),
        ("aws:ResourceTag/trainyard:team", "theirs"),
        ("aws:ResourceTag/trainyard:team", None),
    ],
)
def test_no_one_pays_with_another_teams_share_or_uses_what_is_not_the_stages(
    stage: DeployedStage, templates: Templates, people: Role, key: str, value: str | None
) -> None:
    # GIVEN a submission that is allowed but for one key, which says something else or is missing
    decisions = []
    for resource, context in submission(stage, templates, "our-team"):
        given = {name: what for name, what in context.items() if name != key}
        changed = {key: value} if key in context and value is not None else {}
        decisions.append(people.decide_in("batch:SubmitJob", resource, {**given, **changed}))
    # THEN one of the three resources that it needs is refused
    assert set(decisions) != {"allowed"}


def submission(stage: DeployedStage, templates: Templates, team: str) -> Iterator[tuple[str, Context]]:
    """The resources that Batch wants a permission on when a job is submitted, and what each request carries."""
    request: Context = {
        "batch:ShareIdentifier": team.replace("-", ""),
        "aws:RequestTag/trainyard:team": team,
        "aws:RequestTag/trainyard:stage": "test",
    }
    queue = {**request, **tags_of_queue(templates, team)}
    definition = tags_of(templates, "jobs", "AWS::Batch::JobDefinition", f"Job{team.replace('-', '')}")
    yield stage.published(f"team-queue/{team}/spot"), queue
    yield stage.published(f"job-definition/{team}/finetune-classification"), {**request, **definition}
    yield JOB, request


def tags_of_queue(templates: Templates, team: str) -> Context:
    return tags_of(templates, "compute", "AWS::Batch::JobQueue", f"dl124xlarge1210of{team.replace('-', '')}")


def tags_of(templates: Templates, stack: str, resource_type: str, beginning: str = "") -> Context:
    """The tags of the resources of a type, which must not differ, as a request for one of them carries them."""
    found = [
        properties["Tags"]
        for name, properties in resources(templates[stack], resource_type).items()
        if name.startswith(beginning)
    ]
    assert found
    assert all(tags == found[0] for tags in found)
    return {f"aws:ResourceTag/{key}": value for key, value in found[0].items()}


def permissions_of_commands() -> set[str]:
    """The permissions that the calls in jobs/ need, read from the code itself.

    But for those of the container, which has a role of its own, and of jobs/images: whoever runs the platform pushes
    and lists images, by CodeBuild's role or his own, and tests/infra/image/test_stack.py holds what that needs. They
    run an acceptance too, which deploys.
    """
    others = (ROOT / "jobs/train", ROOT / "jobs/images", ROOT / "jobs/cli/acceptance")
    return permissions_of(
        path for path in (ROOT / "jobs").rglob("*.py") if not any(other in path.parents for other in others)
    )
