"""Access: what no role of the stage may exceed, and who may deploy. It comes first: every role carries the limit."""

import aws_cdk as cdk
from aws_cdk import aws_iam as iam
from constructs import Construct

from infra.access.permissions_boundary import (
    BUILD_ACTIONS,
    DEPLOYER_TAG,
    PermissionsBoundary,
    bootstrap_roles,
    build_projects,
    keep_roles_to_stage,
)
from infra.constructs.inline_role import InlineRole
from infra.constructs.stage_stack import StageStack
from infra.stages import GitHub, Stage
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


PERMISSIONS_BOUNDARY = "permissions-boundary"
"""SSM parameter: ARN of the boundary, for roles that people add beside the stage's own."""
DEPLOY_ROLE = "deploy-role"
"""SSM parameter: ARN of the role that CI deploys with; there only where the settings name a repository."""


class AccessStack(StageStack):
    """The first stack of a stage. It knows nothing of the others, so that all of them may wait for it."""

    def __init__(self, scope: Construct, *, stage: Stage) -> None:
        super().__init__(scope, "access", stage=stage, description="permissions boundary, role of CI")
        own = PermissionsBoundary(self, "Boundary")
        # Made and exported where the account's own is used as well: stacks that import it would forbid its removal, and
        # so the change from one to the other.
        self.export_value(own.managed_policy_arn)
        self.boundary: iam.IManagedPolicy = (
            iam.ManagedPolicy.from_managed_policy_name(self, "AccountsBoundary", stage.permissions_boundary)
            if stage.permissions_boundary
            else own
        )
        self.publish(PERMISSIONS_BOUNDARY, self.boundary.managed_policy_arn)
        if stage.deploy_from:
            role = DeployRole(self, "Deploy", source=stage.deploy_from)
            self.publish(DEPLOY_ROLE, role.role_arn)

    def limit(self, scope: Construct) -> None:
        """Put the boundary on every role below `scope`, and keep each to the stage: CDK's own functions' included."""
        iam.PermissionsBoundary.of(scope).apply(self.boundary)
        keep_roles_to_stage(scope, self.stage_row.name)
