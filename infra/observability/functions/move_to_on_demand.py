"""Move a job that Spot reclaimed too often, or had no capacity for, to the On-Demand queue of its pool, or to the Spot
queue of the stage's fallback stage in another region.

EventBridge calls this at every state change of a job in a Spot queue. Events can arrive more than once, late and out of
order, so an event only identifies the job, and the function decides from DescribeJobs:

1. A job that has not ended but has too many reclaims is terminated; the reason names where it continues.
2. A job is submitted again under the same name if it ended for this reason or by its last reclaim, or if Batch
   cancelled it for lack of Spot capacity.

A job of one node for which Spot had no capacity moves to the fallback stage if there is one, because Spot is cheaper
there than On-Demand here. So does a job that a reclaim ended, if this stage has no On-Demand capacity. Nothing is
terminated for such a move, and a job moves there only once. If the fallback stage refuses the job, the job takes the
way that it would have taken without one. The function of the fallback stage can then move the job to On-Demand there.

Nodes that Batch starts one by one (the children of an array job) move together: each has its own events, but decisions
and actions concern their parent. They move if the On-Demand queue may have enough instances for all of them. Sweeps are
array jobs too, but never move: their children are independent, so a reclaim of one does not affect the others.

Two jobs must never write to the same run at the same time, so the second step waits until Batch reports that the first
job ended. `dependsOn` does not work: if a job fails, and terminated jobs fail, its dependent jobs fail as well.

SubmitJob has no idempotency token. So each move is claimed first, with an S3 object that is only written if it does not
exist; it is stored with the run's files, also by the function of a fallback stage, and later records the successor.
Abandoned claims are taken over. `trainyard resume` uses the same claim (jobs/runs/resume.py), so a run continues only
once.

Submitters choose a job's command and environment, but can only set the tag of their own team. So the claim's key is
made from the tag and the job's name, never from the job's command or environment.
"""

import functools
import json
import os
import time
from dataclasses import dataclass, field
from typing import Any

from infra.observability.functions.batch_jobs import (
    HOME_TAG,
    SWEEP_TAG,
    Queue,
    ReclaimRules,
    children,
    describe,
    is_reclaim,
    read_queues,
    reclaim_rules_from_environment,
    size,
    team_of,
)
from infra.observability.functions.fallback_stage import FallbackStage, RefusedError

CLAIM_SECONDS = 120
"""Seconds after which a claim without a successor counts as abandoned: longer than the function may run, shorter than
the three minutes over which Lambda retries an asynchronous call."""

CAPACITY_FLAG = "--capacity="
"""The launcher's option for the capacity that determines the price of a job's instances."""


class MoveUnderwayError(Exception):
    """Another call holds the claim. When Lambda retries, there is a successor, or the claim is abandoned."""


@dataclass(frozen=True, kw_only=True)
class Rules(ReclaimRules):
    """Settings that the stack passes in the environment."""

    stage: str
    run_bucket: str
    queues: dict[str, Queue]
    """Queues by ARN."""
    moved_reason: str
    moved_tag: str

    @classmethod
    def from_environment(cls) -> "Rules":
        return cls(
            stage=os.environ["STAGE"],
            run_bucket=os.environ["RUN_BUCKET"],
            queues=read_queues(os.environ["PARAMETER_PATH"]),
            moved_reason=os.environ["MOVED_REASON"],
            moved_tag=os.environ["MOVED_TAG"],
            **reclaim_rules_from_environment(),
        )


@dataclass(frozen=True)
class Terminate:
    """End the job, so that it can continue in another queue."""

    reason: str


@dataclass(frozen=True)
class Resubmit:
    """Submit the ended job again."""

    why: str
    queue: str | None
    """ARN of the On-Demand queue of its pool; None if there is none for it."""
    falls_back: bool
    """Whether to try the fallback stage first."""


