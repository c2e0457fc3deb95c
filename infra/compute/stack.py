"""Compute: pools of instances, and the queues before them, of each team and of those that share.

What a stage retires stays beside what it uses: each pool has launch templates, compute environments and queues of its
own, so that no job ever meets another release's driver.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import aws_cdk as cdk
from aws_cdk import aws_batch as batch
from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_iam as iam
from aws_cdk import aws_ssm as ssm
from constructs import Construct

from infra.compute.compute_environment import ComputeEnvironment, Instances, MachineImage
from infra.compute.instance_role import InstanceRole, TeamInstances
from infra.compute.user_data import FileSystem
from infra.constructs.stage_stack import RetainedLogGroup, StageStack
from infra.machine_image.build import ROOT_DEVICE_NAME as BUILT_ROOT_DEVICE_NAME
from infra.machine_image.stack import machine_image_parameter
from infra.network.stack import ENDPOINT_SECURITY_GROUP, NetworkStack
from infra.stages import CapacityReservation, Pool, Stage, Team
from infra.stages.network_plan import has_interface_endpoints
from infra.storage.stack import FSX_DNS_NAME, FSX_MOUNT_NAME, FSX_SECURITY_GROUP, StorageStack
from jobs.core.instance_types import ImageType, InstanceType
from jobs.core.queues import QUEUES, Capacity, Queue
from jobs.core.stage import (
    CPU_INSTANCE_TYPE,
    INSTANCE_TYPE,
    parameter_path,
    queue_parameter,
    share_identifier,
)

INSTANCE_LOG_GROUP = "instance-log-group"
"""Parameter that holds the name of the log group of instances' boot and agent; streams begin with an instance's id."""

_AMAZON_LINUX_ROOT_DEVICE = "/dev/xvda"

_ECS_PARAMETERS: Mapping[ImageType, str] = {
    "ECS_AL2023": "/aws/service/ecs/optimized-ami/amazon-linux-2023/recommended/image_id",
    "ECS_AL2023_NVIDIA": "/aws/service/ecs/optimized-ami/amazon-linux-2023/gpu/recommended/image_id",
}
"""Public parameters with the newest AMI of each family (ECS guide, Retrieving ECS-optimized Linux AMI metadata)."""

_NEVER_FITS = ("MISCONFIGURATION:COMPUTE_ENVIRONMENT_MAX_RESOURCE", "MISCONFIGURATION:JOB_RESOURCE_REQUIREMENT")
"""Reasons, of those that Batch acts on, for which waiting longer does not help.

One guide of Batch's, that of the European Sovereign Cloud, names a further one that it acts on there,
MISCONFIGURATION:EC2_INSTANCE_CONFIGURATION_UNSUPPORTED; the others do not, and Batch refuses what it does not know.
"""
_STUCK_SECONDS = 3600
"""A job that waits at a queue's head for longer, for one of these reasons, is cancelled."""
_SHARE_DECAY_SECONDS = 24 * 3600
"""What a team has used counts against it for that long while teams that share compete."""
_NO_CAPACITY = "CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY"


@dataclass(frozen=True, kw_only=True)
class _InstancePool:
    """Instances that queues draw on, and the compute environments made of them so far."""

    scope: Construct
    instances: Instances
    subnets: list[ec2.ISubnet]
    team: str | None = None
    """Whose own they are; None: teams share them."""
    retiring: str | None = None
    """The pool's id where the stage used it before."""
    environments: dict[tuple[Capacity, bool], ComputeEnvironment] = field(default_factory=dict)
    """By capacity, and whether it is for jobs of several nodes."""


