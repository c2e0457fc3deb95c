"""Every role's permissions boundary allows what the roles need and refuses everything else."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from tests.support.infra.deployed_roles import ACCOUNT, REGION, DeployedStage, Role, statements
from tests.support.infra.policy_evaluation import Request, as_list, evaluate
from tests.support.infra.synthesis import Templates, resources
from tests.support.infra.variants import EXISTING_VPC

USER_ID = "AROAEXAMPLE:ada"

NEEDLESS = (
    r"s3:GetObject .*\.(iso|Iso|ISO)|ecr:BatchDeleteImage .*|ssm:GetParameters? .*/trainyard/all/x"
    r"|logs:(CreateLogStream|PutLogEvents) \*"
)
"""Actions in AWS's policies that nothing here uses: importing Windows from an installation disk, deleting container
images (ECR's lifecycle rules do), reading parameters, and writing any log."""

MAX_POLICY_CHARACTERS = 6_144
"""IAM's quota for a managed policy, without white space."""


@pytest.fixture(scope="module")
def boundary(everything: DeployedStage) -> Mapping[str, Any]:
    documents = everything.role("compute", "InstanceRole").boundary
    assert documents is not None
    return documents[0]


def test_every_role_has_the_stages_or_the_accounts_boundary(
    everything: DeployedStage, boundary: Mapping[str, Any], variants: Templates
) -> None:
    # Roles of the CDK's own functions are bare resources, which settings on constructs do not reach.
    assert any(role.logical_id.startswith("CustomVpcRestrictDefaultSG") for role in everything.roles)
    assert all(role.boundary == (boundary,) for role in everything.roles)
    roles = [
        role
        for path, template in variants.items()
        if path.startswith(f"{EXISTING_VPC.name}/")
        for role in resources(template, "AWS::IAM::Role").values()
    ]
    arn = f"arn:aws:iam::{ACCOUNT}:policy/{EXISTING_VPC.permissions_boundary}"
    resolve = DeployedStage("existing", {}).resolve
    assert {resolve("access", role["PermissionsBoundary"]) for role in roles} == {arn}
    # The stage's own boundary stays exported, because deployed stacks import it until they are updated.
    assert variants[f"{EXISTING_VPC.name}/access"]["Outputs"]


def test_the_boundary_fits_iams_quota(boundary: Mapping[str, Any]) -> None:
    assert len(re.sub(r"\s", "", str(boundary))) < MAX_POLICY_CHARACTERS


def test_the_boundary_admits_what_the_roles_are_allowed(everything: DeployedStage) -> None:
    refused = {
        f"{role.stack} {role.logical_id}: {request.action} on {request.resource}"
        for role in everything.roles
        for request in requests_of(role)
        if not re.fullmatch(NEEDLESS, f"{request.action} {request.resource}")
        and role.decide_in(request.action, request.resource, request.context) != "allowed"
    }
    assert refused == set()


ALLOW_ALL = {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "*", "Resource": "*"}]}
OWN_ROLE, OTHER_ROLE = (f"arn:aws:iam::{ACCOUNT}:role/{name}" for name in ("trainyard-all-jobs-x", "x"))
OTHER_STAGE, OWN_STAGE = ({"aws:ResourceTag/trainyard:stage": stage} for stage in ("prod", "all"))
DEPLOYER = {"aws:PrincipalTag/trainyard:role": "deployer"}
STOP = "trainyard:budget-stop"


def arn(service: str, resource: str) -> str:
    return f"arn:aws:{service}:{REGION}:{ACCOUNT}:{resource}"


