"""Chooses the instance type, queue and ranks of a job, with reasons.

A spec names the resources it needs, not a queue.
"""

from dataclasses import dataclass

from jobs.core.errors import UsageError, raise_all
from jobs.core.instance_types import InstanceType
from jobs.core.queues import CAPACITY_NAMES, QUEUES, Queue
from jobs.core.stage import DeployedStage
from jobs.core.words import counted
from jobs.spec.spec import JobSpec


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The instances, queue and ranks of a job, and why."""

    instance_type: InstanceType
    queue: Queue
    queue_name: str
    """Name of the queue in the stage: the team's own queue, or a shared one."""
    queue_reason: str
    accelerator: str
    """What the job's container trains on: hpu, cuda, cpu or auto."""
    accelerator_reason: str
    nnodes: int
    fewest_nnodes: int
    """The smallest number of nodes that the job may train on."""
    nproc_per_node: int
    nproc_per_node_on_aws: int
    """nproc_per_node, unless the emulator reduces it because this machine is too small."""

    @property
    def world_sizes(self) -> list[int]:
        """Return the world sizes that the arguments must work with; on the emulator, including the ones on AWS."""
        ranks = dict.fromkeys((self.nproc_per_node_on_aws, self.nproc_per_node))
        return [nnodes * nproc for nproc in ranks for nnodes in sorted({self.nnodes, self.fewest_nnodes})]


def place(spec: JobSpec, stage: DeployedStage) -> Placement:
    """Return the placement of a spec's job in the stage. Raises UsageError with every reason why it cannot run it."""
    row = stage.row_of(accelerated=spec.kind.accelerated)
    errors: list[UsageError] = []
    try:
        stage.check_team(spec.team)
    except UsageError as error:
        errors.append(error)
        spec = with_known_team(spec, stage)
    try:
        queue, queue_reason = _choose_queue(spec, stage, row)
    except UsageError as error:
        errors.append(error)
    try:
        nproc_per_node = nproc_per_node_on_aws = _ranks(spec, row)
    except UsageError as error:
        errors.append(error)
    raise_all(errors)
    accelerator: str = row.accelerator
    accelerator_reason = f"{row.name} of stage '{stage.name}'"
    if stage.emulated_processes is not None:
        nproc_per_node = min(nproc_per_node, stage.emulated_processes)
        accelerator = "auto"
        accelerator_reason = f"the emulator runs jobs on this machine; on AWS: {row.accelerator} of {row.name}"
    return Placement(
        instance_type=row,
        queue=queue,
        queue_name=stage.queue_of(spec.team, queue.name),
        queue_reason=queue_reason,
        accelerator=accelerator,
        accelerator_reason=accelerator_reason,
        nnodes=spec.resources.nnodes,
        fewest_nnodes=spec.resources.fewest_nnodes,
        nproc_per_node=nproc_per_node,
        nproc_per_node_on_aws=nproc_per_node_on_aws,
    )


def _choose_queue(spec: JobSpec, stage: DeployedStage, row: InstanceType) -> tuple[Queue, str]:
    """Return the first row of `QUEUES` that provides what the spec needs, and the reason."""
    requested = spec.resources
    capacity = requested.capacity or "spot"
    if requested.nnodes > 1 and spec.kind.one_process:
        raise UsageError(
            f"resources.nnodes: '{spec.job}' runs on one node, not on {requested.nnodes}",
            next_step="remove resources.nnodes",
        )
    several_nodes = requested.nnodes > 1 and not requested.is_node_group
    for queue in QUEUES.values():
        if (queue.accelerated, queue.several_nodes) != (spec.kind.accelerated, several_nodes):
            continue
        if stage.queue_of(spec.team, queue.name) in stage.queues and (several_nodes or queue.capacity == capacity):
            return queue, _queue_reason(spec, queue, row)
    if several_nodes:
        raise UsageError(
            f"resources.nnodes: stage '{stage.name}' has no queue for {requested.nnodes} On-Demand nodes",
            next_step="set resources.capacity to 'spot' or resources.nnodes to 1, or ask for a higher "
            "max_multinode_nodes of the stage in infra/settings.py",
        )
    raise UsageError(
        f"resources.capacity: stage '{stage.name}' has no {CAPACITY_NAMES[capacity]} queue for '{spec.job}'",
        next_step=_other_capacity(spec),
    )


def _other_capacity(spec: JobSpec) -> str:
    if spec.resources.capacity != "on-demand":
        return "set resources.capacity to 'on-demand'"
    higher = "ask for a higher max_on_demand_nodes of the stage in infra/settings.py"
    limit = f", or {higher}" if spec.kind.accelerated else ""
    return f"set resources.capacity to 'spot'{limit}"


def with_known_team(spec: JobSpec, stage: DeployedStage) -> JobSpec:
    """Return the spec with a team of the stage, if it has an unknown one: the team determines the queues."""
    known = spec.team in stage.teams or not stage.teams
    return spec if known else spec.model_copy(update={"team": stage.teams[0]})


def check_room(stage: DeployedStage, placement: Placement, room: int) -> None:
    """Raise UsageError if a job would wait forever, because its queue only has room for `room` nodes.

    0 means that the queue is closed for now.
    """
    if 0 < room < placement.fewest_nnodes:
        limit = "max_multinode_nodes" if placement.queue.several_nodes else "max_nodes"
        raise UsageError(
            f"resources.nnodes: stage '{stage.name}' has room for {counted(room, 'node')} of "
            f"{placement.instance_type.name} ({CAPACITY_NAMES[placement.queue.capacity]}), not for "
            f"{placement.fewest_nnodes}",
            next_step=f"set it to at most {room}, or ask for a higher {limit} of the stage in infra/settings.py",
        )


def _queue_reason(spec: JobSpec, queue: Queue, row: InstanceType) -> str:
    if queue.several_nodes:
        return (
            "several nodes start together On-Demand; with resources.capacity: spot, each starts when Spot has capacity"
        )
    if not queue.accelerated:
        return f"'{spec.job}' needs no accelerator"
    if spec.resources.is_node_group:
        return f"{spec.resources.nnodes} nodes of {row.name} on Spot: each starts separately, and again after a reclaim"
    if queue.capacity == "on-demand":
        return f"one node of {row.name}, On-Demand as resources.capacity requests: never interrupted"
    return f"one node of {row.name} on Spot: started again after a reclaim"


def _ranks(spec: JobSpec, row: InstanceType) -> int:
    requested = spec.resources.nproc_per_node
    if spec.arguments.get("processes") == 1:  # a script that starts its own ranks
        return 1
    if spec.kind.one_process:
        if requested not in (None, 1):
            raise UsageError(
                f"resources.nproc_per_node: '{spec.job}' is one process that uses all {row.card}s of the node",
                next_step="remove resources.nproc_per_node",
            )
        return 1
    if requested is None:
        return row.processes
    if requested > row.processes:
        raise UsageError(
            f"resources.nproc_per_node: {requested} ranks do not fit a {row.name}, which has "
            f"{row.accelerators or row.vcpus} {row.card}s",
            next_step=f"set it to at most {row.processes}, or increase resources.nnodes",
        )
    return requested
