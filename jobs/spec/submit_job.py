"""The SubmitJob request of a plan, as the dict that boto3 takes, and what job definitions have in common with it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jobs.core.locations import S3Location
from jobs.core.queues import on_demand_successor
from jobs.core.retries import RESUMED_TAG, RETRY_RULES
from jobs.core.stage import DeployedStage, share_identifier
from jobs.spec.launcher_options import ACCELERATOR_VARIABLE, RUN_URI_VARIABLE
from jobs.spec.placement import Placement
from jobs.spec.spec import MAX_ATTEMPTS, MAX_TIMEOUT_HOURS, JobSpec
from jobs.spec.sweep import SWEEP_TAG, SweepSize

MAX_DEPENDENCIES = 20
"""Runs that one may wait for: AWS Batch's own limit."""

DEPENDENCY_FAILED = "Dependent Job failed"
"""Batch's own reason of a job that never started, since one that it depended on failed."""


@dataclass(frozen=True, kw_only=True)
class Dependency:
    """One run that a job waits for."""

    run_id: str
    job_id: str | None
    """Batch's id of its job; None: it is submitted together with the job that waits for it."""
    queue: str
    """The queue's name in the stage: cpu-spot, …"""
    arguments: tuple[str, ...]
    """Arguments of the job that waits; this run writes what they name."""

    def depends_on(self, job_id: str | None = None) -> dict[str, str]:
        """Return the dependency as SubmitJob takes it; `job_id` is that of a run which was submitted meanwhile."""
        return {"jobId": self.job_id or job_id or f"<job id of {self.run_id}>"}

    def note(self, stage: DeployedStage) -> str | None:
        """Return what may go wrong with it: a job that goes on On-Demand ends first, which Batch counts as failed."""
        if on_demand_successor(self.queue) not in stage.queues:
            return None
        return (
            f"waits for {self.run_id}, which runs on Spot: should that be moved to On-Demand, this run fails and has "
            "to be submitted again"
        )


CONTAINER_NAME = "main"
"""The one container of every job definition; an override names it."""

MAX_OVERRIDES_CHARACTERS = 8192
"""Amazon ECS's own limit. AWS Batch takes a job with longer overrides, which then can't start on its instance."""

_BATCH_VARIABLES_CHARACTERS = 1024
"""Kept for the variables that AWS Batch adds to a job's own, with the names of its queue and compute environment."""

JOB_TAGS = ("trainyard:stage", "trainyard:run", "trainyard:team", "trainyard:job", SWEEP_TAG, RESUMED_TAG)
"""Keys of all tags that a submission gives its job: people may give no others."""

NODE_RANGE = "0:"
"""The one node range of every multi-node job definition: all of them, however many a submission asks for."""


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
    """Return SubmitJob's arguments.

    `flags` follow the launcher's name on the command line. `resumed_job_id`: the job that the run went through last.
    `sweep`: how many points the job has to run, with how many workers.
    """
    several_nodes = placement.queue.several_nodes
    overrides = _container_overrides(run_location, accelerator=placement.accelerator, flags=flags)
    timeout_hours = spec.timeout_hours or spec.kind.timeout_hours
    children = placement.nnodes if spec.resources.is_gang else sweep.workers if sweep else 1
    rounds = sweep.rounds if sweep else 1
    return {
        "jobName": run_id,
        "jobQueue": stage.queue(placement.queue_name),
        "jobDefinition": stage.job_definition(spec.team, spec.job, several_nodes=several_nodes),
        # A queue with fair share refuses a job that names no share.
        "shareIdentifier": share_identifier(spec.team),
        **(_node_overrides(placement.nnodes, overrides) if several_nodes else {"ecsPropertiesOverride": overrides}),
        # AWS Batch takes no array of one child.
        **({"arrayProperties": {"size": children}} if children > 1 else {}),
        # Given here the strategy replaces the definition's whole, so the rules go along with the number.
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


def is_too_long(request: Mapping[str, Any]) -> bool:
    """Return whether command line and variables of a request are too long for its container to start."""
    overrides = {name: request[name] for name in ("ecsPropertiesOverride", "nodeOverrides") if name in request}
    length = len(json.dumps(overrides, separators=(",", ":"), ensure_ascii=False))
    return length > MAX_OVERRIDES_CHARACTERS - _BATCH_VARIABLES_CHARACTERS


def _container_overrides(run_location: S3Location, *, accelerator: str, flags: Sequence[str]) -> dict[str, Any]:
    container = {
        "name": CONTAINER_NAME,
        "command": ["python", "-m", "jobs.container.launch", *flags],
        "environment": [
            {"name": RUN_URI_VARIABLE, "value": str(run_location)},
            {"name": ACCELERATOR_VARIABLE, "value": accelerator},
        ],
    }
    return {"taskProperties": [{"containers": [container]}]}


def _node_overrides(nnodes: int, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the same command for all nodes.

    Their number can be overridden since the definition's one range is open; the range named here must be that one.
    """
    nodes = {"targetNodes": NODE_RANGE, "ecsPropertiesOverride": overrides}
    return {"nodeOverrides": {"numNodes": nnodes, "nodePropertyOverrides": [nodes]}}
