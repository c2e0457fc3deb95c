"""A job that Spot keeps taking away goes on On-Demand: once, and never beside itself."""

import json
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from botocore.exceptions import ClientError

from infra.observability.functions import move_to_on_demand
from infra.observability.functions.move_to_on_demand import (
    SWEEP_TAG,
    Mover,
    MoveUnderwayError,
    Resubmit,
    Rules,
    Terminate,
    decide,
    handler,
    with_children,
)
from jobs.contract.errors import INTERRUPTED_EXIT_CODE
from jobs.contract.queues import SPOT_WAITED_TOO_LONG
from jobs.contract.retries import EXITED_REASON, MOVED_REASON, MOVED_TAG, RECLAIM_REASON, RETRY_RULES
from tests.infra.observability.functions.conftest import World
from tests.support.waiting import wait_until

RECLAIMED = "Host EC2 (instance i-0123456789abcdef0) terminated."
SLEEP = ("sleep", "600")
EXITED = {"statusReason": EXITED_REASON, "taskProperties": [{"containers": [{"exitCode": INTERRUPTED_EXIT_CODE}]}]}
"""How Batch shows an attempt whose container ended in time before its instance did."""
TIMED_OUT = {**EXITED, "statusReason": "Job attempt duration exceeded timeout"}
OWN_FAULT = {"statusReason": EXITED_REASON, "taskProperties": [{"containers": [{"exitCode": 1}]}]}


@pytest.fixture
def rules(world: World, monkeypatch: pytest.MonkeyPatch) -> Rules:
    """The rules as the stack hands them over; two reclaims are one too many."""
    for name, value in {
        "RUN_BUCKET": world.bucket,
        "RECLAIMS_BEFORE_ON_DEMAND": "2",
        "PARAMETER_PATH": world.parameter_path,
        "ON_DEMAND_NODES": "4",
        "RECLAIM_REASON": RECLAIM_REASON,
        "EXITED_REASON": EXITED_REASON,
        "INTERRUPTED_EXIT_CODE": str(INTERRUPTED_EXIT_CODE),
        "MOVED_REASON": MOVED_REASON,
        "MOVED_TAG": MOVED_TAG,
        "NO_CAPACITY_REASON": SPOT_WAITED_TOO_LONG,
    }.items():
        monkeypatch.setenv(name, value)
    return Rules.from_environment()


def claim_of(world: World, job: dict[str, Any]) -> dict[str, Any]:
    key = f"research/{job['jobName']}/moves/{job['jobId']}.json"
    claim: dict[str, Any] = json.load(world.aws.client("s3").get_object(Bucket=world.bucket, Key=key)["Body"])
    return claim


def stopped_for_a_move(world: World, rules: Rules) -> dict[str, Any]:
    """A job that has ended to go on elsewhere, and has not yet."""
    job_id = world.submit(*SLEEP)
    world.reached(job_id, "RUNNING")
    world.batch.terminate_job(jobId=job_id, reason=f"{rules.moved_reason} after 2 reclaims: goes on elsewhere")
    return world.reached(job_id, "FAILED")


def test_after_the_last_reclaim_that_is_allowed_the_same_job_runs_on_demand(world: World, rules: Rules) -> None:
    command = ("sh", "-c", "sleep 600", "launch", "--capacity=spot", "--max-usd=5")
    job_id = world.submit(*command)
    world.reclaim(job_id)
    handler(world.event(job_id), None)
    assert not world.job(job_id)["isTerminated"]
    world.reclaim(job_id)
    handler(world.event(job_id), None)
    ended = world.reached(job_id, "FAILED")
    assert ended["statusReason"].startswith("moved to On-Demand after 2 reclaims: goes on as the job of the same name")
    assert world.named(ended["jobName"]) == [], "the first job must have ended before there is a second"

    handler(world.event(job_id), None)

    [found] = world.named(ended["jobName"])
    successor = world.reached(found["jobId"], "RUNNING")
    assert successor["jobQueue"] == world.on_demand
    assert successor["tags"] == {**ended["tags"], "trainyard:moved": "after 2 reclaims"}
    for same in (
        *("jobName", "jobDefinition", "retryStrategy", "timeout", "shareIdentifier"),
        *("schedulingPriority", "propagateTags", "parameters"),
    ):
        assert successor[same] == ended[same], same
    [[was], [is_]] = [
        [task["containers"][0] for task in job["ecsProperties"]["taskProperties"]] for job in (ended, successor)
    ]
    for same in ("name", "image", "environment", "resourceRequirements"):
        assert is_[same] == was[same], same
    # Its budget counts at the other price from here on.
    assert is_["command"] == [*command[:4], "--capacity=on-demand", "--max-usd=5"]
    assert claim_of(world, ended)["successor"] == successor["jobId"]


