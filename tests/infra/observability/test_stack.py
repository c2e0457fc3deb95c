"""Alerts, metrics, moves and budget stops: the reviewed template, and its size with many teams."""

import json
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from infra.observability.functions.batch_jobs import queues_of
from infra.observability.functions.watch_instances import SPEND, Rules, metrics
from infra.stages import Team
from infra.stages.checks import check
from jobs.core.queues import team_queue_name
from tests.support.infra.deployed_roles import DeployedStage
from tests.support.infra.goldens import assert_as_reviewed
from tests.support.infra.synthesis import Templates, flatten, resources, stacks_of
from tests.support.infra.variants import ALL


def test_the_template_is_as_reviewed(reviewed: Templates) -> None:
    assert_as_reviewed(reviewed, "observability")


def resolved(stage: DeployedStage, templates: Templates, resource_type: str) -> dict[str, dict[str, Any]]:
    found = resources(templates["observability"], resource_type)
    return {name: stage.resolve("observability", item) for name, item in found.items()}


def queues(stage: DeployedStage, templates: Templates) -> dict[str, str]:
    """Return the ARNs of the queues that the compute stack publishes, by parameter name (`queue/…`, `team-queue/…`)."""
    prefix = f"/trainyard/{stage.stage}/"
    names = [
        item["Name"].removeprefix(prefix) for item in resources(templates["compute"], "AWS::SSM::Parameter").values()
    ]
    return {name: stage.published(name) for name in names if name.startswith(("queue/", "team-queue/"))}


def watched(stage: DeployedStage, templates: Templates, name: str) -> list[str]:
    """Return the ARNs of the queues in the rules with this name, numbered or not."""
    rules = [
        rule
        for key, rule in resolved(stage, templates, "AWS::Events::Rule").items()
        if key[:-8].rstrip("0123456789") == name
    ]
    return sorted(queue for rule in rules for queue in rule["EventPattern"]["detail"]["jobQueue"])


def test_all_queues_are_watched_and_jobs_move_within_their_team(everything: DeployedStage, reviewed: Templates) -> None:
    published = queues(everything, reviewed)
    assert len(published) == ALL.queue_count
    for rule in ("Jobs", "RunningJobs", "AlertsQueueBlocked"):
        assert watched(everything, reviewed, rule) == sorted(published.values())
    # Functions use the same names as the dashboard, which gets them from the settings.
    known = queues_of(published)
    dashboard = json.dumps(resources(reviewed["observability"], "AWS::CloudWatch::Dashboard"))
    for name, arn in published.items():
        kind, *rest = name.split("/")
        team = rest.pop(0) if kind == "team-queue" else ""
        label = f"{team_queue_name(rest[0], team) if team else rest[0]}{f' ({rest[1]})' if rest[1:] else ''}"
        assert (known[arn].label, known[arn].name) == (label, rest[0])
        assert f"Reclaims {label}" in dashboard
    moves = {arn: queue.on_demand for arn, queue in known.items() if queue.on_demand}
    assert moves == {
        arn: published[name.replace("/spot", "/on-demand")] for name, arn in published.items() if "/spot" in name
    }
    assert watched(everything, reviewed, "SpotJobs") == sorted(moves)


def test_no_event_of_other_services_calls_the_watch(reviewed: Templates) -> None:
    rules = resources(reviewed["observability"], "AWS::Events::Rule")
    patterns = {name: rule["EventPattern"] for name, rule in rules.items() if "EventPattern" in rule}
    assert not [name for name, pattern in patterns.items() if pattern["source"] == ["aws.ec2"]]
    (joined,) = (pattern for name, pattern in patterns.items() if name.startswith("InstancesJoined"))
    assert [flatten(item["prefix"]) for item in joined["detail"]["clusterArn"]] == [
        "arn:aws:ecs:us-east-1:123456789012:cluster/AWSBatch"
    ]


def test_moves_and_budget_stops_are_optional(templates: Templates) -> None:
    plain = templates["dev/observability"]
    handlers = {function["Handler"] for function in resources(plain, "AWS::Lambda::Function").values()}
    always = ("end_sweep", "report_drift", "report_job", "tag_instances", "watch_instances")
    assert handlers == {f"{file}.handler" for file in always}
    assert not [name for name in resources(plain, "AWS::Events::Rule") if name.startswith("SpotJobs")]
    assert not resources(plain, "AWS::Budgets::Budget")


def test_the_dashboards_periods_fit_its_metrics(templates: Templates) -> None:
    (dashboard,) = resources(templates["dev/observability"], "AWS::CloudWatch::Dashboard").values()
    widgets = json.loads(flatten(dashboard["DashboardBody"]))["widgets"]
    shown = [metric for widget in widgets for metric in widget["properties"].get("metrics", []) if len(metric) > 1]
    options = [metric[-1] if isinstance(metric[-1], dict) else {} for metric in shown]
    periods = [option.get("period", 300) for option in options]
    assert {(metric[1], period) for metric, period in zip(shown, periods, strict=True)} == {
        *((name, 300) for name in ("QueueDepth", "RunningNodes", "SpendUsdPerHour", "AcceleratorUtilization")),
        *((name, 3600) for name in ("Reclaims", "FailedJobs")),
    }


