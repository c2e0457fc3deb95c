"""Calls to Batch for tests, and waiting for their effects."""

import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest

from tests.support.running_emulator import Emulator
from tests.support.waiting import pause

STOP_TIMEOUT_SECONDS = 1
"""Stop timeout of the server in the fixture `batch`."""
ENDED = ("SUCCEEDED", "FAILED")

FoundT = TypeVar("FoundT")


@dataclass(frozen=True)
class Batch:
    """Creates queues, job definitions and jobs for a test."""

    aws: Emulator
    client: Any
    vpc: str
    subnet: str
    security_group: str
    instance_profile: str

    def environment(self, *, max_vcpus: int = 64, kind: str = "EC2", subnet: str = "", **more: Any) -> str:
        """Create a compute environment; return its name."""
        name = f"environment-{uuid.uuid4().hex[:8]}"
        self.client.create_compute_environment(
            computeEnvironmentName=name,
            type="MANAGED",
            computeResources={
                "type": kind,
                "minvCpus": 0,
                "maxvCpus": max_vcpus,
                "instanceTypes": ["dl1.24xlarge"],
                "subnets": [subnet or self.subnet],
                "securityGroupIds": [self.security_group],
                "instanceRole": self.instance_profile,
            },
            **more,
        )
        return name

    def queue(self, *environments: str, priority: int = 1, **more: Any) -> str:
        """Create a queue, with a new environment if none is given, and return its name."""
        name = f"queue-{uuid.uuid4().hex[:8]}"
        order = [
            {"order": place, "computeEnvironment": environment}
            for place, environment in enumerate(environments or (self.environment(),))
        ]
        self.client.create_job_queue(
            jobQueueName=name, state="ENABLED", priority=priority, computeEnvironmentOrder=order, **more
        )
        return name

    def definition(self, *command: str, vcpus: int = 1, container: Mapping[str, Any] | None = None, **more: Any) -> str:
        """Register a definition for one node; return its name."""
        tasks = ecs_properties(*command, vcpus=vcpus, **(container or {}))
        return self._register(type="container", ecsProperties=tasks, **more)

    def multinode_definition(self, command: str, *, nodes: int = 2, **more: Any) -> str:
        """Register a definition whose nodes run the same shell command, with one vCPU each; return its name."""
        ranges = [{"targetNodes": "0:", "ecsProperties": ecs_properties("sh", "-c", command)}]
        properties = {"numNodes": nodes, "mainNode": 0, "nodeRangeProperties": ranges}
        return self._register(type="multinode", nodeProperties=properties, **more)

    def _register(self, **request: Any) -> str:
        name = f"definition-{uuid.uuid4().hex[:8]}"
        self.client.register_job_definition(jobDefinitionName=name, **request)
        return name

    def submit(self, definition: str, queue: str, **more: Any) -> str:
        """Submit a job; return its id."""
        job_id: str = self.client.submit_job(
            jobName=f"job-{uuid.uuid4().hex[:8]}", jobDefinition=definition, jobQueue=queue, **more
        )["jobId"]
        return job_id

    def run(self, *command: str, **more: Any) -> dict[str, Any]:
        """Submit a command to a new queue, and wait until the job ends."""
        return self.wait_for_end(self.submit(self.definition(*command), self.queue(), **more))

    def shell(self, script: str, **more: Any) -> dict[str, Any]:
        return self.run("sh", "-c", script, **more)

    def job(self, job_id: str) -> dict[str, Any]:
        (job,) = self.client.describe_jobs(jobs=[job_id])["jobs"]
        return dict(job)

    def wait_for_end(self, job_id: str) -> dict[str, Any]:
        return self.wait_for(job_id, *ENDED)

    def wait_for(self, job_id: str, *states: str) -> dict[str, Any]:
        """Wait until a job is in one of the states, and fail if it ends in another."""

        def look() -> dict[str, Any] | None:
            job = self.job(job_id)
            if job["status"] in ENDED and job["status"] not in states:
                pytest.fail(f"job {job_id} ended as {job['status']}: {job.get('statusReason')}")
            return job if job["status"] in states else None

        return until(look, f"job {job_id} is {' or '.join(states)}")

    def lines(self, stream: str, group: str = "/aws/batch/job") -> list[str]:
        """Return the current lines of a log stream."""
        events = self.aws.client("logs").get_log_events(
            logGroupName=group, logStreamName=stream, startFromHead=True, limit=10000
        )["events"]
        return [event["message"] for event in events]

    def output(self, job: Mapping[str, Any]) -> list[str]:
        """Return the output of an attempt, or of a job's last attempt."""
        return self.lines(container_of(job)["logStreamName"])

    def wait_for_line(self, job_id: str, line: str) -> dict[str, Any]:
        """Wait until a running job has written a line."""

        def look() -> dict[str, Any] | None:
            job = self.job(job_id)
            return job if "logStreamName" in container_of(job) and line in self.output(job) else None

        return until(look, f"job {job_id} writes {line!r}")


def container_of(shown: Mapping[str, Any]) -> dict[str, Any]:
    """Return the container of an attempt, or of a job's running or last attempt."""
    (task,) = shown.get("ecsProperties", shown)["taskProperties"]
    (container,) = task["containers"]
    return dict(container)


def ecs_properties(*command: str, vcpus: int = 1, **more: Any) -> dict[str, Any]:
    container = {
        "name": "main",
        "image": "stand-in",
        "command": list(command),
        "resourceRequirements": [{"type": "VCPU", "value": str(vcpus)}, {"type": "MEMORY", "value": "128"}],
        **more,
    }
    return {"taskProperties": [{"containers": [container]}]}


def overrides(**container: Any) -> dict[str, Any]:
    """Return ecsPropertiesOverride for the container."""
    if isinstance(container.get("environment"), dict):
        container["environment"] = [{"name": name, "value": text} for name, text in container["environment"].items()]
    return {"taskProperties": [{"containers": [{"name": "main", **container}]}]}


def until(look: Callable[[], FoundT | None], what: str, *, seconds: float = 60) -> FoundT:
    """Call `look` until it returns a value other than None, and return the value."""
    since = time.monotonic()
    while (found := look()) is None:
        if time.monotonic() > since + seconds:
            pytest.fail(f"timed out after {seconds} s: {what}")
        pause(since)
    return found


def prepare(aws: Emulator) -> Batch:
    """Create the network and instance profile that compute environments need."""
    ec2, iam = aws.client("ec2"), aws.client("iam")
    vpc = ec2.create_vpc(CidrBlock="10.0.0.0/16")["Vpc"]["VpcId"]
    place = {"CidrBlock": "10.0.0.0/24", "AvailabilityZone": "us-east-1a"}
    subnet = ec2.create_subnet(VpcId=vpc, **place)["Subnet"]["SubnetId"]
    group = ec2.create_security_group(GroupName="jobs", Description="jobs", VpcId=vpc)["GroupId"]
    profile = iam.create_instance_profile(InstanceProfileName="instances")["InstanceProfile"]["Arn"]
    return Batch(
        aws=aws, client=aws.client("batch"), vpc=vpc, subnet=subnet, security_group=group, instance_profile=profile
    )
