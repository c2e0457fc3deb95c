"""What instances of one team have to themselves: a security group, a role, and the team's tag."""

import aws_cdk as cdk
from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_iam as iam
from aws_cdk import aws_logs as logs
from constructs import Construct

from infra.compute.instance_role import InstanceRole
from infra.constructs.job_security_group import job_security_group
from infra.constructs.lustre_rules import BOTH_WAYS, lustre_rules


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
