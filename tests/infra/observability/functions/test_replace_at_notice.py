"""At EC2's notice another instance is asked for, where something would run on it."""

import json
from typing import Any

import pytest

from infra.observability.functions.replace_at_notice import REPLACED_TAG, Account, handler, replace, why_not
from tests.infra.observability.functions.conftest import STAGE_TAGS, World

ENVIRONMENT = {"state": "ENABLED", "status": "VALID", "computeResources": {"desiredvCpus": 96, "maxvCpus": 192}}
FULL = {**ENVIRONMENT, "computeResources": {"desiredvCpus": 97, "maxvCpus": 192}}
FAILED = {"statusReason": "Essential container in task exited"}


def job(*attempts: dict[str, Any], allowed: int = 5, **more: Any) -> dict[str, Any]:
    return {"attempts": list(attempts), "retryStrategy": {"attempts": allowed}, **more}


@pytest.mark.parametrize(
    ("running", "environment", "why"),
    [
        ([job()], ENVIRONMENT, None),
        ([job(FAILED, FAILED)], ENVIRONMENT, None),
        ([], ENVIRONMENT, "no job of a run is on it"),
        ([job(isTerminated=True)], ENVIRONMENT, "the job is being ended"),
        ([job(allowed=1)], ENVIRONMENT, "the job's attempts are spent"),
        ([job(FAILED, allowed=2)], ENVIRONMENT, "the job's attempts are spent"),
        ([job(FAILED, allowed=2), job(allowed=2)], ENVIRONMENT, None),
        ([job()], {**ENVIRONMENT, "state": "DISABLED"}, "its compute environment is disabled, or being changed"),
        ([job()], {**ENVIRONMENT, "status": "UPDATING"}, "its compute environment is disabled, or being changed"),
        ([job()], FULL, "its compute environment may have no more instances"),
    ],
)
def test_another_instance_is_asked_for_where_the_job_starts_again(
    running: list[dict[str, Any]], environment: dict[str, Any], why: str | None
) -> None:
    assert why_not(running, environment, 96) == why


@pytest.fixture(autouse=True)
def _stage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAGE", STAGE_TAGS["trainyard:stage"])
    monkeypatch.setenv("VCPUS", json.dumps({"dl1.24xlarge": 96}))


class Instances:
    """Instances as the Spot environment of a World would start them, and what it has been asked for."""

    def __init__(self, world: World) -> None:
        self._ec2, self._batch = world.aws.client("ec2"), world.batch
        self.name = world.spot.rpartition("/")[2]
        self.allow(desiredvCpus=96, maxvCpus=96 * 3)

    def allow(self, **vcpus: int) -> None:
        self._batch.update_compute_environment(computeEnvironment=self.name, computeResources=vcpus)

    def start(self, *, instance_type: str = "dl1.24xlarge", **tags: str) -> str:
        image = self._ec2.describe_images(Owners=["amazon"])["Images"][0]["ImageId"]
        named = {"Name": self.name, **STAGE_TAGS, **{f"trainyard:{key}": value for key, value in tags.items()}}
        specification = {"ResourceType": "instance", "Tags": [{"Key": k, "Value": v} for k, v in named.items()]}
        [instance] = self._ec2.run_instances(
            ImageId=image, MinCount=1, MaxCount=1, InstanceType=instance_type, TagSpecifications=[specification]
        )["Instances"]
        return str(instance["InstanceId"])

    def warn(self, instance: str) -> None:
        """Call the function as EventBridge does (EC2 user guide, "Spot Instance interruption notices")."""
        handler(
            {
                "source": "aws.ec2",
                "detail-type": "EC2 Spot Instance Interruption Warning",
                "detail": {"instance-id": instance, "instance-action": "terminate"},
            },
            None,
        )

    def end(self, instance: str) -> None:
        self._ec2.terminate_instances(InstanceIds=[instance])

    def tags_of(self, instance: str) -> set[str]:
        found = self._ec2.describe_tags(Filters=[{"Name": "resource-id", "Values": [instance]}])["Tags"]
        return {tag["Key"] for tag in found}

    @property
    def desired_vcpus(self) -> int:
        [environment] = self._batch.describe_compute_environments(computeEnvironments=[self.name])[
            "computeEnvironments"
        ]
        return int(environment["computeResources"]["desiredvCpus"])


@pytest.fixture
def instances(world: World) -> Instances:
    return Instances(world)


def test_one_more_instance_is_asked_for_once(
    world: World, instances: Instances, capsys: pytest.CaptureFixture[str]
) -> None:
    running = world.reached(world.submit("sleep", "600"), "RUNNING")
    taken = instances.start(run=running["jobName"])
    instances.warn(taken)
    assert instances.desired_vcpus == 192
    assert REPLACED_TAG in instances.tags_of(taken)
    assert json.loads(capsys.readouterr().out) == {
        "instance": taken,
        "run": running["jobName"],
        "asked_for_vcpus": 96,
        "why": None,
    }
    instances.warn(taken)  # EventBridge delivers at least once
    assert instances.desired_vcpus == 192
    # A second node that goes in the same minute
    instances.warn(instances.start(run=running["jobName"]))
    assert instances.desired_vcpus == 288
    instances.warn(instances.start(run=running["jobName"]))
    assert instances.desired_vcpus == 288, "all that the environment may have"
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["asked_for_vcpus"] == 0


def test_where_the_number_has_grown_since_it_was_read_batch_is_asked_again(world: World, instances: Instances) -> None:
    running = world.reached(world.submit("sleep", "600"), "RUNNING")

    class Late(Account):
        """Reads the compute environment, and then Batch starts instances for other jobs."""

        def running_jobs(self, run: str, environment: str) -> list[dict[str, Any]]:
            if instances.desired_vcpus == 96:
                instances.allow(desiredvCpus=96 * 3, maxvCpus=96 * 5)
            return super().running_jobs(run, environment)

    done = replace(Late("test"), instances.start(run=running["jobName"]), {"dl1.24xlarge": 96})
    assert done is not None
    assert (done["asked_for_vcpus"], instances.desired_vcpus) == (96, 96 * 4)


def test_nodes_that_batch_starts_one_by_one_are_replaced_too(world: World, instances: Instances) -> None:
    parent = world.submit("sleep", "600", arrayProperties={"size": 2})
    name = world.reached(f"{parent}:1", "RUNNING")["jobName"]
    instances.warn(instances.start(run=name))
    assert instances.desired_vcpus == 192


def test_instances_without_a_job_and_those_of_others_are_not_replaced(
    world: World, instances: Instances, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = world.reached(world.submit("true"), "SUCCEEDED")
    elsewhere = world.reached(world.submit("sleep", "600", queue=world.on_demand), "RUNNING")
    last = world.reached(world.submit("sleep", "600", retryStrategy={"attempts": 1}), "RUNNING")
    idle = instances.start()
    stranger = instances.start(run=last["jobName"], stage="other")
    cpus = instances.start(run=last["jobName"], instance_type="m5.large")
    gone = instances.start(run=last["jobName"])
    instances.end(gone)
    for instance in (
        idle,
        stranger,
        cpus,
        gone,
        *(instances.start(run=one["jobName"]) for one in (ended, elsewhere, last)),
    ):
        instances.warn(instance)
        assert REPLACED_TAG not in instances.tags_of(instance)
    assert instances.desired_vcpus == 96
    said = [json.loads(line)["why"] for line in capsys.readouterr().out.splitlines()]
    assert said == [*["no job of a run is on it"] * 3, "the job's attempts are spent"]
