"""The role that GitHub Actions deploys a stage with: by OIDC, so that no key has to be kept anywhere.

permissions: {id-token: write, contents: read}
…
  - uses: aws-actions/configure-aws-credentials@<commit>
    with: {role-to-assume: <SSM: /trainyard/<stage>/deploy-role>, aws-region: <region>}
  - run: cdk deploy '<stage>/*' -c stage=<stage> --require-approval never

infra/README.md has the whole of it, with the build of the images between two deployments.
"""

import aws_cdk as cdk
from aws_cdk import aws_iam as iam

from infra.access.permissions_boundary import BUILD_ACTIONS, DEPLOYER_TAG, bootstrap_roles, build_projects
from infra.constructs.inline_role import InlineRole
from infra.constructs.stage_stack import StageStack
from infra.stages import GitHub
from jobs.core.stage import IMAGE_BUILD_PROJECT, parameter_path

ISSUER = "token.actions.githubusercontent.com"
_AUDIENCE = "sts.amazonaws.com"

_SESSION = cdk.Duration.hours(4)
"""For a build of the images, which may take two hours, between two deployments; what a workflow asks for counts."""


class DeployRole(InlineRole):
    """The role of CI: it may become the roles of CDK's bootstrap here, have images built, and do nothing else."""

    def __init__(self, stack: StageStack, name: str, *, source: GitHub) -> None:
        super().__init__(
            stack,
            name,
            description=f"GitHub Actions of {source.repository}: deploys this stage",
            max_session_duration=_SESSION,
            assumed_by=iam.FederatedPrincipal(
                source.oidc_provider_arn or _provider(stack).attr_arn,
                {
                    "StringEquals": {
                        f"{ISSUER}:aud": _AUDIENCE,
                        # Whole, without a wildcard: else another branch, a pull request or a fork could deploy.
                        f"{ISSUER}:sub": f"repo:{source.repository}:{_where(source)}",
                    }
                },
                "sts:AssumeRoleWithWebIdentity",
            ),
        )
        cdk.Tags.of(self).add(*DEPLOYER_TAG)
        self.allow("DeployThroughCdk", ["sts:AssumeRole"], *bootstrap_roles(stack))
        self._allow_builds(stack)

    def _allow_builds(self, stack: StageStack) -> None:
        """Allow builds of projects with the stage's tag: the image stack makes its own later, under any name."""
        projects = build_projects(stack)
        of_the_stage = {"StringEquals": {"aws:ResourceTag/trainyard:stage": stack.stage_row.name}}
        self.allow("BuildImages", BUILD_ACTIONS, projects, conditions=of_the_stage)
        self.explain(
            "Only those with the stage's tag: the project that builds its images, whose name is made", projects
        )
        name = parameter_path(stack.stage_row.name).removeprefix("/") + IMAGE_BUILD_PROJECT
        parameter = stack.format_arn(service="ssm", resource="parameter", resource_name=name)
        self.allow("FindImageBuild", ["ssm:GetParameter"], parameter)


def _provider(stack: StageStack) -> iam.CfnOIDCProvider:
    """Make the account's OIDC provider. There can be one: stages that share an account name it in their settings."""
    return iam.CfnOIDCProvider(stack, "GitHub", url=f"https://{ISSUER}", client_id_list=[_AUDIENCE])


def _where(source: GitHub) -> str:
    """Return what GitHub's token says of a job besides its repository: its environment, or else its branch."""
    return f"environment:{source.environment}" if source.environment else f"ref:refs/heads/{source.branch}"
