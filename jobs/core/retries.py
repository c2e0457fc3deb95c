"""How a run goes on after an attempt: the rules by which Batch starts a job again, and how a run moves to another job.

A job that Spot keeps taking away, or has no capacity for, goes on On-Demand: the function that moves it (see
infra/observability/functions/move_to_on_demand.py) ends the first job with a reason, and submits the second under the
same name with a tag. `trainyard resume` submits a run that has ended again, with a tag too. The command line knows both
by them.
"""

from collections.abc import Mapping

from jobs.core.errors import INTERRUPTED_EXIT_CODE

RETRY_RULES: tuple[Mapping[str, str], ...] = (
    # Batch reads them in order and, unlike what one would expect, starts again what no rule matches.
    {"onStatusReason": "Host EC2*", "action": "RETRY"},  # the Spot reclaim, in Batch's own words
    {"onExitCode": str(INTERRUPTED_EXIT_CODE), "action": "RETRY"},
    # What the guide starts again as well: a container that never came to run, though capacity was won. Its reason is a
    # CannotPullContainerError or DockerTimeoutError, say: a registry or an engine that was slow for a moment. (Rules by
    # those two reasons would make six in all; Batch takes five.)
    {"onStatusReason": "Task failed to start*", "action": "RETRY"},
    {"onReason": "*", "action": "EXIT"},
    {"onExitCode": "*", "action": "EXIT"},
)
"""evaluateOnExit of every job: a reclaim, the reserved code and a container that never came to run start it again, the
job's own fault does not."""

RECLAIM_REASON = "Host EC2"
"""Batch's own reason of an attempt whose instance was taken away begins so."""

EXITED_REASON = "Essential container in task exited"
"""Batch's reason of an attempt that ended by itself begins so. Where its container uses the two minutes before a
reclaim to end with `INTERRUPTED_EXIT_CODE`, this is all that Batch says: the instance lives on when ECS reports the
end."""

MOVED_REASON = "moved to On-Demand"
"""The reason of a job that was ended to go on elsewhere begins so."""

MOVED_TAG = "trainyard:moved"
"""Tag of the job that goes on; its value completes "moved to On-Demand …"."""

RESUMED_TAG = "trainyard:resumed"
"""Tag of the job with which `trainyard resume` goes on with a run; its value is the id of the job before. One that was
moved afterwards has it too."""

CLAIMS = "moves/"
"""Folder among the run's files in which `JOB.json` claims going on after a job, so that a run is never resumed and
moved at once."""

DUPLICATE_REASON = "duplicate of"
"""The reason of a job that was never the run, but a lost submission that arrived late, begins so."""


CANCELLED_REASON = "cancelled by"
"""The reason of a job that `trainyard cancel` ended begins so; who did it follows, and what they said of it."""


def is_reclaim(reason: str, exit_code: int | None) -> bool:
    """Return whether an attempt in a Spot queue ended by a reclaim, abruptly or in its own good time.

    A timeout and an owner's cancellation make a container exit with the same code, but give a reason of their own.
    """
    return reason.startswith(RECLAIM_REASON) or (
        exit_code == INTERRUPTED_EXIT_CODE and reason.startswith(EXITED_REASON)
    )
