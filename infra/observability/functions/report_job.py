"""Says what became of a job, in words to the stage's topic and in numbers to its metrics.

EventBridge calls it with every change of state of a job of the stage. Batch publishes no metrics, so each call counts
the jobs of the queue in question and logs them in CloudWatch's embedded metric format: while nothing runs there is no
event, nothing is counted and nothing is paid for. Between two events the numbers stay what they were; the dashboard
repeats the last one.

Nodes that Batch starts one by one (the children of an array job) fail and are reclaimed as one: a failure is told of
when their parent has failed, a reclaim when the first child waits again, since all leave when one is taken away.

The children of a sweep run for themselves: a reclaim is told of each, that points have failed once, of the parent.

A job that its owner cancelled, that goes on elsewhere, or that was a duplicate has not failed.
"""

import json
import os
import time
from dataclasses import dataclass
from typing import Any

from infra.observability.functions.batch_jobs import (
    SWEEP_TAG,
    Queue,
    ReclaimRules,
    children,
    containers,
    describe,
    is_reclaim,
    of_environment,
    read_queues,
    size,
)


@dataclass(frozen=True, kw_only=True)
class Rules(ReclaimRules):
    """The stage's values and the contract's words, which the stack hands over in the environment."""

    stage: str
    topic: str
    namespace: str
    queues: dict[str, Queue]
    """By ARN."""
    spot_queues: tuple[str, ...]
    """Names of those on Spot."""
    no_failures: tuple[str, ...]
    """How reasons begin that are no failure: of jobs that go on elsewhere, and of duplicates."""

    @classmethod
    def from_environment(cls) -> "Rules":
        return cls(
            stage=os.environ["STAGE"],
            topic=os.environ["TOPIC_ARN"],
            namespace=os.environ["METRIC_NAMESPACE"],
            queues=read_queues(os.environ["PARAMETER_PATH"]),
            spot_queues=tuple(json.loads(os.environ["SPOT_QUEUES"])),
            no_failures=tuple(json.loads(os.environ["NO_FAILURES"])),
            **of_environment(),
        )


@dataclass(frozen=True, kw_only=True)
class Report:
    """What there is to say of one event."""

    failed: bool = False
    reclaimed: bool = False
    text: str = ""
    """Empty: nobody needs to know."""


def report(job: dict[str, Any], rules: Rules) -> Report:
    """Return what to say of a job, as DescribeJobs shows it, with status, reason and attempts as of the event."""
    child = job.get("arrayProperties", {}).get("index")
    is_sweep = SWEEP_TAG in job.get("tags", {})
    if (child and not is_sweep) or (child is not None and job["status"] == "FAILED"):
        return Report()
    attempts = job.get("attempts", [])
    lost = sum(_is_reclaim(attempt, job["jobQueue"], rules) for attempt in attempts)
    lost_last = bool(attempts) and _is_reclaim(attempts[-1], job["jobQueue"], rules) and _ended_by_batch(job, rules)
    reclaimed = lost_last and job["status"] in ("RUNNABLE", "FAILED")
    run, team = job["jobName"], job.get("tags", {}).get("trainyard:team", "unknown")
    of = f"{run} of team {team} (stage {rules.stage})"
    if job["status"] == "FAILED" and _is_failure(job, lost, rules, reclaimed=reclaimed):
        container = containers(attempts[-1] if attempts else {})[0]
        code = f" (exit code {container['exitCode']})" if "exitCode" in container else ""
        why = "; ".join(filter(None, (job.get("statusReason", "no reason given"), container.get("reason"))))
        if is_sweep:
            return Report(
                failed=True,
                text=f"{of} is a sweep, not all of whose points have succeeded: {why}{code}. "
                f"Look: trainyard sweep {run} --stage {rules.stage}",
            )
        return Report(
            failed=True,
            reclaimed=reclaimed,
            text=f"{of} failed in attempt {max(1, len(attempts))}: {why}{code}. "
            f"Look: trainyard logs {run} --stage {rules.stage}",
        )
    its_instance = "one of its instances" if is_sweep else "its instance"
    if job["status"] == "RUNNABLE" and reclaimed:
        return Report(
            reclaimed=True,
            text=f"{of} lost {its_instance} to a Spot reclaim, for the {_ordinal(lost)} time; it waits for another "
            f"one and starts again with its newest checkpoint. Look: trainyard status {run} --stage {rules.stage}",
        )
    return Report(reclaimed=reclaimed)


def with_children(parent: dict[str, Any], children: list[dict[str, Any]], rules: Rules) -> dict[str, Any]:
    """Return the parent of an array, ended as the child that decided it: first of all one that failed by itself."""

    def failed_by_itself(child: dict[str, Any]) -> bool:
        attempts = child.get("attempts", [])
        lost = bool(attempts) and _is_reclaim(attempts[-1], parent["jobQueue"], rules)
        return bool(child["status"] == "FAILED" and not lost)

    decisive = max(children, key=lambda child: (failed_by_itself(child), len(child.get("attempts", []))))
    stopped = parent.get("isTerminated") or parent.get("isCancelled")
    reason = parent.get("statusReason", "") if stopped else decisive.get("statusReason", "")
    return {**parent, "attempts": decisive.get("attempts", []), "statusReason": reason}


