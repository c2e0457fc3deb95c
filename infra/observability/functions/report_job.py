"""Report the end of a job: as an alert to the stage's topic, and as metrics.

EventBridge calls this at every state change of a job of the stage. Batch publishes no metrics, so each call counts the
jobs in the event's queue and logs the counts in CloudWatch's embedded metric format. While nothing runs, there are no
events, no counts and no costs. Between events, numbers do not change; the dashboard repeats the last value.

Nodes that Batch starts one by one (the children of an array job) fail and are reclaimed together: a failure is reported
when the parent fails, a reclaim when the first child waits again, because all exit when one is reclaimed.

The children of a sweep are independent: every reclaim is reported, and failed points once, for the parent.

Jobs that their owner cancelled, that continue in another queue, or that were duplicates do not count as failed.
"""

import json
import os
import time
from dataclasses import dataclass
from typing import Any

from infra.observability.functions.batch_jobs import (
    HOME_TAG,
    SWEEP_TAG,
    Queue,
    ReclaimRules,
    children,
    containers,
    describe,
    is_reclaim,
    read_queues,
    reclaim_rules_from_environment,
    size,
)


@dataclass(frozen=True, kw_only=True)
class Rules(ReclaimRules):
    """Settings that the stack passes in the environment."""

    stage: str
    topic: str
    namespace: str
    queues: dict[str, Queue]
    """Queues by ARN."""
    spot_queues: tuple[str, ...]
    """Names of the Spot queues."""
    no_failures: tuple[str, ...]
    """Prefixes of reasons that are no failures: jobs that continue in another queue, and duplicates."""

    @classmethod
    def from_environment(cls) -> "Rules":
        return cls(
            stage=os.environ["STAGE"],
            topic=os.environ["TOPIC_ARN"],
            namespace=os.environ["METRIC_NAMESPACE"],
            queues=read_queues(os.environ["PARAMETER_PATH"]),
            spot_queues=tuple(json.loads(os.environ["SPOT_QUEUES"])),
            no_failures=tuple(json.loads(os.environ["NO_FAILURES"])),
            **reclaim_rules_from_environment(),
        )


@dataclass(frozen=True, kw_only=True)
class Report:
    """The report of one event."""

    failed: bool = False
    reclaimed: bool = False
    text: str = ""
    """Text of the alert; empty for no alert."""


def report(job: dict[str, Any], rules: Rules) -> Report:
    """Return the report on a job as described by DescribeJobs, with the status, reason and attempts of the event."""
    child = job.get("arrayProperties", {}).get("index")
    is_sweep = SWEEP_TAG in job.get("tags", {})
    if (child and not is_sweep) or (child is not None and job["status"] == "FAILED"):
        return Report()
    attempts = job.get("attempts", [])
    reclaims = [_is_reclaim(attempt, job["jobQueue"], rules) for attempt in attempts]
    reclaimed = reclaims[-1:] == [True] and _ended_by_batch(job, rules) and job["status"] in ("RUNNABLE", "FAILED")
    run, team = job["jobName"], job.get("tags", {}).get("trainyard:team", "unknown")
    subject = f"{run} of team {team} (stage {rules.stage})"
    own_stage = job.get("tags", {}).get(HOME_TAG, rules.stage).partition("/")[0]  # its commands find it there
    if job["status"] == "FAILED" and _is_failure(job, sum(reclaims), rules, reclaimed=reclaimed):
        container = containers(attempts[-1] if attempts else {})[0]
        code = f" (exit code {container['exitCode']})" if "exitCode" in container else ""
        why = "; ".join(filter(None, (job.get("statusReason", "no reason given"), container.get("reason"))))
        if is_sweep:
            return Report(
                failed=True,
                text=f"{subject} is a sweep whose points did not all succeed: {why}{code}. "
                f"Next: trainyard sweep {run} --stage {own_stage}",
            )
        return Report(
            failed=True,
            reclaimed=reclaimed,
            text=f"{subject} failed in attempt {max(1, len(attempts))}: {why}{code}. "
            f"Next: trainyard logs {run} --stage {own_stage}",
        )
    its_instance = "one of its instances" if is_sweep else "its instance"
    if job["status"] == "RUNNABLE" and reclaimed:
        return Report(
            reclaimed=True,
            text=f"{subject} lost {its_instance} to a Spot reclaim, for the {_ordinal(sum(reclaims))} time; it waits "
            f"for another instance and resumes from its newest checkpoint. "
            f"Next: trainyard status {run} --stage {own_stage}",
        )
    return Report(reclaimed=reclaimed)


def with_children(parent: dict[str, Any], children: list[dict[str, Any]], rules: Rules) -> dict[str, Any]:
    """Return an array's parent with the outcome of one child, preferably a child that failed by itself."""

    def failed_by_itself(child: dict[str, Any]) -> bool:
        attempts = child.get("attempts", [])
        lost = bool(attempts) and _is_reclaim(attempts[-1], parent["jobQueue"], rules)
        return bool(child["status"] == "FAILED" and not lost)

    decisive = max(children, key=lambda child: (failed_by_itself(child), len(child.get("attempts", []))))
    stopped = parent.get("isTerminated") or parent.get("isCancelled")
    reason = parent.get("statusReason", "") if stopped else decisive.get("statusReason", "")
    return {**parent, "attempts": decisive.get("attempts", []), "statusReason": reason}


