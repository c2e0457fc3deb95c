"""Jobs: a job definition for each team and job kind, and the roles of its containers and of the team's people."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import aws_cdk as cdk
from aws_cdk import aws_batch as batch
from aws_cdk import aws_iam as iam
from constructs import Construct

from infra.constructs.stage_stack import RetainedLogGroup, StageStack
from infra.image.published import PublishedImages, images_of_all_jobs, row_of
from infra.image.stack import ImageStack
from infra.job.roles import ExecutionRole, MemberRole, TeamFiles, TeamRole
from infra.stages import Stage, Team
from infra.storage.stack import CONTAINER_PATH, StorageStack
from infra.storage.team_secret import PublishedSecret, kinds_of
from jobs.core.instance_types import SCRATCH, InstanceType
from jobs.core.retries import RETRY_RULES
from jobs.core.stage import (
    IMAGE_TAG,
    LOG_GROUP,
    job_definition_parameter,
    job_image_parameter,
    member_role_parameter,
)
from jobs.spec.arguments import JobKind
from jobs.spec.catalog import CATALOG
from jobs.spec.spec import JobSpec
from jobs.spec.submit_job import CONTAINER_NAME

DEFAULT_NODES = 2
"""Nodes of a multi-node job that is submitted without a number; a plan always gives one."""

_Batch = batch.CfnJobDefinition


@dataclass(frozen=True, kw_only=True)
class _Volume:
    """A folder outside the container that it sees."""

    name: str
    """Nothing but the definition sees it."""
    container_path: str
    host_path: str | None = None
    """None: a new one for each job, below Docker's own folder, and deleted with the job's container."""
    read_only: bool = False


@dataclass(frozen=True, kw_only=True)
class TeamJobs:
    """What all definitions of one team have in common."""

    team: str
    task_role: iam.IRole
    """What the container's code may do."""
    execution_role: iam.IRole
    """What the ECS agent may do to start it."""
    logs: RetainedLogGroup
    secrets: Mapping[str, str] = field(default_factory=dict)
    """Variables of the container by their names, each with the place in a secret that its value comes from."""
    shared_data_mount: str | None = None
    """Where accelerator instances, and so containers, see `shared/` of the data bucket; None: nowhere."""
    allows_exec: Callable[..., bool]
    """Says, given `accelerated`, whether people may run commands in the containers (ECS Exec)."""

    def definition(
        self, scope: Construct, kind: JobKind, *, row: InstanceType, image: str, several_nodes: bool = False
    ) -> batch.CfnJobDefinition:
        """Make the definition of `kind` on instances of `row`."""
        definition = batch.CfnJobDefinition(
            scope,
            f"Job-{self.team}-{kind.name}{'-multinode' if several_nodes else ''}",
            type="multinode" if several_nodes else "container",
            platform_capabilities=["EC2"],
            propagate_tags=True,
            # Jobs of one team run in the order of submission; a queue with fair share wants a number all the same.
            scheduling_priority=1,
            retry_strategy=_Batch.RetryStrategyProperty(
                attempts=JobSpec.model_fields["attempts"].default,
                evaluate_on_exit=[_evaluate_on_exit(rule) for rule in RETRY_RULES],
            ),
            timeout=_Batch.TimeoutProperty(attempt_duration_seconds=round(kind.timeout_hours * 3600)),
            # Runs that were submitted with the old revision, and may be started again, keep it.
            resource_retention_policy=_Batch.ResourceRetentionPolicyProperty(skip_deregister_on_update=True),
            ecs_properties=None if several_nodes else self._one_node(kind, row, image),
            node_properties=self._several_nodes(kind, row, image) if several_nodes else None,
        )
        cdk.Tags.of(definition).add("trainyard:team", self.team)
        return definition

    def _one_node(self, kind: JobKind, row: InstanceType, image: str) -> batch.CfnJobDefinition.EcsPropertiesProperty:
        """Return the task of a job on one node, which is in its instance's network.

        Nodes that start one by one reach each other at the instances' addresses, by the rule of the security group that
        lets its members talk.
        """
        task = _Batch.EcsTaskPropertiesProperty(
            ipc_mode=_ipc_mode(kind),
            enable_execute_command=self.allows_exec(accelerated=kind.accelerated),
            execution_role_arn=self.execution_role.role_arn,
            task_role_arn=self.task_role.role_arn,
            containers=[self._container(kind, row, image)],
            volumes=self._volumes(kind, row),
        )
        return _Batch.EcsPropertiesProperty(task_properties=[task])

    def _several_nodes(
        self, kind: JobKind, row: InstanceType, image: str
    ) -> batch.CfnJobDefinition.NodePropertiesProperty:
        """Return the same task for every node, each in a network namespace that Batch gives it (awsvpc)."""
        task = _Batch.MultiNodeEcsTaskPropertiesProperty(
            ipc_mode=_ipc_mode(kind),
            enable_execute_command=self.allows_exec(accelerated=kind.accelerated),
            execution_role_arn=self.execution_role.role_arn,
            task_role_arn=self.task_role.role_arn,
            containers=[self._container(kind, row, image, devices=_efa_devices(row))],
            volumes=self._volumes(kind, row),
        )
        nodes = _Batch.NodeRangePropertyProperty(
            # Open at its end: a submission may name another number of nodes only where no range says where it ends.
            target_nodes="0:",
            ecs_properties=_Batch.MultiNodeEcsPropertiesProperty(task_properties=[task]),
        )
        return _Batch.NodePropertiesProperty(num_nodes=DEFAULT_NODES, main_node=0, node_range_properties=[nodes])

    def _container(
        self,
        kind: JobKind,
        row: InstanceType,
        image: str,
        *,
        devices: Sequence[batch.CfnJobDefinition.DeviceProperty] = (),
    ) -> batch.CfnJobDefinition.TaskContainerPropertiesProperty:
        """Return a container that fills an instance: Batch has no resource for HPUs, so vCPUs and memory stand in."""
        requirements = {"VCPU": row.vcpus, "MEMORY": row.job_memory_mib}
        if row.gpus:
            requirements["GPU"] = row.gpus
        return _Batch.TaskContainerPropertiesProperty(
            name=CONTAINER_NAME,
            image=image,
            essential=True,
            # A submission overrides it; without one the job says what it could do, and ends.
            command=["python", "-m", "jobs.container.launch", "--help"],
            resource_requirements=[
                _Batch.ResourceRequirementProperty(type=type_, value=str(value))
                for type_, value in requirements.items()
            ],
            linux_parameters=_Batch.LinuxParametersProperty(
                init_process_enabled=True,  # hands SIGTERM on and reaps what ranks leave behind
                # Ranks and data loaders exchange tensors there; Docker's 64 MiB is too little. With the host's IPC
                # namespace they use the host's instead.
                shared_memory_size=None if kind.accelerated else row.job_memory_mib // 4,
                devices=list(devices) or None,
            ),
            # Accelerator drivers and EFA pin the memory that they transfer from.
            ulimits=[_Batch.UlimitProperty(name="memlock", soft_limit=-1, hard_limit=-1)] if kind.accelerated else None,
            # The agent fetches the values as the container starts: they are in no definition, and new ones count from
            # the next attempt on.
            secrets=[_Batch.SecretProperty(name=name, value_from=place) for name, place in self.secrets.items()]
            or None,
            mount_points=[
                _Batch.MountPointProperty(
                    source_volume=volume.name, container_path=volume.container_path, read_only=volume.read_only
                )
                for volume in self._mounted(kind, row)
            ]
            or None,
            log_configuration=_Batch.LogConfigurationProperty(
                log_driver="awslogs",
                options={
                    "awslogs-group": self.logs.log_group_name,
                    "awslogs-region": cdk.Stack.of(self.logs).region,
                    # The streams of a team begin alike, so that its people can be allowed to read those only.
                    "awslogs-stream-prefix": f"{self.team}/{kind.name}",
                },
            ),
        )

    def _volumes(self, kind: JobKind, row: InstanceType) -> list[batch.CfnJobDefinition.VolumesProperty] | None:
        return [
            _Batch.VolumesProperty(
                name=volume.name,
                host=_Batch.VolumesHostProperty(source_path=volume.host_path) if volume.host_path else None,
            )
            for volume in self._mounted(kind, row)
        ] or None

    def _mounted(self, kind: JobKind, row: InstanceType) -> list[_Volume]:
        if not kind.accelerated:
            return []
        volumes = []
        if self.shared_data_mount is not None:
            path = self.shared_data_mount
            volumes.append(_Volume(name="shared-data", container_path=path, host_path=path, read_only=True))
        if row.nvme_disks:
            # Docker's volumes are on the disks whoever made them ready (boot/instance_store.sh, scratch.yaml); what a
            # container writes elsewhere may not be. The host's own /scratch is not shown: Docker's images are in it,
            # which a container could change, and what other teams' jobs left behind.
            volumes.append(_Volume(name="scratch", container_path=SCRATCH))
        return volumes


