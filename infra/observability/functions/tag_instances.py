"""Tags the instances that run a job with its team and run, so that AWS's bill can be split by team.

EventBridge calls it when a job of the stage starts to run. Batch tags instances by compute environment, which teams
share, but a job owns its node: whose job runs there pays for it. The tags count in the bill once `trainyard:team` and
`trainyard:run` are activated as cost allocation tags; a next job on the same instance overwrites them.
"""

import json
from collections.abc import Iterable
from typing import Any

from infra.observability.functions.batch_jobs import describe

TAGS = ("trainyard:team", "trainyard:run")


def container_instances(jobs: Iterable[dict[str, Any]]) -> set[str]:
    """Return the ARNs of the ECS container instances under jobs, or nodes of a job, as DescribeJobs shows them."""
    found = set()
    for job in jobs:
        shown = [job.get("container", {}), *job.get("ecsProperties", {}).get("taskProperties", [])]
        found |= {place["containerInstanceArn"] for place in shown if place.get("containerInstanceArn")}
    return found


def by_cluster(arns: Iterable[str]) -> dict[str, list[str]]:
    """Group ARNs by the cluster that they name, since ECS is asked cluster by cluster."""
    clusters: dict[str, list[str]] = {}
    for arn in sorted(arns):
        clusters.setdefault(arn.split("/")[1], []).append(arn)
    return clusters


class Tagger:
    """The calls to AWS that lead from a job to its instances."""

    def __init__(self) -> None:
        import boto3  # noqa: PLC0415 - what is above is used and tested without it

        self._batch: Any = boto3.client("batch")
        self._ecs: Any = boto3.client("ecs")
        self._ec2: Any = boto3.client("ec2")

    def parts(self, job_id: str) -> list[dict[str, Any]]:
        """Return the job, and the nodes of one that has several."""
        jobs = describe(self._batch, [job_id])
        nodes = [
            f"{job_id}#{index}" for job in jobs for index in range(job.get("nodeProperties", {}).get("numNodes", 0))
        ]
        return [*jobs, *describe(self._batch, nodes)]

    def instances(self, arns: Iterable[str]) -> list[str]:
        """Return EC2's ids of container instances; those that have left their cluster by now are left out."""
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
    """Lambda's entry; `event` is a 'Batch Job State Change' to RUNNING."""
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