def test_nodes_that_start_one_by_one_move_together_and_once(world: World, rules: Rules) -> None:
    # GIVEN three nodes of which two are taken away as often as is allowed
    parent_id = world.submit(*SLEEP, arrayProperties={"size": 3})
    children = [f"{parent_id}:{index}" for index in range(3)]
    for child in (children[1], children[2], children[1]):
        world.reclaim(child)
        assert not world.job(parent_id)["isTerminated"]
        handler(world.event(child), None)
    # WHEN the events of all of them come, and those of their parent
    ended = world.reached(parent_id, "FAILED")
    for _ in range(2):
        for job_id in (*children, parent_id):
            handler(world.event(job_id), None)
    # THEN all go on as one, in the same shape
    [successor] = world.named(ended["jobName"])
    found = world.job(successor["jobId"])
    assert found["arrayProperties"]["size"] == 3
    assert found["tags"]["trainyard:moved"] == "after 2 reclaims"
    assert world.reached(f"{successor['jobId']}:2", "RUNNING")["jobQueue"] == world.on_demand
    assert claim_of(world, ended)["successor"] == successor["jobId"]


GANG = {"isTerminated": False, "status": "PENDING", "arrayProperties": {"size": 2}, "statusReason": "Array Child Job…"}
MOVED = "moved to On-Demand for want of Spot capacity: goes on as …"


@pytest.mark.parametrize(
    ("parent", "reasons", "attempts", "wanted"),
    [
        ({}, ["", ""], [[EXITED], [{"statusReason": RECLAIMED}]], None),
        ({}, ["", ""], [[EXITED], [EXITED, {"statusReason": RECLAIMED}]], Terminate),
        ({"isTerminated": True}, ["", ""], [[EXITED], [EXITED, EXITED]], None),
        ({}, [SPOT_WAITED_TOO_LONG, ""], [[], []], Terminate),
        (
            {"status": "FAILED", "isTerminated": True, "statusReason": MOVED},
            [SPOT_WAITED_TOO_LONG, MOVED],
            [],
            Resubmit,
        ),
        ({"status": "FAILED", "isTerminated": True, "statusReason": "why?"}, [SPOT_WAITED_TOO_LONG, "why?"], [], None),
        ({"status": "FAILED"}, [EXITED_REASON, EXITED_REASON], [[EXITED, EXITED], [EXITED, EXITED]], Resubmit),
        ({"status": "FAILED"}, [EXITED_REASON, EXITED_REASON], [[EXITED, EXITED], [EXITED, OWN_FAULT]], None),
        ({"arrayProperties": {"size": 5}}, ["", ""], [[EXITED], [EXITED, EXITED]], None),  # more than there may be
    ],
)
def test_what_is_done_with_several_nodes_follows_from_all_of_them(
    parent: dict[str, Any],
    reasons: list[str],
    attempts: list[list[dict[str, Any]]],
    wanted: type | None,
    *,
    world: World,
    rules: Rules,
) -> None:
    job = world.job(world.submit("true")) | GANG | parent
    children = [
        {"status": "FAILED" if reason else "RUNNING", "statusReason": reason, "attempts": of_child}
        for reason, of_child in zip(reasons, attempts or [[], []], strict=True)
    ]
    decision = decide(with_children(job, children, rules), rules)
    assert type(decision) is (wanted or type(None))
    if isinstance(decision, Resubmit) and "Spot capacity" in job["statusReason"]:
        assert decision.request["tags"]["trainyard:moved"] == "for want of Spot capacity"


@pytest.mark.parametrize("parent", [{}, {"status": "FAILED"}], ids=str)
def test_a_sweep_is_not_moved_whose_workers_run_on_without_one_that_is_taken_away(
    parent: dict[str, Any], world: World, rules: Rules
) -> None:
    job = world.job(world.submit("true")) | GANG | parent
    children: list[dict[str, Any]] = [
        {"status": "FAILED", "statusReason": EXITED_REASON, "attempts": [EXITED, EXITED]},
        {"status": "RUNNING", "statusReason": "", "attempts": []},
    ]
    assert decide(with_children(job, children, rules), rules) is not None
    job["tags"] = {**job["tags"], SWEEP_TAG: "9"}
    assert decide(with_children(job, children, rules), rules) is None


