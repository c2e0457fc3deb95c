"""The role and security group of instances that run jobs.

The role lets an instance join a cluster and accept Session Manager, and gives access to no team's data. Single-node
jobs can get its keys from the metadata service, so every job may do what the role may do.
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
from infra.stages import Stage

_ECS_AGENT_CALLS = (
    "ecs:DeregisterContainerInstance",
    "ecs:Poll",
    "ecs:StartTelemetrySession",
    "ecs:UpdateContainerInstancesState",
)
"""Calls that the ECS agent makes for a container instance. Poll returns tasks and the keys of their roles."""

_SESSION_MANAGER = (
    "ssm:UpdateInstanceInformation",
    "ssmmessages:CreateControlChannel",
    "ssmmessages:CreateDataChannel",
    "ssmmessages:OpenControlChannel",
    "ssmmessages:OpenDataChannel",
)
"""The SSM agent's permissions for sessions only (AWS Systems Manager user guide, "Create a custom IAM role for Session
Manager"). AWS's AmazonSSMManagedInstanceCore could also read every parameter of the account."""

_SECRET_READS = ("secretsmanager:BatchGetSecretValue", "secretsmanager:GetSecretValue", "ssm:GetParameter*")

TEAM_TAG = "trainyard:team"
"""Tag of container instances that belong to one team. Their agents set it themselves (ecs.config in user data)."""


class InstanceRole(InlineRole):
    """The role of instances. AWS's policy for the ECS agent lets it act for any container instance of the account."""

    def __init__(
        self, scope: Construct, name: str = "InstanceRole", *, boot_logs: logs.ILogGroup, workload: str = "jobs"
    ) -> None:
        """Create the role. `boot_logs`: log group of boot logs. `workload` completes "Instances that run …"."""
        super().__init__(
            scope,
            name,
            description=f"Instances that run {workload}: join the cluster, accept Session Manager",
            assumed_by=iam.ServicePrincipal("ec2.amazonaws.com"),
        )
        self.add_managed_policy(
            iam.ManagedPolicy.from_aws_managed_policy_name("service-role/AmazonEC2ContainerServiceforEC2Role")
        )
        acknowledge(
            self,
            "The ECS agent needs the calls in this AWS policy, and more with each version; a custom list would break "
            "instances. Jobs do not run under this role, and separate statements deny it secrets and parameters.",
            "AwsSolutions-IAM4[Policy::arn:<AWS::Partition>:iam::aws:policy/service-role/"
            "AmazonEC2ContainerServiceforEC2Role]",
        )
        self.allow("SessionManager", _SESSION_MANAGER, "*")
        self.explain("Session Manager's channels have no ARN, and no instance has an id before it starts", "*")
        # Denied even if the boundary, or a policy that the account attaches to all instance roles, allows it.
        self.deny("NoSecrets", _SECRET_READS, resources=["*"])
        self.deny(
            "BootLogsOnly",
            ["logs:CreateLogStream", "logs:PutLogEvents"],
            not_resources=[self.log_streams(boot_logs.log_group_name, "i-*")],
        )

    def deny_other_teams(self, team: str | None) -> None:
        """Deny the ECS agent's calls for container instances that belong to other teams.

        `team`: the role's team, or None if teams share the instances. Keys that a job takes from its instance are then
        useless against other teams' instances. We could not confirm that ECS compares this tag. If it does not, nothing
        is denied. Agents work either way.
        """
        owned_by_a_team = {"Null": {f"aws:ResourceTag/{TEAM_TAG}": "false"}}
        not_own = {"StringNotEquals": {f"aws:ResourceTag/{TEAM_TAG}": team}} if team else {}
        self.deny(
            "InstancesOfOtherTeams",
            _ECS_AGENT_CALLS,
            resources=[Stack.of(self).format_arn(service="ecs", resource="container-instance", resource_name="*")],
            conditions={**owned_by_a_team, **not_own},
        )


class TeamInstances(Construct):
    """The security group and instance role of one team. Its instances can reach each other, but not other teams'."""

    def __init__(
        self,
        scope: Construct,
        team: str,
        *,
        vpc: ec2.IVpc,
        stage: Stage,
        boot_logs: logs.ILogGroup,
        endpoint_group_id: str | None,
        file_server_group_id: str | None,
    ) -> None:
        """Create the group and the role. `boot_logs`: log group of boot logs.

        `endpoint_group_id`: security group of the VPC's interface endpoints, or None without such endpoints.
        `file_server_group_id`: security group of FSx's file servers, or None without a file system.
        """
        # Keep this id: another logical id would be another security group, while instances use this one.
        super().__init__(scope, f"isolated-{team}")
        self.team = team
        workload = f"jobs of team {team}"
        self.security_group = job_security_group(self, vpc=vpc, stage=stage, workload=workload)
        role = InstanceRole(self, boot_logs=boot_logs, workload=workload)
        role.deny_other_teams(team)
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
