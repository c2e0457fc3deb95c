"""A job that Spot keeps reclaiming continues On-Demand: exactly once, and never twice at the same time."""

import json
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import boto3
import pytest
from botocore.stub import ANY, Stubber

from infra.observability.functions import move_to_on_demand
from infra.observability.functions.batch_jobs import HOME_TAG, SWEEP_TAG, Queue
from infra.observability.functions.fallback_stage import FallbackStage, RefusedError
from infra.observability.functions.move_to_on_demand import (
    MoveUnderwayError,
    Resubmit,
    Rules,
    Terminate,
    claim_bucket,
    claim_key,
    decide,
    handler,
    request,
    submissions,
    with_children,
)
from jobs.core.errors import INTERRUPTED_EXIT_CODE
from jobs.core.queues import SPOT_WAITED_TOO_LONG
from jobs.core.retries import EXITED_REASON, MOVED_REASON, MOVED_TAG, RECLAIM_REASON
from tests.infra.observability.functions.conftest import (
    EXITED,
    OWN_FAULT,
    RECLAIM_ENVIRONMENT,
    RECLAIMED,
    TIMED_OUT,
    World,
)

ON_DEMAND = "arn:aws:batch:us-east-1:123456789012:job-queue/on-demand"
RULES = Rules(
    stage="dev",
    run_bucket="runs",
    reclaims_before_on_demand=2,
    queues={"spot": Queue(label="spot", name="spot", on_demand=ON_DEMAND)},
    on_demand_nodes=4,
    reclaim_reason=RECLAIM_REASON,
    exited_reason=EXITED_REASON,
    interrupted_exit_code=INTERRUPTED_EXIT_CODE,
    moved_reason=MOVED_REASON,
    moved_tag=MOVED_TAG,
    no_capacity_reason=SPOT_WAITED_TOO_LONG,
)
JOB: dict[str, Any] = {
    "jobId": "0f0f",
    "jobName": "a-run",
    "jobQueue": "spot",
    "jobDefinition": "probe:1",
    "status": "RUNNING",
    "attempts": [],
    "retryStrategy": {"attempts": 5},
    "tags": {"trainyard:team": "research", "aws:cloudformation:stack-name": "a-stack"},
    "ecsProperties": {
        "taskProperties": [
            {
                "containers": [
                    {
                        "name": "main",
                        "command": ["launch", "--capacity=spot"],
                        "environment": [
                            {"name": "TRAINYARD_RUN_URI", "value": "s3://not-the-runs/product/another-run/"},
                            {"name": "AWS_BATCH_JOB_ID", "value": "0f0f"},
                        ],
                        "resourceRequirements": [],
                    }
                ]
            }
        ]
    },
}
ARRAY = {
    **JOB,
    "isTerminated": False,
    "status": "PENDING",
    "arrayProperties": {"size": 2},
    "statusReason": "Array Child",
}
MOVED = f"{MOVED_REASON} for lack of Spot capacity: continues as …"
TIMEOUT = TIMED_OUT["statusReason"]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"status": "RUNNABLE"}, None),
        ({"status": "RUNNABLE", "reclaims": 2}, Terminate),
        ({"status": "RUNNING", "reclaims": 3}, Terminate),
        ({"status": "RUNNING", "reclaims": 3, "isTerminated": True}, None),
        ({"status": "RUNNING", "reclaims": 3, "tags": {}}, None),
        ({"status": "SUCCEEDED", "reclaims": 3}, None),
        ({"status": "FAILED", "statusReason": SPOT_WAITED_TOO_LONG}, Resubmit),
        ({"status": "FAILED", "statusReason": EXITED_REASON, "reclaims": 3, "last": OWN_FAULT}, None),
        ({"status": "RUNNABLE", "reclaims": 1, "last": EXITED}, Terminate),
        ({"status": "RUNNABLE", "reclaims": 1, "last": OWN_FAULT}, None),
        ({"status": "FAILED", "statusReason": EXITED_REASON, "reclaims": 1, "last": EXITED}, Resubmit),
        ({"status": "FAILED", "statusReason": EXITED_REASON, "last": EXITED}, None),
        ({"status": "FAILED", "statusReason": TIMEOUT, "reclaims": 2, "last": TIMED_OUT}, None),
        ({"status": "FAILED", "statusReason": TIMEOUT, "reclaims": 2, "last": EXITED}, None),
        ({"status": "RUNNABLE", "reclaims": 1, "last": TIMED_OUT}, None),
        # The owner cancelled the job, whatever its container's exit code.
        ({"status": "FAILED", "statusReason": "not needed", "reclaims": 1, "last": EXITED}, None),
        ({"status": "FAILED", "statusReason": RECLAIMED["statusReason"], "reclaims": 1}, None),
        ({"status": "FAILED", "statusReason": RECLAIMED["statusReason"], "reclaims": 2}, Resubmit),
        ({"status": "FAILED", "statusReason": RECLAIMED["statusReason"], "reclaims": 2, "isCancelled": True}, None),
        ({"status": "FAILED", "statusReason": MOVED, "jobQueue": "on-demand"}, None),
    ],
)
def test_the_decision_depends_only_on_the_job(changes: dict[str, Any], expected: type | None) -> None:
    reclaims = [RECLAIMED] * changes.get("reclaims", 0)
    last = [changes["last"]] if "last" in changes else []
    job = {**JOB, "attempts": [{"statusReason": EXITED_REASON}, *reclaims, *last], **changes}
    assert type(decide(job, RULES)) is (expected or type(None))


