"""What Batch tells EventBridge: each change of a job's state, and jobs that block their queue.

Source: AWS Batch user guide, "Job state change events" and "Job queue blocked events": the detail is the job as
DescribeJobs shows it at that moment.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from infra.emulator import events
from infra.emulator.batch.detail import describe_job
from infra.emulator.batch.job import Job


@dataclass(frozen=True, kw_only=True)
class JobEvents:
    """The events of one account and region."""

    account_id: str
    region: str
    tags_of: Callable[[str], Mapping[str, str]]
    """Gives the tags of a job, by its ARN."""

    def state_changed(self, job: Job) -> None:
        """Tell of a job or a child of an array; the nodes of a multi-node job are no jobs of their own."""
        if job.node is None:
            self._emit("Batch Job State Change", job, job.arn)

    def queue_blocked(self, job: Job) -> None:
        self._emit("Batch Job Queue Blocked", job, job.arn, job.submission.queue.arn)

    def _emit(self, detail_type: str, job: Job, *resources: str) -> None:
        if not events.has_rules(self.account_id, self.region):
            return
        events.emit(
            account_id=self.account_id,
            region=self.region,
            source="aws.batch",
            detail_type=detail_type,
            detail=describe_job(job, self.tags_of((job.parent or job).arn)),
            resources=resources,
        )