def _is_reclaim(attempt: dict[str, Any], queue: str, rules: Rules) -> bool:
    """Return whether a finished attempt in a Spot queue ended by a reclaim."""
    return queue in rules.queues and rules.queues[queue].name in rules.spot_queues and is_reclaim(attempt, rules)


def _ended_by_batch(job: dict[str, Any], rules: Rules) -> bool:
    """Return whether the job ended because of its last attempt, and not by its owner or a timeout."""
    reason: str = job.get("statusReason", "")
    return job["status"] != "FAILED" or reason.startswith((rules.reclaim_reason, rules.exited_reason))


def _is_failure(job: dict[str, Any], reclaims: int, rules: Rules, *, reclaimed: bool) -> bool:
    reason = job.get("statusReason", "")
    fits = size(job) <= rules.on_demand_nodes and SWEEP_TAG not in job.get("tags", {})
    queue = rules.queues.get(job["jobQueue"])
    can_move = fits and ((queue is not None and queue.on_demand is not None) or rules.falls_back(job, queue))
    if reason.startswith(rules.no_capacity_reason):
        return not can_move
    if reason.startswith("Canceled by JobStateTimeLimit"):  # cancelled by the queue, not by the owner
        return True
    if job.get("isTerminated") or job.get("isCancelled") or reason.startswith(rules.no_failures):
        return False
    return not (can_move and reclaimed and reclaims >= rules.reclaims_before_on_demand)


def _ordinal(number: int) -> str:
    return {1: "first", 2: "second", 3: "third"}.get(number, f"{number}th")


def metrics(queue: str, summaries: list[dict[str, Any]], report: Report, namespace: str) -> dict[str, Any]:
    """Return a line of CloudWatch's embedded metric format, from the waiting and running jobs of `queue`."""
    values = {
        "QueueDepth": sum(summary["status"] not in ("STARTING", "RUNNING") for summary in summaries),
        "Reclaims": int(report.reclaimed),
        "FailedJobs": int(report.failed),
    }
    directives = [
        {"Namespace": namespace, "Dimensions": [["Queue"]], "Metrics": [{"Name": name} for name in values]},
        # Total of all queues, for the alarm
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
        import boto3  # noqa: PLC0415 - the functions above are used and tested without it

        self._batch: Any = boto3.client("batch")
        self._sns: Any = boto3.client("sns")

    def describe(self, job_id: str) -> dict[str, Any]:
        """Return a job as described by Batch, or an empty dict if Batch no longer lists it."""
        return next(iter(describe(self._batch, [job_id])), {})

    def children(self, job: dict[str, Any]) -> list[dict[str, Any]]:
        return children(self._batch, job)

    def waiting_and_running(self, queue: str) -> list[dict[str, Any]]:
        """Return the queue's waiting and running jobs, with an array's children in place of their parent."""
        found = []
        for summary in self._alive(jobQueue=queue):
            # Batch omits children, and lists their parent as PENDING while they run.
            is_parent = summary["status"] == "PENDING" and size(summary)
            found += self._alive(arrayJobId=summary["jobId"]) if is_parent else [summary]
        return found

    def _alive(self, **filters: str) -> list[dict[str, Any]]:
        pages = self._batch.get_paginator("list_jobs")
        states = ("SUBMITTED", "PENDING", "RUNNABLE", "STARTING", "RUNNING")
        return [
            {**summary, "status": state}
            for state in states
            for page in pages.paginate(**filters, jobStatus=state)
            for summary in page["jobSummaryList"]
        ]

    def publish(self, topic: str, text: str) -> None:
        self._sns.publish(TopicArn=topic, Message=text)


def handler(event: dict[str, Any], _context: object) -> None:
    """Handle a 'Batch Job State Change' event."""
    rules, reporter = Rules.from_environment(), Reporter()
    detail = event["detail"]
    queue = rules.queues.get(detail["jobQueue"])
    if queue is None:  # deleted, together with its jobs
        return
    # Status, reason and attempts come from the event, because the job may have changed since. Other fields may be
    # missing.
    from_event = {key: detail[key] for key in ("status", "statusReason", "attempts") if key in detail}
    # An array's child gets what all children share, such as tags, from its parent.
    parent = reporter.describe(detail["jobId"].partition(":")[0])
    child = reporter.describe(detail["jobId"]) if ":" in detail["jobId"] else {}
    job = {**detail, **parent, **child, **from_event}
    if job["status"] == "FAILED" and (nodes := reporter.children(job)):
        job = with_children(job, nodes, rules)
    result = report(job, rules)
    if result.text:
        reporter.publish(rules.topic, result.text)
    print(json.dumps(metrics(queue.label, reporter.waiting_and_running(detail["jobQueue"]), result, rules.namespace)))
