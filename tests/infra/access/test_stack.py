import re
from typing import Any

import pytest

from infra.stages import GitHub
from jobs.contract.stage import IMAGE_BUILD_PROJECT
from tests.support.infra.deployed_roles import ACCOUNT, REGION, DeployedStage
from tests.support.infra.policy_evaluation import Request, applies, as_list
from tests.support.infra.synthesis import ROOT, only, resources

ISSUER = "token.actions.githubusercontent.com"
PROVIDER = f"arn:aws:iam::{ACCOUNT}:oidc-provider/{ISSUER}"


def trusted(template: dict[str, Any], *, subject: str, audience: str = "sts.amazonaws.com") -> bool:
    """Return whether the role of CI is given to a token of GitHub's."""
    trust = DeployedStage("test", {"access": template}).role("access", "Deploy").trust
    request = Request(
        action="sts:AssumeRoleWithWebIdentity", context={f"{ISSUER}:sub": subject, f"{ISSUER}:aud": audience}
    )
    return any(
        # A trust policy speaks of its own role.
        applies(request, {**{key: value for key, value in statement.items() if key != "Principal"}, "Resource": "*"})
        for statement in as_list(trust["Statement"])
    )


@pytest.mark.parametrize(
    ("source", "subject"),
    [
        (GitHub(repository="org/repo"), "repo:org/repo:ref:refs/heads/main"),
        (GitHub(repository="org/repo", branch="release/1"), "repo:org/repo:ref:refs/heads/release/1"),
        (GitHub(repository="org/repo", environment="production"), "repo:org/repo:environment:production"),
    ],
    ids=["main", "branch", "environment"],
)
def test_ci_deploys_from_the_one_place_that_is_named(synthesised: Any, source: GitHub, subject: str) -> None:
    template = synthesised(deploy_from=source)["access"]
    assert trusted(template, subject=subject)
    for other in (
        "repo:org/repo:pull_request",
        "repo:org/repo:ref:refs/heads/feature",
        "repo:org/repo:ref:refs/tags/main",
        "repo:org/repo-2:ref:refs/heads/main",
        "repo:fork/repo:ref:refs/heads/main",
        "repo:org/repo:environment:other",
        f"{subject}-2",
        "",
    ):
        assert not trusted(template, subject=other), other
    assert not trusted(template, subject=subject, audience="https://github.com/org")


def test_ci_may_become_cdks_roles_of_this_account_and_region_and_little_else(synthesised: Any) -> None:
    stacks = synthesised(deploy_from=GitHub(repository="org/repo"))
    role = DeployedStage("test", {"access": stacks["access"]}).role("access", "Deploy")
    for name in ("deploy", "file-publishing", "image-publishing", "lookup"):
        assert role.may("sts:AssumeRole", f"arn:aws:iam::{ACCOUNT}:role/cdk-hnb659fds-{name}-role-{ACCOUNT}-{REGION}")
    for other in (
        f"cdk-hnb659fds-cfn-exec-role-{ACCOUNT}-{REGION}",  # CloudFormation's, which may do everything
        f"cdk-hnb659fds-deploy-role-{ACCOUNT}-eu-west-1",
        f"cdk-hnb659fds-deploy-role-210987654321-{REGION}",
        "trainyard-test-jobs-x",
    ):
        assert not role.may("sts:AssumeRole", f"arn:aws:iam::{ACCOUNT}:role/{other}")
    for action in ("cloudformation:CreateStack", "s3:GetObject", "iam:PassRole", "sts:GetFederationToken"):
        assert not role.may(action)
    published = {item["Name"] for item in resources(stacks["access"], "AWS::SSM::Parameter").values()}
    assert published == {"/trainyard/test/permissions-boundary", "/trainyard/test/deploy-role"}


def test_ci_has_the_stages_images_built_and_no_other_project(synthesised: Any) -> None:
    # GIVEN the project, by the tags that its template gives it
    stacks = synthesised(deploy_from=GitHub(repository="org/repo"))
    stage = DeployedStage("test", stacks)
    role = stage.role("access", "Deploy")
    project = stage.arn("image", stage.only("image", "AWS::CodeBuild::Project"))
    tags = {
        f"aws:ResourceTag/{tag['Key']}": tag["Value"]
        for tag in only(stacks["image"], "AWS::CodeBuild::Project")["Tags"]
    }
    parameter = f"arn:aws:ssm:{REGION}:{ACCOUNT}:parameter/trainyard/test/{IMAGE_BUILD_PROJECT}"
    assert parameter.split(":parameter")[1] in {
        item["Name"] for item in resources(stacks["image"], "AWS::SSM::Parameter").values()
    }
    # THEN each call of the workflow in infra/README.md is allowed
    needed = {
        "ssm:GetParameter": (parameter, {}),
        "codebuild:StartBuild": (project, tags),
        "codebuild:BatchGetBuilds": (project, tags),
    }
    assert calls_of_the_workflow() == set(needed)
    for action, (resource, context) in needed.items():
        assert role.decide_in(action, resource, context) == "allowed", action
    # AND nothing of another stage's project or of one that is nobody's
    for action in ("codebuild:StartBuild", "codebuild:BatchGetBuilds"):
        assert role.decide_in(action, project, {**tags, "aws:ResourceTag/trainyard:stage": "prod"}) != "allowed"
        assert role.decide_in(action, project, {}) == "implicitly denied"
    # AND nothing else of CodeBuild or SSM
    assert role.decide_in("codebuild:UpdateProject", project, tags) == "implicitly denied"
    assert not role.may("ssm:PutParameter", parameter)
    assert not role.may("ssm:GetParameter", f"arn:aws:ssm:{REGION}:{ACCOUNT}:parameter/trainyard/test/bucket/data")


def test_the_accounts_provider_is_made_or_taken(synthesised: Any) -> None:
    made = synthesised(deploy_from=GitHub(repository="org/repo"))["access"]
    provider = only(made, "AWS::IAM::OIDCProvider")
    assert (provider["Url"], provider["ClientIdList"]) == (f"https://{ISSUER}", ["sts.amazonaws.com"])
    (logical_id,) = resources(made, "AWS::IAM::OIDCProvider")
    assert federated(made) == {"Fn::GetAtt": [logical_id, "Arn"]}
    taken = synthesised(deploy_from=GitHub(repository="org/repo", oidc_provider_arn=PROVIDER))["access"]
    assert not resources(taken, "AWS::IAM::OIDCProvider")
    assert federated(taken) == PROVIDER


def test_no_one_deploys_from_ci_unless_the_settings_say_so(synthesised: Any) -> None:
    template = synthesised()["access"]
    assert not resources(template, "AWS::IAM::Role")
    assert not resources(template, "AWS::IAM::OIDCProvider")


def federated(template: dict[str, Any]) -> Any:
    (statement,) = only(template, "AWS::IAM::Role")["AssumeRolePolicyDocument"]["Statement"]
    return statement["Principal"]["Federated"]


def calls_of_the_workflow() -> set[str]:
    """Return the permissions that the `aws` commands of the workflow in infra/README.md need."""
    section = (ROOT / "infra/README.md").read_text().split("## Deploy from CI, without a key")[1].split("\n## ")[0]
    (workflow,) = re.findall(r"```yaml\n(.*?)```", section, re.DOTALL)
    return {
        f"{service}:{command.title().replace('-', '')}"
        for service, command in re.findall(r"\baws ([a-z]+) ([a-z-]+)", workflow)
    }