def test_many_teams_fit() -> None:
    # GIVEN the maximum number of queues, for teams with the longest names, each with a budget and a member role
    names = [f"{number:02}-".ljust(31, "t") for number in range(10)]
    members = ALL.teams[0].member_principals
    money: dict[str, Any] = {"monthly_budget_usd": 100.0, "max_usd_per_hour": 100.0}
    teams = tuple(Team(name=name, member_principals=members, **money) for name in names)
    row = replace(ALL, name="test", teams=teams, max_multinode_nodes=0)
    check(row)
    templates = stacks_of(row)
    stage = DeployedStage("test", templates)
    published = queues(stage, templates)
    assert len(published) == 50
    for name in ("Jobs", "RunningJobs", "AlertsQueueBlocked"):
        assert watched(stage, templates, name) == sorted(published.values())

    def all_of(resource_type: str) -> list[dict[str, Any]]:
        return list(resolved(stage, templates, resource_type).values())

    # THEN AWS's limits are met: environments of functions, and free parameters,
    for function in all_of("AWS::Lambda::Function"):
        assert len(json.dumps(function.get("Environment", {}).get("Variables", {}))) < 4096
    for parameter in all_of("AWS::SSM::Parameter"):
        assert (parameter["Type"], len(parameter["Value"]) < 4096) == ("String", True)
    # statements of a queue's policy (one admits dead letters from all rules), and permissions to call a function,
    for policy in all_of("AWS::SQS::QueuePolicy"):
        assert len(policy["PolicyDocument"]["Statement"]) <= 20
        assert _size(policy["PolicyDocument"]) <= 8_192
    callers = [permission["FunctionName"] for permission in all_of("AWS::Lambda::Permission")]
    assert max(map(callers.count, callers)) <= 20
    # inline policies of roles, patterns of rules, and resources of a stack
    for policy in all_of("AWS::IAM::Policy"):
        assert _size(policy["PolicyDocument"]) < 10_240
    for rule in all_of("AWS::Events::Rule"):
        pattern = rule.get("EventPattern", {})
        # In the region with the longest name, and with the longest queue names.
        longest = "arn:aws-us-gov:batch:ap-southeast-1:123456789012:job-queue/".ljust(59 + 128, "x")
        longer = sum(len(longest) - len(arn) for arn in pattern.get("detail", {}).get("jobQueue", []))
        assert _size(pattern) + longer <= 2_048
    assert len(templates["observability"]["Resources"]) < 500
    # AND the function is subscribed to every team's budget
    subscribed = {item["TopicArn"] for item in all_of("AWS::SNS::Subscription") if item["Protocol"] == "lambda"}
    for name in names:
        assert json.loads(stage.published(f"budget/{name}"))["topic"] in subscribed
    sources = [permission.get("SourceArn", "") for permission in all_of("AWS::Lambda::Permission")]
    [allowed] = [source for source in sources if source.startswith("arn:aws:sns:") and "*" in source]
    assert all(fnmatchcase(topic, allowed) for topic in subscribed)


def test_a_dedicated_accounts_budget_needs_no_tag(variants: Templates) -> None:
    def filters(stage: str) -> list[Any]:
        found = resources(variants[f"{stage}/observability"], "AWS::Budgets::Budget").values()
        return [budget["Budget"].get("FilterExpression") for budget in found]

    assert filters("closed") == [None]
    assert len(filters("all")) == 3
    assert None not in filters("all")


def test_alarms_of_hourly_limits_watch_emitted_metrics(reviewed: Templates) -> None:
    # GIVEN the metrics of the function that counts instances
    functions = resources(reviewed["observability"], "AWS::Lambda::Function").values()
    (watch,) = (each["Environment"]["Variables"] for each in functions if each["Handler"] == "watch_instances.handler")
    rules = Rules(
        stage=watch["STAGE"],
        topic="",
        namespace=watch["METRIC_NAMESPACE"],
        path="",
        log_group="",
        prices={},
        limited=tuple(json.loads(watch["LIMITED"])),
    )
    lines = [{key: value for key, value in line.items() if key != "_aws"} for line in metrics([], rules)]
    # THEN each limit has an alarm on one of these metrics, which keeps its state while the metric is missing
    found = [
        alarm
        for alarm in resources(reviewed["observability"], "AWS::CloudWatch::Alarm").values()
        if alarm.get("MetricName") == SPEND
    ]
    watched = [{each["Name"]: each["Value"] for each in alarm["Dimensions"]} for alarm in found]
    assert [{**each, SPEND: 0} for each in watched] == lines
    assert {alarm["Namespace"] for alarm in found} == {rules.namespace}
    assert [(alarm["Threshold"], alarm["TreatMissingData"]) for alarm in found] == [(200, "ignore"), (100, "ignore")]


def _size(value: object) -> int:
    return len(json.dumps(value, separators=(",", ":")))
