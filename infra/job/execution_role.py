"""The role of the ECS agent while it starts a team's job: pull its image, fetch its secret, write its log."""

from collections.abc import Iterable

from aws_cdk import aws_ecr as ecr
from constructs import Construct

from infra.constructs.inline_role import InlineRole
from infra.constructs.log_group import RetainedLogGroup
from infra.job.team_role import task_principal
from infra.stages import Team
from infra.storage.huggingface_secret import PublishedSecret


class ExecutionRole(InlineRole):
    """One for each team, since whoever has it can read the team's secret. The container's code never has it."""

    def __init__(
        self,
        scope: Construct,
        name: str,
        *,
        team: Team,
        repositories: Iterable[ecr.IRepository],
        logs: RetainedLogGroup,
        secret: PublishedSecret | None,
    ) -> None:
        super().__init__(
            scope,
            name,
            description=f"The ECS agent, for jobs of team {team.name}: image, secret, log",
            assumed_by=task_principal(scope),
            team=team.name,
        )
        for repository in repositories:
            repository.grant_pull(self)
        self.explain("ecr:GetAuthorizationToken knows no resources: it can only be allowed on all of them", "*")
        streams = self.log_streams(logs.log_group_name, f"{team.name}/*")
        self.allow("WriteLog", ["logs:CreateLogStream", "logs:PutLogEvents"], streams)
        self.explain("Each attempt logs to a stream of its own; those of a team begin with its name", streams)
        if secret is not None:
            secret.let_read(self)