def decide(job: dict[str, Any], rules: Rules) -> Terminate | Resubmit | None:
    """Return what to do with a job as described by DescribeJobs (for arrays: `with_children`), or None for nothing."""
    own = rules.queues.get(job["jobQueue"])
    queue = own.on_demand if own and size(job) <= rules.on_demand_nodes else None
    falls_back = rules.falls_back(job, own)
    if not (queue or falls_back) or job["status"] == "SUCCEEDED" or not team_of(job):
        return None
    if SWEEP_TAG in job.get("tags", {}):
        return None
    attempts = job.get("attempts", [])
    reclaims = sum(is_reclaim(attempt, rules) for attempt in attempts)
    too_many = reclaims >= rules.reclaims_before_on_demand
    reason = job.get("statusReason", "")
    no_capacity = reason.startswith(rules.no_capacity_reason)
    why = "for lack of Spot capacity" if no_capacity else f"after {reclaims} reclaim{'s' if reclaims > 1 else ''}"
    if reason.startswith(rules.moved_reason):  # a reason that this function set
        why = reason.removeprefix(rules.moved_reason).partition(":")[0].strip()
    stopped_by_someone = job.get("isTerminated") or job.get("isCancelled")
    if job["status"] != "FAILED":
        # A job that this function or its owner is already terminating is left alone.
        if queue is None or not (too_many or no_capacity) or stopped_by_someone:
            return None
        return Terminate(
            f"{rules.moved_reason} {why}: continues as the job of the same name in {queue.rsplit('/', 1)[-1]}"
        )
    # Batch ends a job whose last allowed attempt is reclaimed. If its owner or a timeout ends it, the reason differs,
    # whatever the container's exit code.
    ended_by_reclaim = (
        too_many
        and is_reclaim(attempts[-1], rules)
        and reason.startswith((rules.reclaim_reason, rules.exited_reason))
        and not stopped_by_someone
    )
    if no_capacity or reason.startswith(rules.moved_reason) or ended_by_reclaim:
        return Resubmit(why, queue, falls_back and (no_capacity or queue is None))
    return None


def with_children(parent: dict[str, Any], children: list[dict[str, Any]], rules: Rules) -> dict[str, Any]:
    """Return an array's parent with attempts and a reason, which Batch records only for its children.

    If one child is reclaimed, the others exit too, to restart together. So one child decides the outcome of all: the
    child that failed by itself, or else the child with the most reclaims.
    """

    def weight(child: dict[str, Any]) -> tuple[bool, int]:
        attempts = child.get("attempts", [])
        failed = child["status"] == "FAILED" and bool(attempts) and not is_reclaim(attempts[-1], rules)
        return failed, sum(is_reclaim(attempt, rules) for attempt in attempts)

    decisive = max(children, key=weight)
    reason = str(parent.get("statusReason", ""))
    reasons = [reason, *(str(child.get("statusReason", "")) for child in children if child["status"] == "FAILED")]
    moved = [text for text in reasons if text.startswith(rules.moved_reason)]
    no_capacity = [text for text in reasons if text.startswith(rules.no_capacity_reason)]
    stopped = [reason] if parent.get("isTerminated") or parent.get("isCancelled") else []
    reason = [*moved, *stopped, *no_capacity, str(decisive.get("statusReason", ""))][0]
    return {**parent, "attempts": decisive.get("attempts", []), "statusReason": reason}


@dataclass(frozen=True)
class Submission:
    """A SubmitJob request, and the region that it is for."""

    request: dict[str, Any]
    region: str | None = None
    """None for the function's own region."""


def submissions(job: dict[str, Any], decision: Resubmit, rules: Rules) -> list[Submission]:
    """Return the requests that continue the job. The second is for the case that Batch refuses the first.

    Raises RefusedError if only the fallback stage could continue it, but cannot.
    """
    found: list[Submission] = []
    if decision.falls_back and rules.fallback:
        again = request(job, job["jobQueue"], {rules.moved_tag: decision.why}, capacity="spot")
        try:
            stage = FallbackStage.read(*rules.fallback)
            there = stage.request(job, again, home=f"{rules.stage}/{rules.run_bucket}")
            found.append(Submission(there, stage.region))
        except RefusedError as error:
            if decision.queue is None:
                raise
            print(json.dumps({"run": job["jobName"], "job": job["jobId"], "refused": str(error)}))
    if decision.queue is not None:
        found.append(Submission(request(job, decision.queue, {rules.moved_tag: decision.why})))
    return found


