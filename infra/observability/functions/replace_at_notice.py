"""Asks for another instance when EC2 says that it takes a Spot instance away, two minutes before it does.

EventBridge calls it with EC2's warning. Batch itself starts another instance once the job waits again. Until that has
booted no step is made, and the other nodes of a job stand idle. Here it begins to boot while the old one still trains:
the compute environment is asked for as many vCPUs more as one instance has. Batch changes that number as its queues
ask for it, which is why the user guide ("Perform scaling updates") advises against setting it.

Nothing is asked for where the run has no job that Batch would start again. Which instance a job of several is on is not
looked at, so an idle one of a sweep is replaced as well; and of two that are taken at the same moment maybe one only.
"""

import json
import os
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from infra.observability.functions.watch_instances import RUN_TAG, environments_of

REPLACED_TAG = "trainyard:replaced"
"""Tag of an instance in whose place another one was asked for; its value is the time. Events may come twice."""

_TRIES = 3
"""Batch refuses a number that is below the present one, which may have grown since it was read."""


def why_not(jobs: Sequence[Mapping[str, Any]], environment: Mapping[str, Any], vcpus: int) -> str | None:
    """Return why no other instance, of so many vCPUs, is to be asked for; None: one is.

    `jobs`: those of the run that run now, and `environment`: their compute environment, as Batch describes them.
    """
    if not jobs:
        return "no job of a run is on it"
    if all(job.get("isTerminated") or job.get("isCancelled") for job in jobs):
        return "the job is being ended"
    if all(len(job.get("attempts", [])) + 1 >= job["retryStrategy"]["attempts"] for job in jobs):
        return "the job's attempts are spent"
    if environment["state"] != "ENABLED" or environment["status"] != "VALID":
        return "its compute environment is disabled, or being changed"
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
        """Return an instance as EC2 describes it; None: it is none of the stage's, or has gone by now."""
        filters = [
            {"Name": "instance-id", "Values": [instance_id]},
            {"Name": "instance-state-name", "Values": ["running"]},
            {"Name": "tag:trainyard:stage", "Values": [self._stage]},
        ]
        found = self._ec2.describe_instances(Filters=filters)["Reservations"]
        return dict(found[0]["Instances"][0]) if found else None

    def environment(self, name: str) -> dict[str, Any] | None:
        """Return the compute environment whose instances have this name."""
        return environments_of(self._batch, self._stage).get(name)

    def running_jobs(self, run: str, environment: str) -> list[dict[str, Any]]:
        """Return what of a run runs in the queues of a compute environment, whose ARN is given.

        Of an array these are its children, a hundred at most.
        """
        running = []
        named = [{"name": "JOB_NAME", "values": [run]}]
        for queue in self._pages("describe_job_queues", "jobQueues"):
            if environment not in [place["computeEnvironment"] for place in queue["computeEnvironmentOrder"]]:
                continue
            for job in self._pages("list_jobs", "jobSummaryList", jobQueue=queue["jobQueueArn"], filters=named):
                parts = [job]
                if "arrayProperties" in job:
                    parts = self._pages("list_jobs", "jobSummaryList", arrayJobId=job["jobId"], jobStatus="RUNNING")
                running += [part["jobId"] for part in parts if part["status"] == "RUNNING"]
        return list(self._batch.describe_jobs(jobs=running[:100])["jobs"]) if running else []

    def _pages(self, operation: str, items: str, **which: Any) -> list[dict[str, Any]]:
        return [item for page in self._batch.get_paginator(operation).paginate(**which) for item in page[items]]

    def ask(self, environment: Mapping[str, Any], vcpus: int) -> str | None:
        """Ask a compute environment for so many vCPUs more. Return why Batch refuses; None: it does not."""
        resources = {"desiredvCpus": desired_vcpus(environment) + vcpus}
        try:
            self._batch.update_compute_environment(
                computeEnvironment=environment["computeEnvironmentName"], computeResources=resources
            )
        except self._batch.exceptions.ClientException as error:
            return str(error)
        return None

    def tag(self, instance_id: str) -> None:
        """Note on an instance that another one was asked for."""
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        self._ec2.create_tags(Resources=[instance_id], Tags=[{"Key": REPLACED_TAG, "Value": now}])


def replace(account: Account, instance_id: str, vcpus_of: Mapping[str, int]) -> dict[str, Any] | None:
    """Ask for another instance in place of one. Return what was done; None: it is not for this to do.

    `vcpus_of`: those of an instance, by the types for which this is done.
    """
    instance = account.instance(instance_id)
    if instance is None or instance["InstanceType"] not in vcpus_of:  # the account's others are warned as well
        return None
    tags = {tag["Key"]: tag["Value"] for tag in instance["Tags"]}
    if REPLACED_TAG in tags:
        return None
    run, vcpus = tags.get(RUN_TAG), vcpus_of[instance["InstanceType"]]
    why: str | None = None
    for _ in range(_TRIES):
        environment = account.environment(tags.get("Name", ""))
        if environment is None:
            return None
        jobs = account.running_jobs(run, environment["computeEnvironmentArn"]) if run else []
        if why := why_not(jobs, environment, vcpus):
            break
        # First: at worst nothing is asked for, and Batch starts an instance when the job waits again.
        account.tag(instance_id)
        if not (why := account.ask(environment, vcpus)):
            break
    return {"instance": instance_id, "run": run, "asked_for_vcpus": 0 if why else vcpus, "why": why}


def handler(event: dict[str, Any], _context: object) -> None:
    """Lambda's entry; `event` is an 'EC2 Spot Instance Interruption Warning'."""
    done = replace(Account(os.environ["STAGE"]), event["detail"]["instance-id"], json.loads(os.environ["VCPUS"]))
    if done:
        print(json.dumps(done))
