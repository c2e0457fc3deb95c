"""Moves a job that Spot has taken away too often, or had no capacity for, to the On-Demand queue of its pool.

EventBridge calls it with every change of state of a job in a Spot queue. Events come more than once, late and out of
order, so an event only names the job; what is done follows from what DescribeJobs says:

1. a job that lives on after too many reclaims is terminated, with a reason that says where it goes on;
2. a job that has ended with that reason (or of its last reclaim, or was cancelled for want of Spot capacity) is
   submitted again under its own name.

Nodes that Batch starts one by one (the children of an array job) move together: events are of each of them, what is
decided and done is of their parent. It moves where the On-Demand queue may have instances for all of them. The children
of a sweep are no such nodes: one that is reclaimed says nothing of the others, which run on, and a sweep is not moved.

Two jobs must never write one run at the same time, so the second step waits for Batch's word that the first job has
ended. `dependsOn` could not do it: what depends on a job that failed, and a terminated one has failed, fails as well.

SubmitJob has no idempotency token. Before it is called the move is claimed by an object that S3 writes only where there
is none; it lies with the run's files, and names the successor afterwards. A claim whose holder died is taken over.
`trainyard resume` claims in the same place (jobs/runs/claims.py), so a run goes on once.

Whoever submits a job chooses its command and environment, but only its own team's tag: where the claim lies follows
from that tag and the job's name, never from what the job says of itself.
"""

import json
import os
import time
from dataclasses import dataclass
from typing import Any

from infra.observability.functions.batch_jobs import (
    SWEEP_TAG,
    ReclaimRules,
    children,
    describe,
    is_reclaim,
    of_environment,
    read_queues,
    size,
)

CLAIM_SECONDS = 120
"""After it a claim without a successor counts as abandoned. Longer than the function may run; shorter than the three
minutes over which Lambda tries an asynchronous call again."""

CAPACITY_FLAG = "--capacity="
"""The launcher's flag that says what a job's instances are priced at."""


class MoveUnderwayError(Exception):
    """Another call holds the claim. Lambda tries again: by then there is a successor, or the claim is abandoned."""


@dataclass(frozen=True, kw_only=True)
class Rules(ReclaimRules):
    """The stage's values and the contract's words, which the stack hands over in the environment."""

    run_bucket: str
    on_demand_queues: dict[str, str]
    """ARN of a Spot queue to that of the same pool's On-Demand queue."""
    moved_reason: str
    moved_tag: str

    @classmethod
    def from_environment(cls) -> "Rules":
        queues = read_queues(os.environ["PARAMETER_PATH"])
        return cls(
            run_bucket=os.environ["RUN_BUCKET"],
            on_demand_queues={arn: queue.on_demand for arn, queue in queues.items() if queue.on_demand},
            moved_reason=os.environ["MOVED_REASON"],
            moved_tag=os.environ["MOVED_TAG"],
            **of_environment(),
        )


@dataclass(frozen=True)
class Terminate:
    """The job has to end before it can go on elsewhere."""

    reason: str


@dataclass(frozen=True)
class Resubmit:
    """The job has ended and goes on with this SubmitJob request."""

    request: dict[str, Any]


def decide(job: dict[str, Any], rules: Rules) -> Terminate | Resubmit | None:
    """Return what is to be done with a job, as DescribeJobs shows it (an array: as `with_children`); None: nothing."""
    queue = rules.on_demand_queues.get(job["jobQueue"])
    if queue is None or job["status"] == "SUCCEEDED" or not _team(job) or size(job) > rules.on_demand_nodes:
        return None
    if SWEEP_TAG in job.get("tags", {}):
        return None
    attempts = job.get("attempts", [])
    reclaims = sum(is_reclaim(attempt, rules) for attempt in attempts)
    too_many = reclaims >= rules.reclaims_before_on_demand
    reason = job.get("statusReason", "")
    no_capacity = reason.startswith(rules.no_capacity_reason)
    why = "for want of Spot capacity" if no_capacity else f"after {reclaims} reclaim{'s' if reclaims > 1 else ''}"
    if reason.startswith(rules.moved_reason):  # as this function has put it
        why = reason.removeprefix(rules.moved_reason).partition(":")[0].strip()
    stopped_by_someone = job.get("isTerminated") or job.get("isCancelled")
    if job["status"] != "FAILED":
        # One that is being terminated already, by this function or by its owner, is left to it.
        if not (too_many or no_capacity) or stopped_by_someone:
            return None
        return Terminate(f"{rules.moved_reason} {why}: goes on as the job of the same name in {_name(queue)}")
    # The last attempt that the job may have can be the one reclaim too many: then Batch itself has ended it. Whoever
    # else ends a job, its owner or a timeout, gives the job a reason of his own, however its container exited.
    ended_by_reclaim = (
        too_many
        and is_reclaim(attempts[-1], rules)
        and reason.startswith((rules.reclaim_reason, rules.exited_reason))
        and not stopped_by_someone
    )
    if no_capacity or reason.startswith(rules.moved_reason) or ended_by_reclaim:
        return Resubmit(_request(job, queue, {rules.moved_tag: why}))
    return None