def request(
    job: dict[str, Any], queue: str, more_tags: dict[str, str], *, capacity: str = "on-demand"
) -> dict[str, Any]:
    """Return SubmitJob's arguments for the same job in another queue, whose instances have this capacity.

    DescribeJobs merges definition and submission, and submitting the merged values has the same effect. Batch refuses
    values that it adds itself (AWS_BATCH_… variables, `aws:` tags), so these are left out.
    """
    arguments: dict[str, Any] = {
        "jobName": job["jobName"],
        "jobQueue": queue,
        "jobDefinition": job["jobDefinition"],
        "retryStrategy": job["retryStrategy"],
        "propagateTags": job.get("propagateTags", False),
        "tags": {key: value for key, value in job.get("tags", {}).items() if not key.startswith("aws:")} | more_tags,
        "ecsPropertiesOverride": {
            "taskProperties": [
                {"containers": [_container(container, capacity) for container in task["containers"]]}
                for task in job["ecsProperties"]["taskProperties"]
            ]
        },
    }
    if size(job):
        arguments["arrayProperties"] = {"size": size(job)}
    renamed = {
        "shareIdentifier": "shareIdentifier",
        "timeout": "timeout",
        "parameters": "parameters",
        "schedulingPriority": "schedulingPriorityOverride",
    }
    for described, argument in renamed.items():
        if job.get(described):
            arguments[argument] = job[described]
    return arguments


def _container(container: dict[str, Any], capacity: str) -> dict[str, Any]:
    return {
        "name": container["name"],
        # The launcher must now compute the run's cost at the price of this capacity.
        "command": [
            f"{CAPACITY_FLAG}{capacity}" if part == f"{CAPACITY_FLAG}spot" else part for part in container["command"]
        ],
        "environment": [item for item in container["environment"] if not item["name"].startswith("AWS_BATCH")],
        "resourceRequirements": container["resourceRequirements"],
    }


def claim_key(job: dict[str, Any]) -> str:
    """Return the key of the claim on a job's move, `moves/<job id>.json` in the run named like the job."""
    return f"{team_of(job)}/{job['jobName']}/moves/{job['jobId']}.json"


def claim_bucket(job: dict[str, Any], rules: Rules) -> str:
    """Return the run bucket of the job's own stage, which a job that moved here has in a tag."""
    return str(job["tags"][HOME_TAG]).partition("/")[2] if HOME_TAG in job["tags"] else rules.run_bucket