def _is_reclaim(attempt: dict[str, Any], queue: str, rules: Rules) -> bool:
    """Return whether a finished attempt ended by a reclaim; elsewhere than in a Spot queue none does."""
    return queue in rules.queues and rules.queues[queue].name in rules.spot_queues and is_reclaim(attempt, rules)


def _ended_by_batch(job: dict[str, Any], rules: Rules) -> bool:
    """Return False where a job ended for another reason than its last attempt: its owner's, or that of a timeout."""
    reason: str = job.get("statusReason", "")
    return job["status"] != "FAILED" or reason.startswith((rules.reclaim_reason, rules.exited_reason))


def _is_failure(job: dict[str, Any], reclaims: int, rules: Rules, *, reclaimed: bool) -> bool:
    reason = job.get("statusReason", "")
    fits = size(job) <= rules.on_demand_nodes and SWEEP_TAG not in job.get("tags", {})
    queue = rules.queues.get(job["jobQueue"])
    may_go_on = queue is not None and queue.on_demand is not None and fits
    if reason.startswith(rules.no_capacity_reason):
        return not may_go_on
    if reason.startswith("Canceled by JobStateTimeLimit"):  # by the queue, not by its owner
        return True
    if job.get("isTerminated") or job.get("isCancelled") or reason.startswith(rules.no_failures):
        return False
    return not (may_go_on and reclaimed and reclaims >= rules.reclaims_before_on_demand)


def _ordinal(number: int) -> str:
    return {1: "first", 2: "second", 3: "third"}.get(number, f"{number}th")


def metrics(queue: str, summaries: list[dict[str, Any]], said: Report, namespace: str) -> dict[str, Any]:
    """Return a line of CloudWatch's embedded metric format, from the jobs of the queue so called that wait or run."""
    values = {
        "QueueDepth": sum(summary["status"] not in ("STARTING", "RUNNING") for summary in summaries),
        "Reclaims": int(said.reclaimed),
        "FailedJobs": int(said.failed),
    }
    directives = [
        {"Namespace": namespace, "Dimensions": [["Queue"]], "Metrics": [{"Name": name} for name in values]},
        # Of all queues together: what the alarm counts.
        {"Namespace": namespace, "Dimensions": [[]], "Metrics": [{"Name": "FailedJobs"}]},
    ]
    return {
        "_aws": {"Timestamp": int(time.time() * 1000), "CloudWatchMetrics": directives},
        "Queue": queue,
        **values,
    }


class Reporter:
    """The calls to Batch and SNS."""

    def __init__(self) -> None:
        import boto3  # noqa: PLC0415 - the judgements above are used and tested without it

        self._batch: Any = boto3.client("batch")
        self._sns: Any = boto3.client("sns")

    def describe(self, job_id: str) -> dict[str, Any]:
        """Return a job as Batch describes it; an empty dict where Batch has forgotten it."""
        return next(iter(describe(self._batch, [job_id])), {})

    def children(self, job: dict[str, Any]) -> list[dict[str, Any]]:
        return children(self._batch, job)

    def waiting_and_running(self, queue: str) -> list[dict[str, Any]]:
        """Return the queue's jobs that wait or run; of an array its children, each of which has a node."""
        found = []
        for summary in self._alive(jobQueue=queue):
            # Batch leaves children out, and shows their parent as PENDING while they run.
            is_parent = summary["status"] == "PENDING" and size(summary)
            found += self._alive(arrayJobId=summary["jobId"]) if is_parent else [summary]
        return found

    def _alive(self, **which: str) -> list[dict[str, Any]]:
        pages = self._batch.get_paginator("list_jobs")
        states = ("SUBMITTED", "PENDING", "RUNNABLE", "STARTING", "RUNNING")
        return [
            {**summary, "status": state}
            for state in states
            for page in pages.paginate(**which, jobStatus=state)
            for summary in page["jobSummaryList"]
        ]

    def publish(self, topic: str, text: str) -> None:
        self._sns.publish(TopicArn=topic, Message=text)


def handler(event: dict[str, Any], _context: object) -> None:
    """Lambda's entry; `event` is a 'Batch Job State Change'."""
    rules, reporter = Rules.from_environment(), Reporter()
    detail = event["detail"]
    queue = rules.queues.get(detail["jobQueue"])
    if queue is None:  # it was deleted with what it held
        return
    # What happened is the event's to say: by now the job may be elsewhere. The rest it need not carry.
    happened = {key: detail[key] for key in ("status", "statusReason", "attempts") if key in detail}
    # The parent of an array's child has what all children have in common, its tags.
    parent = reporter.describe(detail["jobId"].partition(":")[0])
    child = reporter.describe(detail["jobId"]) if ":" in detail["jobId"] else {}
    job = {**detail, **parent, **child, **happened}
    if job["status"] == "FAILED" and (nodes := reporter.children(job)):
        job = with_children(job, nodes, rules)
    said = report(job, rules)
    if said.text:
        reporter.publish(rules.topic, said.text)
    print(json.dumps(metrics(queue.label, reporter.waiting_and_running(detail["jobQueue"]), said, rules.namespace)))