def with_children(parent: dict[str, Any], children: list[dict[str, Any]], rules: Rules) -> dict[str, Any]:
    """Return the parent of an array with what Batch says of its children only: attempts, and why they ended.

    When one is taken away the others leave too, to begin again together. So what has become of them all is what became
    of the one that failed by itself, else of the one that saw most reclaims.
    """

    def weight(child: dict[str, Any]) -> tuple[bool, int]:
        attempts = child.get("attempts", [])
        failed = child["status"] == "FAILED" and bool(attempts) and not is_reclaim(attempts[-1], rules)
        return failed, sum(is_reclaim(attempt, rules) for attempt in attempts)

    decisive = max(children, key=weight)
    reason = str(parent.get("statusReason", ""))
    reasons = [reason, *(str(child.get("statusReason", "")) for child in children if child["status"] == "FAILED")]
    moved = [said for said in reasons if said.startswith(rules.moved_reason)]
    no_capacity = [said for said in reasons if said.startswith(rules.no_capacity_reason)]
    stopped = [reason] if parent.get("isTerminated") or parent.get("isCancelled") else []
    reason = [*moved, *stopped, *no_capacity, str(decisive.get("statusReason", ""))][0]
    return {**parent, "attempts": decisive.get("attempts", []), "statusReason": reason}


def _request(job: dict[str, Any], queue: str, more_tags: dict[str, str]) -> dict[str, Any]:
    """Return SubmitJob's arguments for the same job in another queue.

    DescribeJobs shows definition and submission merged into one; given as the submission's they come to the same. What
    Batch adds itself (AWS_BATCH_…, tags of `aws:`) it does not take from others.
    """
    request: dict[str, Any] = {
        "jobName": job["jobName"],
        "jobQueue": queue,
        "jobDefinition": job["jobDefinition"],
        "retryStrategy": job["retryStrategy"],
        "propagateTags": job.get("propagateTags", False),
        "tags": {key: value for key, value in job.get("tags", {}).items() if not key.startswith("aws:")} | more_tags,
        "ecsPropertiesOverride": {
            "taskProperties": [
                {"containers": [_container(container) for container in task["containers"]]}
                for task in job["ecsProperties"]["taskProperties"]
            ]
        },
    }
    if size(job):
        request["arrayProperties"] = {"size": size(job)}
    same = {"shareIdentifier": "shareIdentifier", "timeout": "timeout", "parameters": "parameters"}
    for shown, asked in (same | {"schedulingPriority": "schedulingPriorityOverride"}).items():
        if job.get(shown):
            request[asked] = job[shown]
    return request


def _container(container: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": container["name"],
        # From here on the launcher counts the run's cost at the other price.
        "command": [
            f"{CAPACITY_FLAG}on-demand" if part == f"{CAPACITY_FLAG}spot" else part for part in container["command"]
        ],
        "environment": [item for item in container["environment"] if not item["name"].startswith("AWS_BATCH")],
        "resourceRequirements": container["resourceRequirements"],
    }


def _name(arn: str) -> str:
    return arn.rsplit("/", 1)[-1]


def claim_key(job: dict[str, Any]) -> str:
    """Return the key of the claim on a job's move: `moves/<job id>.json` of its run, whose id is the job's name."""
    return f"{_team(job)}/{job['jobName']}/moves/{job['jobId']}.json"


def _team(job: dict[str, Any]) -> str:
    """Return the team that submitted it; IAM holds people to their own. Empty: not submitted by `trainyard submit`."""
    return str(job.get("tags", {}).get("trainyard:team", ""))


