"""At EC2's notice another instance is asked for, where something would run on it."""

import json
from typing import Any

import pytest

from infra.observability.functions.replace_at_notice import REPLACED_TAG, Rules, handler, why_not
from jobs.contract.errors import INTERRUPTED_EXIT_CODE
from jobs.contract.retries import EXITED_REASON, RECLAIM_REASON
from jobs.contract.sweep import SWEEP_TAG
from tests.infra.observability.functions.conftest import STAGE_TAGS, World

RULES = Rules(
    stage="test",
    vcpus={"dl1.24xlarge": 96},
    reclaims_before_on_demand=3,
    reclaim_reason=RECLAIM_REASON,
    exited_reason=EXITED_REASON,
    interrupted_exit_code=INTERRUPTED_EXIT_CODE,
)
RECLAIMED = {"statusReason": f"{RECLAIM_REASON} (instance i-0123456789abcdef0) terminated."}
FAILED = {"statusReason": EXITED_REASON, "container": {"exitCode": 1}}
ENVIRONMENT = {"state": "ENABLED", "computeResources": {"desiredvCpus": 96, "maxvCpus": 192}}


def job(*attempts: dict[str, Any], allowed: int = 5, **more: Any) -> dict[str, Any]:
    return {"attempts": list(attempts), "retryStrategy": {"attempts": allowed}, **more}


@pytest.mark.parametrize(
    ("running", "environment", "why"),
    [
        (job(), ENVIRONMENT, None),
        (job(RECLAIMED), ENVIRONMENT, None),
        (job(FAILED, FAILED), ENVIRONMENT, None),
        (None, ENVIRONMENT, "no job of a run is on it"),
        (job(allowed=1), ENVIRONMENT, "the job's attempts are spent"),
        (job(FAILED, allowed=2), ENVIRONMENT, "the job's attempts are spent"),
        (job(RECLAIMED, RECLAIMED), ENVIRONMENT, "the job moves to On-Demand"),
        (job(RECLAIMED, RECLAIMED, tags={SWEEP_TAG: "sweep-1"}), ENVIRONMENT, None),
        (job(), {**ENVIRONMENT, "state": "DISABLED"}, "its compute environment is disabled"),
        (
            job(),
            {"state": "ENABLED", "computeResources": {"desiredvCpus": 97, "maxvCpus": 192}},
            "its compute environment may have no more instances",
        ),
    ],
)
def test_an_instance_is_replaced_where_its_job_runs_on_spot_again(
    running: dict[str, Any] | None, environment: dict[str, Any], why: str | None
) -> None:
    assert why_not(running, environment, 96, RULES) == why


def test_without_on_demand_instances_every_reclaim_is_followed_by_spot() -> None:
    rules = Rules(**{**vars(RULES), "reclaims_before_on_demand": None})
    assert why_not(job(RECLAIMED, RECLAIMED), ENVIRONMENT, 96, rules) is None


@pytest.fixture(autouse=True)
def _stage(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in {
        "STAGE": STAGE_TAGS["trainyard:stage"],
        "VCPUS": json.dumps({"dl1.24xlarge": 96}),
        "RECLAIMS_BEFORE_ON_DEMAND": "3",
        "RECLAIM_REASON": RECLAIM_REASON,
        "EXITED_REASON": EXITED_REASON,
        "INTERRUPTED_EXIT_CODE": str(INTERRUPTED_EXIT_CODE),
    }.items():
        monkeypatch.setenv(variable, value)


class Instances:
    """Instances as the Spot environment of a World would start them, and what it has been asked for."""

    def __init__(self, world: World) -> None:
        self._ec2, self._batch = world.aws.client("ec2"), world.batch
        self.name = world.spot.rpartition("/")[2]
        self._batch.update_compute_environment(
            computeEnvironment=self.name, computeResources={"desiredvCpus": 96, "maxvCpus": 288}
        )

    def start(self, **tags: str) -> str:
        image = self._ec2.describe_images(Owners=["amazon"])["Images"][0]["ImageId"]
        named = {"Name": self.name, **STAGE_TAGS, **{f"trainyard:{key}": value for key, value in tags.items()}}
        specification = {"ResourceType": "instance", "Tags": [{"Key": k, "Value": v} for k, v in named.items()]}
        [instance] = self._ec2.run_instances(
            ImageId=image, MinCount=1, MaxCount=1, InstanceType="dl1.24xlarge", TagSpecifications=[specification]
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
    for instance in (idle, stranger, *(instances.start(run=one["jobName"]) for one in (ended, elsewhere, last))):
        instances.warn(instance)
        assert REPLACED_TAG not in instances.tags_of(instance)
    assert instances.desired_vcpus == 96
    said = [json.loads(line)["why"] for line in capsys.readouterr().out.splitlines()]
    assert said == [*["no job of a run is on it"] * 3, "the job's attempts are spent"]
