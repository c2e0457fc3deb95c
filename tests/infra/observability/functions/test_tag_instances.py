"""Instances are tagged with their job's team and run, so that the bill can be split."""

import json
import uuid
from typing import Any

import pytest

from infra.observability.functions.tag_instances import Tagger, container_instances, handler
from tests.infra.observability.functions.conftest import CONTAINER, World
from tests.support.running_emulator import Emulator


def start_instance(aws: Emulator, cluster: str) -> tuple[str, str]:
    """Start an EC2 instance in a cluster. Return its id and the ARN of its container instance."""
    image = aws.client("ec2").describe_images(Owners=["amazon"])["Images"][0]["ImageId"]
    [instance] = aws.client("ec2").run_instances(ImageId=image, MinCount=1, MaxCount=1)["Instances"]
    document = {"instanceId": instance["InstanceId"], "region": "us-east-1", "accountId": "123456789012"}
    document |= {"availabilityZone": "us-east-1a", "instanceType": "m5.large"}
    member = aws.client("ecs").register_container_instance(
        cluster=cluster, instanceIdentityDocument=json.dumps(document)
    )["containerInstance"]
    return instance["InstanceId"], member["containerInstanceArn"]


def test_instances_of_several_clusters_are_found_and_tagged(emulator: Emulator) -> None:
    names = [f"cluster-{uuid.uuid4().hex[:8]}" for _ in range(2)]
    for name in names:
        emulator.client("ecs").create_cluster(clusterName=name)
    started = [start_instance(emulator, name) for name in (*names, names[0])]
    gone = started[0][1].rsplit("/", 1)[0] + "/" + uuid.uuid4().hex
    tagger, tags = Tagger(), {"trainyard:team": "research", "trainyard:run": "tiny-20260131-120000-0000"}
    instances = tagger.instances([*(member for _, member in started), gone])
    assert sorted(instances) == sorted(instance for instance, _ in started)
    tagger.tag(instances, tags)
    found = emulator.client("ec2").describe_tags(Filters=[{"Name": "resource-id", "Values": instances}])["Tags"]
    assert sorted((tag["ResourceId"], tag["Key"], tag["Value"]) for tag in found) == sorted(
        (instance, key, value) for instance in instances for key, value in tags.items()
    )


def test_nodes_of_both_kinds_of_multinode_jobs_are_tagged(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    parent_id = world.submit("sleep", "600", arrayProperties={"size": 2})
    world.reached(f"{parent_id}:1", "RUNNING")
    handler(world.event(f"{parent_id}:1"), None)
    line = json.loads(capsys.readouterr().out)
    assert (line["job"], line["tags"]["trainyard:team"]) == (f"{parent_id}:1", "research")
    container = {**CONTAINER, "command": ["sleep", "600"]}
    all_nodes = {"targetNodes": "0:", "ecsProperties": {"taskProperties": [{"containers": [container]}]}}
    definition = world.batch.register_job_definition(
        jobDefinitionName=f"nodes-{uuid.uuid4().hex[:8]}",
        type="multinode",
        nodeProperties={"numNodes": 3, "mainNode": 0, "nodeRangeProperties": [all_nodes]},
    )["jobDefinitionArn"]
    job_id = world.batch.submit_job(
        jobName="nodes", jobQueue=world.on_demand, jobDefinition=definition, shareIdentifier="research"
    )["jobId"]
    for node in (job_id, *(f"{job_id}#{index}" for index in range(3))):
        world.reached(node, "RUNNING")
    assert len(container_instances(Tagger().parts(job_id))) == 3


@pytest.mark.parametrize(
    ("job", "expected"),
    [
        ({}, set()),
        ({"container": {"containerInstanceArn": "a"}}, {"a"}),
        ({"container": {}, "ecsProperties": {"taskProperties": [{"containerInstanceArn": "b"}]}}, {"b"}),
    ],
)
def test_both_shapes_of_a_job_are_read(job: dict[str, Any], expected: set[str]) -> None:
    assert container_instances([job]) == expected
