"""Jobs: a job definition for each team and job kind, and the roles of its containers and of the team's people."""

from constructs import Construct

from infra.constructs.log_group import RetainedLogGroup
from infra.constructs.stage_stack import StageStack
from infra.image.published import PublishedImages, images_of_all_jobs, row_of
from infra.image.stack import ImageStack
from infra.job.container_roles import ExecutionRole, TeamRole
from infra.job.job_definition import TeamJobs
from infra.job.member_role import MemberRole
from infra.job.team_files import TeamFiles
from infra.stages import Stage, Team
from infra.storage.shared_file_system import CONTAINER_PATH
from infra.storage.stack import StorageStack
from infra.storage.team_secret import PublishedSecret, kinds_of
from jobs.core.stage import (
    IMAGE_TAG,
    LOG_GROUP,
    job_definition_parameter,
    job_image_parameter,
    member_role_parameter,
)
from jobs.spec.arguments import JobKind
from jobs.spec.catalog import CATALOG


class JobStack(StageStack):
    """The stack of all that a submission needs besides a queue."""

    def __init__(self, scope: Construct, *, stage: Stage, storage: StorageStack, image: ImageStack) -> None:
        super().__init__(scope, "jobs", stage=stage, description="job definitions and their roles")
        self._stage = stage
        self._storage = storage
        self._images = PublishedImages(self, image=image, names=images_of_all_jobs(stage))
        self._logs = RetainedLogGroup(self, "JobLogs", retention_days=stage.log_retention_days)
        self.publish(LOG_GROUP, self._logs.log_group_name)
        if stage.image_tag:
            self.publish(IMAGE_TAG, stage.image_tag)
        images = {kind.name: self._images.job_image(kind) for kind in CATALOG.values()}
        for kind_name, uri in images.items():
            self.publish(job_image_parameter(kind_name), uri)
        for team in stage.teams:
            files = self._team_files(team)
            jobs = self._team_jobs(team, files)
            for kind in CATALOG.values():
                self._definitions(jobs, kind, images[kind.name])
            if team.member_principals:
                role = MemberRole(
                    self,
                    f"Members-{team.name}",
                    team=team,
                    files=files,
                    logs=self._logs,
                    enters_jobs=self._lets_commands_in,
                )
                self.publish(member_role_parameter(team.name), role.role_arn)

    @property
    def _lets_commands_in(self) -> bool:
        return any(self._stage.lets_commands_in(accelerated=accelerated) for accelerated in (True, False))

    def _definitions(self, jobs: TeamJobs, kind: JobKind, image: str) -> None:
        row = row_of(self._stage, kind)
        one = jobs.definition(self, kind, row=row, image=image)
        self.publish(job_definition_parameter(jobs.team, kind.name), one.ref)
        if kind.accelerated and not kind.one_process and self._stage.max_multinode_nodes:
            several = jobs.definition(self, kind, row=row, image=image, several_nodes=True)
            self.publish(job_definition_parameter(jobs.team, kind.name, several_nodes=True), several.ref)

    def _team_files(self, team: Team) -> TeamFiles:
        storage = self._storage
        # Exported by hand, since cdk-nag calls a finding after the export's name, known only once it is made; so the
        # order of the stacks has to be said as well.
        self.add_stack_dependency(storage, "the ARNs of buckets")
        return TeamFiles(
            team=team.name,
            data_arn=storage.export_value(storage.data_bucket.bucket_arn),
            runs_arn=storage.export_value(storage.run_bucket.bucket_arn),
            key_arn=storage.key_arn(self),
        )

    def _team_jobs(self, team: Team, files: TeamFiles) -> TeamJobs:
        storage = self._storage
        key_arn = storage.key_arn(self) if any(kinds_of(team)) else None
        secrets = [PublishedSecret(self, kind, storage=storage, key_arn=key_arn) for kind in kinds_of(team)]
        return TeamJobs(
            team=team.name,
            task_role=TeamRole(
                self, f"Team-{team.name}", files=files, logs=self._logs if self._lets_commands_in else None
            ),
            execution_role=ExecutionRole(
                self,
                f"Execution-{team.name}",
                team=team,
                repositories=self._images.repositories.values(),
                logs=self._logs,
                secrets=secrets,
            ),
            logs=self._logs,
            secrets={name: place for secret in secrets for name, place in secret.values.items()},
            shared_data_mount=CONTAINER_PATH if self._stage.fsx_gib else None,
            lets_commands_in=self._stage.lets_commands_in,
        )
