"""The role of instances that run jobs: join a cluster, be reached by Session Manager, and nothing of a team's."""

from aws_cdk import Stack
from aws_cdk import aws_iam as iam
from constructs import Construct

from infra.constructs.stage_stack import acknowledge

_AS_AN_AGENT = (
    "ecs:DeregisterContainerInstance",
    "ecs:Poll",
    "ecs:StartTelemetrySession",
    "ecs:UpdateContainerInstancesState",
)
"""What an agent calls in the name of a container instance: by Poll it is told of tasks, and of their roles' keys."""

TEAM_TAG = "trainyard:team"
"""Tag of container instances that are one team's own: their agents give it to themselves (boot, ecs.config)."""


class InstanceRole(iam.Role):
    """A role for instances; AWS's policies for its agents let it speak as any container instance of the account."""

    def __init__(self, scope: Construct, name: str = "InstanceRole", *, of: str = "jobs") -> None:
        """`of`: whose jobs the instances run, for the description."""
        super().__init__(
            scope,
            name,
            description=f"Instances that run {of}: join the cluster, be reached by Session Manager",
            assumed_by=iam.ServicePrincipal("ec2.amazonaws.com"),
            managed_policies=[
                iam.ManagedPolicy.from_aws_managed_policy_name("service-role/AmazonEC2ContainerServiceforEC2Role"),
                iam.ManagedPolicy.from_aws_managed_policy_name("AmazonSSMManagedInstanceCore"),
            ],
        )
        acknowledge(
            self,
            "The ECS agent and the SSM agent call what AWS keeps in these two policies, and more with each version; "
            "a list of our own would break instances. Jobs do not run under this role.",
            "AwsSolutions-IAM4[Policy::arn:<AWS::Partition>:iam::aws:policy/service-role/"
            "AmazonEC2ContainerServiceforEC2Role]",
            "AwsSolutions-IAM4[Policy::arn:<AWS::Partition>:iam::aws:policy/AmazonSSMManagedInstanceCore]",
        )

    def speak_for_no_other_team(self, team: str | None) -> None:
        """Deny what an agent calls in the name of another team's own instance.

        `team`: whose role it is; None: of those that share. Keys that a job took from its instance are then of no use
        against instances of other teams. A tag that ECS should not compare denies nothing, so agents work either way.
        """
        of_others = {"Null": {f"aws:ResourceTag/{TEAM_TAG}": "false"}}
        own = {"StringNotEquals": {f"aws:ResourceTag/{TEAM_TAG}": team}} if team else {}
        self.add_to_policy(
            iam.PolicyStatement(
                sid="InstancesOfOtherTeams",
                effect=iam.Effect.DENY,
                actions=list(_AS_AN_AGENT),
                resources=[Stack.of(self).format_arn(service="ecs", resource="container-instance", resource_name="*")],
                conditions={**of_others, **own},
            )
        )
        acknowledge(
            self,
            "What this role is denied belongs to it alone; a managed policy could be attached elsewhere",
            "NIST.800.53.R5-IAMNoInlinePolicy",
        )
