"""Which queue a job goes to, and why. A spec names no queue, only what it needs."""

from jobs.contract.errors import UsageError
from jobs.contract.instance_types import InstanceType
from jobs.contract.queues import MARKET, QUEUES, Queue
from jobs.contract.spec import JobSpec
from jobs.contract.stage import DeployedStage


def choose_queue(spec: JobSpec, stage: DeployedStage, row: InstanceType) -> tuple[Queue, str]:
    """The first row of `QUEUES` that fits what the spec asks for, and why it is that one.

    Raises UsageError where the stage has none that does.
    """
    asked = spec.resources
    capacity = asked.capacity or "spot"
    if asked.nnodes > 1 and spec.kind.one_process:
        raise UsageError(
            f"resources.nnodes: a '{spec.job}' runs on one node, not on {asked.nnodes}",
            next_step="leave resources.nnodes out",
        )
    if asked.nnodes > 1 and not spec.kind.accelerated:
        raise UsageError(f"resources.nnodes: '{spec.job}' runs on one CPU instance, not on {asked.nnodes}")
    several_nodes = asked.nnodes > 1 and not asked.is_gang
    for queue in QUEUES.values():
        if (queue.accelerated, queue.several_nodes) != (spec.kind.accelerated, several_nodes):
            continue
        if queue.name in stage.queues and (several_nodes or queue.capacity == capacity):
            return queue, _queue_reason(spec, queue, row)
    if several_nodes:
        raise UsageError(
            f"resources.nnodes: {asked.nnodes} were asked for, but stage '{stage.name}' has no queue for several nodes",
            next_step="set resources.capacity to 'spot', resources.nnodes to 1, or have max_multinode_nodes of the "
            "stage raised in infra/settings.py",
        )
    raise UsageError(
        f"resources.capacity: '{capacity}' was asked for, but stage '{stage.name}' has no "
        f"{MARKET[capacity]} queue for '{spec.job}'",
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