class ComputeStack(StageStack):
    """The stack of job queues, which it publishes under the names that a plan picks from."""

    def __init__(
        self,
        scope: Construct,
        *,
        stage: Stage,
        network: NetworkStack,
        storage: StorageStack,
        machine_image: cdk.Stack | None = None,
    ) -> None:
        """`machine_image`: the stack that builds the AMIs which the settings do not name."""
        super().__init__(scope, "compute", stage=stage, description="compute environments and job queues")
        self._network = network
        self._machine_image = machine_image
        self._logs = RetainedLogGroup(self, "InstanceLogs", retention_days=stage.log_retention_days)
        self.publish(INSTANCE_LOG_GROUP, self._logs.log_group_name)
        self._file_system = self._shared_file_system(storage) if stage.fsx_gib else None
        self._shares = self._scheduling_policy()
        for team in stage.instance_owners:
            self._queues(self._own_instances(team, storage) if team else None)
        self.publish(INSTANCE_TYPE, stage.instance_type)
        self.publish(CPU_INSTANCE_TYPE, stage.cpu_instance_type)

    def _queues(self, owner: TeamInstances | None) -> None:
        """Make all queues whose capacity the stage allows, of one team or, where None, of those that share."""
        accelerated = [
            self._accelerator_pool(self.stage_row.pool, owner),
            *(self._accelerator_pool(pool, owner, retiring=True) for pool in self.stage_row.retiring),
        ]
        cpu = self._cpu_pool(owner)
        for queue in QUEUES.values():
            for pool in accelerated if queue.accelerated else [cpu]:
                if self._max_nodes(queue, queue.capacity):
                    self._queue(queue, pool)

    def _own_instances(self, team: Team, storage: StorageStack) -> TeamInstances:
        has_endpoints = has_interface_endpoints(self.stage_row)
        return TeamInstances(
            self,
            team.name,
            vpc=self._network.vpc,
            boot_logs=self._logs,
            endpoint_group_id=(
                self._network.published(ENDPOINT_SECURITY_GROUP, reader=self) if has_endpoints else None
            ),
            file_server_group_id=(storage.published(FSX_SECURITY_GROUP, reader=self) if self._file_system else None),
        )

    def _queue(self, queue: Queue, pool: _InstancePool) -> None:
        environments = [
            self._environment(queue, capacity, pool)
            for capacity in self._capacities(queue)
            if self._max_nodes(queue, capacity)
        ]
        resource = batch.CfnJobQueue(
            pool.scope,
            # A new logical id would be a new queue: what waits and runs in the old one would be lost.
            f"Queue-{queue.name}",
            state="ENABLED",
            priority=queue.priority,
            # From the first day: fair share cannot be added to a queue that was created without it.
            scheduling_policy_arn=self._shares.attr_arn,
            compute_environment_order=[
                batch.CfnJobQueue.ComputeEnvironmentOrderProperty(
                    order=order, compute_environment=environment.resource.attr_compute_environment_arn
                )
                for order, environment in enumerate(environments, start=1)
            ],
            job_state_time_limit_actions=self._time_limits(queue),
        )
        parameter = queue_parameter(queue.name, team=pool.team, retiring=pool.retiring)
        self.publish(parameter, resource.attr_job_queue_arn)

    def _environment(self, queue: Queue, capacity: Capacity, pool: _InstancePool) -> ComputeEnvironment:
        """Return a pool's compute environment. Its queues share it, so a limit of the settings is given out once."""
        key = (capacity, queue.several_nodes)
        if key not in pool.environments:
            pool.environments[key] = ComputeEnvironment(
                pool.scope,
                "multinode" if queue.several_nodes else capacity,
                instances=pool.instances,
                capacity=capacity,
                max_nodes=self._max_nodes(queue, capacity),
                subnets=pool.subnets,
                side_by_side=queue.several_nodes,
            )
        return pool.environments[key]

    def _capacities(self, queue: Queue) -> tuple[Capacity, ...]:
        """Return a queue's capacities, in Batch's order: Spot alone where the stage says how long a job may wait.

        Batch finds that capacity is missing only where all of a queue's environments lack it: with On-Demand as a
        second one the wait would never end, and nobody would move the job (see
        observability/functions/move_to_on_demand.py).
        """
        return queue.capacities[:1] if self._waits_for_spot(queue) else queue.capacities

    def _waits_for_spot(self, queue: Queue) -> bool:
        return queue.accelerated and queue.capacity == "spot" and self.stage_row.spot_wait_hours is not None

    def _max_nodes(self, queue: Queue, capacity: Capacity) -> int:
        """Return how many instances the settings allow for it; 0 where the stage has none of that capacity."""
        stage = self.stage_row
        if not queue.accelerated:
            return stage.max_cpu_nodes
        if queue.several_nodes:
            return stage.max_multinode_nodes
        return stage.max_nodes if capacity == "spot" else stage.max_on_demand_nodes

    def _time_limits(self, queue: Queue) -> list[batch.CfnJobQueue.JobStateTimeLimitActionProperty]:
        """Return the limits by which a job at the queue's head that can never start makes way for those behind it."""
        stage = self.stage_row
        seconds = dict.fromkeys(_NEVER_FITS, _STUCK_SECONDS)
        if self._waits_for_spot(queue) and stage.spot_wait_hours is not None:
            seconds[_NO_CAPACITY] = round(stage.spot_wait_hours * 3600)
        return [
            batch.CfnJobQueue.JobStateTimeLimitActionProperty(
                action="CANCEL", state="RUNNABLE", reason=reason, max_time_seconds=limit
            )
            for reason, limit in seconds.items()
        ]

    def _accelerator_pool(self, pool: Pool, owner: TeamInstances | None, *, retiring: bool = False) -> _InstancePool:
        return _InstancePool(
            scope=self._pool_scope(pool.id, owner),
            instances=self._instances(
                pool.row,
                owner,
                machine_image=self._machine_image_of(pool),
                root_volume_gib=self.stage_row.root_volume_gib,
                file_system=self._file_system,
                reservation=pool.capacity_reservation,
            ),
            subnets=list(self._network.subnets_offering(pool.row)),
            team=owner.team if owner else None,
            retiring=pool.id if retiring else None,
        )

    def _cpu_pool(self, owner: TeamInstances | None) -> _InstancePool:
        stage = self.stage_row
        return _InstancePool(
            scope=self._pool_scope(f"cpu-{stage.cpu_instance_type.replace('.', '-')}", owner),
            instances=self._instances(
                stage.cpu_row,
                owner,
                machine_image=self._newest_of_ecs(stage.cpu_row),
                root_volume_gib=stage.cpu_root_volume_gib,
            ),
            subnets=list(self._network.job_subnets),
            team=owner.team if owner else None,
        )

    def _pool_scope(self, name: str, owner: TeamInstances | None) -> Construct:
        """Return the construct of a pool's resources, whose name their instances carry: no two may be alike."""
        if owner is None:
            return Construct(self, name)
        scope = Construct(self, f"{name}-of-{owner.team}")
        # By it the role of a team's people is kept to its own queues.
        cdk.Tags.of(scope).add("trainyard:team", owner.team)
        return scope

    def _instances(
        self,
        row: InstanceType,
        owner: TeamInstances | None,
        *,
        machine_image: MachineImage,
        root_volume_gib: int,
        file_system: FileSystem | None = None,
        reservation: CapacityReservation | None = None,
    ) -> Instances:
        return Instances(
            row=row,
            machine_image=machine_image,
            root_volume_gib=root_volume_gib,
            security_group=owner.security_group if owner else self._network.job_security_group,
            instance_profile=owner.instance_profile if owner else self._shared_profile,
            log_group_name=self._logs.log_group_name,
            tags={**self.instance_tags, **({"trainyard:team": owner.team} if owner else {})},
            team=owner.team if owner else None,
            file_system=file_system,
            reservation=reservation,
        )

    @cached_property
    def _shared_profile(self) -> iam.InstanceProfile:
        """The profile of instances that teams share; made where some do."""
        role = InstanceRole(self, boot_logs=self._logs)
        if any(self.stage_row.instance_owners):
            role.speak_for_no_other_team(None)
        return iam.InstanceProfile(self, "InstanceProfile", role=role)

    def _machine_image_of(self, pool: Pool) -> MachineImage:
        row = pool.row
        if pool.machine_image is None and row.machine_image == "batch":
            return self._newest_of_ecs(row)
        given = pool.root_device_name or self.stage_row.root_device_name
        return MachineImage(
            # Of another name than the AMI's, it would be a second volume beside a root that stays as small as that is.
            root_device_name=BUILT_ROOT_DEVICE_NAME if pool.builds_machine_image else given,
            image_type=row.image_type,
            ami_id=self._ami_id(pool),
        )

    def _ami_id(self, pool: Pool) -> str:
        given = pool.machine_image
        if given is not None and not given.startswith("ssm:"):
            return given
        if given is None:
            if self._machine_image is not None:
                self.add_stack_dependency(self._machine_image, "the AMIs that it builds")
            parameter = machine_image_parameter(self.stage_row, pool)
        else:
            parameter = given.removeprefix("ssm:")
        return self._ami_id_in(parameter)

    def _newest_of_ecs(self, row: InstanceType) -> MachineImage:
        """Return the AMI that AWS recommends for ECS today.

        Left to choose, Batch takes that of the day on which it makes a compute environment, and never upgrades it.
        """
        return MachineImage(
            root_device_name=_AMAZON_LINUX_ROOT_DEVICE,
            image_type=row.image_type,
            ami_id=self._ami_id_in(_ECS_PARAMETERS[row.image_type]),
        )

    def _ami_id_in(self, parameter: str) -> str:
        # A parameter of the template: CloudFormation reads it anew at each deployment, so a new AMI needs no edit.
        return ssm.StringParameter.value_for_typed_string_parameter_v2(
            self, parameter, ssm.ParameterValueType.AWS_EC2_IMAGE_ID
        )

    def _shared_file_system(self, storage: StorageStack) -> FileSystem:
        # By parameter: another file system has other names, and an export that is imported cannot change.
        self.add_stack_dependency(storage, "the file system's names")
        path = parameter_path(self.stage_row.name)
        return FileSystem(
            dns_name=ssm.StringParameter.value_for_string_parameter(self, path + FSX_DNS_NAME),
            mount_name=ssm.StringParameter.value_for_string_parameter(self, path + FSX_MOUNT_NAME),
        )

    def _scheduling_policy(self) -> batch.CfnSchedulingPolicy:
        return batch.CfnSchedulingPolicy(
            self,
            "TeamShares",
            fairshare_policy=batch.CfnSchedulingPolicy.FairsharePolicyProperty(
                share_decay_seconds=_SHARE_DECAY_SECONDS,
                # Nothing is held back for teams that run nothing.
                compute_reservation=0,
                share_distribution=[
                    batch.CfnSchedulingPolicy.ShareAttributesProperty(
                        share_identifier=share_identifier(team.name),
                        # Batch weighs usage: half the factor is twice the share.
                        weight_factor=round(1 / team.share, 4),
                    )
                    for team in self.stage_row.teams
                ],
            ),
        )