@dataclass
class Mover:
    """The AWS calls that carry out a decision exactly once."""

    _clients: dict[tuple[str | None, bool], Any] = field(default_factory=dict)

    def _batch(self, region: str | None = None, *, once: bool = False) -> Any:
        """Return a client. With `once`, it has no retries.

        If botocore repeated SubmitJob after a lost response, it would start a second job.
        """
        import boto3  # noqa: PLC0415 - the functions above are used and tested without it
        from botocore.config import Config  # noqa: PLC0415

        if (region, once) not in self._clients:
            config = Config(retries={"total_max_attempts": 1}) if once else None
            self._clients[region, once] = boto3.client("batch", region_name=region, config=config)
        return self._clients[region, once]

    @functools.cached_property
    def _s3(self) -> Any:
        import boto3  # noqa: PLC0415 - as above

        return boto3.client("s3")

    def describe(self, job_id: str, rules: Rules) -> dict[str, Any] | None:
        """Return a job (for arrays: `with_children`), or None if Batch no longer lists it."""
        for job in describe(self._batch(), [job_id]):
            nodes = children(self._batch(), job)
            return with_children(job, nodes, rules) if nodes else job
        return None

    def terminate(self, job_id: str, reason: str) -> None:
        self._batch().terminate_job(jobId=job_id, reason=reason)

    def resubmit(self, job: dict[str, Any], decision: Resubmit, rules: Rules) -> str | None:
        """Submit the job again and return the id of the successor, or None if it already has one.

        Raises MoveUnderwayError if another call is moving it, RefusedError if only the fallback stage could continue it
        but cannot.
        """
        possible = submissions(job, decision, rules)
        place = {"Bucket": claim_bucket(job, rules), "Key": claim_key(job)}
        if not self._claim(place):
            held = self._s3.get_object(**place)
            if json.load(held["Body"]).get("successor"):
                return None
            if time.time() - held["LastModified"].timestamp() < CLAIM_SECONDS:
                raise MoveUnderwayError(f"the move of {job['jobName']} is claimed by another call")
            if decision.falls_back and not any(each.region for each in possible):
                raise MoveUnderwayError(f"{job['jobName']} may already continue in the fallback stage")
            # The holder of the claim may have submitted the job and died before it recorded the successor.
            found = (self._submitted(each, since=job["createdAt"]) for each in possible)
            if successor := next(filter(None, found), None):
                self._record(place, successor)
                return None
            if not self._claim(place, instead_of=held["ETag"]):
                raise MoveUnderwayError(f"the move of {job['jobName']} was taken over by another call")
        *first, last = possible
        successor = next(filter(None, map(self._submit_unless_refused, first)), None) or self._submit(last)
        self._record(place, successor)
        return successor

    def _submit(self, submission: Submission) -> str:
        return str(self._batch(submission.region, once=True).submit_job(**submission.request)["jobId"])

    def _submit_unless_refused(self, submission: Submission) -> str | None:
        """Return None if Batch certainly has no such job. Raises ClientError if it may have."""
        from botocore.exceptions import ClientError  # noqa: PLC0415

        try:
            return self._submit(submission)
        except ClientError as error:
            if error.response["ResponseMetadata"]["HTTPStatusCode"] not in (400, 403, 404):
                raise
            print(json.dumps({"run": submission.request["jobName"], "refused": str(error)}))
            return None

    def _claim(self, place: dict[str, str], *, instead_of: str | None = None) -> bool:
        from botocore.exceptions import ClientError  # noqa: PLC0415

        condition = {"IfMatch": instead_of} if instead_of else {"IfNoneMatch": "*"}
        # The time makes the ETag of each claim unique: if two calls take a claim over, only one succeeds.
        body = json.dumps({"claimed_at": time.time_ns(), "successor": None})
        try:
            self._s3.put_object(**place, Body=body.encode(), **condition)
        except ClientError as error:
            # ConditionalRequestConflict: another call wrote at the same time and won.
            if error.response["Error"]["Code"] in ("PreconditionFailed", "ConditionalRequestConflict"):
                return False
            raise
        return True

    def _record(self, place: dict[str, str], successor: str) -> None:
        body = json.dumps({"claimed_at": time.time_ns(), "successor": successor})
        self._s3.put_object(**place, Body=body.encode())

    def _submitted(self, submission: Submission, *, since: int) -> str | None:
        """Return a job of the same name created after `since`; a resumed run may have older ones in the queue."""
        arguments = submission.request
        pages = (
            self._batch(submission.region)
            .get_paginator("list_jobs")
            .paginate(jobQueue=arguments["jobQueue"], filters=[{"name": "JOB_NAME", "values": [arguments["jobName"]]}])
        )
        found = (job for page in pages for job in page["jobSummaryList"])
        return next((job["jobId"] for job in found if job["createdAt"] >= since), None)


def handler(event: dict[str, Any], _context: object) -> None:
    """Handle a 'Batch Job State Change' event."""
    rules = Rules.from_environment()
    mover = Mover()
    # For the child of an array job, whose id is `<parent>:<index>`, use the parent.
    job = mover.describe(event["detail"]["jobId"].partition(":")[0], rules)
    if job is None:  # the event is many days old
        return
    decision = decide(job, rules)
    if isinstance(decision, Terminate):
        mover.terminate(job["jobId"], decision.reason)
        print(json.dumps({"run": job["jobName"], "job": job["jobId"], "terminated": decision.reason}))
    elif isinstance(decision, Resubmit):
        successor = mover.resubmit(job, decision, rules)
        print(json.dumps({"run": job["jobName"], "job": job["jobId"], "successor": successor or "already submitted"}))
