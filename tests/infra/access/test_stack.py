"""CI's roles, which only the configured place and its pull requests get, and the check of the instance types."""

import re
import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import boto3
import pytest
import yaml

from infra.access.instance_type_offer import _CODE
from infra.access.stack import _SESSION, STACKS
from infra.settings import STAGES
from infra.stages import GitHub, Stage, Team
from tests.support.infra.deployed_roles import ACCOUNT, DeployedStage
from tests.support.infra.goldens import assert_as_reviewed
from tests.support.infra.policy_evaluation import Request, applies, as_list
from tests.support.infra.synthesis import ROOT, Templates, resources, up_to

ISSUER = "token.actions.githubusercontent.com"
PROVIDER = f"arn:aws:iam::{ACCOUNT}:oidc-provider/{ISSUER}"


def test_the_template_is_as_reviewed(reviewed: Templates) -> None:
    assert_as_reviewed(reviewed, "access")


def trusted(
    template: dict[str, Any], *, subject: str, audience: str = "sts.amazonaws.com", role: str = "Deploy"
) -> bool:
    """Return whether a GitHub token with these claims may assume a role."""
    trust = DeployedStage("test", {"access": template}).role("access", role).trust
    request = Request(
        action="sts:AssumeRoleWithWebIdentity", context={f"{ISSUER}:sub": subject, f"{ISSUER}:aud": audience}
    )
    return any(
        # A trust policy applies to its role only.
        applies(request, {**{key: value for key, value in statement.items() if key != "Principal"}, "Resource": "*"})
        for statement in as_list(trust["Statement"])
    )


@pytest.mark.parametrize(
    ("source", "subject"),
    [
        (GitHub(repository="org/repo", branch="release/1"), "repo:org/repo:ref:refs/heads/release/1"),
        (GitHub(repository="org/repo", oidc_provider_arn=PROVIDER), "repo:org/repo:ref:refs/heads/main"),
        (GitHub(repository="org/repo", environment="production"), "repo:org/repo:environment:production"),
        # The example of GitHub's OIDC reference, with the form of repositories created after 15 July 2026
        (
            GitHub(repository="octo-org/octo-repo", owner_id=123456, repository_id=456789),
            "repo:octo-org@123456/octo-repo@456789:ref:refs/heads/main",
        ),
    ],
    ids=["branch", "provider", "environment", "immutable"],
)
def test_ci_only_deploys_from_the_configured_place(source: GitHub, subject: str) -> None:
    row = Stage(name="test", teams=(Team(name="research"),), deploy_from=source)
    template = up_to("access", row)["access"]
    assert trusted(template, subject=subject)
    for other in (
        "repo:org/repo:pull_request",
        "repo:org/repo:ref:refs/heads/feature",
        "repo:org/repo:ref:refs/tags/main",
        "repo:org/repo-2:ref:refs/heads/main",
        "repo:octo-org/octo-repo:ref:refs/heads/main",
        "repo:octo-org-123456/octo-repo-456789:ref:refs/heads/main",
        "repo:octo-org@1/octo-repo@456789:ref:refs/heads/main",
        "repo:org/repo:environment:other",
        f"{subject}-2",
        "",
    ):
        assert not trusted(template, subject=other), other
    assert not trusted(template, subject=subject, audience="https://github.com/org")
    # Pull requests of the same repository, in the same form of subject, get the other role.
    pull_request = f"{':'.join(subject.split(':')[:2])}:pull_request"
    for other in (subject, pull_request, "repo:org/fork:pull_request"):
        assert trusted(template, subject=other, role="Diff") is (other == pull_request)
    # The account's only GitHub provider is created, unless the settings name an existing one.
    created = list(resources(template, "AWS::IAM::OIDCProvider"))
    roles = [
        role for name, role in resources(template, "AWS::IAM::Role").items() if name.startswith(("Deploy", "Diff"))
    ]
    for role in roles:
        (statement,) = role["AssumeRolePolicyDocument"]["Statement"]
        assert statement["Principal"]["Federated"] == ({"Fn::GetAtt": [created[0], "Arn"]} if created else PROVIDER)
    assert bool(created) is (source.oidc_provider_arn is None)


def test_without_the_setting_ci_cannot_deploy(templates: Templates) -> None:
    roles = resources(templates["dev/access"], "AWS::IAM::Role")
    assert not [name for name in roles if name.startswith(("Deploy", "Diff"))]
    assert not resources(templates["dev/access"], "AWS::IAM::OIDCProvider")


