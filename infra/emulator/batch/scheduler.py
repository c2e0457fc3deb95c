"""When jobs run: dependencies, queues and capacity, attempts and what follows them.

Nothing here waits: each change (a submission, the end of an attempt, a queue that was enabled) is followed through in
the thread that brought it, under one lock.

Source: AWS Batch user guide, "Job scheduling", "Job dependencies", "Array jobs". A queue without a scheduling policy is
first in, first out: a job that cannot be placed holds back those behind it.
"""

import bisect
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from infra.emulator.batch.attempt import Attempt, Place
from infra.emulator.batch.compute import ComputeEnvironment, JobQueue
from infra.emulator.batch.job import BEFORE_STARTING, Job, Status
from infra.emulator.batch.job_definition import Outcome, should_retry

DEFAULT_WINDOW_SECONDS = 600.0
"""What shareDecaySeconds = 0 stands for."""
MINIMUM_USE_SECONDS = 60.0
"""What a job that was just started counts for at least, so that one look does not give all room to one share."""


@dataclass(kw_only=True)
class Usage:
    """vCPUs that one share held from `started` to `stopped` (None: still), in seconds of one clock."""

    share: str
    vcpus: float
    started: float
    stopped: float | None = None


def weight_factor(policy: Mapping[str, Any], share: str) -> float:
    """The weight of a share: its own entry's, its prefix's, or 1. A lower one means more of the capacity."""
    for entry in policy.get("shareDistribution") or ():
        name = entry["shareIdentifier"]
        if name == share or (name.endswith("*") and share.startswith(name[:-1])):
            return float(entry.get("weightFactor", 1.0))
    return 1.0


def weighted_usage(policy: Mapping[str, Any], usages: Iterable[Usage], share: str, now: float) -> float:
    """The share's vCPU seconds within the policy's window, recent ones counting more, times its weight."""
    window = float(policy.get("shareDecaySeconds") or DEFAULT_WINDOW_SECONDS)
    total = sum(usage.vcpus * _faded_seconds(usage, now, window) for usage in usages if usage.share == share)
    return total * weight_factor(policy, share)


def is_forgotten(policy: Mapping[str, Any], usage: Usage, now: float) -> bool:
    """Say whether a usage has left the window."""
    window = float(policy.get("shareDecaySeconds") or DEFAULT_WINDOW_SECONDS)
    return usage.stopped is not None and usage.stopped < now - window


def _faded_seconds(usage: Usage, now: float, window: float) -> float:
    """The integral of a weight that falls from 1 now to 0 at the window's far end."""
    end = now if usage.stopped is None else usage.stopped
    age_from = min(window, now - usage.started)
    age_to = min(window, now - end)
    faded = (age_from - age_to) - (age_from**2 - age_to**2) / (2 * window)
    return max(faded, MINIMUM_USE_SECONDS) if usage.stopped is None else faded


DEPENDENCY_FAILED = "Dependent Job failed"
CHILD_FAILED = "Array Child Job failed"
TOO_LARGE = (
    "MISCONFIGURATION:COMPUTE_ENVIRONMENT_MAX_RESOURCE - All compute environments have a maxVcpu setting that is "
    "smaller than the job requirements."
)
NO_CAPACITY = (
    "CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY - Service cannot fulfill the capacity requested for instance type"
)
MAX_TASKS = 32
"""Tasks that run on this machine at once, each with a process and three threads. What comes after waits, as for an
instance."""
_SHUTDOWN_SECONDS = 20


