"""Compute: pools of instances and their job queues, per team and for the teams that share instances.

Retiring pools stay beside the current one. Each pool has its own launch templates, compute environments and queues, so
no job ever runs on another release's driver.
"""

from collections.abc import Sequence
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
from infra.constructs.proxy import proxy_variables
from infra.constructs.stage_stack import RetainedLogGroup, StageStack
from infra.machine_image.build import ROOT_DEVICE_NAME as BUILT_ROOT_DEVICE_NAME
from infra.network.stack import ENDPOINT_SECURITY_GROUP, NetworkStack
from infra.stages import CapacityReservation, Pool, Stage, Team
from infra.stages.amis import ami_sources, is_ami, recorded_ami
from infra.stages.network_plan import has_interface_endpoints, multinode_subnet_indices, subnet_names
from infra.storage.stack import FSX_DNS_NAME, FSX_MOUNT_NAME, FSX_SECURITY_GROUP, StorageStack
from jobs.core.instance_types import InstanceType
from jobs.core.queues import QUEUES, Capacity, Queue, environments, queues_of
from jobs.core.stage import (
    CPU_INSTANCE_TYPE,
    INSTANCE_TYPES,
    RESERVED_INSTANCE_TYPE,
    queue_parameter,
    share_identifier,
)

INSTANCE_LOG_GROUP = "instance-log-group"
"""SSM parameter: log group of instances' boot and ECS agent logs; stream names start with the instance id."""

_AMAZON_LINUX_ROOT_DEVICE = "/dev/xvda"

_NEVER_FITS = ("MISCONFIGURATION:COMPUTE_ENVIRONMENT_MAX_RESOURCE", "MISCONFIGURATION:JOB_RESOURCE_REQUIREMENT")
"""Reasons that waiting cannot resolve, of those that Batch can act on.

Batch's guide for the European Sovereign Cloud also lists MISCONFIGURATION:EC2_INSTANCE_CONFIGURATION_UNSUPPORTED. The
other guides do not, and Batch refuses unknown reasons.
"""
_STUCK_SECONDS = 3600
"""Seconds after which Batch cancels a job at a queue's head that waits for one of these reasons."""
_SHARE_DECAY_SECONDS = 24 * 3600
"""Period over which past usage counts when teams that share instances compete."""
_NO_CAPACITY = "CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY"


@dataclass(frozen=True, kw_only=True)
class InstancePool:
    """A pool's instances, and the compute environments created for them so far."""

    scope: Construct
    instances: Instances
    pool: Pool | None
    """None for CPU instances, which have one type."""
    retiring: str | None = None
    """Id of the pool if it is retiring."""
    environments: dict[tuple[Capacity, str, int | None], ComputeEnvironment] = field(default_factory=dict)
    """Compute environments by capacity, first type and, if they are for multi-node jobs, the index of their subnet."""


