"""Failed jobs and reclaims in words, queues in numbers; and silence about what nobody needs to know."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from infra.observability.functions.report_job import SWEEP_TAG, Rules, handler, report, with_children
from jobs.contract.errors import INTERRUPTED_EXIT_CODE
from jobs.contract.queues import SPOT_WAITED_TOO_LONG
from jobs.contract.retries import DUPLICATE_REASON, EXITED_REASON, MOVED_REASON, RECLAIM_REASON, RETRY_RULES
from jobs.contract.sweep import NO_POINT_LEFT_REASON
from tests.infra.observability.functions.conftest import World
from tests.support.infra.messages import Inbox
from tests.support.waiting import wait_until

RECLAIMED = "Host EC2 (instance i-0123456789abcdef0) terminated."


@pytest.fixture
def rules(world: World, inbox: Inbox, monkeypatch: pytest.MonkeyPatch) -> Rules:
    for name, value in {
        "STAGE": "test",
        "TOPIC_ARN": inbox.topic,
        "METRIC_NAMESPACE": "trainyard/test",
        "PARAMETER_PATH": world.parameter_path,
        "SPOT_QUEUES": json.dumps(["cpu-spot", "spot"]),
        "ON_DEMAND_NODES": "4",
        "RECLAIMS_BEFORE_ON_DEMAND": "2",
        "RECLAIM_REASON": RECLAIM_REASON,
        "EXITED_REASON": EXITED_REASON,
        "INTERRUPTED_EXIT_CODE": str(INTERRUPTED_EXIT_CODE),
        "NO_FAILURES": json.dumps([MOVED_REASON, DUPLICATE_REASON, NO_POINT_LEFT_REASON]),
        "NO_CAPACITY_REASON": SPOT_WAITED_TOO_LONG,
    }.items():
        monkeypatch.setenv(name, value)
    return Rules.from_environment()


@pytest.fixture
def numbers(capsys: pytest.CaptureFixture[str]) -> Callable[[], dict[str, Any]]:
    """The last line that the function has logged."""
    return lambda: json.loads(capsys.readouterr().out.splitlines()[-1])


def test_a_job_that_failed_is_told_of_with_its_reason_and_how_to_look(
    world: World, rules: Rules, inbox: Inbox, numbers: Callable[[], dict[str, Any]]
) -> None:
    job = world.reached(world.submit("sh", "-c", "exit 3"), "FAILED")
    handler(world.event(job["jobId"]), None)
    [message] = inbox.read()
    assert message == (
        f"{job['jobName']} of team research (stage test) failed in attempt 1: "
        f"{job['statusReason']} (exit code 3). Look: trainyard logs {job['jobName']} --stage test"
    )
    line = numbers()
    assert (line["FailedJobs"], line["Reclaims"]) == (1, 0)


def test_a_job_that_its_owner_stopped_is_no_failure(
    world: World, rules: Rules, inbox: Inbox, numbers: Callable[[], dict[str, Any]]
) -> None:
    job_id = world.submit("sleep", "600")
    world.reached(job_id, "RUNNING")
    world.batch.terminate_job(jobId=job_id, reason="changed my mind")
    world.reached(job_id, "FAILED")
    handler(world.event(job_id), None)
    assert inbox.read() == []
    assert numbers()["FailedJobs"] == 0


def test_a_reclaim_is_told_of_once_the_job_waits_again(
    world: World, rules: Rules, inbox: Inbox, numbers: Callable[[], dict[str, Any]]
) -> None:
    job_id = world.submit("sleep", "600")
    job = world.reclaim(job_id)
    # By now the job may run again; the event is of the moment when it did not.
    handler(world.event(job_id, status="RUNNABLE"), None)
    [message] = inbox.read()
    assert message.startswith(f"{job['jobName']} of team research (stage test) lost its instance to a Spot reclaim, ")
    assert "for the first time" in message
    assert numbers()["Reclaims"] == 1


@pytest.mark.parametrize(("capacity", "reclaims"), [("spot", 1), ("on-demand", 0)])
def test_a_container_that_exits_before_its_instance_lost_it_in_a_spot_queue_only(
    capacity: str,
    reclaims: int,
    *,
    world: World,
    rules: Rules,
    inbox: Inbox,
    numbers: Callable[[], dict[str, Any]],
) -> None:
    queue = {"spot": world.spot, "on-demand": world.on_demand}[capacity]
    retry = {"attempts": 2, "evaluateOnExit": [dict(rule) for rule in RETRY_RULES]}
    job = world.submit("sh", "-c", f"exit {INTERRUPTED_EXIT_CODE}", queue=queue, retryStrategy=retry)
    attempts = world.reached(job, "FAILED")["attempts"][:1]
    handler(world.event(job, status="RUNNABLE", attempts=attempts), None)
    assert numbers()["Reclaims"] == reclaims
    assert ["Spot reclaim, for the first time" in message for message in inbox.read()] == [True] * reclaims


def test_the_numbers_are_those_of_the_queue_at_that_moment(
    world: World, rules: Rules, numbers: Callable[[], dict[str, Any]]
) -> None:
    running = [world.submit("sleep", "600") for _ in range(2)]
    for job_id in running:
        world.reached(job_id, "RUNNING")
    blocked = world.submit("true", dependsOn=[{"jobId": running[0]}])
    world.reached(blocked, "PENDING")
    handler(world.event(running[0]), None)
    line = numbers()
    assert (line["Queue"], line["QueueDepth"]) == ("spot@research", 1)
    by_dimensions = {
        tuple(map(tuple, directive["Dimensions"])): [metric["Name"] for metric in directive["Metrics"]]
        for directive in line["_aws"]["CloudWatchMetrics"]
    }
    assert by_dimensions[(("Queue",),)] == ["QueueDepth", "Reclaims", "FailedJobs"]
    assert by_dimensions[((),)] == ["FailedJobs"]
    assert {directive["Namespace"] for directive in line["_aws"]["CloudWatchMetrics"]} == {"trainyard/test"}
    assert all(name in line for names in by_dimensions.values() for name in names)


def test_nodes_that_start_one_by_one_are_told_of_as_one_and_counted_each(
    world: World, rules: Rules, inbox: Inbox, numbers: Callable[[], dict[str, Any]]
) -> None:
    # GIVEN three nodes, one of which fails by itself when the others have gone with the reclaim of one
    script = f"[ $AWS_BATCH_JOB_ATTEMPT = 1 ] && exit {INTERRUPTED_EXIT_CODE}; sleep 600"
    retry = {"attempts": 3, "evaluateOnExit": [dict(rule) for rule in RETRY_RULES]}
    parent_id = world.submit("sh", "-c", script, retryStrategy=retry, arrayProperties={"size": 3})
    children = [f"{parent_id}:{index}" for index in range(3)]
    wait_until(lambda: [world.job(child) for child in children], lambda jobs: all(job["attempts"] for job in jobs))
    # WHEN all wait again
    for child in children:
        handler(world.event(child, status="RUNNABLE"), None)
    [message] = inbox.read()
    assert "(stage test) lost its instance to a Spot reclaim, for the first time" in message
    # THEN none of them waits
    for child in children:
        world.reached(child, "RUNNING")
    handler(world.event(parent_id), None)
    line = numbers()
    assert (line["QueueDepth"], line["Reclaims"]) == (0, 0)
    # AND their end is one
    world.batch.terminate_job(jobId=children[1], reason="a fault")
    for child in (children[0], children[2]):
        world.batch.terminate_job(jobId=child, reason="changed my mind")
    world.reached(parent_id, "FAILED")
    for job_id in (*children, parent_id):
        handler(world.event(job_id), None)
    [message] = inbox.read()
    assert "of team research (stage test) failed in attempt 2: " in message


def test_workers_of_a_sweep_are_reclaimed_each_for_itself_and_its_failed_points_are_told_once(
    world: World, rules: Rules
) -> None:
    tags = {"trainyard:team": "research", SWEEP_TAG: "9"}
    job = {"jobName": "rates", "jobQueue": world.spot, "tags": tags}
    waits = {"status": "RUNNABLE", "statusReason": "", "attempts": [EXITED]}
    for index in (0, 3):
        said = report({**job, **waits, "arrayProperties": {"index": index}}, rules)
        assert said.reclaimed
        assert "rates of team research (stage test) lost one of its instances to a Spot reclaim" in said.text
    failed = {"status": "FAILED", "statusReason": EXITED_REASON, "attempts": [DIED]}
    assert report({**job, **failed, "arrayProperties": {"index": 3}}, rules).text == ""
    said = report({**job, **failed, "arrayProperties": {"size": 4}}, rules)
    assert said.failed
    assert "is a sweep, not all of whose points have succeeded" in said.text
    assert "Look: trainyard sweep rates --stage test" in said.text
    # A sweep whose waiting workers were cancelled, since no point was left, has failed only if one of its points has.
    ended = {"status": "FAILED", "arrayProperties": {"size": 3}, "statusReason": "Array Child Job failed"}
    well: dict[str, Any] = {"status": "SUCCEEDED", "attempts": [{"container": {"exitCode": 0}}]}
    needless: dict[str, Any] = {"status": "FAILED", "statusReason": NO_POINT_LEFT_REASON, "attempts": []}
    for children, has_failed in (([well, needless, needless], False), ([needless, failed, well], True)):
        assert report(with_children({**job, **ended}, children, rules), rules).failed is has_failed
    # One that Spot has taken away too often goes on nowhere: that is a failure.
    lost = {"status": "FAILED", "statusReason": EXITED_REASON, "attempts": [EXITED, EXITED]}
    assert report({**job, **lost, "arrayProperties": {"size": 4}}, rules).failed


def test_a_queue_that_is_not_the_stages_is_nobodys_business(
    world: World, rules: Rules, inbox: Inbox, capsys: pytest.CaptureFixture[str]
) -> None:
    job = world.reached(world.submit("false"), "FAILED")
    handler(world.event(job["jobId"], jobQueue="arn:aws:batch:us-east-1:123456789012:job-queue/other"), None)
    assert inbox.read() == []
    assert capsys.readouterr().out == ""


LOST = {"statusReason": RECLAIMED}
DIED = {"statusReason": EXITED_REASON, "taskProperties": [{"containers": [{"exitCode": 1}]}]}
EXITED = {"statusReason": EXITED_REASON, "taskProperties": [{"containers": [{"exitCode": INTERRUPTED_EXIT_CODE}]}]}
"""How Batch shows an attempt whose container ended in time before its instance did."""
TIMEOUT = "Job attempt duration exceeded timeout"


@pytest.mark.parametrize(
    ("status", "reason", "attempts", "more", "failed"),
    [
        ("FAILED", "Essential container in task exited", [DIED], {}, True),
        ("FAILED", RECLAIMED, [LOST], {}, True),
        ("FAILED", RECLAIMED, [LOST, LOST], {}, False),  # goes on On-Demand
        ("FAILED", EXITED_REASON, [EXITED, EXITED], {}, False),  # so does this
        ("FAILED", EXITED_REASON, [LOST, EXITED], {}, False),
        ("FAILED", EXITED_REASON, [EXITED], {}, True),
        ("FAILED", EXITED_REASON, [EXITED, EXITED, DIED], {}, True),
        ("FAILED", EXITED_REASON, [EXITED, EXITED], {"jobQueue": "On-Demand"}, True),
        ("FAILED", TIMEOUT, [LOST, LOST, {**EXITED, "statusReason": TIMEOUT}], {}, True),
        ("FAILED", SPOT_WAITED_TOO_LONG, [], {"isCancelled": True}, False),  # so does this
        ("FAILED", SPOT_WAITED_TOO_LONG, [], {"isCancelled": True, "jobQueue": "without On-Demand"}, True),
        ("FAILED", "Canceled by JobStateTimeLimit action due to reason: MISCONFIGURATION:…", [], {}, True),
        ("FAILED", "moved to On-Demand after 2 reclaims: …", [LOST, LOST], {"isTerminated": True}, False),
        ("FAILED", "duplicate of 1: a lost submission arrived late", [], {"isTerminated": True}, False),
        ("FAILED", "not needed", [], {"isCancelled": True}, False),
        ("SUCCEEDED", "", [LOST], {}, False),
        ("RUNNING", "", [LOST], {}, False),
    ],
)
def test_what_counts_as_failed(
    status: str,
    reason: str,
    attempts: Sequence[dict[str, Any]],
    more: dict[str, Any],
    *,
    failed: bool,
    world: World,
    rules: Rules,
) -> None:
    job = {"jobName": "probe", "jobQueue": world.spot, "status": status, "statusReason": reason, "attempts": attempts}
    said = report({**job, **more}, rules)
    assert said.failed is failed
    assert bool(said.text) is failed