class Mover:
    """The calls to AWS that carry a decision out, once."""

    def __init__(self, run_bucket: str) -> None:
        import boto3  # noqa: PLC0415 - the decisions above are used and tested without it
        from botocore.config import Config  # noqa: PLC0415

        self._batch = boto3.client("batch")
        # Sent again by botocore after a lost answer, SubmitJob would start a second job.
        self._batch_once = boto3.client("batch", config=Config(retries={"total_max_attempts": 1}))
        self._s3 = boto3.client("s3")
        self._bucket = run_bucket

    def describe(self, job_id: str, rules: Rules) -> dict[str, Any] | None:
        """Return a job (one of several nodes as `with_children` does), or None if Batch has forgotten it."""
        for job in describe(self._batch, [job_id]):
            nodes = children(self._batch, job)
            return with_children(job, nodes, rules) if nodes else job
        return None

    def terminate(self, job_id: str, reason: str) -> None:
        self._batch.terminate_job(jobId=job_id, reason=reason)

    def resubmit(self, job: dict[str, Any], request: dict[str, Any]) -> str | None:
        """Submit the job again and return the id of the successor; None where there was one.

        Raises MoveUnderwayError where another call is at it.
        """
        key = claim_key(job)
        if not self._claim(key):
            held = self._s3.get_object(Bucket=self._bucket, Key=key)
            if json.load(held["Body"]).get("successor"):
                return None
            if time.time() - held["LastModified"].timestamp() < CLAIM_SECONDS:
                raise MoveUnderwayError(f"the move of {job['jobName']} is claimed by another call")
            # Whoever held it may have submitted the job and died before it could say so.
            successor = self._job_named(request["jobQueue"], request["jobName"], since=job["createdAt"])
            if successor:
                self._record(key, successor)
                return None
            if not self._claim(key, instead_of=held["ETag"]):
                raise MoveUnderwayError(f"the move of {job['jobName']} was taken over by another call")
        successor = self._batch_once.submit_job(**request)["jobId"]
        self._record(key, successor)
        return successor

    def _claim(self, key: str, *, instead_of: str | None = None) -> bool:
        from botocore.exceptions import ClientError  # noqa: PLC0415

        condition = {"IfMatch": instead_of} if instead_of else {"IfNoneMatch": "*"}
        # The time makes each claim's ETag its own: of two calls that take one over, one succeeds.
        body = json.dumps({"claimed_at": time.time_ns(), "successor": None})
        try:
            self._s3.put_object(Bucket=self._bucket, Key=key, Body=body.encode(), **condition)  # type: ignore[arg-type]
        except ClientError as error:
            # The second: two wrote at the very same time, and the other one won.
            if error.response["Error"]["Code"] in ("PreconditionFailed", "ConditionalRequestConflict"):
                return False
            raise
        return True

    def _record(self, key: str, successor: str) -> None:
        body = json.dumps({"claimed_at": time.time_ns(), "successor": successor})
        self._s3.put_object(Bucket=self._bucket, Key=key, Body=body.encode())

    def _job_named(self, queue: str, name: str, *, since: int) -> str | None:
        """Return a job of that name which is younger: a run that was resumed may have had older ones in the queue."""
        pages = self._batch.get_paginator("list_jobs").paginate(
            jobQueue=queue, filters=[{"name": "JOB_NAME", "values": [name]}]
        )
        found = (job for page in pages for job in page["jobSummaryList"])
        return next((job["jobId"] for job in found if job["createdAt"] >= since), None)


def handler(event: dict[str, Any], _context: object) -> None:
    """Lambda's entry; `event` is a 'Batch Job State Change'."""
    rules = Rules.from_environment()
    mover = Mover(rules.run_bucket)
    # Of a child of an array job, whose id goes on after a colon, its parent.
    job = mover.describe(event["detail"]["jobId"].partition(":")[0], rules)
    if job is None:  # the event is many days old
        return
    decision = decide(job, rules)
    if isinstance(decision, Terminate):
        mover.terminate(job["jobId"], decision.reason)
        print(json.dumps({"run": job["jobName"], "job": job["jobId"], "terminated": decision.reason}))
    elif isinstance(decision, Resubmit):
        successor = mover.resubmit(job, decision.request)
        print(json.dumps({"run": job["jobName"], "job": job["jobId"], "successor": successor or "was there already"}))
