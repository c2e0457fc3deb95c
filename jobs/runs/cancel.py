"""Stop a run."""

from jobs.aws.connection import Aws
from jobs.core.errors import TrainyardError
from jobs.core.retries import CANCELLED_REASON
from jobs.core.stage import DeployedStage
from jobs.runs.batch import place_of, terminate
from jobs.runs.job import Job
from jobs.runs.logs import may_have_successor


def cancel_job(aws: Aws, stage: DeployedStage, job: Job, *, reason: str) -> bool:
    """Stop a run's newest job and record who did it, and why. Return False if it had already ended.

    Raises TrainyardError while the run may be about to continue as another job.
    """
    if may_have_successor(stage, job):
        raise TrainyardError(
            f"{job.run_id} is between two jobs: its Spot job has ended, and it may continue elsewhere",
            next_step=f"trainyard cancel {job.run_id}, again in a minute",
        )
    if job.ended:
        return False
    there, _ = place_of(aws, stage, job)
    terminate(there, job.id, reason=f"{CANCELLED_REASON} {aws.caller}{f': {reason}' if reason else ''}")
    return True