class Scheduler:
    """All jobs of one account and region."""

    def __init__(
        self,
        *,
        place: Callable[[], Place],
        queues: Callable[[], Iterable[JobQueue]],
        policy: Callable[[str], Mapping[str, Any]],
        on_blocked: Callable[[Job], None],
    ) -> None:
        """`policy` gives the fairsharePolicy of a scheduling policy's ARN; `on_blocked` hears of stuck queues."""
        self.lock = threading.RLock()
        self.jobs: dict[str, Job] = {}
        self._place = place
        self._queues = queues
        self._policy = policy
        self._dependents: dict[str, list[Job]] = {}
        self._runnable: dict[str, list[Job]] = {}
        """By the queue's ARN, in the order of submission."""
        self._attempts: dict[str, Attempt] = {}
        self._usages: dict[str, dict[str, Usage]] = {}
        """The latest use of queues with a scheduling policy, by job and attempt."""
        self._ended: deque[Job] = deque()
        """Jobs whose end is still to be followed up."""
        self._on_blocked = on_blocked
        self._closed = False

    # What the API asks for

    def submit(self, job: Job) -> None:
        """Take on a job, with its children or nodes; `outstanding` of each says what it waits for."""
        with self.lock:
            self.jobs.update({each.id: each for each in (job, *job.children, *job.nodes)})
            for each in job.children or [job]:
                self._evaluate(each)
            self.dispatch()

    def cancel(self, job: Job, reason: str) -> None:
        """End it if it has not been started; a job that waits for others ends when they are through."""
        with self.lock:
            self._cancel(job, reason)
            if job.children and not job.ended:
                job.is_cancelled = True
            self.dispatch()

    def terminate(self, job: Job, reason: str) -> None:
        """End it, whatever it is doing."""
        with self.lock:
            self._cancel(job, reason)
            for each in job.children or [job]:
                attempt = self._attempts.get(each.id)
                if attempt is not None:
                    each.is_terminated = True
                    attempt.stop(reason)
            if job.children and not job.ended:
                job.is_terminated = True
            self.dispatch()

    def front(self, queue: JobQueue) -> list[Job]:
        """Return what waits for capacity in a queue, in the order in which it would be picked."""
        with self.lock:
            waiting = list(self._runnable.get(queue.arn, []))
            return sorted(waiting, key=self._turn(queue)) if queue.scheduling_policy_arn and waiting else waiting

    def reclaim(self, job: Job) -> bool:
        """Take the instance away that it runs on; False where it runs on none."""
        with self.lock:
            attempt = self._attempt_of(job)
            return attempt is not None and attempt.reclaim(job)

    def entrance(self, job: Job) -> Mapping[str, Any] | None:
        """Return what its container is entered by; None where it does not run, or where nobody may enter it."""
        with self.lock:
            attempt = self._attempt_of(job)
            return attempt.entrance(job) if attempt is not None else None

    def _attempt_of(self, job: Job) -> Attempt | None:
        """Return the attempt that a job runs in, or the job of which it is a node."""
        owner = job.parent if job.node is not None and job.parent is not None else job
        return self._attempts.get(owner.id)

    def shutdown(self) -> None:
        """Kill everything that runs, and start nothing any more. Returns when it is gone."""
        with self.lock:
            self._closed = True
            attempts = list(self._attempts.values())
            for attempt in attempts:
                attempt.stop("The emulator was stopped", grace_seconds=0)
        deadline = time.monotonic() + _SHUTDOWN_SECONDS
        for attempt in attempts:
            attempt.join(max(0, deadline - time.monotonic()))

    # What follows from it; all under the lock

    def _cancel(self, job: Job, reason: str) -> None:
        if job.children and not job.ended:
            job.cancel_reason = job.cancel_reason or reason
        for each in job.children or [job]:
            if each.status in BEFORE_STARTING:
                each.is_cancelled = True
                each.cancel_reason = each.cancel_reason or reason
                if not each.outstanding:
                    self._fail(each, each.cancel_reason)

    def dispatch(self) -> None:
        """Start what can be started now: queues by their priority, and in each as its policy says."""
        with self.lock:
            self._follow_up()
            for queue in sorted(self._queues(), key=lambda queue: -queue.priority):
                while not self._closed and (job := self._next_job(queue)) is not None:
                    environment = self._find_room(job)
                    if environment is None:
                        self._note_blocked(job)
                        break
                    self._start(job, environment)
            if self._ended:  # something was cancelled, and others may have waited for it
                self.dispatch()

    def _note_blocked(self, job: Job) -> None:
        """Say why a job at the head of its queue will not start as things are, if it just has to wait for nobody."""
        reason = _blocking_reason(job)
        if reason != job.status_reason:
            job.status_reason = reason
            if reason is not None:
                self._on_blocked(job)

    def _evaluate(self, job: Job) -> None:
        """A new job: wait for others, or for capacity."""
        for job_id in sorted(job.outstanding):
            other = self.jobs[job_id]
            if other.status is Status.SUCCEEDED:
                job.outstanding.discard(job_id)
            elif other.status is Status.FAILED:
                self._fail(job, DEPENDENCY_FAILED)
                return
            else:
                self._dependents.setdefault(job_id, []).append(job)
        if not job.outstanding:
            self._make_runnable(job)
        elif job.status is Status.SUBMITTED:
            self._enter(job, Status.PENDING)

    def _make_runnable(self, job: Job) -> None:
        if job.cancel_reason is not None:
            self._fail(job, job.cancel_reason)
            return
        self._enter(job, Status.RUNNABLE)
        waiting = self._runnable.setdefault(job.submission.queue.arn, [])
        bisect.insort(waiting, job, key=lambda other: other.sequence)
        if job.array is not None and job.parent is not None and job.parent.status is Status.SUBMITTED:
            job.parent.enter(Status.PENDING)

    def _next_job(self, queue: JobQueue) -> Job | None:
        waiting = self._runnable.get(queue.arn)
        if not waiting:
            return None
        return waiting[0] if queue.scheduling_policy_arn is None else min(waiting, key=self._turn(queue))

    def _turn(self, queue: JobQueue) -> Callable[[Job], tuple[float, int, int]]:
        """Return the key by which the jobs of a queue with fair share are picked, the least first."""
        assert queue.scheduling_policy_arn is not None  # noqa: S101 - narrows the type
        policy = self._policy(queue.scheduling_policy_arn)
        now = time.monotonic()
        recent = self._usages.setdefault(queue.arn, {})
        for key in [key for key, usage in recent.items() if is_forgotten(policy, usage, now)]:
            del recent[key]
        usage_of = {
            share: weighted_usage(policy, recent.values(), share, now)
            for share in {job.submission.share_identifier or "" for job in self._runnable.get(queue.arn, [])}
        }
        return lambda job: (
            usage_of[job.submission.share_identifier or ""],
            -(job.submission.scheduling_priority or 0),
            job.sequence,
        )

    def _find_room(self, job: Job) -> ComputeEnvironment | None:
        running = sum(len(attempt.job.nodes) or 1 for attempt in self._attempts.values())
        if running and running + (len(job.nodes) or 1) > MAX_TASKS:
            return None
        for environment in job.submission.queue.environments:
            fits = environment.used_vcpus + job.submission.vcpus <= environment.max_vcpus
            # On Spot a multi-node job waits for ever, as it does on AWS.
            if environment.enabled and fits and (environment.takes_multinode or job.submission.nodes is None):
                return environment
        return None

    def _start(self, job: Job, environment: ComputeEnvironment) -> None:
        number = len(job.attempts) + 1
        self._runnable[job.submission.queue.arn].remove(job)
        environment.used_vcpus += job.submission.vcpus
        if job.submission.queue.scheduling_policy_arn is not None:
            self._usages.setdefault(job.submission.queue.arn, {})[f"{job.id} {number}"] = Usage(
                share=job.submission.share_identifier or "", vcpus=job.submission.vcpus, started=time.monotonic()
            )
        attempt = Attempt(
            job,
            number,
            environment,
            self._place(),
            on_running=self._note_running,
            on_node_ended=self._note_node_ended,
            on_ended=self._note_ended,
        )
        self._attempts[job.id] = attempt
        job.enter(Status.STARTING)
        if job.nodes:
            job.nodes[0].enter(Status.STARTING)
        attempt.start()

    def _note_running(self, unit: Job) -> None:
        with self.lock:
            unit.enter(Status.RUNNING)
            if unit.parent is not None and unit.is_main_node:
                unit.parent.enter(Status.RUNNING)
                for node in unit.parent.nodes:
                    if node is not unit:
                        node.enter(Status.STARTING)

    def _note_node_ended(self, node: Job, succeeded: bool) -> None:
        with self.lock:
            if node.current is None:
                return
            node.attempts.append(node.current)
            node.current = None
            # What becomes of the main node is what becomes of the job.
            if not node.is_main_node:
                reason = node.attempts[-1].status_reason
                node.enter(Status.SUCCEEDED if succeeded else Status.FAILED, reason)

    def _note_ended(self, attempt: Attempt) -> None:
        job = attempt.job
        with self.lock:
            del self._attempts[job.id]
            attempt.environment.used_vcpus -= job.submission.vcpus
            usage = self._usages.get(job.submission.queue.arn, {}).get(f"{job.id} {attempt.number}")
            if usage is not None:
                usage.stopped = time.monotonic()
            if job.current is not None:
                job.attempts.append(job.current)
                job.current = None
            if attempt.succeeded:
                self._end(job, Status.SUCCEEDED, job.attempts[-1].status_reason)
            elif self._may_retry(attempt):
                self._make_runnable(job)
            else:
                self._end(job, Status.FAILED, job.attempts[-1].status_reason)
            self.dispatch()

    def _may_retry(self, attempt: Attempt) -> bool:
        if self._closed or attempt.stop_reason is not None or attempt.failed_inside:
            return False
        record = attempt.job.attempts[-1]
        outcome = Outcome(exit_code=record.exit_code, reason=record.reason, status_reason=record.status_reason or "")
        return should_retry(attempt.job.submission.retry_strategy, attempt.number, outcome)

    def _enter(self, job: Job, status: Status, reason: str | None = None) -> None:
        """Change a job's state, and with it that of its nodes."""
        job.enter(status, reason)
        for node in job.nodes:
            if status is Status.RUNNABLE and node.status is not Status.SUBMITTED:
                node.restart()
            elif not node.ended:
                # A node that never started, since the main node was faster or nothing ran at all, did not succeed.
                never_started = status is Status.SUCCEEDED and node.status in (Status.RUNNABLE, Status.STARTING)
                node.enter(Status.FAILED if never_started else status, reason)
                node.current = None

    def _fail(self, job: Job, reason: str) -> None:
        waiting = self._runnable.get(job.submission.queue.arn, [])
        if job.status is Status.RUNNABLE and job in waiting:
            waiting.remove(job)
        self._end(job, Status.FAILED, reason)

    def _end(self, job: Job, status: Status, reason: str | None) -> None:
        self._enter(job, status, reason)
        self._ended.append(job)

    def _follow_up(self) -> None:
        """Do what the end of jobs means for their parents and dependents; in a loop, since chains may be long."""
        while self._ended:
            job = self._ended.popleft()
            if job.array is not None and job.parent is not None:
                self._follow_child(job.parent)
            for dependent in self._dependents.pop(job.id, []):
                if dependent.ended:
                    continue
                dependent.outstanding.discard(job.id)
                if job.status is Status.FAILED:
                    self._fail(dependent, dependent.cancel_reason or DEPENDENCY_FAILED)
                elif not dependent.outstanding:
                    self._make_runnable(dependent)

    def _follow_child(self, parent: Job) -> None:
        """End the parent of an array once all its children are through."""
        parent.unfinished_children -= 1
        if parent.unfinished_children:
            return
        if parent.status is Status.SUBMITTED:
            parent.enter(Status.PENDING)
        failed = [child for child in parent.children if child.status is Status.FAILED]
        if not failed:
            self._end(parent, Status.SUCCEEDED, None)
            return
        of_dependency = {child.status_reason for child in failed} == {DEPENDENCY_FAILED}
        self._end(parent, Status.FAILED, parent.cancel_reason or (DEPENDENCY_FAILED if of_dependency else CHILD_FAILED))


def _blocking_reason(job: Job) -> str | None:
    """Return why a job will not start as things are; None if it just has to wait for others.

    Source: AWS Batch user guide, "Jobs stuck in a RUNNABLE status". Of its reasons two can arise here: a job that is
    larger than any environment, and, as the stand-in for instances that EC2 does not have, that every environment which
    could hold the job is DISABLED. Of a multi-node job Batch gives none if all environments are Spot.
    """
    environments = list(job.submission.queue.environments)
    if job.submission.nodes is not None:
        environments = [environment for environment in environments if environment.takes_multinode]
    large_enough = [one for one in environments if job.submission.vcpus <= one.max_vcpus]
    if any(environment.enabled for environment in large_enough) or not environments:
        return None
    if not large_enough:
        return TOO_LARGE
    types = sorted({str(name) for one in large_enough for name in one.resources.get("instanceTypes", ())})
    return f"{NO_CAPACITY} [{', '.join(types)}]"