@pytest.mark.parametrize(
    ("parent", "reasons", "attempts", "expected"),
    [
        ({}, ["", ""], [[EXITED], [RECLAIMED]], None),
        ({}, ["", ""], [[EXITED], [EXITED, RECLAIMED]], Terminate),
        ({"isTerminated": True}, ["", ""], [[EXITED], [EXITED, EXITED]], None),
        ({}, [SPOT_WAITED_TOO_LONG, ""], [[], []], Terminate),
        (
            {"status": "FAILED", "isTerminated": True, "statusReason": MOVED},
            [SPOT_WAITED_TOO_LONG, MOVED],
            [[], []],
            Resubmit,
        ),
        (
            {"status": "FAILED", "isTerminated": True, "statusReason": "why?"},
            [SPOT_WAITED_TOO_LONG, "why?"],
            [[], []],
            None,
        ),
        ({"status": "FAILED"}, [EXITED_REASON, EXITED_REASON], [[EXITED, EXITED], [EXITED, EXITED]], Resubmit),
        ({"status": "FAILED"}, [EXITED_REASON, EXITED_REASON], [[EXITED, EXITED], [EXITED, OWN_FAULT]], None),
        (
            {"arrayProperties": {"size": 5}},
            ["", ""],
            [[EXITED], [EXITED, EXITED]],
            None,
        ),  # more nodes than On-Demand allows
        # Workers of a sweep continue without a reclaimed one.
        ({"tags": {**JOB["tags"], SWEEP_TAG: "9"}}, ["", ""], [[EXITED], [EXITED, RECLAIMED]], None),
    ],
)
def test_the_decision_for_an_array_depends_on_all_children(
    parent: dict[str, Any], reasons: list[str], attempts: list[list[dict[str, Any]]], expected: type | None
) -> None:
    children = [
        {"status": "FAILED" if reason else "RUNNING", "statusReason": reason, "attempts": of_child}
        for reason, of_child in zip(reasons, attempts, strict=True)
    ]
    assert type(decide(with_children({**ARRAY, **parent}, children, RULES), RULES)) is (expected or type(None))


@pytest.mark.parametrize(
    ("reason", "why"),
    [(SPOT_WAITED_TOO_LONG, "for lack of Spot capacity"), (f"{MOVED_REASON} after 2 reclaims: …", "after 2 reclaims")],
)
def test_values_that_aws_added_are_not_resubmitted(reason: str, why: str) -> None:
    job = {**JOB, "status": "FAILED", "statusReason": reason}
    decision = decide(job, RULES)
    assert isinstance(decision, Resubmit)
    [submission] = submissions(job, decision, RULES)
    assert submission.request["tags"] == {"trainyard:team": "research", "trainyard:moved": why}
    [task] = submission.request["ecsPropertiesOverride"]["taskProperties"]
    assert [item["name"] for item in task["containers"][0]["environment"]] == ["TRAINYARD_RUN_URI"]
    # From now on, its budget counts at the On-Demand price.
    assert task["containers"][0]["command"] == ["launch", "--capacity=on-demand"]


