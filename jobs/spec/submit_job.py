"""The SubmitJob request of a plan, as boto3's dict, and the values that it shares with job definitions."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jobs.core.locations import S3Location
from jobs.core.queues import falls_back, on_demand_successor
from jobs.core.retries import RESUMED_TAG, RETRY_RULES
from jobs.core.stage import DeployedStage, share_identifier
from jobs.spec.launcher_options import ACCELERATOR_VARIABLE, RUN_URI_VARIABLE
from jobs.spec.placement import Placement
from jobs.spec.spec import MAX_ATTEMPTS, MAX_TIMEOUT_HOURS, JobSpec
from jobs.spec.sweep import SWEEP_TAG, SweepSize

MAX_DEPENDENCIES = 20
"""Limit of AWS Batch on the runs that a job can wait for."""

DEPENDENCY_FAILED = "Dependent Job failed"
"""Batch's reason for a job that never started because a job that it depended on failed."""


@dataclass(frozen=True, kw_only=True)
class Dependency:
    """An unfinished run of the same team that writes inputs of the waiting job."""

    run_id: str
    job_id: str | None
    """Batch job id of the run. None if it is submitted together with the waiting job."""
    queue: str
    """Name of the run's queue in the stage: cpu-spot, …"""
    arguments: tuple[str, ...]
    """Arguments of the waiting job that read the run's output."""

    def depends_on(self, job_id: str | None = None) -> dict[str, str]:
        """Return the dependency for SubmitJob; `job_id` is the run's job id if it was submitted in the meantime."""
        return {"jobId": self.job_id or job_id or f"<job id of {self.run_id}>"}

    def note(self, stage: DeployedStage) -> str | None:
        """Return a warning if the run may move: its first job then ends, which Batch counts as failed."""
        may_fall_back = stage.fallback is not None and falls_back(self.queue)
        if on_demand_successor(self.queue) not in stage.queues and not may_fall_back:
            return None
        return (
            f"waits for {self.run_id}, which runs on Spot: if that run is moved to "
            f"{'another region or ' if may_fall_back else ''}On-Demand, this run fails and must be submitted again"
        )


SCHEDULING_PRIORITY = 10
"""Batch's scheduling priority of a run with priority 0. Batch takes no negative ones (SubmitJob's API reference)."""

CONTAINER_NAME = "main"
"""Name of the only container in every job definition; overrides refer to it."""

MAX_OVERRIDES_CHARACTERS = 8192
"""Limit of Amazon ECS, JSON's own characters included (API reference, TaskOverride of RunTask). AWS Batch accepts a job
with longer overrides, but the job cannot start on its instance."""

MAX_REQUEST_BYTES = 30 << 10
"""Limit of AWS Batch on a SubmitJob request (User Guide, "AWS Batch service quotas")."""

_BATCH_VARIABLES_CHARACTERS = 1024
"""Reserved for the variables that AWS Batch adds, with the names of the queue and the compute environment."""

SUBMITTER_TAG = "trainyard:submitter"
"""Tag with the identity in AWS that submitted or resumed a job. It is for people: who submits could change it."""

JOB_TAGS = (
    "trainyard:stage",
    "trainyard:run",
    "trainyard:team",
    "trainyard:job",
    SUBMITTER_TAG,
    SWEEP_TAG,
    RESUMED_TAG,
)
"""Keys of all tags that a submission sets on its job; members of a team may not set others."""

NODE_RANGE = "0:"
"""The only node range of every multi-node job definition: all nodes, for any number of nodes."""


def submit_job_request(
    spec: JobSpec,
    stage: DeployedStage,
    placement: Placement,
    *,
    run_id: str,
    run_location: S3Location,
    flags: Sequence[str],
    dependencies: Sequence[Dependency],
    resumed_job_id: str | None,
    sweep: SweepSize | None = None,
) -> dict[str, Any]:
    """Return the arguments of SubmitJob.

    `flags` follow the launcher's name on the command line. `resumed_job_id` is the previous job of a resumed run,
    `sweep` the number of points and workers of a sweep.
    """
    several_nodes = placement.queue.several_nodes
    overrides = _container_overrides(run_location, accelerator=placement.accelerator, flags=flags, env=spec.env)
    timeout_hours = spec.timeout_hours or spec.kind.timeout_hours
    children = placement.nnodes if spec.resources.is_node_group else sweep.workers if sweep else 1
    rounds = sweep.rounds if sweep else 1
    return {
        "jobName": run_id,
        "jobQueue": stage.queue(placement.queue_name),
        "jobDefinition": stage.job_definition(spec.team, spec.job, several_nodes=several_nodes),
        # A queue with fair-share scheduling rejects a job without a share.
        "shareIdentifier": share_identifier(spec.team),
        **({"schedulingPriorityOverride": SCHEDULING_PRIORITY + spec.priority} if spec.priority else {}),
        **(_node_overrides(placement.nnodes, overrides) if several_nodes else {"ecsPropertiesOverride": overrides}),
        # AWS Batch rejects an array of one child.
        **({"arrayProperties": {"size": children}} if children > 1 else {}),
        # A strategy in the request replaces the whole strategy of the definition, so the rules must be repeated.
        "retryStrategy": {
            "attempts": min(MAX_ATTEMPTS, spec.attempts * rounds),
            "evaluateOnExit": [dict(rule) for rule in RETRY_RULES],
        },
        "timeout": {"attemptDurationSeconds": round(min(MAX_TIMEOUT_HOURS, timeout_hours * rounds) * 3600)},
        "tags": {
            "trainyard:stage": stage.name,
            "trainyard:run": run_id,
            "trainyard:team": spec.team,
            "trainyard:job": spec.job,
            **({SWEEP_TAG: str(sweep.points)} if sweep else {}),
            **({RESUMED_TAG: resumed_job_id} if resumed_job_id else {}),
        },
        "propagateTags": True,
        **({"dependsOn": [run.depends_on() for run in dependencies]} if dependencies else {}),
    }


def excess(request: Mapping[str, Any]) -> int:
    """Return by how many characters a request's command line and variables are too long; at most 0 if they are not.

    AWS Batch limits the request, in which boto3 escapes letters outside ASCII, and Amazon ECS the container's part.
    """
    overrides = {name: request[name] for name in ("ecsPropertiesOverride", "nodeOverrides") if name in request}
    length = len(json.dumps(overrides, separators=(",", ":"), ensure_ascii=False))
    most = MAX_OVERRIDES_CHARACTERS - _BATCH_VARIABLES_CHARACTERS
    return max(length - most, len(json.dumps(request)) - MAX_REQUEST_BYTES)


def _container_overrides(
    run_location: S3Location, *, accelerator: str, flags: Sequence[str], env: Mapping[str, str]
) -> dict[str, Any]:
    container = {
        "name": CONTAINER_NAME,
        "command": ["python", "-m", "jobs.container.launch", *flags],
        "environment": [
            {"name": RUN_URI_VARIABLE, "value": str(run_location)},
            {"name": ACCELERATOR_VARIABLE, "value": accelerator},
            *({"name": name, "value": value} for name, value in env.items()),
        ],
    }
    return {"taskProperties": [{"containers": [container]}]}


def _node_overrides(nnodes: int, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return node overrides with the same command for all nodes.

    The number of nodes can be overridden because the definition's range is open; the override must use the same range.
    """
    nodes = {"targetNodes": NODE_RANGE, "ecsPropertiesOverride": overrides}
    return {"nodeOverrides": {"numNodes": nnodes, "nodePropertyOverrides": [nodes]}}
