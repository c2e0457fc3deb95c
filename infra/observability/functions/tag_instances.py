"""Tag the instances of a running job with its team and run, so that AWS's bill can be split by team.

EventBridge calls this when a job of the stage starts to run. Batch tags instances per compute environment, which teams
may share, but a job has its node to itself, so its team pays for the node. The tags appear in the bill once
`trainyard:team` and `trainyard:run` are activated as cost allocation tags. The next job on an instance overwrites them.
"""

import json
from collections.abc import Iterable
from typing import Any

from infra.observability.functions.batch_jobs import describe

TAGS = ("trainyard:team", "trainyard:run")


def container_instances(jobs: Iterable[dict[str, Any]]) -> set[str]:
    """Return the ARNs of the ECS container instances of jobs, or of a job's nodes, as described by DescribeJobs."""
    found = set()
    for job in jobs:
        parts = [job.get("container", {}), *job.get("ecsProperties", {}).get("taskProperties", [])]
        found |= {part["containerInstanceArn"] for part in parts if part.get("containerInstanceArn")}
    return found


def by_cluster(arns: Iterable[str]) -> dict[str, list[str]]:
    """Group ARNs by the cluster in them, because ECS describes instances per cluster."""
    clusters: dict[str, list[str]] = {}
    for arn in sorted(arns):
        clusters.setdefault(arn.split("/")[1], []).append(arn)
    return clusters


class Tagger:
    """The AWS calls that find and tag a job's instances."""

    def __init__(self) -> None:
        import boto3  # noqa: PLC0415 - the functions above are used and tested without it

        self._batch: Any = boto3.client("batch")
        self._ecs: Any = boto3.client("ecs")
        self._ec2: Any = boto3.client("ec2")

    def parts(self, job_id: str) -> list[dict[str, Any]]:
        """Return the job, followed by its nodes if it is a multi-node job."""
        jobs = describe(self._batch, [job_id])
        nodes = [
            f"{job_id}#{index}" for job in jobs for index in range(job.get("nodeProperties", {}).get("numNodes", 0))
        ]
        return [*jobs, *describe(self._batch, nodes)]

    def instances(self, arns: Iterable[str]) -> list[str]:
        """Return the EC2 ids of container instances, without those that have left their cluster."""
        return [
            instance["ec2InstanceId"]
            for cluster, members in by_cluster(arns).items()
            for start in range(0, len(members), 100)
            for instance in self._ecs.describe_container_instances(
                cluster=cluster, containerInstances=members[start : start + 100]
            )["containerInstances"]
        ]

    def tag(self, instances: list[str], tags: dict[str, str]) -> None:
        self._ec2.create_tags(Resources=instances, Tags=[{"Key": key, "Value": value} for key, value in tags.items()])


def handler(event: dict[str, Any], _context: object) -> None:
    """Handle a 'Batch Job State Change' event to RUNNING."""
    tagger = Tagger()
    jobs = tagger.parts(event["detail"]["jobId"])
    if not jobs:
        return
    # A child of an array job has its parent's tags.
    parent = tagger.parts(jobs[0]["jobId"].partition(":")[0])[:1] if ":" in jobs[0]["jobId"] else jobs[:1]
    tags = {key: value for job in parent for key, value in job.get("tags", {}).items() if key in TAGS}
    instances = tagger.instances(container_instances(jobs))
    if instances and tags:
        tagger.tag(instances, tags)
    print(json.dumps({"job": jobs[0]["jobId"], "instances": instances, "tags": tags}))
