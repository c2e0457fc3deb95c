"""Only CI from the configured place gets the deploy role, through the account's only provider, and only if set."""

from typing import Any

import pytest

from infra.stages import GitHub, Stage, Team
from tests.support.infra.deployed_roles import ACCOUNT, DeployedStage
from tests.support.infra.goldens import assert_as_reviewed
from tests.support.infra.policy_evaluation import Request, applies, as_list
from tests.support.infra.synthesis import Templates, only, resources, up_to

ISSUER = "token.actions.githubusercontent.com"
PROVIDER = f"arn:aws:iam::{ACCOUNT}:oidc-provider/{ISSUER}"


def test_the_template_is_as_reviewed(reviewed: Templates) -> None:
    assert_as_reviewed(reviewed, "access")


def trusted(template: dict[str, Any], *, subject: str, audience: str = "sts.amazonaws.com") -> bool:
    """Return whether a GitHub token with these claims may assume the deploy role."""
    trust = DeployedStage("test", {"access": template}).role("access", "Deploy").trust
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
    # The account's only GitHub provider is created, unless the settings name an existing one.
    (statement,) = only(template, "AWS::IAM::Role")["AssumeRolePolicyDocument"]["Statement"]
    created = list(resources(template, "AWS::IAM::OIDCProvider"))
    assert statement["Principal"]["Federated"] == ({"Fn::GetAtt": [created[0], "Arn"]} if created else PROVIDER)
    assert bool(created) is (source.oidc_provider_arn is None)


def test_without_the_setting_ci_cannot_deploy(templates: Templates) -> None:
    assert not resources(templates["dev/access"], "AWS::IAM::Role")
    assert not resources(templates["dev/access"], "AWS::IAM::OIDCProvider")
