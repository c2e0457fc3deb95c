"""The two roles of a job's container: its own, and that of the ECS agent which starts it."""

from collections.abc import Iterable

import aws_cdk as cdk
from aws_cdk import aws_ecr as ecr
from aws_cdk import aws_iam as iam
from constructs import Construct

from infra.constructs.inline_role import InlineRole
from infra.constructs.log_group import RetainedLogGroup
from infra.job.team_files import TeamFiles
from infra.stages import Team
from infra.storage.team_secret import PublishedSecret


class TeamRole(InlineRole):
    """The role that a team's jobs run under: its own files, what all teams share, and nothing else.

    It reads `shared/` and `<team>/` of the data bucket, and reads and writes `<team>/` of the run bucket. Where people
    may run commands in its containers, it also is the role of the SSM agent that ECS starts there for them.
    """

    def __init__(self, scope: Construct, name: str, *, files: TeamFiles, logs: RetainedLogGroup | None) -> None:
        """`logs`: the jobs' log group, into which what people do in containers goes; None: they do nothing there."""
        super().__init__(
            scope,
            name,
            description=f"Jobs of team {files.team}",
            assumed_by=_task_principal(scope),
            team=files.team,
        )
        files.let_read_data(self)
        files.let_read_runs(self)
        files.let_write_runs(self, "*")
        files.let_use_key(self)
        if logs is not None:
            self._let_people_in(logs)

    def _let_people_in(self, logs: RetainedLogGroup) -> None:
        """Allow the agent of ECS Exec its channels, and the log of its sessions.

        As the developer guide of Amazon ECS has it, "ECS Exec permissions" and "Logging using ECS Exec"; a session's
        stream has the session's name.
        """
        channels = ("CreateControlChannel", "CreateDataChannel", "OpenControlChannel", "OpenDataChannel")
        self.allow("OpenChannels", [f"ssmmessages:{channel}" for channel in channels], "*")
        self.allow("FindLogGroup", ["logs:DescribeLogGroups"], "*")
        self.explain("Session Manager's channels have no ARN, and log groups are described all at once", "*")
        streams = self.log_streams(logs.log_group_name, "ecs-execute-command-*")
        self.allow("LogCommands", ["logs:CreateLogStream", "logs:PutLogEvents"], streams)
        self.explain("Each session logs to a stream of its own", streams)
        self.allow("FindLogStreams", ["logs:DescribeLogStreams"], logs.log_group_arn)


class ExecutionRole(InlineRole):
    """The role of the ECS agent while it starts a team's job: pull its image, fetch its secrets, write its log.

    There is one for each team, since whoever has it can read the team's secret. The container's code never has it.
    """

    def __init__(
        self,
        scope: Construct,
        name: str,
        *,
        team: Team,
        repositories: Iterable[ecr.IRepository],
        logs: RetainedLogGroup,
        secrets: Iterable[PublishedSecret],
    ) -> None:
        super().__init__(
            scope,
            name,
            description=f"The ECS agent, for jobs of team {team.name}: image, secret, log",
            assumed_by=_task_principal(scope),
            team=team.name,
        )
        for repository in repositories:
            repository.grant_pull(self)
        self.explain("ecr:GetAuthorizationToken knows no resources: it can only be allowed on all of them", "*")
        streams = self.log_streams(logs.log_group_name, f"{team.name}/*")
        self.allow("WriteLog", ["logs:CreateLogStream", "logs:PutLogEvents"], streams)
        self.explain("Each attempt logs to a stream of its own; those of a team begin with its name", streams)
        for secret in secrets:
            secret.let_read(self)


def _task_principal(scope: Construct) -> iam.PrincipalBase:
    """Return ECS on behalf of tasks in this account; the conditions keep it from using the role for anyone else's."""
    stack = cdk.Stack.of(scope)
    return iam.ServicePrincipal(
        "ecs-tasks.amazonaws.com",
        conditions={
            "StringEquals": {"aws:SourceAccount": stack.account},
            "ArnLike": {"aws:SourceArn": stack.format_arn(service="ecs", resource="*")},
        },
    )
