"""Who uses an instance is told by its tags, so that the bill can be split."""

import json
import uuid
from typing import Any

import pytest

from infra.observability.functions.tag_instances import Tagger, container_instances, handler
from tests.infra.observability.functions.conftest import World
from tests.support.embedded_aws import EmbeddedAws


def start_instance(aws: EmbeddedAws, cluster: str) -> tuple[str, str]:
    """Start an EC2 instance; return its id and the ARN of the container instance that it is in a cluster."""
    image = aws.client("ec2").describe_images(Owners=["amazon"])["Images"][0]["ImageId"]
    [instance] = aws.client("ec2").run_instances(ImageId=image, MinCount=1, MaxCount=1)["Instances"]
    document = {
        "instanceId": instance["InstanceId"],
        "region": "us-east-1",
        "accountId": "123456789012",
        "availabilityZone": "us-east-1a",
        "instanceType": "m5.large",
    }
    member = aws.client("ecs").register_container_instance(
        cluster=cluster, instanceIdentityDocument=json.dumps(document)
    )["containerInstance"]
    return instance["InstanceId"], member["containerInstanceArn"]


def tags_of(aws: EmbeddedAws, instance: str) -> dict[str, str]:
    found = aws.client("ec2").describe_tags(Filters=[{"Name": "resource-id", "Values": [instance]}])["Tags"]
    return {tag["Key"]: tag["Value"] for tag in found}


def test_instances_of_several_clusters_are_found_and_tagged(embedded_aws: EmbeddedAws) -> None:
    names = [f"cluster-{uuid.uuid4().hex[:8]}" for _ in range(2)]
    for name in names:
        embedded_aws.client("ecs").create_cluster(clusterName=name)
    started = [start_instance(embedded_aws, name) for name in (*names, names[0])]
    gone = started[0][1].rsplit("/", 1)[0] + "/" + uuid.uuid4().hex
    tagger = Tagger()
    instances = tagger.instances([*(member for _, member in started), gone])
    assert sorted(instances) == sorted(instance for instance, _ in started)
    tagger.tag(instances, {"trainyard:team": "research", "trainyard:run": "tiny-20260131-120000-0000"})
    for instance, _ in started:
        assert tags_of(embedded_aws, instance) == {
            "trainyard:team": "research",
            "trainyard:run": "tiny-20260131-120000-0000",
        }


def test_a_node_that_was_started_by_itself_has_the_tags_of_its_job(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    parent_id = world.submit("sleep", "600", arrayProperties={"size": 2})
    world.reached(f"{parent_id}:1", "RUNNING")
    handler(world.event(f"{parent_id}:1"), None)
    line = json.loads(capsys.readouterr().out)
    assert (line["job"], line["tags"]["trainyard:team"]) == (f"{parent_id}:1", "research")


def test_of_a_job_of_several_nodes_each_node_is_looked_at(world: World) -> None:
    container = {
        "name": "main",
        "image": "probe",
        "command": ["sleep", "600"],
        "resourceRequirements": [{"type": "VCPU", "value": "96"}, {"type": "MEMORY", "value": "760000"}],
    }
    definition = world.batch.register_job_definition(
        jobDefinitionName=f"nodes-{uuid.uuid4().hex[:8]}",
        type="multinode",
        nodeProperties={
            "numNodes": 3,
            "mainNode": 0,
            "nodeRangeProperties": [
                {
                    "targetNodes": "0:",
                    "ecsProperties": {"taskProperties": [{"containers": [container]}]},
                }
            ],
        },
    )["jobDefinitionArn"]
    job_id = world.batch.submit_job(
        jobName="nodes", jobQueue=world.on_demand, jobDefinition=definition, shareIdentifier="research"
    )["jobId"]
    world.reached(job_id, "RUNNING")
    for index in range(3):
        world.reached(f"{job_id}#{index}", "RUNNING")
    assert len(container_instances(Tagger().parts(job_id))) == 3


@pytest.mark.parametrize(
    ("job", "found"),
    [
        ({}, set()),
        ({"container": {}}, set()),
        ({"container": {"containerInstanceArn": "a"}}, {"a"}),
        ({"container": {}, "ecsProperties": {"taskProperties": [{"containerInstanceArn": "b"}]}}, {"b"}),
    ],
)
def test_either_shape_of_a_job_is_read(job: dict[str, Any], found: set[str]) -> None:
    assert container_instances([job]) == found
