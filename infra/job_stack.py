"""Jobs: a job definition for each team and job kind, and the roles that its containers get."""

from collections.abc import Mapping

import aws_cdk as cdk
from aws_cdk import aws_batch as batch
from aws_cdk import aws_iam as iam
from constructs import Construct

from infra.constructs.log_group import RetainedLogGroup
from infra.constructs.stage_stack import StageStack, acknowledge
from infra.constructs.team_role import TeamRole, task_principal
from infra.image_stack import ImageStack
from infra.settings import Stage, Team
from infra.storage_stack import StorageStack
from jobs.catalog import CATALOG, JobKind
from jobs.instance_types import InstanceType
from jobs.plan import CONTAINER_NAME, RETRY_RULES
from jobs.spec import JobSpec
from jobs.stage import LOG_GROUP, job_definition_parameter


class JobStack(StageStack):
    """What a submission needs besides a queue."""

    def __init__(
        self,
        scope: Construct,
        *,
        stage: Stage,
        storage: StorageStack,
        image: ImageStack,
        catalog: Mapping[str, JobKind] = CATALOG,
    ) -> None:
        super().__init__(scope, "jobs", stage=stage, description="job definitions and their roles")
        self._stage = stage
        self._image = image
        self._logs = RetainedLogGroup(self, "JobLogs", retention_days=stage.log_retention_days)
        self.publish(LOG_GROUP, self._logs.log_group_name)
        self._execution_role = self._make_execution_role()
        for team in stage.teams:
            role = TeamRole(self, f"Team-{team.name}", team=team, storage=storage)
            for kind in catalog.values():
                definition = self._job_definition(team, role, kind)
                self.publish(job_definition_parameter(team.name, kind.name), definition.ref)

    def _job_definition(self, team: Team, role: TeamRole, kind: JobKind) -> batch.CfnJobDefinition:
        row = self._stage.row if kind.accelerated else self._stage.cpu_row
        definition = batch.CfnJobDefinition(
            self,
            f"Job-{team.name}-{kind.name}",
            type="container",
            platform_capabilities=["EC2"],
            propagate_tags=True,
            # Jobs of one team run in the order of submission; a queue with fair share wants a number all the same.
            scheduling_priority=1,
            retry_strategy=batch.CfnJobDefinition.RetryStrategyProperty(
                attempts=JobSpec.model_fields["attempts"].default,
                evaluate_on_exit=[_evaluate_on_exit(rule) for rule in RETRY_RULES],
            ),
            timeout=batch.CfnJobDefinition.TimeoutProperty(attempt_duration_seconds=round(kind.timeout_hours * 3600)),
            # Runs that were submitted with the old revision, and may be started again, keep it.
            resource_retention_policy=batch.CfnJobDefinition.ResourceRetentionPolicyProperty(
                skip_deregister_on_update=True
            ),
            ecs_properties=batch.CfnJobDefinition.EcsPropertiesProperty(
                task_properties=[
                    batch.CfnJobDefinition.EcsTaskPropertiesProperty(
                        # HCCL needs the host's IPC namespace; `containerProperties` could not say so.
                        ipc_mode="host" if kind.accelerated else None,
                        execution_role_arn=self._execution_role.role_arn,
                        task_role_arn=role.role_arn,
                        containers=[self._container(kind, row)],
                    )
                ]
            ),
        )
        cdk.Tags.of(definition).add("trainyard:team", team.name)
        return definition

    def _container(self, kind: JobKind, row: InstanceType) -> batch.CfnJobDefinition.TaskContainerPropertiesProperty:
        """One container that fills an instance: there is no resource type for HPUs, so vCPUs and memory stand in."""
        job = batch.CfnJobDefinition
        return job.TaskContainerPropertiesProperty(
            name=CONTAINER_NAME,
            image=self._image.job_image(row),
            essential=True,
            # A submission overrides it; without one the job says what it could do, and ends.
            command=["python", "-m", "jobs.train.launch", "--help"],
            # No environment: what the accelerator's software wants (HABANA_VISIBLE_DEVICES, OMPI_MCA_…) is the image's
            # business, and the rest is Batch's own or comes with the submission.
            resource_requirements=[
                job.ResourceRequirementProperty(type="VCPU", value=str(row.vcpus)),
                job.ResourceRequirementProperty(type="MEMORY", value=str(row.job_memory_mib)),
            ],
            linux_parameters=job.LinuxParametersProperty(
                init_process_enabled=True,  # hands SIGTERM on and reaps what ranks leave behind
                # Ranks and data loaders exchange tensors there; Docker's 64 MiB is too little. With the host's IPC
                # namespace they use the host's instead.
                shared_memory_size=None if kind.accelerated else row.job_memory_mib // 4,
            ),
            # Accelerator drivers and EFA pin the memory that they transfer from.
            ulimits=[job.UlimitProperty(name="memlock", soft_limit=-1, hard_limit=-1)] if kind.accelerated else None,
            log_configuration=job.LogConfigurationProperty(
                log_driver="awslogs",
                options={
                    "awslogs-group": self._logs.log_group_name,
                    "awslogs-region": self.region,
                    "awslogs-stream-prefix": kind.name,
                },
            ),
        )

    def _make_execution_role(self) -> iam.Role:
        role = iam.Role(
            self,
            "ExecutionRole",
            description="The ECS agent, for a job: pull its image, write its log",
            assumed_by=task_principal(self),
        )
        for repository in self._image.repositories.values():
            repository.grant_pull(role)
        self._logs.grant_write(role)
        acknowledge(
            role,
            "ecr:GetAuthorizationToken knows no resources: it can only be allowed on all of them",
            "AwsSolutions-IAM5[Resource::*]",
        )
        return role


def _evaluate_on_exit(rule: Mapping[str, str]) -> batch.CfnJobDefinition.EvaluateOnExitProperty:
    return batch.CfnJobDefinition.EvaluateOnExitProperty(
        action=rule["action"],
        on_status_reason=rule.get("onStatusReason"),
        on_exit_code=rule.get("onExitCode"),
        on_reason=rule.get("onReason"),
    )
