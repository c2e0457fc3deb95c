"""The stage's queues, as the compute stack publishes them: what each is called, and where its jobs may go on.

They are read from Systems Manager and not handed over in the environment, whose variables may have 4,096 characters
together (Lambda's quota): a stage may have so many teams that their queues' names alone take more.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_SPOT, _ON_DEMAND = "spot", "on-demand"
"""Names of the two queues between which jobs move (jobs/core/queues.py)."""


@dataclass(frozen=True, kw_only=True)
class Queue:
    """One job queue."""

    label: str
    """What the dashboard calls it: `spot@research (dl1-24xlarge-1-20-0)`, of a team and of a pool that retires."""
    name: str
    """What all of its kind are called, whosever they are: a row of jobs/core/queues.py."""
    on_demand: str | None = None
    """ARN of the On-Demand queue of its team and pool, where its jobs may go on."""


def read_queues(path: str) -> dict[str, Queue]:
    """Return the queues of the stage whose parameters lie below `path`, by ARN."""
    import boto3  # noqa: PLC0415 - the rest is used and tested without it

    pages = boto3.client("ssm").get_paginator("get_parameters_by_path")
    found = {
        item["Name"].removeprefix(path): item["Value"]
        for kind in ("queue", "team-queue")
        for page in pages.paginate(Path=f"{path}{kind}", Recursive=True)
        for item in page["Parameters"]
    }
    return queues_of(found)


def queues_of(parameters: Mapping[str, Any]) -> dict[str, Queue]:
    """Return the queues by ARN; `parameters`: ARNs by the names that jobs/core/stage.py gives them.

    `queue/` or `team-queue/<team>/`, the queue's name and, of a pool that retires, a slash and the pool's id.
    """
    arns = {}
    for parameter, arn in parameters.items():
        kind, *rest = parameter.split("/")
        team = rest.pop(0) if kind == "team-queue" else ""
        name, pool = [*rest, ""][:2]
        arns[name, team, pool] = arn
    return {
        arn: Queue(
            label=f"{name}{f'@{team}' if team else ''}{f' ({pool})' if pool else ''}",
            name=name,
            on_demand=arns.get((_ON_DEMAND, team, pool)) if name == _SPOT else None,
        )
        for (name, team, pool), arn in arns.items()
    }
