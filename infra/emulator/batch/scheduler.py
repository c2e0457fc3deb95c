"""Schedule jobs: dependencies, queues, capacity, fair share and retries.

The scheduler has no thread. The thread that causes a change (a submission, the end of an attempt, an enabled queue)
also handles its consequences, under one lock.

Source: AWS Batch user guide, "Job scheduling", "Job dependencies", "Array jobs". A queue without a scheduling policy is
first in, first out: a job that cannot be placed holds back the jobs behind it.
"""

import bisect
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from infra.emulator.batch.attempt import Attempt, Services
from infra.emulator.batch.compute import ComputeEnvironment, JobQueue
from infra.emulator.batch.job import BEFORE_STARTING, Job, Status
from infra.emulator.batch.job_definition import Outcome, should_retry

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
"""Maximum number of concurrent tasks on this machine; each has a process and three threads. Others wait, as they
would for an instance."""
_SHUTDOWN_SECONDS = 20
MINIMUM_USE_SECONDS = 60.0
"""Minimum usage of a running job, so that one share does not get all capacity in a single dispatch."""


class Scheduler:
    """Schedules all jobs of one account and region."""

    def __init__(
        self,
        *,
        services: Callable[[], Services],
        queues: Callable[[], Iterable[JobQueue]],
        policy: Callable[[str], Mapping[str, Any]],
        on_blocked: Callable[[Job], None],
    ) -> None:
        """`policy` returns the fairsharePolicy for an ARN; `on_blocked` is called with the job that blocks a queue."""
        self.lock = threading.RLock()
        self.jobs: dict[str, Job] = {}
        self._services = services
        self._queues = queues
        self._policy = policy
        self._dependents: dict[str, list[Job]] = {}
        self._runnable: dict[str, list[Job]] = {}
        """By ARN of the queue, in order of submission."""
        self._attempts: dict[str, Attempt] = {}
        self._used: defaultdict[tuple[str, str], float] = defaultdict(float)
        """vCPU seconds of ended attempts, by ARN of the queue and share."""
        self._ended: deque[Job] = deque()
        """Ended jobs whose parents and dependents are not updated yet."""
        self._on_blocked = on_blocked
        self._closed = False

    # Called by the API

    def submit(self, job: Job) -> None:
        """Add a job with its children or nodes. Each waits for the jobs in its `outstanding`."""
        with self.lock:
            self.jobs.update({each.id: each for each in (job, *job.children, *job.nodes)})
            for each in job.children or [job]:
                self._evaluate(each)
            self.dispatch()

    def cancel(self, job: Job, reason: str) -> None:
        """Cancel a job that has not started. A job with dependencies ends only when they have ended."""
        with self.lock:
            self._cancel(job, reason)
            if job.children and not job.ended:
                job.is_cancelled = True
            self.dispatch()

    def terminate(self, job: Job, reason: str) -> None:
        """Cancel or stop a job, whatever its state."""
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
        """Return the jobs that wait for capacity in a queue, in the order in which they would start."""
        with self.lock:
            waiting = list(self._runnable.get(queue.arn, []))
            if queue.scheduling_policy_arn:
                waiting.sort(key=self._fair_share_key(queue))
            return waiting

    def reclaim(self, job: Job) -> bool:
        """Reclaim the instance of a job. Returns False if it is not running."""
        with self.lock:
            attempt = self._attempt_of(job)
            return attempt is not None and attempt.reclaim(job)

    def exec_target(self, job: Job) -> Mapping[str, Any] | None:
        """Return how to run a command in a job's container, or None if it is not running or does not allow that."""
        with self.lock:
            attempt = self._attempt_of(job)
            return attempt.exec_target(job) if attempt is not None else None

    def metadata(self, instance_id: str) -> Mapping[str, str] | None:
        """Return what the metadata service of an instance answers, by path; None if no job runs on it."""
        with self.lock:
            found = (attempt.metadata(instance_id) for attempt in self._attempts.values())
            return next((answers for answers in found if answers is not None), None)

    def _attempt_of(self, job: Job) -> Attempt | None:
        """Return the running attempt of a job. A node belongs to the attempt of its multi-node job."""
        owner = job.parent if job.node is not None and job.parent is not None else job
        return self._attempts.get(owner.id)

    def shutdown(self) -> None:
        """Kill all running jobs and start no more. Returns when they are gone."""
        with self.lock:
            self._closed = True
            attempts = list(self._attempts.values())
            for attempt in attempts:
                attempt.stop("The emulator was stopped", grace_seconds=0)
        deadline = time.monotonic() + _SHUTDOWN_SECONDS
        for attempt in attempts:
            attempt.join(max(0, deadline - time.monotonic()))

    # Consequences of changes, under the lock

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
        """Start all jobs that can start now: queues by priority, and in each queue by its policy."""
        with self.lock:
            self._follow_up()
            for queue in sorted(self._queues(), key=lambda queue: -queue.priority):
                while not self._closed and (job := self._next_job(queue)) is not None:
                    environment = self._find_room(job)
                    if environment is None:
                        self._note_blocked(job)
                        break
                    self._start(job, environment)
            if self._ended:  # a job was cancelled, and others may depend on it
                self.dispatch()

    def _note_blocked(self, job: Job) -> None:
        """Set the reason why the job at the head of a queue will not start, unless it only waits for capacity."""
        reason = _blocking_reason(job)
        if reason != job.status_reason:
            job.status_reason = reason
            if reason is not None:
                self._on_blocked(job)

    def _evaluate(self, job: Job) -> None:
        """Make a new job wait for its dependencies or for capacity, or fail it if a dependency failed."""
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
        return waiting[0] if queue.scheduling_policy_arn is None else min(waiting, key=self._fair_share_key(queue))

    def _fair_share_key(self, queue: JobQueue) -> Callable[[Job], tuple[float, int, int]]:
        """Return the sort key for jobs of a queue with fair share; the smallest starts first."""
        assert queue.scheduling_policy_arn is not None  # noqa: S101 - narrows the type
        policy = self._policy(queue.scheduling_policy_arn)
        used = self._used.copy()
        for attempt in self._attempts.values():
            used[_share(attempt.job)] += attempt.job.submission.vcpus * max(attempt.seconds, MINIMUM_USE_SECONDS)
        return lambda job: (
            used[_share(job)] * weight_factor(policy, job.submission.share_identifier or ""),
            -(job.submission.scheduling_priority or 0),
            job.sequence,
        )

    def _find_room(self, job: Job) -> ComputeEnvironment | None:
        running = sum(len(attempt.job.nodes) or 1 for attempt in self._attempts.values())
        if running and running + (len(job.nodes) or 1) > MAX_TASKS:
            return None
        for environment in job.submission.queue.environments:
            fits = environment.used_vcpus + job.submission.vcpus <= environment.max_vcpus
            # On Spot, a multi-node job waits forever, as on AWS.
            if environment.enabled and fits and (environment.accepts_multinode or job.submission.nodes is None):
                return environment
        return None

    def _start(self, job: Job, environment: ComputeEnvironment) -> None:
        number = len(job.attempts) + 1
        self._runnable[job.submission.queue.arn].remove(job)
        environment.used_vcpus += job.submission.vcpus
        attempt = Attempt(
            job,
            number,
            environment,
            self._services(),
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
            # The main node takes the state of the job.
            if not node.is_main_node:
                reason = node.attempts[-1].status_reason
                node.enter(Status.SUCCEEDED if succeeded else Status.FAILED, reason)

    def _note_ended(self, attempt: Attempt) -> None:
        job = attempt.job
        with self.lock:
            del self._attempts[job.id]
            attempt.environment.release(job.submission.vcpus)
            self._used[_share(job)] += job.submission.vcpus * attempt.seconds
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
        """Change the state of a job and of its nodes."""
        job.enter(status, reason)
        for node in job.nodes:
            if status is Status.RUNNABLE and node.status is not Status.SUBMITTED:
                node.restart()
            elif not node.ended:
                # A node that never started did not succeed: the main node was faster, or nothing ran at all.
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
        """Update parents and dependents of ended jobs. Not recursive, because chains of dependencies may be long."""
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
        """End the parent of an array when all its children have ended."""
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
    """Return why a job will not start, or None if it only waits for capacity.

    Source: AWS Batch user guide, "Jobs stuck in a RUNNABLE status". Two of its reasons can occur here: the job is
    larger than any environment; or all environments large enough are DISABLED, which counts as a lack of instances.
    Batch gives no reason for a multi-node job if all environments are Spot.
    """
    environments = list(job.submission.queue.environments)
    if job.submission.nodes is not None:
        environments = [environment for environment in environments if environment.accepts_multinode]
    large_enough = [environment for environment in environments if job.submission.vcpus <= environment.max_vcpus]
    if any(environment.enabled for environment in large_enough) or not environments:
        return None
    if not large_enough:
        return TOO_LARGE
    types = {str(name) for environment in large_enough for name in environment.resources.get("instanceTypes", ())}
    return f"{NO_CAPACITY} [{', '.join(sorted(types))}]"


# Fair share. Source: AWS Batch user guide, "Use share identifiers to identify workloads": the scheduler weighs each
# share's usage as T * weightFactor, T being vCPUs over time, and picks from the share with the least. Here usage never
# decays: shareDecaySeconds has no effect.


def _share(job: Job) -> tuple[str, str]:
    return job.submission.queue.arn, job.submission.share_identifier or ""


def weight_factor(policy: Mapping[str, Any], share: str) -> float:
    """Return the weight of a share: from its entry or its prefix, else 1. A lower weight gets more capacity."""
    for entry in policy.get("shareDistribution") or ():
        name = entry["shareIdentifier"]
        if name == share or (name.endswith("*") and share.startswith(name[:-1])):
            return float(entry.get("weightFactor", 1.0))
    return 1.0
