"""Jobs: a job definition per team and job kind, and the roles of containers and of the team's people."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aws_cdk as cdk
from aws_cdk import aws_batch as batch
from aws_cdk import aws_iam as iam
from constructs import Construct

from infra.constructs.proxy import proxy_variables
from infra.constructs.stage_stack import RetainedLogGroup, StageStack
from infra.image.stack import ImageStack, PublishedImages, images_of_all_jobs, row_of
from infra.job.roles import ExecutionRole, MemberRole, TeamFiles, TeamRole
from infra.stages import Stage, Team
from infra.stages.checks import fallback_of, homes_of
from infra.storage.stack import CONTAINER_PATH, StorageStack
from infra.storage.team_secret import PublishedSecret, secret_kinds
from jobs.core.instance_types import SCRATCH, InstanceType
from jobs.core.retries import RETRY_RULES
from jobs.core.stage import (
    FALLBACK_STAGE,
    IMAGE_TAG,
    LOG_GROUP,
    job_definition_parameter,
    job_image_parameter,
    member_role_parameter,
)
from jobs.spec.arguments import JobKind
from jobs.spec.catalog import CATALOG
from jobs.spec.spec import JobSpec
from jobs.spec.submit_job import CONTAINER_NAME, SCHEDULING_PRIORITY

DEFAULT_NODES = 2
"""Nodes of a multi-node job submitted without a number; plans always give one."""

_Batch = batch.CfnJobDefinition


@dataclass(frozen=True, kw_only=True)
class _Volume:
    """A folder outside the container, mounted into it."""

    name: str
    """Name within the job definition."""
    container_path: str
    host_path: str | None = None
    """Path on the instance. If it is None, each job gets a new Docker volume, deleted with the job's container."""
    read_only: bool = False


