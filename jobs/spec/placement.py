"""Chooses the instance type, queue and ranks of a job, with reasons.

A spec names the resources it needs, not a queue.
"""

from dataclasses import dataclass

from jobs.core.errors import UsageError, raise_all
from jobs.core.instance_types import InstanceType
from jobs.core.queues import CAPACITY_NAMES, QUEUES, Queue, environments, falls_back, queues_of, types_text
from jobs.core.stage import DeployedStage
from jobs.core.words import counted
from jobs.spec.spec import JobSpec


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The instances, queue and ranks of a job, and why."""

    instance_types: tuple[InstanceType, ...]
    """Types on which Batch may start the job, in its order."""
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
    def instance_type(self) -> InstanceType:
        """Return the first type, for what all types have in common, and for the expected price."""
        return self.instance_types[0]

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
        queue, types, queue_reason = _choose_queue(spec, stage)
        row = types[0]
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
        instance_types=types,
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


def may_fall_back(spec: JobSpec, stage: DeployedStage, queue_name: str) -> bool:
    """Return whether the job of a spec may move from a queue to the stage's fallback stage."""
    return stage.fallback is not None and falls_back(queue_name) and spec.resources.nnodes == 1 and spec.sweep is None


def queues_for(spec: JobSpec, stage: DeployedStage) -> list[tuple[Queue, tuple[InstanceType, ...]]]:
    """Return the stage's queues for the spec's kind and team, each with the types of its instances."""
    if spec.kind.accelerated:
        reserved = stage.reserved_instance_type
        found = [
            (queue, (reserved,) if reserved and queue.capacity == "on-demand" else types)
            for queue, types in queues_of(stage.instance_types)
        ]
    else:
        found = [(queue, (stage.cpu_instance_type,)) for queue in QUEUES.values() if not queue.accelerated]
    return [(queue, types) for queue, types in found if stage.queue_of(spec.team, queue.name) in stage.queues]


def _choose_queue(spec: JobSpec, stage: DeployedStage) -> tuple[Queue, tuple[InstanceType, ...], str]:
    """Return the first queue all of whose types fit the spec, these types, and the reason."""
    requested = spec.resources
    capacity = requested.capacity or "spot"
    if requested.nnodes > 1 and spec.kind.one_process:
        raise UsageError(
            f"resources.nnodes: '{spec.job}' runs on one node, not on {requested.nnodes}",
            next_step="remove resources.nnodes",
        )
    several_nodes = requested.nnodes > 1 and not requested.is_node_group
    queues = [
        (queue, types)
        for queue, types in queues_for(spec, stage)
        if queue.several_nodes == several_nodes and (several_nodes or queue.capacity == capacity)
    ]
    for queue, types in queues:
        # The nodes of a job need equal cards.
        if not any(map(requested.misfit, types)) and not (requested.is_node_group and len(environments(types)) > 1):
            return queue, types, _queue_reason(spec, queue, types)
    if queues:
        raise _misfit(spec, stage, [types for _, types in queues])
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


def _misfit(spec: JobSpec, stage: DeployedStage, queues: list[tuple[InstanceType, ...]]) -> UsageError:
    """Return the refusal of a spec whose resources no queue of its capacity provides, with what there is."""
    requested = spec.resources
    rows = dict.fromkeys(row for types in queues for row in types)
    keys = (key for key in ("instance_types", "gpu", "gpu_memory_gib") if getattr(requested, key) is not None)
    key = next(keys, "nnodes")
    there = ", ".join(f"{types_text(group)} ({card_text(group[0])})" for group in environments(tuple(rows)))
    fits = " and ".join(row.name for row in rows if not requested.misfit(row))
    mixed = f": the queue of {fits} also starts other types" if fits else ""
    spot = [
        types
        for queue, types in queues_for(spec, stage)
        if queue.capacity == "spot" and not any(map(requested.misfit, types))
    ]
    instead = f"set resources.capacity to 'spot', which has a queue of {types_text(spot[0])}; or " if spot else ""
    return UsageError(
        f"resources.{key}: no queue of stage '{stage.name}' has only instances that fit{mixed}. It has {there}",
        next_step=f"{instead}change resources.{key}, or ask for other instance_types of the stage in infra/settings.py",
    )


def card_text(row: InstanceType) -> str:
    """Return the cards of an instance type as text: `4 x L40S of 45 GiB`."""
    if not row.accelerators:
        return f"{row.vcpus} vCPUs"
    return f"{row.accelerators} x {row.card_model or row.card} of {row.card_memory_mib / 1024:.0f} GiB"


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
            f"{types_text(placement.instance_types)} ({CAPACITY_NAMES[placement.queue.capacity]}), not for "
            f"{placement.fewest_nnodes}",
            next_step=f"set it to at most {room}, or ask for a higher {limit} of the stage in infra/settings.py",
        )


def _queue_reason(spec: JobSpec, queue: Queue, types: tuple[InstanceType, ...]) -> str:
    names = types_text(types)
    if queue.several_nodes:
        return (
            "several nodes start together On-Demand, in one zone; with resources.capacity: spot, each starts when Spot "
            "has capacity"
        )
    if not queue.accelerated:
        return f"'{spec.job}' needs no accelerator"
    if spec.resources.is_node_group:
        return f"{spec.resources.nnodes} nodes of {names} on Spot: each starts separately, and again after a reclaim"
    if queue.capacity == "on-demand":
        return f"one node of {names}, On-Demand as resources.capacity requests: never interrupted"
    return f"one node of {names} on Spot: started again after a reclaim"


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
