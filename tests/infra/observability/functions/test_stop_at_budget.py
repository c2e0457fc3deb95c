"""A budget that is used up stops what is new and lets run what runs; the next month, or a raised budget, ends that."""

import json
import uuid
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from infra.observability.functions import stop_at_budget
from infra.observability.functions.stop_at_budget import STOP_TAG, TEAM_BUDGETS, Rules, handler, next_month
from jobs.contract.stage import budget_stop_parameter, job_definition_parameter, member_role_parameter
from tests.infra.observability.functions.conftest import World
from tests.support.infra.messages import Inbox

STAGE_TOPIC = "arn:aws:sns:us-east-1:123456789012:stage"
TEAM_TOPIC = "arn:aws:sns:us-east-1:123456789012:team"
MONTHLY: dict[str, Any] = {"source": "aws.events", "detail-type": "Scheduled Event", "detail": {}}
DEPLOYED: dict[str, Any] = {
    "source": "aws.cloudformation",
    "detail-type": "CloudFormation Stack Status Change",
    "detail": {"status-details": {"status": "UPDATE_COMPLETE"}},
}

Configure = Callable[..., Rules]


def used_up(topic: str) -> dict[str, Any]:
    """Return a budget's notification as SNS hands it on; its words are for people and are not read."""
    return {"Records": [{"EventSource": "aws:sns", "Sns": {"TopicArn": topic, "Message": "AWS Budget Notification …"}}]}


@pytest.fixture
def stage(world: World) -> str:
    """A stage's name of the test's own, on the compute environments of its queues."""
    name = f"s{uuid.uuid4().hex[:8]}"
    for environment in environments(world):
        world.batch.tag_resource(resourceArn=environment["computeEnvironmentArn"], tags={"trainyard:stage": name})
    for queue in (world.spot, world.on_demand):
        world.batch.tag_resource(resourceArn=queue, tags={"trainyard:stage": name})
    return name


@pytest.fixture
def role(world: World) -> str:
    name = f"members-{uuid.uuid4().hex[:8]}"
    world.aws.client("iam").create_role(RoleName=name, AssumeRolePolicyDocument="{}")
    return name


@pytest.fixture
def configure(world: World, inbox: Inbox, stage: str, role: str, monkeypatch: pytest.MonkeyPatch) -> Configure:
    def set_environment(*, stage_usd: float = 1000, team_usd: float = 100) -> Rules:
        path = f"/trainyard/{stage}/"
        for name, deployed in {
            "stage-budget": json.dumps({"limit_usd": stage_usd, "topic": STAGE_TOPIC}),
            f"{TEAM_BUDGETS}research": json.dumps({"limit_usd": team_usd, "topic": TEAM_TOPIC}),
            member_role_parameter("research"): f"arn:aws:iam::123456789012:role/{role}",
            # More than Systems Manager shows at once.
            **{job_definition_parameter("research", f"kind-{number}"): "arn" for number in range(12)},
        }.items():
            world.aws.client("ssm").put_parameter(Name=path + name, Value=deployed, Type="String", Overwrite=True)
        for name, value in {
            "STAGE": stage,
            "TOPIC_ARN": inbox.topic,
            "PARAMETER_PATH": path,
        }.items():
            monkeypatch.setenv(name, value)
        return Rules.from_environment()

    set_environment()
    return set_environment


def environments(world: World) -> list[dict[str, Any]]:
    """Return the compute environments of the test's own queues."""
    order = [
        place["computeEnvironment"]
        for queue in world.batch.describe_job_queues(jobQueues=[world.spot, world.on_demand])["jobQueues"]
        for place in queue["computeEnvironmentOrder"]
    ]
    found: list[dict[str, Any]] = world.batch.describe_compute_environments(computeEnvironments=order)[
        "computeEnvironments"
    ]
    return found


def states(world: World) -> set[str]:
    return {environment["state"] for environment in environments(world)}


def parameter(world: World, name: str) -> dict[str, Any] | None:
    found = world.aws.client("ssm").get_parameters(Names=[name])["Parameters"]
    return json.loads(found[0]["Value"]) if found else None


def stop_tag(world: World, role: str) -> str | None:
    tags = world.aws.client("iam").list_role_tags(RoleName=role)["Tags"]
    return {tag["Key"]: tag["Value"] for tag in tags}.get(STOP_TAG)


def test_a_stage_that_has_used_up_its_budget_starts_nothing_new_and_lets_run_what_runs(
    world: World, stage: str, configure: Configure, inbox: Inbox
) -> None:
    running = world.submit("sleep", "600")
    world.reached(running, "RUNNING")
    handler(used_up(STAGE_TOPIC), None)
    handler(used_up(STAGE_TOPIC), None)
    assert states(world) == {"DISABLED"}
    assert world.job(running)["status"] == "RUNNING"
    record = parameter(world, f"/trainyard/{stage}/stage-budget-stop")
    assert record is not None
    assert record["budget_usd"] == 1000
    assert datetime.fromisoformat(record["until"]).day == 1
    first, again = inbox.read()
    assert first.startswith(f"Stage {stage} has used up its budget of 1000 USD: 2 compute environments were disabled.")
    assert "0 compute environments" in again

    handler(DEPLOYED, None)
    assert states(world) == {"DISABLED"}


def test_a_deployment_that_enables_again_what_a_budget_stopped_does_not_last(
    world: World, stage: str, configure: Configure
) -> None:
    handler(used_up(STAGE_TOPIC), None)
    for environment in environments(world):
        world.batch.update_compute_environment(computeEnvironment=environment["computeEnvironmentArn"], state="ENABLED")
    handler(DEPLOYED, None)
    assert states(world) == {"DISABLED"}