JOB = arn("batch", "job/x")
BEYOND: list[tuple[str, str, Mapping[str, str | list[str]]]] = [
    # Permissions, of the role itself and of others
    ("iam:CreateRole", OTHER_ROLE, {}),
    ("iam:DeleteRolePermissionsBoundary", OTHER_ROLE, {}),
    ("iam:CreatePolicyVersion", f"arn:aws:iam::{ACCOUNT}:policy/x", {}),
    ("iam:AttachRolePolicy", OWN_ROLE, {"iam:PolicyARN": "arn:aws:iam::aws:policy/AdministratorAccess"}),
    ("iam:TagRole", OWN_ROLE, {"aws:TagKeys": ["trainyard:role"]}),
    ("iam:TagRole", OWN_ROLE, {"aws:TagKeys": [STOP, "trainyard:team"]}),
    ("iam:UntagRole", OTHER_ROLE, {"aws:TagKeys": [STOP]}),
    ("sts:AssumeRole", OWN_ROLE, {}),
    ("sts:AssumeRole", f"arn:aws:iam::{ACCOUNT}:role/cdk-hnb659fds-deploy-role-{ACCOUNT}-{REGION}", {}),
    # The account and its stacks
    ("organizations:LeaveOrganization", "*", {}),
    ("cloudformation:UpdateStack", arn("cloudformation", "stack/x/y"), {}),
    ("cloudtrail:StopLogging", arn("cloudtrail", "trail/x"), {}),
    ("ec2:RunInstances", "*", {}),
    ("lambda:UpdateFunctionCode", arn("lambda", "function:x"), {}),
    ("batch:RegisterJobDefinition", arn("batch", "job-definition/x"), {}),
    ("kms:ScheduleKeyDeletion", arn("kms", "key/x"), {}),
    # Commands with a build's role, unless the caller is the deployer
    ("codebuild:StartBuild", arn("codebuild", "project/x"), OWN_STAGE),
    ("codebuild:StartBuild", arn("codebuild", "project/x"), {**OTHER_STAGE, **DEPLOYER}),
    # Other regions, and other stages in the same account
    ("batch:SubmitJob", f"arn:aws:batch:eu-west-1:{ACCOUNT}:job-queue/x", {"aws:RequestedRegion": "eu-west-1"}),
    ("s3:GetObject", "arn:aws:s3:::trainyard-prod-storage-data-1a2b3c/shared/x", {}),
    ("s3:GetObject", "arn:aws:s3:::somebody-elses/x", {}),
    ("ssm:PutParameter", arn("ssm", "parameter/trainyard/prod/queue/spot"), {}),
    ("ssm:GetParameter", arn("ssm", "parameter/trainyard/all-2/bucket/run"), {}),
    ("batch:TerminateJob", JOB, OTHER_STAGE),
    ("secretsmanager:GetSecretValue", arn("secretsmanager", "secret:x"), OTHER_STAGE),
    ("kms:Decrypt", arn("kms", "key/x"), OTHER_STAGE),
]


def test_the_boundary_limits_a_role_that_may_do_everything(boundary: Mapping[str, Any]) -> None:
    def admitted(action: str, resource: str, context: Mapping[str, str | list[str]]) -> bool:
        request = Request(action=action, resource=resource, context={"aws:RequestedRegion": REGION, **context})
        return evaluate(request, [ALLOW_ALL], boundary=[boundary]) == "allowed"

    assert [call for call in BEYOND if admitted(*call)] == []
    # Resources of this stage, or of no stage, are admitted.
    within = [("batch:TerminateJob", JOB, OWN_STAGE), ("batch:TerminateJob", JOB, {})]
    assert [call for call in within if not admitted(*call)] == []


def requests_of(role: Role) -> Iterator[Request]:
    """Yield a request for every action in the role's statements, with a matching resource and condition keys."""
    for statement in statements(role):
        if statement["Effect"] != "Allow":
            continue
        context: dict[str, Any] = {"aws:userid": USER_ID}
        for operator, keys in statement.get("Condition", {}).items():
            for key, values in keys.items():
                context.update(satisfying(operator, key, as_list(values)))
        for pattern in as_list(statement["Action"]):
            action = pattern.replace("*", "X")
            for resource in as_list(statement["Resource"]):
                yield Request(action=action, resource=matching_resource(action, resource), context=context)


def satisfying(operator: str, key: str, values: list[Any]) -> dict[str, Any]:
    """Return a value for a condition key that satisfies the condition."""
    if operator == "Null":
        return {} if str(values[0]).lower() == "true" else {key: "x"}
    value = str(values[0]).replace("*", "x").replace("${aws:PrincipalAccount}", ACCOUNT)
    value = value.replace("${aws:userid}", USER_ID)
    assert "Not" not in operator, f"cannot satisfy {operator}"
    return {key: [value] if operator.startswith("For") else value}


def matching_resource(action: str, pattern: str) -> str:
    """Return a resource that matches the pattern; for `*`, one of the stage's."""
    if pattern != "*":
        return pattern.replace("*", "x")
    if action.startswith("s3:"):
        return "arn:aws:s3:::trainyard-test-storage-x/y"
    if "Parameter" in action:
        return f"arn:aws:ssm:{REGION}:{ACCOUNT}:parameter/trainyard/all/x"
    return "*"