def _ipc_mode(kind: JobKind) -> str | None:
    """Return the IPC mode: HCCL and NCCL need the host's namespace, for which `containerProperties` has no word."""
    return "host" if kind.accelerated else None


def _efa_devices(row: InstanceType) -> list[batch.CfnJobDefinition.DeviceProperty]:
    """Return a device for each EFA interface: the runtime hands on the accelerator's own by itself, but not these."""
    return [
        _Batch.DeviceProperty(host_path=path, container_path=path, permissions=["READ", "WRITE", "MKNOD"])
        for path in (f"/dev/infiniband/uverbs{index}" for index in range(row.network_cards))
    ]


def _evaluate_on_exit(rule: Mapping[str, str]) -> batch.CfnJobDefinition.EvaluateOnExitProperty:
    return _Batch.EvaluateOnExitProperty(
        action=rule["action"],
        on_status_reason=rule.get("onStatusReason"),
        on_exit_code=rule.get("onExitCode"),
        on_reason=rule.get("onReason"),
    )


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
                    allows_exec=self._allows_exec,
                )
                self.publish(member_role_parameter(team.name), role.role_arn)

    @property
    def _allows_exec(self) -> bool:
        return any(self._stage.allows_exec(accelerated=accelerated) for accelerated in (True, False))

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
            task_role=TeamRole(self, f"Team-{team.name}", files=files, logs=self._logs if self._allows_exec else None),
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
            allows_exec=self._stage.allows_exec,
        )
