"""How a run continues after an attempt: Batch's retry rules, and how a run moves to another job.

A job that Spot keeps reclaiming, or has no capacity for, continues On-Demand or in another region: a Lambda function
(infra/observability/functions/move_to_on_demand.py) ends the first job with a reason and submits a second one under the
same name with a tag. `trainyard resume` submits another job for an ended run, also with a tag. The command line
recognizes both by these reasons and tags.
"""

from collections.abc import Mapping

from jobs.core.errors import INTERRUPTED_EXIT_CODE

RETRY_RULES: tuple[Mapping[str, str], ...] = (
    # Batch applies the first rule that matches. It also retries a job that no rule matches.
    {"onStatusReason": "Host EC2*", "action": "RETRY"},  # Batch's reason for a Spot reclaim
    {"onExitCode": str(INTERRUPTED_EXIT_CODE), "action": "RETRY"},
    # Batch's guide also retries a container that never started although an instance was available: for example with
    # CannotPullContainerError or DockerTimeoutError, because a registry or an engine was briefly slow. (Separate
    # rules for those two reasons would make six in total; Batch allows five.)
    {"onStatusReason": "Task failed to start*", "action": "RETRY"},
    # Every ended task has a status reason; its container may have no reason. If a secret has no value, the status
    # reason on EC2 is "Fetching secret data from AWS Secrets Manager in region …", and a retry would not help (Amazon
    # ECS developer guide, "Troubleshooting Amazon ECS ResourceNotFoundException errors").
    {"onStatusReason": "*", "action": "EXIT"},
    {"onExitCode": "*", "action": "EXIT"},
)
"""evaluateOnExit of every job: a reclaim, the reserved exit code and a container that never started are retried; the
job's own errors are not."""

RECLAIM_REASON = "Host EC2"
"""Start of Batch's reason for an attempt whose instance was reclaimed."""

EXITED_REASON = "Essential container in task exited"
"""Start of Batch's reason for an attempt whose container exited. Batch reports the same reason if the container uses
the two minutes before a reclaim to exit with `INTERRUPTED_EXIT_CODE`, because the instance is still running then."""

MOVED_REASON = "moved to On-Demand"
"""Start of the reason of a job that was ended because it continues as another job."""

MOVED_TAG = "trainyard:moved"
"""Tag of the job that continues the run; its value completes "moved to On-Demand …"."""

HOME_TAG = "trainyard:home"
"""Tag of a job that has moved to the fallback stage: `<home stage>/<home run bucket>`."""

RESUMED_TAG = "trainyard:resumed"
"""Tag of a job that `trainyard resume` submitted; its value is the id of the previous job. A job that is moved later
keeps the tag."""

CLAIMS = "moves/"
"""Folder of the run in which `JOB.json` claims the continuation of a job, so that a run is never resumed and moved at
the same time."""

DUPLICATE_REASON = "duplicate of"
"""Start of the reason of a duplicate job: a submission that seemed lost but arrived late."""

CANCELLED_REASON = "cancelled by"
"""Start of the reason of a job that `trainyard cancel` ended; the user and their reason follow."""


def is_reclaim(reason: str, exit_code: int | None) -> bool:
    """Return whether a reclaim ended an attempt in a Spot queue, by killing it or by an orderly shutdown.

    A container exits with the same code after a timeout or a cancellation, but then the reason differs.
    """
    return reason.startswith(RECLAIM_REASON) or (
        exit_code == INTERRUPTED_EXIT_CODE and reason.startswith(EXITED_REASON)
    )