SPOT_ONLY = replace(RULES, queues={"spot": Queue(label="spot", name="spot")}, fallback=("west", "us-west-2"))
RECLAIMED_TWICE = {"statusReason": RECLAIMED["statusReason"], "attempts": [RECLAIMED, RECLAIMED]}
NO_CAPACITY = {"statusReason": SPOT_WAITED_TOO_LONG}
RETIRING = {"spot": Queue(label="spot", name="spot", retiring=True)}
ONE_CARD = {"spot": Queue(label="spot", name="spot-g5.xlarge")}


@pytest.mark.parametrize(
    ("changes", "rules", "expected"),
    [
        (NO_CAPACITY, SPOT_ONLY, (None, True)),
        (NO_CAPACITY, replace(RULES, fallback=SPOT_ONLY.fallback), (ON_DEMAND, True)),
        (RECLAIMED_TWICE, SPOT_ONLY, (None, True)),
        # On-Demand here is never reclaimed.
        (RECLAIMED_TWICE, replace(RULES, fallback=SPOT_ONLY.fallback), (ON_DEMAND, False)),
        (NO_CAPACITY, replace(SPOT_ONLY, queues=RETIRING), None),
        (NO_CAPACITY, replace(SPOT_ONLY, queues=ONE_CARD), None),
        ({**NO_CAPACITY, "arrayProperties": {"size": 2}}, SPOT_ONLY, None),
        ({**NO_CAPACITY, "tags": {**JOB["tags"], SWEEP_TAG: "9"}}, SPOT_ONLY, None),
        ({**NO_CAPACITY, "tags": {**JOB["tags"], HOME_TAG: "east/runs-of-east"}}, SPOT_ONLY, None),  # only once
        # A running job is never ended to move there.
        ({**RECLAIMED_TWICE, "status": "RUNNABLE"}, SPOT_ONLY, None),
    ],
)
def test_a_job_of_one_node_moves_once_to_the_fallback_stage(
    changes: dict[str, Any], rules: Rules, expected: tuple[str | None, bool] | None
) -> None:
    decision = decide({**JOB, "status": "FAILED", **changes}, rules)
    found = (decision.queue, decision.falls_back) if isinstance(decision, Resubmit) else decision
    assert found == expected


PARAMETERS = {
    "team-queue/research/spot": "the-queue",
    "job-definition/research/script": "the-definition:3",
    "job-image/script": "the-image@sha256:0f",
}
PRICED = ["launch", "--instance-type=g6e.xlarge", '--other-instance-types={"g5.xlarge": 0.5}', "--spot-usd-per-hour=1"]
SCRIPT = {**JOB, "tags": {**JOB["tags"], "trainyard:job": "script", "trainyard:stage": "dev"}}


def in_fallback(**parameters: str | None) -> dict[str, Any]:
    """Return the request for the fallback stage, whose parameters change."""
    found = {name: value for name, value in {**PARAMETERS, **parameters}.items() if value is not None}
    stage = FallbackStage(name="west", region="us-west-2", parameters=found, spot_prices={"g5.xlarge": 0.7})
    again = request(SCRIPT, "spot", {MOVED_TAG: "why"}, capacity="spot")
    again["ecsPropertiesOverride"]["taskProperties"][0]["containers"][0]["command"] = PRICED
    return stage.request(SCRIPT, again, home="dev/runs")


def test_the_job_there_has_that_stages_queue_definition_tags_and_prices() -> None:
    found = in_fallback()
    assert (found["jobQueue"], found["jobDefinition"]) == ("the-queue", "the-definition:3")
    assert found["tags"] == {
        "trainyard:team": "research",
        "trainyard:job": "script",
        "trainyard:stage": "west",
        MOVED_TAG: "why",
        HOME_TAG: "dev/runs",
    }
    [task] = found["ecsPropertiesOverride"]["taskProperties"]
    [container] = task["containers"]
    # Sizes are those of the definition there. EC2 has no price there for the first type.
    assert container == {
        "name": "main",
        "command": ["launch", "--instance-type=g6e.xlarge", '--other-instance-types={"g5.xlarge": 0.7}'],
        "environment": [{"name": "TRAINYARD_RUN_URI", "value": "s3://not-the-runs/product/another-run/"}],
    }
    # If it moves again there, the claim is among the run's files at home.
    assert claim_bucket({**SCRIPT, "tags": found["tags"]}, replace(RULES, run_bucket="runs-of-west")) == "runs"
    assert claim_bucket(SCRIPT, RULES) == "runs"


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"job-image/script": "the-image:not-built-yet"}, "the image of script jobs was not pushed to stage west"),
        ({"job-definition/research/script": None}, "stage west in us-west-2 has no job-definition/research/script"),
        ({"team-queue/research/spot": None}, "stage west in us-west-2 has no queue/spot"),
        ({"budget-stop/research": "{}"}, "the budget of stage west is used up"),
        ({"stage-budget-stop": "{}"}, "the budget of stage west is used up"),
    ],
)
def test_what_is_missing_there_is_found_before_the_job_is_submitted(
    parameters: dict[str, str | None], message: str
) -> None:
    with pytest.raises(RefusedError, match=message):
        in_fallback(**parameters)


