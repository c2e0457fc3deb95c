"""Instances that never join are recognised from EC2's descriptions, and ended on the emulator."""

import json
import uuid
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from infra.observability.functions import watch_instances
from infra.observability.functions.watch_instances import (
    JOINED_TAG,
    NEVER_JOINED,
    Instance,
    Rules,
    explain,
    handler,
    metrics,
    never_joined,
)
from jobs.core import stage as core_stage
from tests.infra.observability.functions.conftest import Inbox, World
from tests.support.running_emulator import Emulator

NOW = datetime(2026, 11, 21, 12, tzinfo=timezone.utc)
RULES = Rules(
    stage="test",
    topic="topic",
    namespace="trainyard/test",
    path="/trainyard/test/",
    log_group="boot-logs",
    prices={"dl1.24xlarge": {"spot": 4.0, "on-demand": 13.0}},
)
BOOTING = Instance(
    id="i-1",
    type="dl1.24xlarge",
    capacity="spot",
    environment="trainyard-test-dl1-spot",
    state="running",
    launched=NOW - timedelta(minutes=5),
    joined=False,
)


def aged(minutes: float, **changes: Any) -> Instance:
    return replace(BOOTING, launched=NOW - timedelta(minutes=minutes), **changes)


def gone(minutes: float, code: str = "Client.InstanceInitiatedShutdown") -> Instance:
    return aged(minutes, id=f"i-{minutes:g}", state="terminated", ended_by=code)


def culprits(*instances: Instance, since: datetime | None = None) -> list[str]:
    return [instance.id for instance in never_joined(instances, NOW, since)]


def test_an_overdue_instance_is_found_but_a_booting_one_is_not() -> None:
    assert culprits(aged(29)) == []
    assert culprits(aged(30)) == ["i-1"]
    assert culprits(aged(300, joined=True)) == []
    # A multi-node job's instance that waits for the others has joined
    assert culprits(aged(40, id="i-late"), aged(50, joined=True)) == ["i-late"]


def test_several_failed_boots_in_a_row_are_found() -> None:
    failed = [gone(25), gone(15), gone(5)]
    assert culprits(*failed[:2], BOOTING) == []
    assert culprits(*failed) == ["i-5", "i-15", "i-25"]
    # Boots before one that worked do not count
    assert culprits(*failed, aged(10, joined=True)) == []
    # Spot reclaims are no boot failures, and earlier findings do not count again
    assert culprits(*failed[:2], gone(5, "Server.SpotInstanceTermination")) == []
    assert culprits(*failed, since=NOW - timedelta(minutes=10)) == []


def test_the_reason_lists_instances_and_how_they_ended() -> None:
    assert explain("trainyard-test-dl1-spot", [aged(31)], RULES) == (
        "trainyard-test-dl1-spot started an instance of dl1.24xlarge that did not join its cluster within 30 minutes: "
        "i-1 (running); boot logs: streams i-1/ in log group boot-logs"
    )
    assert explain("x", [gone(5), gone(15)], RULES) == (
        "x started 2 instances of dl1.24xlarge that did not join its cluster before they ended: "
        "i-5 (terminated, Client.InstanceInitiatedShutdown), i-15 (terminated, Client.InstanceInitiatedShutdown); "
        "boot logs: streams i-5/ in log group boot-logs"
    )


def test_running_instances_are_counted_and_priced_even_when_idle() -> None:
    spot, on_demand = metrics([BOOTING, aged(90, joined=True), gone(5)], RULES)
    assert (spot["Instances"], spot["RunningNodes"], spot["SpendUsdPerHour"]) == ("dl1.24xlarge spot", 2, 8.0)
    assert (on_demand["RunningNodes"], on_demand["SpendUsdPerHour"]) == (0, 0.0)
    (directive,) = spot["_aws"]["CloudWatchMetrics"]
    assert (directive["Namespace"], directive["Dimensions"]) == ("trainyard/test", [["Instances"]])