def test_the_first_stack_asks_for_both_types_before_the_network() -> None:
    # Inline code may have up to 4096 characters, and only inline code has `cfnresponse`.
    assert len(_CODE.read_text()) < 4096
    row = Stage(name="test", teams=(Team(name="research"),))
    offers = resources(up_to("access", row)["access"], "Custom::InstanceTypeOffer").values()
    assert {offer["InstanceType"] for offer in offers} == {"dl1.24xlarge", "m6i.4xlarge"}
    assert not resources(up_to("access", replace(row, allow_unoffered=True))["access"], "Custom::InstanceTypeOffer")


Ask = Callable[..., tuple[str, str, str | None]]


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch) -> Ask:
    """Return a function that sends a CloudFormation request, while EC2 offers one type, or fails."""
    sent: list[tuple[str, str, str | None]] = []

    def send(_event: Any, _context: Any, status: str, _data: Any, physical: str, *, reason: str | None) -> None:
        sent.append((status, physical, reason))

    def offerings(**arguments: list[dict[str, Any]]) -> dict[str, Any]:
        (name,) = arguments["Filters"][0]["Values"]
        if name == "broken":
            raise RuntimeError("no answer")
        return {"InstanceTypeOfferings": [{"InstanceType": name}] if name == "p4d.24xlarge" else []}

    # CloudFormation's module, which only inline code has.
    monkeypatch.setitem(sys.modules, "cfnresponse", SimpleNamespace(SUCCESS="SUCCESS", FAILED="FAILED", send=send))
    monkeypatch.delitem(sys.modules, "infra.access.functions.offer", raising=False)
    monkeypatch.setattr(boto3, "client", lambda _: SimpleNamespace(describe_instance_type_offerings=offerings))
    from infra.access.functions.offer import handler

    def of(name: str, request: str = "Create", *, release: str = "1", **more: str) -> tuple[str, str, Any]:
        properties = {"InstanceType": name, "Release": release, "Otherwise": f"no {name}. Next: another"}
        handler({"RequestType": request, "ResourceProperties": properties, **more}, None)
        return sent[-1]

    return of


def test_an_unoffered_type_fails_with_a_next_step(ask: Ask) -> None:
    assert ask("p4d.24xlarge") == ("SUCCESS", "p4d.24xlarge/1", None)
    assert ask("dl1.24xlarge") == ("FAILED", "dl1.24xlarge/1", "no dl1.24xlarge. Next: another")
    assert ask("broken") == ("FAILED", "broken/1", "EC2 did not report whether it offers broken: no answer")


def test_a_failed_deployment_can_roll_back_and_be_deleted(ask: Ask) -> None:
    # GIVEN a stage from when the type was offered, WHEN its release changes after the type was withdrawn
    before = {"PhysicalResourceId": "dl1.24xlarge/1"}
    assert ask("dl1.24xlarge", "Update", release="2", **before)[:2] == ("FAILED", "dl1.24xlarge/1")
    # THEN CloudFormation can roll back to it, and delete it
    assert ask("dl1.24xlarge", "Update", release="1", **before)[0] == "SUCCESS"
    assert ask("dl1.24xlarge", "Delete", release="2", **before)[0] == "SUCCESS"


WORKFLOW = yaml.safe_load((ROOT / ".github/workflows/deploy.yml").read_text())
DIFF, DEPLOY = (WORKFLOW["jobs"][name] for name in ("diff", "deploy"))


def test_the_workflow_matches_roles_and_settings(templates: Templates) -> None:
    assert {path.split("/")[1] for path in templates} == set(STACKS)
    stages = [row["stage"] for row in DIFF["strategy"]["matrix"]["include"]]
    assert stages == DEPLOY["strategy"]["matrix"]["stage"] == list(STAGES)
    # The subject of a token names the job's environment, if it has one; a pull request's role does not trust that.
    assert "environment" not in DIFF
    assert DEPLOY["environment"] == "${{ matrix.stage }}"
    [sign_in] = [step["with"] for step in DEPLOY["steps"] if "role-to-assume" in step.get("with", {})]
    assert sign_in["role-duration-seconds"] == _SESSION.to_seconds() > DEPLOY["timeout-minutes"] * 60
    # No token unless a job asks for it, and no action that someone else can change.
    assert WORKFLOW["permissions"] == {}
    used = [step["uses"] for job in (DIFF, DEPLOY) for step in job["steps"] if "uses" in step]
    assert all(re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", action) for action in used)