@dataclass(frozen=True, kw_only=True)
class TeamJobs:
    """Settings that all job definitions of a team share."""

    team: str
    task_role: iam.IRole
    """Role of the container's code."""
    execution_role: iam.IRole
    """Role of the ECS agent that starts the container."""
    logs: RetainedLogGroup
    environment: Mapping[str, str]
    """Proxy variables of the container, empty without a proxy."""
    secrets: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the container, each with the reference to its value in a secret."""
    shared_data_mount: str | None = None
    """Path at which instances and containers see `shared/` of the data bucket, or None if it is not mounted."""
    allows_exec: Callable[..., bool]
    """Returns, given `accelerated`, whether people may run commands in the containers (ECS Exec)."""

    def definition(
        self, scope: Construct, kind: JobKind, *, row: InstanceType, image: str, several_nodes: bool = False
    ) -> batch.CfnJobDefinition:
        """Create the definition of `kind` for instances of `row`."""
        definition = batch.CfnJobDefinition(
            scope,
            f"Job-{self.team}-{kind.name}{'-multinode' if several_nodes else ''}",
            type="multinode" if several_nodes else "container",
            platform_capabilities=["EC2"],
            propagate_tags=True,
            # Jobs of a team run in the order of submission, unless a spec has a priority.
            scheduling_priority=SCHEDULING_PRIORITY,
            retry_strategy=_Batch.RetryStrategyProperty(
                attempts=JobSpec.model_fields["attempts"].default,
                evaluate_on_exit=[_evaluate_on_exit(rule) for rule in RETRY_RULES],
            ),
            timeout=_Batch.TimeoutProperty(attempt_duration_seconds=round(kind.timeout_hours * 3600)),
            # Keep old revisions for runs that were submitted with them and may be retried.
            resource_retention_policy=_Batch.ResourceRetentionPolicyProperty(skip_deregister_on_update=True),
            ecs_properties=None if several_nodes else self._one_node(kind, row, image),
            node_properties=self._several_nodes(kind, row, image) if several_nodes else None,
        )
        cdk.Tags.of(definition).add("trainyard:team", self.team)
        return definition

    def _one_node(self, kind: JobKind, row: InstanceType, image: str) -> batch.CfnJobDefinition.EcsPropertiesProperty:
        """Return the task of a single-node job, which uses its instance's network.

        Nodes of a job that start one by one reach each other at their instances' addresses; the security group allows
        traffic among its members.
        """
        task = _Batch.EcsTaskPropertiesProperty(**self._task(kind, row, image))
        return _Batch.EcsPropertiesProperty(task_properties=[task])

    def _several_nodes(
        self, kind: JobKind, row: InstanceType, image: str
    ) -> batch.CfnJobDefinition.NodePropertiesProperty:
        """Return the task of all nodes of a multi-node job; Batch gives each a network interface (awsvpc)."""
        task = _Batch.MultiNodeEcsTaskPropertiesProperty(**self._task(kind, row, image, devices=_efa_devices(row)))
        nodes = _Batch.NodeRangePropertyProperty(
            # An open range: submissions may override the number of nodes only if no range states its end.
            target_nodes="0:",
            ecs_properties=_Batch.MultiNodeEcsPropertiesProperty(task_properties=[task]),
        )
        return _Batch.NodePropertiesProperty(num_nodes=DEFAULT_NODES, main_node=0, node_range_properties=[nodes])

    def _task(
        self,
        kind: JobKind,
        row: InstanceType,
        image: str,
        *,
        devices: Sequence[batch.CfnJobDefinition.DeviceProperty] = (),
    ) -> dict[str, Any]:
        """Return the properties that single-node and multi-node tasks share."""
        return {
            # HCCL and NCCL need the host's namespace, which `containerProperties` cannot express.
            "ipc_mode": "host" if kind.accelerated else None,
            "enable_execute_command": self.allows_exec(accelerated=kind.accelerated),
            "execution_role_arn": self.execution_role.role_arn,
            "task_role_arn": self.task_role.role_arn,
            "containers": [self._container(kind, row, image, devices)],
            "volumes": self._volumes(kind, row),
        }

    def _container(
        self, kind: JobKind, row: InstanceType, image: str, devices: Sequence[batch.CfnJobDefinition.DeviceProperty]
    ) -> batch.CfnJobDefinition.TaskContainerPropertiesProperty:
        """Return a container that fills an instance by vCPUs and memory, because Batch has no resource for HPUs."""
        requirements = {"VCPU": row.vcpus, "MEMORY": row.job_memory_mib}
        if row.gpus:
            requirements["GPU"] = row.gpus
        return _Batch.TaskContainerPropertiesProperty(
            name=CONTAINER_NAME,
            image=image,
            essential=True,
            # Submissions override it. Without an override, the job prints its help and exits.
            command=["python", "-m", "jobs.container.launch", "--help"],
            resource_requirements=[
                _Batch.ResourceRequirementProperty(type=type_, value=str(value))
                for type_, value in requirements.items()
            ],
            linux_parameters=_Batch.LinuxParametersProperty(
                init_process_enabled=True,  # forwards SIGTERM and reaps orphaned processes
                # Ranks and data loaders exchange tensors here, and Docker's 64 MiB is too little. Jobs in the host's
                # IPC namespace use the host's shared memory.
                shared_memory_size=None if kind.accelerated else row.job_memory_mib // 4,
                devices=list(devices) or None,
            ),
            # Accelerator drivers and EFA pin the memory they transfer from.
            ulimits=[_Batch.UlimitProperty(name="memlock", soft_limit=-1, hard_limit=-1)] if kind.accelerated else None,
            environment=[_Batch.EnvironmentProperty(name=name, value=value) for name, value in self.environment.items()]
            or None,
            # The agent reads the values when the container starts: definitions do not contain them, and new values take
            # effect with the next attempt.
            secrets=[_Batch.SecretProperty(name=name, value_from=reference) for name, reference in self.secrets.items()]
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
                    # The streams of a team share a prefix, so that its people can be allowed to read only those.
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
            # Docker's volumes are on the NVMe disks, set up by either boot/instance_store.sh or scratch.yaml; other
            # paths of a container may not be. The host's /scratch is not mounted, because it holds Docker's images,
            # which a container could change, and leftovers of other teams' jobs.
            volumes.append(_Volume(name="scratch", container_path=SCRATCH))
        return volumes


def _efa_devices(row: InstanceType) -> list[batch.CfnJobDefinition.DeviceProperty]:
    """Return a device per EFA interface. The container runtime adds the accelerators' devices, but not these."""
    return [
        _Batch.DeviceProperty(host_path=path, container_path=path, permissions=["READ", "WRITE", "MKNOD"])
        for path in (f"/dev/infiniband/uverbs{index}" for index in range(len(row.efa_cards)))
    ]