def test_of_many_calls_at_once_one_submits_the_job(world: World, rules: Rules) -> None:
    ended = stopped_for_a_move(world, rules)
    event = world.event(ended["jobId"])

    def call(_: int) -> str:
        try:
            handler(event, None)
        except MoveUnderwayError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(call, range(16)))
    assert "" in answers
    assert {answer for answer in answers if answer} <= {f"the move of {ended['jobName']} is claimed by another call"}
    assert len(world.named(ended["jobName"])) == 1


def test_a_call_that_died_before_it_submitted_is_taken_over(
    world: World, rules: Rules, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = stopped_for_a_move(world, rules)
    event = world.event(ended["jobId"])
    decision = decide(ended, rules)
    assert isinstance(decision, Resubmit)
    with pytest.raises(ClientError, match="no-such-queue"):
        Mover(rules.run_bucket).resubmit(ended, {**decision.request, "jobQueue": "no-such-queue"})
    assert world.named(ended["jobName"]) == []
    with pytest.raises(MoveUnderwayError):  # the claim may be in good hands yet
        handler(event, None)

    monkeypatch.setattr(move_to_on_demand, "CLAIM_SECONDS", -1)
    handler(event, None)
    handler(event, None)

    [successor] = world.named(ended["jobName"])
    assert claim_of(world, ended)["successor"] == successor["jobId"]


def test_a_call_that_died_after_it_submitted_has_not_lost_the_job(
    world: World, rules: Rules, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = stopped_for_a_move(world, rules)
    decision = decide(ended, rules)
    assert isinstance(decision, Resubmit)
    submitted = world.batch.submit_job(**decision.request)["jobId"]
    world.aws.client("s3").put_object(
        Bucket=world.bucket,
        Key=f"research/{ended['jobName']}/moves/{ended['jobId']}.json",
        Body=b'{"claimed_at": 0, "successor": null}',
    )
    monkeypatch.setattr(move_to_on_demand, "CLAIM_SECONDS", -1)
    handler(world.event(ended["jobId"]), None)
    assert [job["jobId"] for job in world.named(ended["jobName"])] == [submitted]
    assert claim_of(world, ended)["successor"] == submitted


def test_a_reclaim_that_the_container_was_faster_than_is_one(world: World, rules: Rules) -> None:
    # GIVEN a job whose container exits each time before its instance does, until it has no attempt left
    retry = {"attempts": 2, "evaluateOnExit": [dict(rule) for rule in RETRY_RULES]}
    job_id = world.submit("sh", "-c", f"exit {INTERRUPTED_EXIT_CODE}", retryStrategy=retry)
    ended = world.reached(job_id, "FAILED")
    assert [attempt["statusReason"] for attempt in ended["attempts"]] == [EXITED_REASON] * 2
    # WHEN its end is told of
    handler(world.event(job_id), None)
    # THEN it goes on
    [successor] = world.named(ended["jobName"])
    assert world.job(successor["jobId"])["tags"]["trainyard:moved"] == "after 2 reclaims"
    # AND what exits so On-Demand has lost nothing to Spot
    for attempt in world.named(ended["jobName"]):
        handler(world.event(world.reached(attempt["jobId"], "FAILED")["jobId"]), None)
    assert len(world.named(ended["jobName"])) == 1


def test_an_owner_who_cancels_ends_a_job_however_its_container_exits(world: World, rules: Rules) -> None:
    # GIVEN a job that was reclaimed once, and whose container ends at SIGTERM as it does at a reclaim
    code = INTERRUPTED_EXIT_CODE
    script = f'[ "$AWS_BATCH_JOB_ATTEMPT" = 1 ] && exit {code}; trap "exit {code}" TERM; echo ready; sleep 600 & wait'
    retry = {"attempts": 5, "evaluateOnExit": [dict(rule) for rule in RETRY_RULES]}
    job_id = world.submit("sh", "-c", script, retryStrategy=retry)
    wait_until(lambda: world.log(job_id), lambda lines: "ready" in lines)
    # WHEN its owner cancels it
    world.batch.terminate_job(jobId=job_id, reason="not needed any more")
    ended = world.reached(job_id, "FAILED")
    assert ended["attempts"][-1]["taskProperties"][0]["containers"][0]["exitCode"] == code
    handler(world.event(job_id), None)
    # THEN it goes on nowhere
    assert world.named(ended["jobName"]) == []


def test_a_team_cannot_have_a_claim_written_among_another_teams_files(world: World, rules: Rules) -> None:
    # GIVEN a job of research that says of itself that it writes among product's runs, in a bucket of its choice
    elsewhere = f"not-the-runs-{uuid.uuid4().hex[:8]}"
    world.aws.client("s3").create_bucket(Bucket=elsewhere)
    said = [{"name": "TRAINYARD_RUN_URI", "value": f"s3://{elsewhere}/product/a-run/"}]
    override = {"taskProperties": [{"containers": [{"name": "main", "command": [*SLEEP], "environment": said}]}]}
    job_id = world.submit(ecsPropertiesOverride=override)
    world.reached(job_id, "RUNNING")
    world.batch.terminate_job(jobId=job_id, reason=f"{rules.moved_reason} after 2 reclaims: goes on elsewhere")
    ended = world.reached(job_id, "FAILED")
    # WHEN it moves
    handler(world.event(job_id), None)
    # THEN the claim lies where its team and its name put it, and nowhere else
    [successor] = world.named(ended["jobName"])
    assert claim_of(world, ended)["successor"] == successor["jobId"]
    assert world.aws.client("s3").list_objects_v2(Bucket=elsewhere)["KeyCount"] == 0


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"status": "RUNNABLE"}, None),
        ({"status": "RUNNABLE", "reclaims": 2}, Terminate),
        ({"status": "RUNNING", "reclaims": 3}, Terminate),
        ({"status": "RUNNING", "reclaims": 3, "isTerminated": True}, None),
        ({"status": "SUCCEEDED", "reclaims": 3}, None),
        ({"status": "FAILED", "statusReason": SPOT_WAITED_TOO_LONG}, Resubmit),
        ({"status": "FAILED", "statusReason": EXITED_REASON, "reclaims": 3, "last": OWN_FAULT}, None),
        ({"status": "RUNNABLE", "reclaims": 1, "last": EXITED}, Terminate),
        ({"status": "RUNNABLE", "reclaims": 1, "last": OWN_FAULT}, None),
        ({"status": "FAILED", "statusReason": EXITED_REASON, "reclaims": 1, "last": EXITED}, Resubmit),
        ({"status": "FAILED", "statusReason": EXITED_REASON, "last": EXITED}, None),
        ({"status": "FAILED", "statusReason": TIMED_OUT["statusReason"], "reclaims": 2, "last": TIMED_OUT}, None),
        ({"status": "FAILED", "statusReason": TIMED_OUT["statusReason"], "reclaims": 2, "last": EXITED}, None),
        ({"status": "RUNNABLE", "reclaims": 1, "last": TIMED_OUT}, None),
        ({"status": "FAILED", "statusReason": "not needed", "reclaims": 1, "last": EXITED}, None),
        ({"status": "FAILED", "statusReason": RECLAIMED, "reclaims": 1}, None),
        ({"status": "FAILED", "statusReason": RECLAIMED, "reclaims": 2}, Resubmit),
        ({"status": "FAILED", "statusReason": RECLAIMED, "reclaims": 2, "isCancelled": True}, None),
        ({"status": "FAILED", "statusReason": "moved to On-Demand after 2 reclaims: …", "jobQueue": "other"}, None),
    ],
)
def test_what_is_done_follows_from_the_job_alone(
    changes: dict[str, Any], wanted: type | None, world: World, rules: Rules
) -> None:
    job = world.job(world.submit("true"))
    reclaims = [{"statusReason": RECLAIMED}] * changes.pop("reclaims", 0)
    last = [changes.pop("last")] if "last" in changes else []
    decision = decide({**job, "attempts": [{"statusReason": EXITED_REASON}, *reclaims, *last], **changes}, rules)
    assert type(decision) is (wanted or type(None))


def test_what_a_job_was_given_by_aws_is_not_given_again(world: World, rules: Rules) -> None:
    job = world.job(world.submit("true"))
    job["tags"]["aws:cloudformation:stack-name"] = "a-stack"
    container = job["ecsProperties"]["taskProperties"][0]["containers"][0]
    container["environment"] = [*container["environment"], {"name": "AWS_BATCH_JOB_ID", "value": "1"}]
    decision = decide({**job, "status": "FAILED", "statusReason": SPOT_WAITED_TOO_LONG}, rules)
    assert isinstance(decision, Resubmit)
    assert decision.request["tags"]["trainyard:moved"] == "for want of Spot capacity"
    assert not [key for key in decision.request["tags"] if key.startswith("aws:")]
    [task] = decision.request["ecsPropertiesOverride"]["taskProperties"]
    names = [item["name"] for item in task["containers"][0]["environment"]]
    assert sorted(names) == ["TRAINYARD_ACCELERATOR", "TRAINYARD_RUN_URI"]
