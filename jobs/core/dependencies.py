"""Dependencies of a job: runs of its team that have not ended and that write what it will read."""

from dataclasses import dataclass

from jobs.core.queues import on_demand_successor
from jobs.core.stage import DeployedStage

MAX_DEPENDENCIES = 20
"""Runs that one may wait for: AWS Batch's own limit."""

DEPENDENCY_FAILED = "Dependent Job failed"
"""Batch's own reason of a job that never started, since one that it depended on failed."""


@dataclass(frozen=True, kw_only=True)
class Awaited:
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
