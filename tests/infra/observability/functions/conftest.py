"""Handlers, called in this process as by Lambda, on the emulator with the tests' queues and jobs."""

import json
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import boto3
import pytest

from jobs.core.errors import INTERRUPTED_EXIT_CODE
from jobs.core.queues import SPOT_WAITED_TOO_LONG
from jobs.core.retries import EXITED_REASON, RECLAIM_REASON, RETRY_RULES
from jobs.core.stage import queue_parameter
from tests.support.running_emulator import Emulator, environment_of
from tests.support.waiting import wait_until

STAGE_TAGS = {"trainyard:project": "trainyard", "trainyard:stage": "test"}
CONTAINER = {
    "name": "main",
    "image": "probe",
    "essential": True,
    "command": ["true"],
    "resourceRequirements": [{"type": "VCPU", "value": "96"}, {"type": "MEMORY", "value": "760000"}],
}


RECLAIMED = {"statusReason": "Host EC2 (instance i-0123456789abcdef0) terminated."}
EXITED = {"statusReason": EXITED_REASON, "taskProperties": [{"containers": [{"exitCode": INTERRUPTED_EXIT_CODE}]}]}
"""An attempt in DescribeJobs whose container exited before its instance ended."""
OWN_FAULT = {"statusReason": EXITED_REASON, "taskProperties": [{"containers": [{"exitCode": 1}]}]}
TIMED_OUT = {**EXITED, "statusReason": "Job attempt duration exceeded timeout"}

RECLAIM_ENVIRONMENT = {
    "RECLAIMS_BEFORE_ON_DEMAND": "2",
    "ON_DEMAND_NODES": "4",
    "RECLAIM_REASON": RECLAIM_REASON,
    "EXITED_REASON": EXITED_REASON,
    "INTERRUPTED_EXIT_CODE": str(INTERRUPTED_EXIT_CODE),
    "NO_CAPACITY_REASON": SPOT_WAITED_TOO_LONG,
}
"""Environment that the stack sets for functions that recognise reclaims; a job moves at its second reclaim."""


@dataclass(frozen=True)
class Inbox:
    """A queue with a subscription to a topic."""

    topic: str
    queue: str
    sqs: Any

    def read(self) -> list[str]:
        """Return the messages since the last call."""
        found: list[str] = []
        while messages := self.sqs.receive_message(QueueUrl=self.queue, MaxNumberOfMessages=10).get("Messages"):
            for message in messages:
                found.append(json.loads(message["Body"])["Message"])
                self.sqs.delete_message(QueueUrl=self.queue, ReceiptHandle=message["ReceiptHandle"])
        return found


@dataclass(frozen=True)
class World:
    """A team's two published queues, a bucket, and a job definition like the stacks'."""

    aws: Emulator
    spot: str
    on_demand: str
    bucket: str
    definition: str
    parameter_path: str

    @property
    def batch(self) -> Any:
        return self.aws.client("batch")

    def submit(self, *command: str, team: str = "research", **more: Any) -> str:
        """Submit a job named like a run's id. Return the job's id."""
        run_id = f"probe-20260131-120000-{uuid.uuid4().hex[:4]}"
        environment = [
            {"name": "TRAINYARD_RUN_URI", "value": f"s3://{self.bucket}/{team}/{run_id}/"},
            {"name": "TRAINYARD_ACCELERATOR", "value": "auto"},
        ]
        container = {"name": "main", "command": list(command), "environment": environment}
        request = {
            "jobName": run_id,
            "jobQueue": self.spot,
            "jobDefinition": self.definition,
            "shareIdentifier": team,
            "ecsPropertiesOverride": {"taskProperties": [{"containers": [container]}]},
            "retryStrategy": {"attempts": 5, "evaluateOnExit": [dict(rule) for rule in RETRY_RULES]},
            "timeout": {"attemptDurationSeconds": 600},
            "tags": {"trainyard:run": run_id, "trainyard:team": team, "trainyard:job": "probe"},
            "propagateTags": True,
        }
        job_id: str = self.batch.submit_job(**{**request, **more})["jobId"]
        return job_id

    def job(self, job_id: str) -> dict[str, Any]:
        (job,) = self.batch.describe_jobs(jobs=[job_id])["jobs"]
        return dict(job)

    def reached(self, job_id: str, *states: str) -> dict[str, Any]:
        return wait_until(lambda: self.job(job_id), lambda job: job["status"] in states)

    def named(self, name: str) -> list[dict[str, Any]]:
        """Return all jobs with this name in the On-Demand queue."""
        filters = [{"name": "JOB_NAME", "values": [name]}]
        return list(self.batch.list_jobs(jobQueue=self.on_demand, filters=filters)["jobSummaryList"])

    def reclaim(self, job_id: str) -> dict[str, Any]:
        """Reclaim a running job's instance. Return the job once it waits, runs again, or has ended."""
        before = len(self.reached(job_id, "RUNNING")["attempts"])
        self.aws.reclaim(job_id)
        return wait_until(lambda: self.job(job_id), lambda job: len(job["attempts"]) > before)

    def event(self, job_id: str, **detail: Any) -> dict[str, Any]:
        """Return a 'Batch Job State Change' event, as in the user guide, for the current state of the job."""
        return {
            "detail-type": "Batch Job State Change",
            "source": "aws.batch",
            "detail": {**self.job(job_id), **detail},
        }