class ComputeStack(StageStack):
    """The stack of job queues, published under the names that plans use."""

    def __init__(
        self,
        scope: Construct,
        *,
        stage: Stage,
        network: NetworkStack,
        storage: StorageStack,
        machine_image: cdk.Stack | None = None,
    ) -> None:
        """Create the stack. `machine_image`: the stack that builds AMIs, or None if the stage builds none."""
        super().__init__(scope, "compute", stage=stage, description="compute environments and job queues")
        self._network = network
        self._machine_image = machine_image
        self._logs = RetainedLogGroup(self, "InstanceLogs", retention_days=stage.log_retention_days)
        self.publish(INSTANCE_LOG_GROUP, self._logs.log_group_name)
        self._file_system = (
            FileSystem(
                dns_name=storage.published(FSX_DNS_NAME, reader=self),
                mount_name=storage.published(FSX_MOUNT_NAME, reader=self),
            )
            if stage.fsx_gib
            else None
        )
        self._shares = self._scheduling_policy()
        self._unrecorded_pools: set[str] = set()
        self.queues: list[tuple[Queue, InstancePool, Sequence[InstanceType]]] = []
        """All queues, each with the pool and the types of its instances."""
        for team in stage.instance_owners:
            self._queues(self._team_instances(team, storage) if team else None)
        if self._unrecorded_pools:
            cdk.Annotations.of(self).add_warning_v2(
                "trainyard:unrecorded-ami",
                "no AMI is recorded, so every deployment takes the newest one, and `cdk diff` does not show it: "
                f"{', '.join(sorted(self._unrecorded_pools))}. Next: python -m infra.amis update --stage {stage.name}",
            )
        self.publish(INSTANCE_TYPES, " ".join(stage.instance_types))
        if stage.capacity_reservation:
            self.publish(RESERVED_INSTANCE_TYPE, stage.row.name)
        self.publish(CPU_INSTANCE_TYPE, stage.cpu_instance_type)

    def _queues(self, owner: TeamInstances | None) -> None:
        """Create the queues of one team, or of the teams that share instances if `owner` is None."""
        accelerated = [
            (pool.rows, self._accelerator_pool(pool, owner, retiring=number > 0))
            for number, pool in enumerate(self.stage_row.pools)
        ]
        cpu = self._cpu_pool(owner)
        found = [(queue, types, pool) for rows, pool in accelerated for queue, types in queues_of(rows)]
        found += [(queue, (self.stage_row.cpu_row,), cpu) for queue in QUEUES.values() if not queue.accelerated]
        order = {name: number for number, name in enumerate(QUEUES)}  # before the queues of one card
        for queue, types, pool in sorted(found, key=lambda each: order.get(each[0].name, len(order))):
            if self._max_nodes(queue, queue.capacity):
                self._queue(queue, types, pool)

    def _team_instances(self, team: Team, storage: StorageStack) -> TeamInstances:
        has_endpoints = has_interface_endpoints(self.stage_row)
        return TeamInstances(
            self,
            team.name,
            vpc=self._network.vpc,
            stage=self.stage_row,
            boot_logs=self._logs,
            endpoint_group_id=(
                self._network.published(ENDPOINT_SECURITY_GROUP, reader=self) if has_endpoints else None
            ),
            file_server_group_id=(storage.published(FSX_SECURITY_GROUP, reader=self) if self._file_system else None),
        )

    def _queue(self, queue: Queue, types: Sequence[InstanceType], pool: InstancePool) -> None:
        tried = [
            self._environment(queue, capacity, group, pool, zone)
            for capacity in self._capacities(queue)
            if self._max_nodes(queue, capacity)
            for group in self._groups(queue, capacity, types, pool)
            for zone in self._zones(queue, pool)
        ]
        resource = batch.CfnJobQueue(
            pool.scope,
            # Keep this id: another logical id would be another queue, and the jobs in the old one would be lost.
            f"Queue-{queue.name}",
            state="ENABLED",
            priority=queue.priority,
            # From the start, because fair share cannot be added to a queue later.
            scheduling_policy_arn=self._shares.attr_arn,
            compute_environment_order=[
                batch.CfnJobQueue.ComputeEnvironmentOrderProperty(
                    order=order, compute_environment=environment.resource.attr_compute_environment_arn
                )
                for order, environment in enumerate(tried, start=1)
            ],
            job_state_time_limit_actions=self._time_limits(queue),
        )
        self.queues.append((queue, pool, types))
        parameter = queue_parameter(queue.name, team=pool.instances.team, retiring=pool.retiring)
        self.publish(parameter, resource.attr_job_queue_arn)

    def _groups(
        self, queue: Queue, capacity: Capacity, types: Sequence[InstanceType], pool: InstancePool
    ) -> list[tuple[InstanceType, ...]]:
        """Return the types of each compute environment of a queue that has a capacity, in Batch's order."""
        if pool.pool is None or queue.several_nodes:
            return [tuple(types)]
        if capacity == "spot":
            return environments(types)
        # Batch allows three environments: On-Demand instances as a fallback for Spot are of the first card only.
        return pool.pool.on_demand_environments[: None if queue.capacity == capacity else 1]

    def _zones(self, queue: Queue, pool: InstancePool) -> Sequence[int | None]:
        """Return the subnets of a queue's multi-node jobs, by index, in Batch's order; else one None, for all of them.

        All nodes of a job are in one environment, and therefore in one zone.
        """
        if pool.pool is None or not queue.several_nodes:
            return [None]
        return multinode_subnet_indices(self.stage_row, pool.pool)

    def _environment(
        self, queue: Queue, capacity: Capacity, types: Sequence[InstanceType], pool: InstancePool, zone: int | None
    ) -> ComputeEnvironment:
        """Return a pool's compute environment. Queues share it, so that the limit applies to them together.

        `zone`: index of the only subnet of multi-node jobs.
        """
        key = (capacity, types[0].name, zone)
        if key not in pool.environments:
            name = capacity if zone is None else self._multinode_name(pool, zone)
            pool.environments[key] = ComputeEnvironment(
                pool.scope,
                name if types[0] == pool.instances.row else f"{name}-{types[0].name}",
                instances=pool.instances,
                types=types,
                capacity=capacity,
                max_nodes=self._max_nodes(queue, capacity),
                subnets=self._subnets(capacity, types, pool.pool)
                if zone is None
                else [self._network.job_subnets[zone]],
                multinode=zone is not None,
            )
        return pool.environments[key]

    def _multinode_name(self, pool: InstancePool, zone: int) -> str:
        """Return the name of an environment for multi-node jobs, with its zone or subnet unless it is the first.

        The first keeps the name that it has in a stage of one zone: another name would replace it.
        """
        is_first = not any(known is not None for *_, known in pool.environments)
        return "multinode" if is_first else f"multinode-{subnet_names(self.stage_row)[zone]}"

    def _subnets(self, capacity: Capacity, types: Sequence[InstanceType], pool: Pool | None) -> Sequence[ec2.ISubnet]:
        if pool is None:
            return self._network.job_subnets
        if capacity == "on-demand":
            return self._network.on_demand_subnets(pool, types)
        return self._network.subnets_offering(types)

    def _capacities(self, queue: Queue) -> tuple[Capacity, ...]:
        """Return a queue's capacities in Batch's order: only Spot if the stage limits the wait for Spot.

        Batch only reports missing capacity if all of a queue's environments lack it. With On-Demand as the second, the
        wait would never end, and no job would be moved (see observability/functions/move_to_on_demand.py).
        """
        return queue.capacities[:1] if self._waits_for_spot(queue) else queue.capacities

    def _waits_for_spot(self, queue: Queue) -> bool:
        return queue.accelerated and queue.capacity == "spot" and self.stage_row.spot_wait_hours is not None

    def _max_nodes(self, queue: Queue, capacity: Capacity) -> int:
        """Return the settings' instance limit for a queue's capacity; 0 if the stage does not have this capacity."""
        stage = self.stage_row
        if not queue.accelerated:
            return stage.max_cpu_nodes
        if queue.several_nodes:
            return stage.max_multinode_nodes
        return stage.max_nodes if capacity == "spot" else stage.max_on_demand_nodes

    def _time_limits(self, queue: Queue) -> list[batch.CfnJobQueue.JobStateTimeLimitActionProperty]:
        """Return the time limits after which Batch cancels a job that blocks the head of a queue."""
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

    def _accelerator_pool(self, pool: Pool, owner: TeamInstances | None, *, retiring: bool = False) -> InstancePool:
        return InstancePool(
            scope=self._pool_scope(pool.id, owner),
            instances=self._instances(
                pool.row,
                owner,
                machine_image=self._machine_image_of(pool),
                root_volume_gib=self.stage_row.root_volume_gib,
                file_system=self._file_system,
                reservation=pool.capacity_reservation,
            ),
            pool=pool,
            retiring=pool.id if retiring else None,
        )

    def _cpu_pool(self, owner: TeamInstances | None) -> InstancePool:
        stage = self.stage_row
        return InstancePool(
            scope=self._pool_scope(stage.cpu_pool_id, owner),
            instances=self._instances(
                stage.cpu_row,
                owner,
                machine_image=MachineImage(
                    root_device_name=stage.cpu_root_device_name
                    if stage.cpu_machine_image
                    else _AMAZON_LINUX_ROOT_DEVICE,
                    image_type=stage.cpu_row.image_type,
                    ami_id=self._ami_id(stage.cpu_pool_id),
                ),
                root_volume_gib=stage.cpu_root_volume_gib,
            ),
            pool=None,
        )

    def _pool_scope(self, name: str, owner: TeamInstances | None) -> Construct:
        """Return the construct of a pool's resources. Its name is in its instances' names, so it must be unique."""
        if owner is None:
            return Construct(self, name)
        scope = Construct(self, f"{name}-of-{owner.team}")
        # This tag limits the members of a team to their own queues.
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
            ebs_key_arn=self.stage_row.ebs_key_arn,
            proxy=proxy_variables(self.stage_row),
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
        """The instance profile of teams that share instances, created only if there are any."""
        role = InstanceRole(self, boot_logs=self._logs)
        if any(self.stage_row.instance_owners):
            role.deny_other_teams(None)
        return iam.InstanceProfile(self, "InstanceProfile", role=role)

    def _machine_image_of(self, pool: Pool) -> MachineImage:
        if pool.builds_machine_image and self._machine_image is not None:
            self.add_stack_dependency(self._machine_image, "the AMIs that it builds")
        custom = pool.root_device_name or self.stage_row.root_device_name
        default = BUILT_ROOT_DEVICE_NAME if pool.builds_machine_image else _AMAZON_LINUX_ROOT_DEVICE
        return MachineImage(
            # With a name other than the AMI's, this would add a second volume, and the root volume would stay small.
            root_device_name=custom if pool.machine_image else default,
            image_type=pool.row.image_type,
            ami_id=self._ami_id(pool.id),
        )

    def _ami_id(self, pool: str) -> str:
        """Return the AMI of a pool: the context's for one deployment, else the recorded one, else the newest.

        Batch's own choice would be the AMI of the day on which it creates the compute environment, forever.
        """
        stage, source = self.stage_row, ami_sources(self.stage_row)[pool]
        chosen: str = self.node.try_get_context(f"ami:{pool}") or recorded_ami(stage, source) or source
        if is_ami(chosen):
            return chosen
        self._unrecorded_pools.add(pool)
        # A template parameter, which CloudFormation reads at each deployment.
        return ssm.StringParameter.value_for_typed_string_parameter_v2(
            self, source, ssm.ParameterValueType.AWS_EC2_IMAGE_ID
        )

    def _scheduling_policy(self) -> batch.CfnSchedulingPolicy:
        return batch.CfnSchedulingPolicy(
            self,
            "TeamShares",
            fairshare_policy=batch.CfnSchedulingPolicy.FairsharePolicyProperty(
                share_decay_seconds=_SHARE_DECAY_SECONDS,
                # No capacity is held back for idle teams.
                compute_reservation=0,
                share_distribution=[
                    batch.CfnSchedulingPolicy.ShareAttributesProperty(
                        share_identifier=share_identifier(team.name),
                        # Batch weighs usage: half the factor means twice the share.
                        weight_factor=round(1 / team.share, 4),
                    )
                    for team in self.stage_row.teams
                ],
            ),
        )
