"""The job at the head of a queue that cannot be placed: why, and when it is cancelled for it.

Source: AWS Batch user guide, "Jobs stuck in a RUNNABLE status" and "Automatic remediation with
jobStateTimeLimitActions". Of its reasons two can arise here: a job that is larger than any environment, and, as the
stand-in for instances that EC2 does not have, that every environment which could hold the job is DISABLED.
"""

import threading
import time
from collections.abc import Callable
from typing import Any

from infra.emulator.batch.compute import JobQueue
from infra.emulator.batch.job import Job
from infra.emulator.batch.quotas import time_limit_scale

TOO_LARGE = (
    "MISCONFIGURATION:COMPUTE_ENVIRONMENT_MAX_RESOURCE - All compute environments have a maxVcpu setting that is "
    "smaller than the job requirements."
)
NO_CAPACITY = (
    "CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY - Service cannot fulfill the capacity requested for instance type"
)
CANCELLED = "Canceled by JobStateTimeLimit action due to reason: "


def blocking_reason(job: Job) -> str | None:
    """Why a job that cannot be placed now never will be as things are; None where it just has to wait for others.

    Of a multi-node job Batch gives no reason where all environments are Spot.
    """
    environments = list(job.submission.queue.environments)
    if job.submission.is_multinode:
        environments = [environment for environment in environments if environment.takes_multinode]
        if not environments:
            return None
    large_enough = [one for one in environments if job.submission.vcpus <= one.max_vcpus]
    if not large_enough:
        return TOO_LARGE
    if any(environment.enabled for environment in large_enough):
        return None
    types = sorted({str(name) for one in large_enough for name in one.resources.get("instanceTypes", ())})
    return f"{NO_CAPACITY} [{', '.join(types)}]"


class HeadWatch:
    """Looks after the heads of all queues of a region; everything but the timers happens under the scheduler's lock."""

    def __init__(self, *, wake: Callable[[], None], on_blocked: Callable[[Job], None]) -> None:
        """`wake` is called, from a thread of its own, when a head's time is up; `on_blocked` when a head gets stuck."""
        self._wake = wake
        self._on_blocked = on_blocked
        self._timers: dict[str, threading.Timer] = {}

    def verdict(self, queue: JobQueue, job: Job) -> str | None:
        """Note that `job`, at the head of `queue`, cannot be placed now; why it is to be cancelled, if it is."""
        reason = blocking_reason(job)
        if reason is None or reason != job.status_reason or job.blocked_since is None:
            newly = reason is not None
            job.status_reason = reason
            job.blocked_since = time.monotonic() if newly else None
            if newly:
                self._on_blocked(job)
        if reason is None or job.blocked_since is None:
            return None
        action = _action_for(queue, reason)
        if action is None:
            return None
        left = job.blocked_since + action["maxTimeSeconds"] * time_limit_scale() - time.monotonic()
        if left <= 0:
            return f"{CANCELLED}{action['reason']}"
        self._set_timer(queue, left)
        return None

    def close(self) -> None:
        for timer in self._timers.values():
            timer.cancel()

    def _set_timer(self, queue: JobQueue, seconds: float) -> None:
        if queue.arn in self._timers:
            self._timers[queue.arn].cancel()
        timer = threading.Timer(seconds, self._wake)
        timer.daemon = True
        self._timers[queue.arn] = timer
        timer.start()


def _action_for(queue: JobQueue, reason: str) -> dict[str, Any] | None:
    code = reason.split(" - ", maxsplit=1)[0]
    actions = queue.properties.get("jobStateTimeLimitActions") or ()
    return next((action for action in actions if action["reason"] == code), None)