def test_the_cost_of_a_limited_team_and_stage_is_added_up() -> None:
    running = [aged(9, team="vision"), aged(9, team="speech"), aged(9, team="vision", type="p9.large"), gone(5)]
    *_, stage, vision, idle = metrics(running, replace(RULES, limited=(None, "vision", "audio")))
    assert (stage["Stage"], stage["SpendUsdPerHour"], "RunningNodes" in stage) == ("test", 8.0, False)
    assert (vision["Team"], vision["SpendUsdPerHour"]) == ("vision", 4.0)
    assert (idle["Team"], idle["SpendUsdPerHour"]) == ("audio", 0)
    assert stage["_aws"]["CloudWatchMetrics"][0]["Dimensions"] == [["Stage"]]


@pytest.fixture
def stage(emulator: Emulator, inbox: Inbox, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a new stage."""
    name = f"watch-{uuid.uuid4().hex[:8]}"
    for variable, value in {
        "STAGE": name,
        "TOPIC_ARN": inbox.topic,
        "METRIC_NAMESPACE": f"trainyard/{name}",
        "PARAMETER_PATH": f"/trainyard/{name}/",
        "LOG_GROUP": "boot-logs",
        "PRICES": json.dumps({"m5.large": {"on-demand": 2.0}}),
        "LIMITED": "[]",
    }.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setattr(watch_instances, "MINUTES", 0)  # every instance that has not joined is overdue
    return name


@pytest.fixture
def environments(emulator: Emulator, _network: dict[str, Any], stage: str) -> list[str]:
    """Two environments of the stage, like the compute stack's; their names are also their instances' Name tags."""
    names = [f"environment-{uuid.uuid4().hex[:8]}" for _ in range(2)]
    for name in names:
        resources = {**_network, "type": "EC2", "tags": {"Name": name, "trainyard:stage": stage}}
        emulator.client("batch").create_compute_environment(
            computeEnvironmentName=name, type="MANAGED", computeResources=resources, tags={"trainyard:stage": stage}
        )
    return names


def launched(aws: Emulator, **tags: str) -> str:
    ec2 = aws.client("ec2")
    image = ec2.describe_images(Owners=["amazon"])["Images"][0]["ImageId"]
    tag_list = [{"Key": key.replace("trainyard_", "trainyard:"), "Value": value} for key, value in tags.items()]
    specification = {"ResourceType": "instance", "Tags": tag_list}
    [instance] = ec2.run_instances(
        ImageId=image, MinCount=1, MaxCount=1, InstanceType="m5.large", TagSpecifications=[specification]
    )["Instances"]
    instance_id: str = instance["InstanceId"]
    return instance_id


def state_of(aws: Emulator, instance: str) -> str:
    [reservation] = aws.client("ec2").describe_instances(InstanceIds=[instance])["Reservations"]
    state: str = reservation["Instances"][0]["State"]["Name"]
    return state


def test_an_environment_whose_instances_never_join_is_disabled(
    emulator: Emulator,
    environments: list[str],
    stage: str,
    inbox: Inbox,
    capsys: pytest.CaptureFixture[str],
) -> None:
    aws = emulator
    healthy, failing = environments
    # GIVEN an instance that joins (ECS's event), one that does not, and one that is not the stage's
    member = launched(aws, Name=healthy, trainyard_stage=stage)
    joined = {"source": "aws.ecs", "detail": {"ec2InstanceId": member, "status": "ACTIVE"}}
    handler(joined, None)
    tags = aws.client("ec2").describe_tags(Filters=[{"Name": "resource-id", "Values": [member]}])["Tags"]
    assert JOINED_TAG in {tag["Key"] for tag in tags}
    stranger = launched(aws, Name=failing)
    never = launched(aws, Name=failing, trainyard_stage=stage)
    capsys.readouterr()

    # WHEN an instance of another stage joins, or a task starts on one that has joined, THEN nothing happens
    handler({"source": "aws.ecs", "detail": {"ec2InstanceId": stranger, "status": "ACTIVE"}}, None)
    handler(joined, None)
    assert (capsys.readouterr().out, inbox.read()) == ("", [])

    # WHEN the schedule calls the function
    handler({"source": "aws.events"}, None)

    # THEN the environment is disabled, the instance that never joined is terminated, and an alert has the reason
    described = aws.client("batch").describe_compute_environments(computeEnvironments=[healthy, failing])
    states = {item["computeEnvironmentName"]: item["state"] for item in described["computeEnvironments"]}
    assert states == {healthy: "ENABLED", failing: "DISABLED"}
    assert [state_of(aws, name) for name in (member, never, stranger)] == ["running", "terminated", "running"]
    [message] = inbox.read()

    assert f"{failing} started an instance of m5.large that did not join" in message
    assert f"within 0 minutes: {never}" in message
    assert f"aws logs tail boot-logs --since 1d --log-stream-name-prefix {never}/" in message
    assert f"update-compute-environment --compute-environment {failing} --state ENABLED" in message
    [line] = capsys.readouterr().out.splitlines()
    assert (json.loads(line)["RunningNodes"], json.loads(line)["SpendUsdPerHour"]) == (2, 4.0)
    name = f"/trainyard/{stage}/{NEVER_JOINED}{failing}"
    assert never in json.loads(aws.client("ssm").get_parameter(Name=name)["Parameter"]["Value"])["reason"]
    assert f"{core_stage.NEVER_JOINED}/" == NEVER_JOINED

    # AND it alerts only once, and deletes the record as soon as an instance joins again
    handler({"source": "aws.events"}, None)
    assert inbox.read() == []
    aws.client("batch").update_compute_environment(computeEnvironment=failing, state="ENABLED")
    again = launched(aws, Name=failing, trainyard_stage=stage)
    handler({"source": "aws.ecs", "detail": {"ec2InstanceId": again, "status": "ACTIVE"}}, None)
    with pytest.raises(aws.client("ssm").exceptions.ParameterNotFound):
        aws.client("ssm").get_parameter(Name=name)
    assert state_of(aws, again) == "running"
    aws.client("ec2").terminate_instances(InstanceIds=[member, stranger, again])


def test_an_environment_under_update_does_not_keep_others_unwatched(
    world: World, emulator: Emulator, environments: list[str], stage: str, inbox: Inbox
) -> None:
    batch = emulator.client("batch")
    # GIVEN two environments whose instances never join; a deployment replaces the instances of the first
    running = world.submit("sleep", "600")
    world.reached(running, "RUNNING")
    (queue,) = batch.describe_job_queues(jobQueues=[world.spot])["jobQueues"]
    updated, failing = queue["computeEnvironmentOrder"][0]["computeEnvironment"], environments[1]
    batch.tag_resource(resourceArn=updated, tags={"trainyard:stage": stage})
    batch.update_compute_environment(
        computeEnvironment=updated, computeResources={"tags": {"Name": f"{stage}-updated"}}
    )
    never = [launched(emulator, Name=name, trainyard_stage=stage) for name in (f"{stage}-updated", failing)]
    # WHEN the schedule calls the function
    handler({"source": "aws.events"}, None)
    # THEN the second is disabled, the instances of both are terminated, and the alerts tell the difference
    described = batch.describe_compute_environments(computeEnvironments=[updated, failing])["computeEnvironments"]
    assert {item["computeEnvironmentArn"] == updated: item["state"] for item in described} == {
        True: "ENABLED",
        False: "DISABLED",
    }
    assert [state_of(emulator, instance) for instance in never] == ["terminated"] * 2
    messages = inbox.read()
    assert ["Batch refused to disable" in message for message in messages].count(True) == 1
    assert len(messages) == 2
    batch.terminate_job(jobId=running, reason="test")
    world.reached(running, "FAILED")
