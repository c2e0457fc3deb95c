"""A used-up budget stops new jobs but not running ones, until the next month or a higher budget."""

import json
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from infra.observability.functions import stop_at_budget
from infra.observability.functions.stop_at_budget import (
    MEMBER_ROLES,
    STAGE_BUDGET,
    STAGE_HOURLY_STOP,
    STAGE_LIMIT,
    STAGE_STOP,
    STOP_TAG,
    TEAM_BUDGETS,
    TEAM_LIMITS,
    handler,
    next_month,
    stop_parameter,
)
from jobs.core.stage import DeployedStage, budget_stop_parameter, job_definition_parameter, member_role_parameter
from tests.infra.observability.functions.conftest import Inbox, World

STAGE_TOPIC = "arn:aws:sns:us-east-1:123456789012:stage"
TEAM_TOPIC = "arn:aws:sns:us-east-1:123456789012:team"
MONTHLY: dict[str, Any] = {"source": "aws.events", "detail-type": "Scheduled Event", "detail": {}}
DEPLOYED: dict[str, Any] = {
    "source": "aws.cloudformation",
    "detail-type": "CloudFormation Stack Status Change",
    "detail": {"status-details": {"status": "UPDATE_COMPLETE"}},
}


def used_up(topic: str) -> dict[str, Any]:
    """Return a budget's notification in SNS's format. The function does not read its text."""
    return {"Records": [{"EventSource": "aws:sns", "Sns": {"TopicArn": topic, "Message": "AWS Budget Notification …"}}]}


@dataclass(frozen=True)
class StoppedStage:
    """A new stage, whose name is in the tags of its environments and queues."""

    world: World
    name: str
    role: str
    """Member role of team research."""

    def deploy(self, **usd: float) -> None:
        """Write the parameters of a deployment with these budgets, and call the function with its event."""
        ssm = self.world.aws.client("ssm")
        ssm.delete_parameters(Names=[self.path(name) for name in (STAGE_BUDGET, f"{TEAM_BUDGETS}research")])
        topics = {STAGE_BUDGET: STAGE_TOPIC, f"{TEAM_BUDGETS}research": TEAM_TOPIC}
        limits = {STAGE_BUDGET: usd.get("stage"), f"{TEAM_BUDGETS}research": usd.get("team")}
        for name, value in {
            **{
                name: json.dumps({"limit_usd": limit, "topic": topics[name]}) for name, limit in limits.items() if limit
            },
            member_role_parameter("research"): f"arn:aws:iam::123456789012:role/{self.role}",
            # More than one page of results
            **{job_definition_parameter("research", f"kind-{number}"): "arn" for number in range(12)},
        }.items():
            ssm.put_parameter(Name=self.path(name), Value=value, Type="String", Overwrite=True)
        handler(DEPLOYED, None)

    def limit(self, alarm: str, team: str | None = None, usd: float = 60) -> Callable[[str], None]:
        """Deploy an hourly limit with an alarm. Return a function that sets the alarm's state and calls the handler."""
        name, cloudwatch = f"{self.name}-{alarm}", self.world.aws.client("cloudwatch")
        metric = {"Namespace": "x", "MetricName": "x", "Statistic": "Maximum", "Period": 300, "EvaluationPeriods": 1}
        above = {"Threshold": usd, "ComparisonOperator": "GreaterThanThreshold"}
        cloudwatch.put_metric_alarm(AlarmName=name, **metric, **above)
        self.world.aws.client("ssm").put_parameter(
            Name=self.path(TEAM_LIMITS + team if team else STAGE_LIMIT),
            Value=json.dumps({"usd_per_hour": usd, "alarm": name}),
            Type="String",
        )

        def becomes(state: str) -> None:
            cloudwatch.set_alarm_state(AlarmName=name, StateValue=state, StateReason="test")
            handler(used_up("arn:aws:sns:us-east-1:123456789012:alarms"), None)

        return becomes

    def switch(self, environment: dict[str, Any], state: str) -> None:
        batch = self.world.batch
        batch.update_compute_environment(computeEnvironment=environment["computeEnvironmentName"], state=state)

    def path(self, name: str) -> str:
        return f"/trainyard/{self.name}/{name}"

    def record(self, name: str) -> dict[str, Any] | None:
        found = self.world.aws.client("ssm").get_parameters(Names=[self.path(name)])["Parameters"]
        return json.loads(found[0]["Value"]) if found else None

    @property
    def environments(self) -> list[dict[str, Any]]:
        batch = self.world.batch
        order = [
            place["computeEnvironment"]
            for queue in batch.describe_job_queues(jobQueues=[self.world.spot, self.world.on_demand])["jobQueues"]
            for place in queue["computeEnvironmentOrder"]
        ]
        found = batch.describe_compute_environments(computeEnvironments=order)
        return list(found["computeEnvironments"])

    @property
    def states(self) -> set[str]:
        return {environment["state"] for environment in self.environments}

    def stop_tag(self) -> str | None:
        tags = self.world.aws.client("iam").list_role_tags(RoleName=self.role)["Tags"]
        return {tag["Key"]: tag["Value"] for tag in tags}.get(STOP_TAG)


