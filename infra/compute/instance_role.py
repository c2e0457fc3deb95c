"""The role of instances that run jobs: join a cluster, be reached by Session Manager, and nothing of a team's.

A job of one node reaches the metadata service, and so this role's keys: what the role may do, any job may do.
"""

from aws_cdk import Stack
from aws_cdk import aws_iam as iam
from aws_cdk import aws_logs as logs
from constructs import Construct

from infra.constructs.inline_role import InlineRole
from infra.constructs.stage_stack import acknowledge

_AS_AN_AGENT = (
    "ecs:DeregisterContainerInstance",
    "ecs:Poll",
    "ecs:StartTelemetrySession",
    "ecs:UpdateContainerInstancesState",
)
"""What an agent calls in the name of a container instance: by Poll it is told of tasks, and of their roles' keys."""

_SESSION_MANAGER = (
    "ssm:UpdateInstanceInformation",
    "ssmmessages:CreateControlChannel",
    "ssmmessages:CreateDataChannel",
    "ssmmessages:OpenControlChannel",
    "ssmmessages:OpenDataChannel",
)
"""What the SSM agent needs for sessions and no more (AWS Systems Manager user guide, "Create a custom IAM role for
Session Manager"). AWS's own AmazonSSMManagedInstanceCore also reads every parameter of the account."""

_NOTHING_TO_READ = ("secretsmanager:BatchGetSecretValue", "secretsmanager:GetSecretValue", "ssm:GetParameter*")

TEAM_TAG = "trainyard:team"
"""Tag of container instances that are one team's own: their agents give it to themselves (boot, ecs.config)."""


class InstanceRole(InlineRole):
    """A role for instances; AWS's policy for the ECS agent lets it speak as any container instance of the account."""

    def __init__(
        self, scope: Construct, name: str = "InstanceRole", *, boot_logs: logs.ILogGroup, of: str = "jobs"
    ) -> None:
        """`boot_logs`: where instances send the logs of their boot. `of`: whose jobs they run, for the description."""
        super().__init__(
            scope,
            name,
            description=f"Instances that run {of}: join the cluster, be reached by Session Manager",
            assumed_by=iam.ServicePrincipal("ec2.amazonaws.com"),
        )
        self.add_managed_policy(
            iam.ManagedPolicy.from_aws_managed_policy_name("service-role/AmazonEC2ContainerServiceforEC2Role")
        )
        acknowledge(
            self,
            "The ECS agent calls what AWS keeps in this policy, and more with each version; a list of our own would "
            "break instances. Jobs do not run under this role, and what it must not reach is denied beside it.",
            "AwsSolutions-IAM4[Policy::arn:<AWS::Partition>:iam::aws:policy/service-role/"
            "AmazonEC2ContainerServiceforEC2Role]",
        )
        self.allow("SessionManager", _SESSION_MANAGER, "*")
        self.explain("Session Manager's channels have no ARN, and no instance has an id before it starts", "*")
        # Whatever the boundary, and whatever an account attaches to all instance roles.
        self.deny("NothingToRead", _NOTHING_TO_READ, resources=["*"])
        self.deny(
            "BootLogsOnly",
            ["logs:CreateLogStream", "logs:PutLogEvents"],
            not_resources=[self.log_streams(boot_logs.log_group_name, "i-*")],
        )

    def speak_for_no_other_team(self, team: str | None) -> None:
        """Deny what an agent calls in the name of another team's own instance.

        `team`: whose role it is; None: of those that share. Keys that a job took from its instance are then of no use
        against instances of other teams. A tag that ECS should not compare denies nothing, so agents work either way.
        """
        of_others = {"Null": {f"aws:ResourceTag/{TEAM_TAG}": "false"}}
        own = {"StringNotEquals": {f"aws:ResourceTag/{TEAM_TAG}": team}} if team else {}
        self.deny(
            "InstancesOfOtherTeams",
            _AS_AN_AGENT,
            resources=[Stack.of(self).format_arn(service="ecs", resource="container-instance", resource_name="*")],
            conditions={**of_others, **own},
        )
