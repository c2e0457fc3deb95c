"""Plan: JobSpec + stage -> the SubmitJob request, the queue and why, and the price. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jobs.errors import INTERRUPTED_EXIT_CODE, UsageError
from jobs.instance_types import InstanceType
from jobs.locations import DATA
from jobs.queues import CPU_SPOT, GAUDI_MULTINODE, GAUDI_SPOT
from jobs.runs import ACCELERATOR_VARIABLE, RUN_URI_VARIABLE, S3Location, run_prefix
from jobs.spec import JobSpec
from jobs.stage import DeployedStage, share_identifier

CONTAINER_NAME = "main"
"""The one container of every job definition; an override names it."""

RETRY_RULES: tuple[Mapping[str, str], ...] = (
    # Batch reads them in order and, unlike what one would expect, starts again what no rule matches.
    {"onStatusReason": "Host EC2*", "action": "RETRY"},  # the Spot reclaim, in Batch's own words
    {"onExitCode": str(INTERRUPTED_EXIT_CODE), "action": "RETRY"},
    {"onReason": "*", "action": "EXIT"},
    {"onExitCode": "*", "action": "EXIT"},
)
"""evaluateOnExit of every job: only a reclaim and the reserved code start it again, the job's own fault never does."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What would be submitted, and its price."""

    run_id: str
    run_location: S3Location
    spec: JobSpec
    request: dict[str, Any]
    """SubmitJob's arguments, exactly as they will be sent."""
    queue: str
    queue_reason: str
    instance_type: InstanceType
    accelerator: str
    accelerator_reason: str
    nnodes: int
    nproc_per_node: int
    notes: tuple[str, ...]
    """What the submitter should know before paying."""

    @property
    def on_demand_usd_per_hour(self) -> float:
        return self.instance_type.on_demand_usd_per_hour * self.nnodes

    @property
    def spot_usd_per_hour(self) -> float:
        return self.instance_type.spot_usd_per_hour * self.nnodes

    @property
    def inputs(self) -> tuple[tuple[str, str, str], ...]:
        """`(argument, resolved location, what it should be)` of everything the job will read."""
        return tuple(self.spec.entrypoint_arguments().sources())


def plan(spec: JobSpec, stage: DeployedStage, *, run_id: str) -> Plan:
    """What would be submitted.

    Raises UsageError where the spec asks for what the stage cannot give, ConfigurationError where the stage lacks what
    the kind needs.
    """
    kind = spec.kind
    row = stage.instance_type if kind.accelerated else stage.cpu_instance_type
    definition = stage.job_definition(spec.team, spec.job)
    nproc_per_node = _ranks(spec, row)
    queue, queue_reason = _queue(spec, stage)
    world_sizes = [spec.resources.nnodes * nproc_per_node]
    notes = []
    if nproc_per_node < row.processes and row.accelerators:
        notes.append(
            f"uses {nproc_per_node} of the {row.accelerators} {row.accelerator.upper()}s of a {row.name}; the whole "
            "instance is paid for"
        )
    accelerator: str = row.accelerator
    accelerator_reason = f"{row.name} of stage '{stage.name}'"
    if stage.embedded_processes is not None:
        accelerator = "auto"
        accelerator_reason = f"the embedded AWS runs jobs on this machine; on AWS: {row.accelerator} of {row.name}"
        if nproc_per_node > stage.embedded_processes:
            notes.append(
                f"runs {stage.embedded_processes} ranks on this machine instead of {nproc_per_node}; "
                "the global batch size stays"
            )
            nproc_per_node = stage.embedded_processes
            world_sizes.append(spec.resources.nnodes * nproc_per_node)

    arguments = spec.entrypoint_arguments()
    # What runs here should run on AWS too, so it is held to the ranks that it would have there.
    arguments.check(*world_sizes)
    locations = {
        name: f"s3://{stage.data_bucket}/{location.removeprefix(DATA)}"
        for name, location, _ in arguments.sources()
        if location.startswith(DATA)
    }
    arguments = arguments.with_sources(**locations)
    run_location = S3Location(stage.run_bucket, run_prefix(spec.team, run_id))
    command = [
        "python",
        "-m",
        "jobs.train.launch",
        f"--instance-type={row.name}",
        f"--nproc-per-node={nproc_per_node}",
        spec.job,
        *arguments.to_flags(),
    ]
    timeout_hours = spec.timeout_hours or kind.timeout_hours
    tags = {"trainyard:run": run_id, "trainyard:team": spec.team, "trainyard:job": spec.job}
    request: dict[str, Any] = {
        "jobName": run_id,
        "jobQueue": stage.queue(queue),
        "jobDefinition": definition,
        # A queue with fair share refuses a job that names no share.
        "shareIdentifier": share_identifier(spec.team),
        "ecsPropertiesOverride": {
            "taskProperties": [
                {
                    "containers": [
                        {
                            "name": CONTAINER_NAME,
                            "command": command,
                            "environment": [
                                {"name": RUN_URI_VARIABLE, "value": str(run_location)},
                                {"name": ACCELERATOR_VARIABLE, "value": accelerator},
                            ],
                        }
                    ]
                }
            ]
        },
        # Given here the strategy replaces the definition's whole, so the rules go along with the number.
        "retryStrategy": {"attempts": spec.attempts, "evaluateOnExit": [dict(rule) for rule in RETRY_RULES]},
        "timeout": {"attemptDurationSeconds": round(timeout_hours * 3600)},
        "tags": tags,
        "propagateTags": True,
    }
    return Plan(
        run_id=run_id,
        run_location=run_location,
        spec=spec.model_copy(update={"arguments": arguments.model_dump(mode="json", exclude_none=True)}),
        request=request,
        queue=queue,
        queue_reason=queue_reason,
        instance_type=row,
        accelerator=accelerator,
        accelerator_reason=accelerator_reason,
        nnodes=spec.resources.nnodes,
        nproc_per_node=nproc_per_node,
        notes=tuple(notes),
    )


def _ranks(spec: JobSpec, row: InstanceType) -> int:
    asked = spec.resources.nproc_per_node
    if asked is None:
        return row.processes
    if asked > row.processes:
        what = f"{row.accelerators} {row.accelerator.upper()}s" if row.accelerators else f"{row.vcpus} vCPUs"
        raise UsageError(
            f"resources.nproc_per_node: {asked} ranks do not fit a {row.name}, which has {what}",
            next_step=f"ask for at most {row.processes}, or for more nodes",
        )
    return asked


def _queue(spec: JobSpec, stage: DeployedStage) -> tuple[str, str]:
    if not spec.kind.accelerated:
        if spec.resources.nnodes > 1:
            raise UsageError(f"resources.nnodes: '{spec.job}' runs on one CPU instance, not on {spec.resources.nnodes}")
        return CPU_SPOT, f"'{spec.job}' needs no accelerator"
    if spec.resources.nnodes > 1:
        if GAUDI_MULTINODE not in stage.queues:
            raise UsageError(
                f"resources.nnodes: {spec.resources.nnodes} were asked for, but stage '{stage.name}' has no queue for "
                "several nodes",
                next_step="set resources.nnodes to 1",
            )
        return GAUDI_MULTINODE, "several nodes: Batch does not run multi-node jobs on Spot"
    return GAUDI_SPOT, f"one node of {stage.instance_type.name}: Spot, started again after a reclaim"
