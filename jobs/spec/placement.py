"""The placement of a job: its instance type, its queue and its ranks, and why.

A spec names no queue, only what it needs.
"""

from dataclasses import dataclass

from jobs.core.errors import UsageError
from jobs.core.instance_types import InstanceType
from jobs.core.queues import CAPACITY_NAMES, QUEUES, Queue
from jobs.core.stage import DeployedStage
from jobs.spec.spec import JobSpec


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The instances, queue and ranks of a job, and why."""

    instance_type: InstanceType
    queue: Queue
    queue_name: str
    """What the stage calls the queue: a team has one of its own, unless it shares."""
    queue_reason: str
    accelerator: str
    """hpu, cuda, cpu or auto: what the job's container is told to train on."""
    accelerator_reason: str
    nnodes: int
    fewest_nnodes: int
    """The fewest nodes that it may come to train on."""
    nproc_per_node: int
    nproc_per_node_on_aws: int
    """The same number, unless the emulator runs the job on a machine that is too small for it."""

    @property
    def world_sizes(self) -> list[int]:
        """Return the numbers of ranks that the arguments have to work on: what runs here should run on AWS too."""
        ranks = dict.fromkeys((self.nproc_per_node_on_aws, self.nproc_per_node))
        return [nnodes * nproc for nproc in ranks for nnodes in sorted({self.nnodes, self.fewest_nnodes})]


def place(spec: JobSpec, stage: DeployedStage) -> Placement:
    """Return where the stage runs what the spec asks for. Raises UsageError where it can't."""
    stage.check_team(spec.team)  # whose queues it is that are looked for
    row = stage.row_of(accelerated=spec.kind.accelerated)
    queue, queue_reason = _choose_queue(spec, stage, row)
    nproc_per_node = nproc_per_node_on_aws = _ranks(spec, row)
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
    """Return the first row of `QUEUES` that fits what the spec asks for, and why it is that one."""
    asked = spec.resources
    capacity = asked.capacity or "spot"
    if asked.nnodes > 1 and spec.kind.one_process:
        raise UsageError(
            f"resources.nnodes: a '{spec.job}' runs on one node, not on {asked.nnodes}",
            next_step="leave resources.nnodes out",
        )
    several_nodes = asked.nnodes > 1 and not asked.is_gang
    for queue in QUEUES.values():
        if (queue.accelerated, queue.several_nodes) != (spec.kind.accelerated, several_nodes):
            continue
        if stage.queue_of(spec.team, queue.name) in stage.queues and (several_nodes or queue.capacity == capacity):
            return queue, _queue_reason(spec, queue, row)
    if several_nodes:
        raise UsageError(
            f"resources.nnodes: {asked.nnodes} were asked for, but stage '{stage.name}' has no queue for several nodes",
            next_step="set resources.capacity to 'spot', resources.nnodes to 1, or have max_multinode_nodes of the "
            "stage raised in infra/settings.py",
        )
    raise UsageError(
        f"resources.capacity: '{capacity}' was asked for, but stage '{stage.name}' has no "
        f"{CAPACITY_NAMES[capacity]} queue for '{spec.job}'",
        next_step=_other_capacity(spec),
    )


def _other_capacity(spec: JobSpec) -> str:
    if spec.resources.capacity != "on-demand":
        return "set resources.capacity to 'on-demand'"
    limit = ", or have max_on_demand_nodes of the stage raised in infra/settings.py" if spec.kind.accelerated else ""
    return f"set resources.capacity to 'spot'{limit}"


def _queue_reason(spec: JobSpec, queue: Queue, row: InstanceType) -> str:
    if queue.several_nodes:
        return "several nodes: started together, On-Demand; resources.capacity: spot starts each as Spot has it"
    if not queue.accelerated:
        return f"'{spec.job}' needs no accelerator"
    if spec.resources.is_gang:
        return f"{spec.resources.nnodes} nodes of {row.name}: Spot, each started for itself, and again after a reclaim"
    if queue.capacity == "on-demand":
        return f"one node of {row.name}: On-Demand, as resources.capacity asks; it is not interrupted"
    return f"one node of {row.name}: Spot, started again after a reclaim"


def _ranks(spec: JobSpec, row: InstanceType) -> int:
    asked = spec.resources.nproc_per_node
    if spec.arguments.get("processes") == 1:  # of a script, which starts its own ranks
        return 1
    if spec.kind.one_process:
        if asked not in (None, 1):
            raise UsageError(
                f"resources.nproc_per_node: a '{spec.job}' is one process, to which all {row.card}s of the node belong",
                next_step="leave resources.nproc_per_node out",
            )
        return 1
    if asked is None:
        return row.processes
    if asked > row.processes:
        raise UsageError(
            f"resources.nproc_per_node: {asked} ranks do not fit a {row.name}, which has "
            f"{row.accelerators or row.vcpus} {row.card}s",
            next_step=f"ask for at most {row.processes}, or for more nodes",
        )
    return asked
