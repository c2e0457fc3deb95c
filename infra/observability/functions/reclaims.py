"""How functions know, from what Batch shows of an attempt, that Spot took its instance away."""

import os
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class ReclaimRules:
    """The words and the exit code of a reclaim, as the stack hands them over from `jobs.core.retries`."""

    reclaim_reason: str
    """Begins the reason of an attempt whose instance was gone before its container."""
    exited_reason: str
    """Begins the reason of an attempt whose container ended before its instance did."""
    interrupted_exit_code: int
    """What a container that had the time to end before its instance did exits with."""
    no_capacity_reason: str
    """What Batch cancels a job with that waited too long for Spot."""
    reclaims_before_on_demand: int
    on_demand_nodes: int
    """Instances that an On-Demand queue may have."""


def of_environment() -> dict[str, Any]:
    """Return the fields of `ReclaimRules`, as the stack hands them over."""
    return {
        "reclaim_reason": os.environ["RECLAIM_REASON"],
        "exited_reason": os.environ["EXITED_REASON"],
        "interrupted_exit_code": int(os.environ["INTERRUPTED_EXIT_CODE"]),
        "no_capacity_reason": os.environ["NO_CAPACITY_REASON"],
        "reclaims_before_on_demand": int(os.environ["RECLAIMS_BEFORE_ON_DEMAND"]),
        "on_demand_nodes": int(os.environ["ON_DEMAND_NODES"]),
    }


def is_reclaim(attempt: dict[str, Any], rules: ReclaimRules) -> bool:
    """Return whether a finished attempt in a Spot queue, in the shape that Batch shows, ended by a reclaim.

    Either the instance was gone before the container, or the container used the notice to exit. What a Spot queue runs
    On-Demand while Spot has no capacity is not told apart: Batch's attempts do not say.
    """
    reason: str = attempt.get("statusReason", "")
    exit_codes = [container.get("exitCode") for container in containers(attempt)]
    return reason.startswith(rules.reclaim_reason) or (
        reason.startswith(rules.exited_reason) and rules.interrupted_exit_code in exit_codes
    )


def containers(attempt: dict[str, Any]) -> list[dict[str, Any]]:
    """Return an attempt's containers, wherever the job's definition makes Batch show them; a job of ours has one."""
    tasks = [container for task in attempt.get("taskProperties", []) for container in task.get("containers", [])]
    return tasks or [attempt.get("container", {})]