@pytest.fixture
def stage(world: World, inbox: Inbox, monkeypatch: pytest.MonkeyPatch) -> StoppedStage:
    name, role = f"s{uuid.uuid4().hex[:8]}", f"members-{uuid.uuid4().hex[:8]}"
    world.aws.client("iam").create_role(RoleName=role, AssumeRolePolicyDocument="{}")
    stage = StoppedStage(world, name, role)
    for arn in (*(item["computeEnvironmentArn"] for item in stage.environments), world.spot, world.on_demand):
        world.batch.tag_resource(resourceArn=arn, tags={"trainyard:stage": name})
    for variable, value in {"STAGE": name, "TOPIC_ARN": inbox.topic, "PARAMETER_PATH": stage.path("")}.items():
        monkeypatch.setenv(variable, value)
    stage.deploy(stage=1000, team=100)
    return stage


@pytest.fixture
def month_passes(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    class NextMonth(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> "NextMonth":
            first = next_month(datetime.now(timezone.utc)) + timedelta(minutes=5)
            return cls.fromtimestamp(first.timestamp(), tz)

    return lambda: monkeypatch.setattr(stop_at_budget, "datetime", NextMonth)


def test_a_stage_over_budget_only_continues_running_jobs(world: World, stage: StoppedStage, inbox: Inbox) -> None:
    running = world.submit("sleep", "600")
    world.reached(running, "RUNNING")
    handler(used_up(STAGE_TOPIC), None)
    handler(used_up(STAGE_TOPIC), None)
    assert stage.states == {"DISABLED"}
    assert world.job(running)["status"] == "RUNNING"
    record = stage.record(STAGE_STOP)
    assert record is not None
    assert (record["budget_usd"], datetime.fromisoformat(record["until"]).day) == (1000, 1)
    first, again = inbox.read()
    assert f"{stage.name} has used up its budget of 1000 USD: 2 compute environments were disabled." in first
    assert "0 compute environments" in again
    # If a deployment enables stopped environments, they are disabled again.
    for environment in stage.environments:
        world.batch.update_compute_environment(computeEnvironment=environment["computeEnvironmentArn"], state="ENABLED")
    stage.deploy(stage=1000, team=100)
    assert stage.states == {"DISABLED"}
    # A deployment with a higher budget ends the stop.
    stage.deploy(stage=2000, team=100)
    assert (stage.states, stage.record(STAGE_STOP)) == ({"ENABLED"}, None)
    assert inbox.read() == [f"Stage {stage.name} may start jobs again, with a budget of 2000 USD a month."]


def test_the_end_of_a_stop_enables_only_what_the_stop_disabled(
    stage: StoppedStage, month_passes: Callable[[], None]
) -> None:
    # GIVEN an environment that a person, or watch_instances, has disabled
    broken, _ = stage.environments
    stage.switch(broken, "DISABLED")
    # WHEN the stage's budget is used up, and a repeated notification and a deployment confirm the stop
    handler(used_up(STAGE_TOPIC), None)
    handler(used_up(STAGE_TOPIC), None)
    stage.deploy(stage=1000, team=100)
    assert stage.states == {"DISABLED"}
    # THEN the end of the stop enables the other environment only
    month_passes()
    handler(MONTHLY, None)
    assert [item["state"] for item in stage.environments] == ["DISABLED", "ENABLED"]
    # BUT if a deployment enables the environment during a stop, the end of the stop enables it too
    handler(used_up(STAGE_TOPIC), None)
    stage.switch(broken, "ENABLED")
    handler(MONTHLY, None)
    assert stage.states == {"DISABLED"}
    stage.deploy(stage=2000, team=100)
    assert stage.states == {"ENABLED"}


def test_an_hourly_limit_stops_until_its_alarm_is_ok(stage: StoppedStage, inbox: Inbox) -> None:
    # GIVEN an environment that a person, or watch_instances, has disabled
    broken, _ = stage.environments
    stage.switch(broken, "DISABLED")
    alarm = stage.limit("spend")
    # WHEN the alarm is raised, and a deployment enables an environment in the meantime
    alarm("ALARM")
    assert stage.states == {"DISABLED"}
    assert set(stage.record(STAGE_HOURLY_STOP) or {}) == {"since", "disabled_before"}
    stage.switch(stage.environments[1], "ENABLED")
    stage.deploy(stage=1000)
    assert stage.states == {"DISABLED"}
    # THEN the stop lasts while the cost is unknown, and its end enables the other environment only
    alarm("INSUFFICIENT_DATA")
    assert stage.states == {"DISABLED"}
    alarm("OK")
    assert [item["state"] for item in stage.environments] == ["DISABLED", "ENABLED"]
    assert stage.record(STAGE_HOURLY_STOP) is None
    begin, end = inbox.read()
    assert begin.startswith(f"Stage {stage.name} spends more than its limit of 60 USD an hour: 1 compute environments")
    assert end == f"Stage {stage.name}: the stop at the hourly limit has ended."
    # A limit that is removed during a stop ends it
    alarm("ALARM")
    stage.world.aws.client("ssm").delete_parameter(Name=stage.path(STAGE_LIMIT))
    stage.deploy(stage=1000)
    assert [item["state"] for item in stage.environments] == ["DISABLED", "ENABLED"]


def test_an_alarm_that_ends_during_a_call_is_not_missed(stage: StoppedStage, monkeypatch: pytest.MonkeyPatch) -> None:
    alarm, cloudwatch = stage.limit("spend"), stage.world.aws.client("cloudwatch")

    def disable(*arguments: Any) -> Any:
        # The call for the end of the alarm finds nothing to end, and is over before this one acts.
        cloudwatch.set_alarm_state(AlarmName=f"{stage.name}-spend", StateValue="OK", StateReason="test")
        return original(*arguments)

    original = stop_at_budget.disable
    monkeypatch.setattr(stop_at_budget, "disable", disable)
    alarm("ALARM")
    assert stage.states == {"ENABLED"}
    assert stage.record(STAGE_HOURLY_STOP) is None


@pytest.mark.parametrize("first", ["budget", "limit"])
def test_the_end_of_a_stop_leaves_what_another_stop_covers(stage: StoppedStage, first: str) -> None:
    # GIVEN a team's environment, and one that a person has disabled
    theirs, broken = stage.environments
    stage.world.batch.tag_resource(resourceArn=theirs["computeEnvironmentArn"], tags={"trainyard:team": "research"})
    stage.switch(broken, "DISABLED")
    alarm = stage.limit("team", "research")
    begin = {"budget": lambda: handler(used_up(STAGE_TOPIC), None), "limit": lambda: alarm("ALARM")}
    end = {"budget": lambda: stage.deploy(stage=2000), "limit": lambda: alarm("OK")}
    # WHEN two stops cover the environment, THEN only the end of the second enables it, in either order
    for order in (("budget", "limit"), ("limit", "budget")):
        stage.deploy(stage=1000)
        begin[first]()
        begin["limit" if first == "budget" else "budget"]()
        assert stage.states == {"DISABLED"}
        end[order[0]]()
        assert stage.states == {"DISABLED"}
        end[order[1]]()
        assert [item["state"] for item in stage.environments] == ["ENABLED", "DISABLED"]


def test_a_teams_hourly_limit_stops_only_its_environments(stage: StoppedStage) -> None:
    theirs, _ = stage.environments
    stage.world.batch.tag_resource(resourceArn=theirs["computeEnvironmentArn"], tags={"trainyard:team": "research"})
    alarm = stage.limit("team", "research")
    alarm("ALARM")
    assert [item["state"] for item in stage.environments] == ["DISABLED", "ENABLED"]
    deployed = {"bucket/data": "d", "bucket/run": "r", "log-group": "l", "instance-type": "dl1.24xlarge"}
    values = {**deployed, "cpu-instance-type": "m6i.4xlarge", "hourly-stop/research": "{}"}
    assert stage.record("hourly-stop/research")
    reader = DeployedStage.from_parameters("dev", values)
    assert reader.hourly_stop("research") == "the instances of team 'research' cost more than its max_usd_per_hour"
    assert reader.hourly_stop("product") is None
    alarm("OK")
    assert stage.states == {"ENABLED"}


def test_an_environment_under_update_does_not_keep_the_others_enabled(
    world: World, stage: StoppedStage, inbox: Inbox
) -> None:
    # GIVEN a deployment that replaces instances of one environment, which waits for a running job
    running = world.submit("sleep", "600")
    world.reached(running, "RUNNING")
    first, _ = stage.environments
    name = first["computeEnvironmentName"]
    world.batch.update_compute_environment(computeEnvironment=name, computeResources={"tags": {"Name": "new"}})
    # WHEN the budget is used up, THEN the other environment is disabled
    handler(used_up(STAGE_TOPIC), None)
    assert [item["state"] for item in stage.environments] == ["ENABLED", "DISABLED"]
    [message] = inbox.read()
    assert "1 compute environments were disabled" in message
    assert f"Batch refused to change {name}, which are still enabled" in message
    # AND the end of the deployment disables the rest
    world.batch.terminate_job(jobId=running, reason="test")
    world.reached(running, "FAILED")
    stage.deploy(stage=1000, team=100)
    assert stage.states == {"DISABLED"}


def test_a_team_over_budget_has_its_waiting_jobs_cancelled(
    world: World, stage: StoppedStage, inbox: Inbox, month_passes: Callable[[], None]
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
    assert stage.states == {"ENABLED"}
    record = stage.record("budget-stop/research")
    assert record is not None
    assert set(record) == {"budget_usd", "since", "until"}
    assert stage.stop_tag() == record["until"]
    [message] = inbox.read()
    assert "research" in message
    assert "has used up its budget of 100 USD: 1 waiting jobs were" in message
    # A replaced role is stopped as well, and before the next month the stop does not end.
    world.aws.client("iam").untag_role(RoleName=stage.role, TagKeys=[STOP_TAG])
    handler(MONTHLY, None)
    assert stage.stop_tag()
    # The next month ends the stop.
    month_passes()
    handler(MONTHLY, None)
    assert (stage.stop_tag(), stage.record("budget-stop/research")) == (None, None)
    team = f"Team research (stage {stage.name})"
    assert inbox.read() == [f"{team} may start jobs again, with a budget of 100 USD a month."]


def test_a_stop_does_not_outlive_its_budget(stage: StoppedStage, inbox: Inbox) -> None:
    # GIVEN a team and a stage with used-up budgets
    handler(used_up(TEAM_TOPIC), None)
    handler(used_up(STAGE_TOPIC), None)
    inbox.read()
    # WHEN a deployment removes both budgets
    stage.deploy()
    # THEN nothing is stopped
    assert (stage.states, stage.stop_tag()) == ({"ENABLED"}, None)
    assert stage.record(STAGE_STOP) is stage.record("budget-stop/research") is None
    assert inbox.read() == [
        f"Stage {stage.name} may start jobs again, without a budget.",
        f"Team research (stage {stage.name}) may start jobs again, without a budget.",
    ]


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        ("2026-01-31T23:59:59+00:00", "2026-02-01T00:00:00+00:00"),
        ("2026-12-15T12:00:00+00:00", "2027-01-01T00:00:00+00:00"),
        ("2026-05-01T01:00:00+02:00", "2026-05-01T00:00:00+00:00"),  # still April in UTC
    ],
)
def test_months_are_in_utc(now: str, expected: str) -> None:
    assert next_month(datetime.fromisoformat(now)) == datetime.fromisoformat(expected)


def test_parameter_names_match_those_of_the_rest_of_the_stage() -> None:
    assert stop_parameter("research") == budget_stop_parameter("research")
    assert member_role_parameter("research") == MEMBER_ROLES + "research"