def test_its_prices_are_those_of_the_most_expensive_zone_there(monkeypatch: pytest.MonkeyPatch) -> None:
    make: Any = boto3.client
    name = f"west-{uuid.uuid4().hex[:8]}"
    make("ssm", region_name="us-west-2").put_parameter(
        Name=f"/trainyard/{name}/instance-type", Value="g6e.xlarge g5.xlarge", Type="String"
    )
    ec2 = make("ec2", region_name="us-west-2")
    rows = (("g5.xlarge", "a", "0.41"), ("g5.xlarge", "b", "0.55"), ("g6e.xlarge", "a", "1.02"))
    history = [
        {"InstanceType": instance_type, "AvailabilityZone": f"us-west-2{zone}", "SpotPrice": price}
        for instance_type, zone, price in rows
    ]
    expected = {"InstanceTypes": ["g6e.xlarge", "g5.xlarge"], "ProductDescriptions": ["Linux/UNIX"], "StartTime": ANY}
    with Stubber(ec2) as stub:
        stub.add_response("describe_spot_price_history", {"SpotPriceHistory": history}, expected)
        stub.add_client_error("describe_spot_price_history", "UnauthorizedOperation")
        monkeypatch.setattr(boto3, "client", lambda service, **more: ec2 if service == "ec2" else make(service, **more))
        assert FallbackStage.read(name, "us-west-2").spot_prices == {"g5.xlarge": 0.55, "g6e.xlarge": 1.02}
        assert FallbackStage.read(name, "us-west-2").spot_prices == {}  # the recorded prices apply