def _evaluate_on_exit(rule: Mapping[str, str]) -> batch.CfnJobDefinition.EvaluateOnExitProperty:
    return _Batch.EvaluateOnExitProperty(
        action=rule["action"],
        on_status_reason=rule.get("onStatusReason"),
        on_exit_code=rule.get("onExitCode"),
        on_reason=rule.get("onReason"),
    )


class JobStack(StageStack):
    """The stack of everything that a submission needs besides a queue."""

    def __init__(self, scope: Construct, *, stage: Stage, storage: StorageStack, image: ImageStack) -> None:
        super().__init__(scope, "jobs", stage=stage, description="job definitions and their roles")
        self._stage = stage
        self._storage = storage
        self._images = PublishedImages(self, image=image, names=images_of_all_jobs(stage))
        self._logs = RetainedLogGroup(self, "JobLogs", retention_days=stage.log_retention_days)
        self.publish(LOG_GROUP, self._logs.log_group_name)
        if fallback := fallback_of(stage):
            wait_seconds = round((stage.spot_wait_hours or 0) * 3600)
            self.publish(FALLBACK_STAGE, f"{fallback.name} {fallback.region} {wait_seconds}")
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
        single_node = jobs.definition(self, kind, row=row, image=image)
        self.publish(job_definition_parameter(jobs.team, kind.name), single_node.ref)
        if kind.accelerated and not kind.one_process and self._stage.max_multinode_nodes:
            multinode = jobs.definition(self, kind, row=row, image=image, several_nodes=True)
            self.publish(job_definition_parameter(jobs.team, kind.name, several_nodes=True), multinode.ref)

    def _team_files(self, team: Team) -> TeamFiles:
        storage = self._storage
        # Exported explicitly, because cdk-nag's findings contain the name of an automatic export, which is not known in
        # advance. The dependency is then explicit too.
        self.add_stack_dependency(storage, "the ARNs of buckets")
        return TeamFiles(
            team=team.name,
            data_arn=storage.export_value(storage.data_bucket.bucket_arn),
            runs_arn=storage.export_value(storage.run_bucket.bucket_arn),
            key_arn=storage.key_arn(self),
        )

    def _team_jobs(self, team: Team, files: TeamFiles) -> TeamJobs:
        storage = self._storage
        key_arn = storage.key_arn(self) if any(secret_kinds(team)) else None
        secrets = [PublishedSecret(self, kind, storage=storage, key_arn=key_arn) for kind in secret_kinds(team)]
        return TeamJobs(
            team=team.name,
            task_role=TeamRole(
                self,
                f"Team-{team.name}",
                files=files,
                logs=self._logs if self._allows_exec else None,
                others=[home for home in homes_of(self._stage) if team.name in {each.name for each in home.teams}],
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
            environment=proxy_variables(self._stage),
            secrets={name: reference for secret in secrets for name, reference in secret.values.items()},
            shared_data_mount=CONTAINER_PATH if self._stage.fsx_gib else None,
            allows_exec=self._stage.allows_exec,
        )