def test_a_raised_budget_lets_the_stage_go_on(world: World, stage: str, configure: Configure, inbox: Inbox) -> None:
    handler(used_up(STAGE_TOPIC), None)
    inbox.read()
    configure(stage_usd=2000)
    handler(DEPLOYED, None)
    assert states(world) == {"ENABLED"}
    assert parameter(world, f"/trainyard/{stage}/stage-budget-stop") is None
    assert inbox.read() == [f"Stage {stage} may start jobs again, with a budget of 2000 USD a month."]


def test_a_team_that_has_used_up_its_budget_waits_no_longer_and_submits_nothing(
    world: World, stage: str, role: str, configure: Configure, inbox: Inbox
) -> None:
    running = [world.submit("sleep", "600") for _ in range(10)]
    for job_id in running:
        world.reached(job_id, "RUNNING")
    waiting, others = world.submit("true"), world.submit("true", team="product")
    for job_id in (waiting, others):
        world.reached(job_id, "RUNNABLE")

    handler(used_up(TEAM_TOPIC), None)

    cancelled = world.reached(waiting, "FAILED")
    assert cancelled["statusReason"].startswith("budget of team research (100 USD a month) is used up until ")
    assert "trainyard submit SPEC" in cancelled["statusReason"]
    assert world.job(others)["status"] == "RUNNABLE"
    assert {world.job(job_id)["status"] for job_id in running} == {"RUNNING"}
    assert states(world) == {"ENABLED"}
    record = parameter(world, f"/trainyard/{stage}/budget-stop/research")
    assert record is not None
    assert set(record) == {"budget_usd", "since", "until"}
    assert stop_tag(world, role) == record["until"]
    world.aws.client("iam").delete_role(RoleName=role)  # which what is attached to it would forbid
    [message] = inbox.read()
    assert message.startswith(f"Team research (stage {stage}) has used up its budget of 100 USD: 1 waiting jobs were")


def test_a_role_that_comes_in_anothers_place_is_stopped_as_well(
    world: World, stage: str, role: str, configure: Configure
) -> None:
    handler(used_up(TEAM_TOPIC), None)
    world.aws.client("iam").untag_role(RoleName=role, TagKeys=[STOP_TAG])
    handler(DEPLOYED, None)
    assert stop_tag(world, role)


def test_the_next_month_ends_all_stops(
    *, world: World, stage: str, role: str, configure: Configure, inbox: Inbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    handler(used_up(STAGE_TOPIC), None)
    handler(used_up(TEAM_TOPIC), None)
    handler(MONTHLY, None)  # called on some other day it changes nothing
    assert states(world) == {"DISABLED"}
    assert stop_tag(world, role)

    class NextMonth(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> "NextMonth":
            first = next_month(datetime.now(timezone.utc)) + timedelta(minutes=5)
            return cls.fromtimestamp(first.timestamp(), tz)

    monkeypatch.setattr(stop_at_budget, "datetime", NextMonth)
    handler(MONTHLY, None)

    assert states(world) == {"ENABLED"}
    assert stop_tag(world, role) is None
    assert parameter(world, f"/trainyard/{stage}/stage-budget-stop") is None
    assert parameter(world, f"/trainyard/{stage}/budget-stop/research") is None
    assert inbox.read()[-1] == f"Team research (stage {stage}) may start jobs again, with a budget of 100 USD a month."


def test_a_stop_does_not_outlive_its_budget(
    world: World, stage: str, role: str, configure: Configure, inbox: Inbox
) -> None:
    # GIVEN a team and a stage that have used up their budgets
    handler(used_up(TEAM_TOPIC), None)
    handler(used_up(STAGE_TOPIC), None)
    inbox.read()
    # WHEN a deployment takes both budgets away
    world.aws.client("ssm").delete_parameters(
        Names=[f"/trainyard/{stage}/{name}" for name in ("stage-budget", TEAM_BUDGETS + "research")]
    )
    handler(DEPLOYED, None)
    # THEN nothing is stopped any more
    assert states(world) == {"ENABLED"}
    assert stop_tag(world, role) is None
    for name in ("stage-budget-stop", "budget-stop/research"):
        assert parameter(world, f"/trainyard/{stage}/{name}") is None
    assert inbox.read() == [
        f"Stage {stage} may start jobs again, without a budget of its own.",
        f"Team research (stage {stage}) may start jobs again, without a budget of its own.",
    ]


@pytest.mark.parametrize(
    ("now", "then"),
    [
        ("2026-01-31T23:59:59+00:00", "2026-02-01T00:00:00+00:00"),
        ("2026-02-01T00:00:00+00:00", "2026-03-01T00:00:00+00:00"),
        ("2026-12-15T12:00:00+00:00", "2027-01-01T00:00:00+00:00"),
        ("2026-05-01T01:00:00+02:00", "2026-05-01T00:00:00+00:00"),  # still April in UTC
    ],
)
def test_a_month_is_one_of_utc(now: str, then: str) -> None:
    assert next_month(datetime.fromisoformat(now)) == datetime.fromisoformat(then)


def test_stops_and_roles_are_called_as_the_rest_of_the_stage_calls_them() -> None:
    assert stop_at_budget.stop_parameter("research") == budget_stop_parameter("research")
    assert member_role_parameter("research") == stop_at_budget.MEMBER_ROLES + "research"
