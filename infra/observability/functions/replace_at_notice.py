"""Asks for another instance when EC2 says that it takes a Spot instance away, two minutes before it does.

EventBridge calls it with EC2's warning. Batch itself starts another instance once the job waits again. Until that has
booted no step is made, and the other nodes of a job stand idle. Here it boots while the old one still trains: the
compute environment is asked for as many vCPUs more as one instance has. Batch lowers that number by itself when an
instance is idle (user guide, "Scaling updates", which advises against `desiredvCpus` for just that reason).

Nothing is asked for where nothing would use it: no run has its job on the instance, its attempts are spent, or it moves
to On-Demand now.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from infra.observability.functions.move_to_on_demand import SWEEP_TAG
from infra.observability.functions.reclaims import ReclaimRules, is_reclaim
from infra.observability.functions.watch_instances import RUN_TAG, environments_of

REPLACED_TAG = "trainyard:replaced"
"""Tag of an instance in whose place another one was asked for; its value is when. Events may come twice."""


@dataclass(frozen=True, kw_only=True)
class Rules(ReclaimRules):
    """The stage's values and the contract's words, which the stack hands over in the environment."""

    stage: str
    vcpus: Mapping[str, int]
    """Of an instance of each type."""
    reclaims_before_on_demand: int | None
    """None: the stage has no On-Demand instances that a job could move to."""

    @classmethod
    def from_environment(cls) -> "Rules":
        return cls(
            stage=os.environ["STAGE"],
            vcpus=json.loads(os.environ["VCPUS"]),
            reclaims_before_on_demand=json.loads(os.environ["RECLAIMS_BEFORE_ON_DEMAND"]),
            reclaim_reason=os.environ["RECLAIM_REASON"],
            exited_reason=os.environ["EXITED_REASON"],
            interrupted_exit_code=int(os.environ["INTERRUPTED_EXIT_CODE"]),
        )


def why_not(job: Mapping[str, Any] | None, environment: Mapping[str, Any], vcpus: int, rules: Rules) -> str | None:
    """Return why an instance with so many vCPUs is not replaced; None: it is.

    `job`: the one that it runs, and `environment`: its compute environment, both as Batch describes them.
    """
    if job is None:
        return "no job of a run is on it"
    attempts = job.get("attempts", [])
    if len(attempts) + 1 >= job["retryStrategy"]["attempts"]:
        return "the job's attempts are spent"
    limit, is_moved = rules.reclaims_before_on_demand, SWEEP_TAG not in job.get("tags", {})
    if limit and is_moved and sum(is_reclaim(attempt, rules) for attempt in attempts) + 1 >= limit:
        return "the job moves to On-Demand"
    if environment["state"] != "ENABLED":
        return "its compute environment is disabled"
    if desired_vcpus(environment) + vcpus > environment["computeResources"]["maxvCpus"]:
        return "its compute environment may have no more instances"
    return None


def desired_vcpus(environment: Mapping[str, Any]) -> int:
    """Return for how many vCPUs a compute environment has instances, or has them start."""
    return int(environment["computeResources"].get("desiredvCpus", 0))


class Account:
    """The calls to AWS."""

    def __init__(self, stage: str) -> None:
        import boto3  # noqa: PLC0415 - the judgement above is used and tested without it

        self._stage = stage
        self._ec2: Any = boto3.client("ec2")
        self._batch: Any = boto3.client("batch")

    def instance(self, instance_id: str) -> dict[str, Any] | None:
        """Return an instance as EC2 describes it; None: it is none of the stage's."""
        filters = [
            {"Name": "instance-id", "Values": [instance_id]},
            {"Name": "tag:trainyard:stage", "Values": [self._stage]},
        ]
        found = self._ec2.describe_instances(Filters=filters)["Reservations"]
        return dict(found[0]["Instances"][0]) if found else None

    def environment(self, name: str) -> dict[str, Any] | None:
        """Return the compute environment whose instances have this name."""
        return environments_of(self._batch, self._stage).get(name)

    def running_job(self, run: str, environment: str) -> dict[str, Any] | None:
        """Return the job of a run that runs in a compute environment, by its ARN; of an array one of the children."""
        queues = self._pages("describe_job_queues", "jobQueues")
        own = [
            queue["jobQueueArn"]
            for queue in queues
            if environment in [place["computeEnvironment"] for place in queue["computeEnvironmentOrder"]]
        ]
        named = [{"name": "JOB_NAME", "values": [run]}]
        for queue in own:
            for job in self._pages("list_jobs", "jobSummaryList", jobQueue=queue, filters=named):
                parts = [job]
                if "arrayProperties" in job:
                    parts = self._pages("list_jobs", "jobSummaryList", arrayJobId=job["jobId"], jobStatus="RUNNING")
                if running := [part["jobId"] for part in parts if part["status"] == "RUNNING"]:
                    return dict(self._batch.describe_jobs(jobs=running[:1])["jobs"][0])
        return None

    def _pages(self, operation: str, items: str, **which: Any) -> list[dict[str, Any]]:
        return [item for page in self._batch.get_paginator(operation).paginate(**which) for item in page[items]]

    def ask(self, environment: str, vcpus: int) -> None:
        """Ask for instances with so many vCPUs in all."""
        self._batch.update_compute_environment(computeEnvironment=environment, computeResources={"desiredvCpus": vcpus})

    def tag(self, instance_id: str) -> None:
        """Note on an instance that another one was asked for."""
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        self._ec2.create_tags(Resources=[instance_id], Tags=[{"Key": REPLACED_TAG, "Value": now}])


def handler(event: dict[str, Any], _context: object) -> None:
    """Lambda's entry; `event` is an 'EC2 Spot Instance Interruption Warning'."""
    rules = Rules.from_environment()
    account = Account(rules.stage)
    instance = account.instance(event["detail"]["instance-id"])
    if instance is None:  # the account's other instances are warned as well
        return
    tags = {tag["Key"]: tag["Value"] for tag in instance["Tags"]}
    environment = account.environment(tags.get("Name", ""))
    if REPLACED_TAG in tags or environment is None:
        return
    run, vcpus = tags.get(RUN_TAG), rules.vcpus[instance["InstanceType"]]
    job = account.running_job(run, environment["computeEnvironmentArn"]) if run else None
    why = why_not(job, environment, vcpus, rules)
    if why is None:
        # In this order: at worst nothing is asked for, and Batch starts an instance when the job waits again.
        account.tag(instance["InstanceId"])
        account.ask(environment["computeEnvironmentName"], desired_vcpus(environment) + vcpus)
    print(
        json.dumps({"instance": instance["InstanceId"], "run": run, "asked_for_vcpus": 0 if why else vcpus, "why": why})
    )
