"""Access: what no role of the stage may exceed, and who may deploy. It comes first: every role carries the limit."""

from aws_cdk import aws_iam as iam
from constructs import Construct

from infra.access.deploy_role import DeployRole
from infra.access.permissions_boundary import PermissionsBoundary, keep_roles_to_stage
from infra.constructs.stage_stack import StageStack
from infra.stages import Stage

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