@pytest.fixture(autouse=True)
def _endpoint(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment_of(emulator.endpoint).items():
        monkeypatch.setenv(name, value)
    for name in ("AWS_PROFILE", "AWS_REGION", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)  # it keeps the credentials from its creation


@pytest.fixture(scope="session")
def _network(emulator: Emulator) -> dict[str, Any]:
    iam, ec2 = emulator.client("iam"), emulator.client("ec2")
    name = f"functions-{uuid.uuid4().hex[:8]}"
    iam.create_role(RoleName=name, AssumeRolePolicyDocument="{}")
    profile = iam.create_instance_profile(InstanceProfileName=name)["InstanceProfile"]
    iam.add_role_to_instance_profile(InstanceProfileName=name, RoleName=name)
    subnet = ec2.describe_subnets()["Subnets"][0]
    [group, *_] = ec2.describe_security_groups(Filters=[{"Name": "vpc-id", "Values": [subnet["VpcId"]]}])[
        "SecurityGroups"
    ]
    return {
        "subnets": [subnet["SubnetId"]],
        "securityGroupIds": [group["GroupId"]],
        "instanceRole": profile["Arn"],
        "instanceTypes": ["dl1.24xlarge"],
        "minvCpus": 0,
        "maxvCpus": 960,
    }


@pytest.fixture
def world(emulator: Emulator, _network: dict[str, Any]) -> Iterator[World]:
    batch, unique = emulator.client("batch"), uuid.uuid4().hex[:8]
    policy = batch.create_scheduling_policy(name=f"shares-{unique}", fairsharePolicy={"shareDistribution": []})["arn"]
    queues = {}
    for name, kind in (("spot", "SPOT"), ("on-demand", "EC2")):
        environment = batch.create_compute_environment(
            computeEnvironmentName=f"{name}-{unique}",
            type="MANAGED",
            computeResources={"type": kind, **_network, "tags": {"Name": f"{name}-{unique}"}},
            tags=STAGE_TAGS,
        )["computeEnvironmentArn"]
        queues[name] = batch.create_job_queue(
            jobQueueName=f"{name}-{unique}",
            state="ENABLED",
            priority=1,
            schedulingPolicyArn=policy,
            computeEnvironmentOrder=[{"order": 1, "computeEnvironment": environment}],
            tags=STAGE_TAGS,
        )["jobQueueArn"]
        emulator.client("ssm").put_parameter(
            Name=f"/trainyard/{unique}/{queue_parameter(name, team='research')}", Value=queues[name], Type="String"
        )
    bucket = f"runs-{unique}"
    emulator.client("s3").create_bucket(Bucket=bucket)
    definition = batch.register_job_definition(
        jobDefinitionName=f"probe-{unique}",
        type="container",
        schedulingPriority=1,
        ecsProperties={"taskProperties": [{"containers": [CONTAINER]}]},
    )["jobDefinitionArn"]
    world = World(
        aws=emulator,
        spot=queues["spot"],
        on_demand=queues["on-demand"],
        bucket=bucket,
        definition=definition,
        parameter_path=f"/trainyard/{unique}/",
    )
    yield world
    left = [
        job["jobId"]
        for queue in queues.values()
        for state in ("SUBMITTED", "PENDING", "RUNNABLE", "STARTING", "RUNNING")
        for job in batch.list_jobs(jobQueue=queue, jobStatus=state)["jobSummaryList"]
    ]
    for job_id in left:
        batch.terminate_job(jobId=job_id, reason="the test is over")
    for job_id in left:
        world.reached(job_id, "FAILED", "SUCCEEDED")


@pytest.fixture
def inbox(emulator: Emulator) -> Inbox:
    sns, sqs, name = emulator.client("sns"), emulator.client("sqs"), f"inbox-{uuid.uuid4().hex[:8]}"
    topic = sns.create_topic(Name=name)["TopicArn"]
    queue = sqs.create_queue(QueueName=name)["QueueUrl"]
    arn = sqs.get_queue_attributes(QueueUrl=queue, AttributeNames=["QueueArn"])["Attributes"]["QueueArn"]
    sns.subscribe(TopicArn=topic, Protocol="sqs", Endpoint=arn)
    return Inbox(topic=topic, queue=queue, sqs=sqs)
