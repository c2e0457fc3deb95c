"""Access: the permissions boundary of every role, and the roles of CI. Deployed first.

Because it is first, it also checks that EC2 offers the stage's instance types.

GitHub Actions deploys a stage through OIDC, without a stored key. The workflow is .github/workflows/deploy.yml.
"""

import aws_cdk as cdk
from aws_cdk import aws_iam as iam
from constructs import Construct

from infra.access.instance_type_offer import InstanceTypeOffer
from infra.access.permissions_boundary import (
    BUILD_ACTIONS,
    DEPLOYER_TAG,
    DIFF_ACTIONS,
    PermissionsBoundary,
    bootstrap_roles,
    build_projects,
    deny_other_stages,
    stack_arn,
)
from infra.constructs.inline_role import InlineRole
from infra.constructs.stage_stack import StageStack
from infra.stages import GitHub, Stage
from jobs.core.stage import IMAGE_BUILD_PROJECT, parameter_path

PERMISSIONS_BOUNDARY = "permissions-boundary"
"""SSM parameter: ARN of the boundary, for roles that people add to the stage."""
DEPLOY_ROLE = "deploy-role"
"""SSM parameter: ARN of the role that CI deploys with. Only present if the settings name a repository."""

DIFF_ROLE = "diff-role"
"""SSM parameter: ARN of the role of pull requests. Only present if the settings name a repository."""

STACKS = ("access", "compute", "image", "jobs", "machine-image", "network", "observability", "storage")
"""All stacks that a stage may have. A pull request may add one that is not deployed yet."""

ISSUER = "token.actions.githubusercontent.com"
AUDIENCE = "sts.amazonaws.com"

_SESSION = cdk.Duration.hours(4)
"""Maximum session length: a build of the images between two deployments may take two hours. The workflow sets the
actual length."""


class DeployRole(InlineRole):
    """The role of CI: it may assume the roles of the CDK bootstrap, build images, and do nothing else."""

    def __init__(self, stack: StageStack, name: str, *, source: GitHub, provider_arn: str) -> None:
        super().__init__(
            stack,
            name,
            description=f"GitHub Actions of {source.repository}: deploys this stage",
            max_session_duration=_SESSION,
            assumed_by=_workflows(provider_arn, source.subject),
        )
        cdk.Tags.of(self).add(*DEPLOYER_TAG)
        self.allow("DeployThroughCdk", ["sts:AssumeRole"], *bootstrap_roles(stack))
        self._allow_builds(stack)

    def _allow_builds(self, stack: StageStack) -> None:
        """Allow builds of projects with the stage's tag, because the image stack creates its project later."""
        projects = build_projects(stack)
        of_stage = {"StringEquals": {"aws:ResourceTag/trainyard:stage": stack.stage_row.name}}
        self.allow("BuildImages", BUILD_ACTIONS, projects, conditions=of_stage)
        self.explain("The stage's tag limits this to its image build project, whose name is generated", projects)
        name = parameter_path(stack.stage_row.name).removeprefix("/") + IMAGE_BUILD_PROJECT
        parameter = stack.format_arn(service="ssm", resource="parameter", resource_name=name)
        self.allow("FindImageBuild", ["ssm:GetParameter"], parameter)


class DiffRole(InlineRole):
    """The role of pull requests: it may read the templates of the stage's stacks, and do nothing else.

    Anyone who may push a branch can use it, by changing the workflow. So it may not assume the bootstrap's lookup role,
    which can read the files of all buckets (ReadOnlyAccess); without that role, the CDK CLI uses this one.
    """

    def __init__(self, stack: StageStack, name: str, *, source: GitHub, provider_arn: str) -> None:
        super().__init__(
            stack,
            name,
            description=f"Pull requests of {source.repository}: compare this stage's templates",
            assumed_by=_workflows(provider_arn, source.pull_request_subject),
        )
        stacks = [stack_arn(stack, name) for name in STACKS]
        self.allow("ReadTemplates", DIFF_ACTIONS, *stacks)
        self.explain("The ARN of a stack ends in a random id", *stacks)


def _workflows(provider_arn: str, subject: str) -> iam.IPrincipal:
    """Return the principal for workflows whose token has this subject."""
    # Exact match: a wildcard would admit other branches, pull requests or forks.
    claims = {f"{ISSUER}:aud": AUDIENCE, f"{ISSUER}:sub": subject}
    return iam.FederatedPrincipal(provider_arn, {"StringEquals": claims}, "sts:AssumeRoleWithWebIdentity")


def _provider(stack: StageStack) -> iam.CfnOIDCProvider:
    """Create the OIDC provider. An account can have only one, which the settings of its other stages name."""
    return iam.CfnOIDCProvider(stack, "GitHub", url=f"https://{ISSUER}", client_id_list=[AUDIENCE])


class AccessStack(StageStack):
    """The first stack of a stage. It depends on no other stack, so all others can depend on it."""

    def __init__(self, scope: Construct, *, stage: Stage) -> None:
        super().__init__(scope, "access", stage=stage, description="permissions boundary, role of CI")
        own = PermissionsBoundary(self, "Boundary")
        # Created and exported even if the account's own boundary is used: otherwise stacks that import the export would
        # block the switch from one boundary to the other.
        self.export_value(own.managed_policy_arn)
        self.boundary: iam.IManagedPolicy = (
            iam.ManagedPolicy.from_managed_policy_name(self, "AccountsBoundary", stage.permissions_boundary)
            if stage.permissions_boundary
            else own
        )
        self.publish(PERMISSIONS_BOUNDARY, self.boundary.managed_policy_arn)
        if not stage.allow_unoffered:
            InstanceTypeOffer(self, "Offer", stage=stage)
        if stage.deploy_from:
            source = stage.deploy_from
            provider_arn = source.oidc_provider_arn or _provider(self).attr_arn
            deploy = DeployRole(self, "Deploy", source=source, provider_arn=provider_arn)
            self.publish(DEPLOY_ROLE, deploy.role_arn)
            self.publish(DIFF_ROLE, DiffRole(self, "Diff", source=source, provider_arn=provider_arn).role_arn)

    def limit(self, scope: Construct) -> None:
        """Put the boundary on every role below `scope`, including those of CDK functions, and deny other stages.

        All stacks below `scope` are deployed after this one.
        """
        for stack in scope.node.children:
            # Not all import the boundary, but none may cost money before this stack has asked for the instance types.
            if isinstance(stack, cdk.Stack) and stack is not self:
                stack.add_stack_dependency(self, "the instance types")
        iam.PermissionsBoundary.of(scope).apply(self.boundary)
        deny_other_stages(scope, self.stage_row)
