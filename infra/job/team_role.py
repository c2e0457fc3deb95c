"""The role that a team's jobs run under: its own files, what all teams share, and nothing else."""

import aws_cdk as cdk
from aws_cdk import aws_iam as iam
from constructs import Construct

from infra.constructs.inline_role import InlineRole
from infra.job.team_files import TeamFiles
from infra.stages import Team
from infra.storage.stack import StorageStack


def task_principal(scope: Construct) -> iam.PrincipalBase:
    """ECS, on behalf of tasks in this account: the conditions keep it from being used for anyone else's."""
    stack = cdk.Stack.of(scope)
    return iam.ServicePrincipal(
        "ecs-tasks.amazonaws.com",
        conditions={
            "StringEquals": {"aws:SourceAccount": stack.account},
            "ArnLike": {"aws:SourceArn": stack.format_arn(service="ecs", resource="*")},
        },
    )


class TeamRole(InlineRole):
    """Reads `shared/` and `<team>/` of the data bucket, reads and writes `<team>/` of the run bucket."""

    def __init__(self, scope: Construct, name: str, *, team: Team, storage: StorageStack) -> None:
        super().__init__(
            scope,
            name,
            description=f"Jobs of team {team.name}",
            assumed_by=task_principal(scope),
            team=team.name,
        )
        files = TeamFiles(self, team=team, storage=storage)
        files.read_data()
        files.read_runs()
        files.write_runs("*")
        files.use_key()
