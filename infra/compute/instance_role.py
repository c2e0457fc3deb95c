"""The role of instances that run jobs: join a cluster, be reached by Session Manager, and nothing of a team's.

A job of one node reaches the metadata service, and so this role's keys: what the role may do, any job may do.
"""

import aws_cdk as cdk
from aws_cdk import Stack
from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_iam as iam
from aws_cdk import aws_logs as logs
from constructs import Construct

from infra.constructs.inline_role import InlineRole
from infra.constructs.security_groups import BOTH_WAYS, job_security_group, lustre_rules
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


class TeamInstances(Construct):
    """A group whose members reach each other and no other team's instances, and a role for no other instances.

    In the stack of the compute environments that use them, with which they come and go.
    """

    def __init__(
        self,
        scope: Construct,
        team: str,
        *,
        vpc: ec2.IVpc,
        boot_logs: logs.ILogGroup,
        endpoint_group_id: str | None,
        file_server_group_id: str | None,
    ) -> None:
        """Make them. `boot_logs`: where instances send the logs of their boot.

        `endpoint_group_id`: the group of the VPC's interface endpoints; None: the stage makes none.
        `file_server_group_id`: that of FSx's file servers; None: the stage has none.
        """
        # The name of old: another logical id would be another group, while instances are in this one.
        super().__init__(scope, f"isolated-{team}")
        self.team = team
        of = f"jobs of team {team}"
        self.security_group = job_security_group(self, vpc=vpc, of=of)
        role = InstanceRole(self, boot_logs=boot_logs, of=of)
        role.speak_for_no_other_team(team)
        self.instance_profile = iam.InstanceProfile(self, "InstanceProfile", role=role)
        if endpoint_group_id:
            ec2.CfnSecurityGroupIngress(
                self,
                "EndpointsFromJobs",
                group_id=endpoint_group_id,
                source_security_group_id=self.security_group.security_group_id,
                ip_protocol="tcp",
                from_port=443,
                to_port=443,
                description=f"Instances of team {team}",
            )
        if file_server_group_id:
            groups = {"Servers": file_server_group_id, "Jobs": self.security_group.security_group_id}
            lustre_rules(self, groups, BOTH_WAYS)
        cdk.Tags.of(self).add("trainyard:team", team)