@pytest.mark.usefixtures("rules")
def test_a_job_that_the_fallback_stage_refuses_runs_on_demand(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # GIVEN a fallback stage that is not deployed, or whose queue Batch refuses
    monkeypatch.setenv("FALLBACK_STAGE", "nowhere us-west-2")
    of_probe = {name.replace("script", "probe"): value for name, value in PARAMETERS.items()}
    refusing = FallbackStage(name="west", region="us-west-2", parameters=of_probe, spot_prices={})
    for stage, why in ((None, "stage nowhere is not deployed in us-west-2"), (refusing, "SubmitJob operation")):
        if stage is not None:
            monkeypatch.setattr(FallbackStage, "read", lambda *_, stage=stage: stage)
        job_id = world.submit("sleep", "600")
        world.reached(job_id, "RUNNING")
        # WHEN a job ends for lack of capacity
        world.batch.terminate_job(jobId=job_id, reason=SPOT_WAITED_TOO_LONG)
        ended = world.reached(job_id, "FAILED")
        handler(world.event(job_id), None)
        # THEN it runs On-Demand here, and the log says why
        [found] = world.named(ended["jobName"])
        assert world.job(found["jobId"])["jobQueue"] == world.on_demand
        assert why in capsys.readouterr().out


def test_a_claim_is_always_among_the_teams_own_files() -> None:
    # The job's environment claims a run of team product, in another bucket.
    assert claim_key(JOB) == "research/a-run/moves/0f0f.json"


@pytest.fixture
def rules(world: World, monkeypatch: pytest.MonkeyPatch) -> Rules:
    """The rules from the environment that the stack sets."""
    more = {"RUN_BUCKET": world.bucket, "PARAMETER_PATH": world.parameter_path, "MOVED_REASON": MOVED_REASON}
    for name, value in {**RECLAIM_ENVIRONMENT, **more, "MOVED_TAG": MOVED_TAG, "STAGE": "test"}.items():
        monkeypatch.setenv(name, value)
    return Rules.from_environment()


def claim_of(world: World, job: dict[str, Any]) -> dict[str, Any]:
    claim: dict[str, Any] = json.load(
        world.aws.client("s3").get_object(Bucket=world.bucket, Key=claim_key(job))["Body"]
    )
    return claim


@pytest.mark.usefixtures("rules")
def test_after_too_many_reclaims_the_job_runs_on_demand_once(world: World) -> None:
    job_id = world.submit("sh", "-c", "sleep 600", "launch", "--capacity=spot", "--max-usd=5")
    world.reclaim(job_id)
    handler(world.event(job_id), None)
    assert not world.job(job_id)["isTerminated"]
    world.reclaim(job_id)
    handler(world.event(job_id), None)
    ended = world.reached(job_id, "FAILED")
    assert ended["statusReason"].startswith(
        "moved to On-Demand after 2 reclaims: continues as the job of the same name"
    )
    assert world.named(ended["jobName"]) == [], "the first job must have ended before there is a second"

    event = world.event(job_id)

    def call(_: int) -> str:
        try:
            handler(event, None)
        except MoveUnderwayError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(8) as threads:
        answers = set(threads.map(call, range(16)))
    assert "" in answers
    assert answers <= {"", f"the move of {ended['jobName']} is claimed by another call"}

    [found] = world.named(ended["jobName"])
    successor = world.reached(found["jobId"], "RUNNING")
    assert successor["jobQueue"] == world.on_demand
    assert successor["tags"] == {**ended["tags"], "trainyard:moved": "after 2 reclaims"}
    for key in (
        *("jobName", "jobDefinition", "retryStrategy", "timeout", "shareIdentifier"),
        *("schedulingPriority", "propagateTags", "parameters"),
    ):
        assert successor[key] == ended[key], key
    [old], [new] = (
        [task["containers"][0] for task in job["ecsProperties"]["taskProperties"]] for job in (ended, successor)
    )
    for key in ("name", "image", "environment", "resourceRequirements"):
        assert new[key] == old[key], key
    assert claim_of(world, ended)["successor"] == successor["jobId"]


@pytest.mark.usefixtures("rules")
def test_nodes_that_start_one_by_one_move_together_once(world: World) -> None:
    # GIVEN three nodes, of which two are reclaimed as often as allowed
    parent_id = world.submit("sleep", "600", arrayProperties={"size": 3})
    children = [f"{parent_id}:{index}" for index in range(3)]
    for child in (children[1], children[2], children[1]):
        world.reclaim(child)
        assert not world.job(parent_id)["isTerminated"]
        handler(world.event(child), None)
    # WHEN the events of all nodes and of their parent arrive
    ended = world.reached(parent_id, "FAILED")
    for _ in range(2):
        for job_id in (*children, parent_id):
            handler(world.event(job_id), None)
    # THEN all continue as one job of the same size
    [successor] = world.named(ended["jobName"])
    found = world.job(successor["jobId"])
    assert (found["arrayProperties"]["size"], found["tags"]["trainyard:moved"]) == (3, "after 2 reclaims")
    assert world.reached(f"{successor['jobId']}:2", "RUNNING")["jobQueue"] == world.on_demand


@pytest.mark.parametrize("submitted", [False, True], ids=["before it submitted", "after it submitted"])
def test_the_claim_of_a_dead_call_is_taken_over(
    world: World, rules: Rules, monkeypatch: pytest.MonkeyPatch, *, submitted: bool
) -> None:
    # GIVEN a job that ended to continue elsewhere, and a call that claimed its move and died
    job_id = world.submit("sleep", "600")
    world.reached(job_id, "RUNNING")
    world.batch.terminate_job(jobId=job_id, reason=f"{rules.moved_reason} after 2 reclaims: continues elsewhere")
    ended = world.reached(job_id, "FAILED")
    body = b'{"claimed_at": 0, "successor": null}'
    world.aws.client("s3").put_object(Bucket=world.bucket, Key=claim_key(ended), Body=body)
    decision = decide(ended, rules)
    assert isinstance(decision, Resubmit)
    [submission] = submissions(ended, decision, rules)
    earlier = [world.batch.submit_job(**submission.request)["jobId"]] if submitted else []
    # WHEN other calls come, THEN they respect the claim for a while
    with pytest.raises(MoveUnderwayError):
        handler(world.event(job_id), None)
    monkeypatch.setattr(move_to_on_demand, "CLAIM_SECONDS", -1)
    for _ in range(2):
        handler(world.event(job_id), None)
    # AND then the job is submitted, unless it already was
    [successor] = world.named(ended["jobName"])
    assert claim_of(world, ended)["successor"] == successor["jobId"]

    assert earlier in ([], [successor["jobId"]])
