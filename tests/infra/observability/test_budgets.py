"""Budgets that warn and then stop, and the rights of what stops: on the template, with ARNs worked out."""

import json

from infra.observability.functions.stop_at_budget import STOP_TAG
from tests.support.infra.observed_stage import Observed
from tests.support.infra.synthesis import resources


def test_budgets_count_what_carries_the_tags_and_warn_before_they_stop(everything: Observed) -> None:
    budgets = list(everything.all("AWS::Budgets::Budget").values())
    by_limit = {budget["Budget"]["BudgetLimit"]["Amount"]: budget for budget in budgets}
    stage_tag = {"Tags": {"Key": "trainyard:stage", "MatchOptions": ["EQUALS"], "Values": ["test"]}}
    team_tag = {"Tags": {"Key": "trainyard:team", "MatchOptions": ["EQUALS"], "Values": ["research"]}}
    assert by_limit[1000]["Budget"]["FilterExpression"] == stage_tag
    assert by_limit[100]["Budget"]["FilterExpression"] == {"And": [stage_tag, team_tag]}
    told = [json.loads(everything.published(name)) for name in ("stage-budget", "budget/research")]
    assert [budget["limit_usd"] for budget in told] == [1000, 100]
    topics = {budget["topic"] for budget in told}
    alerts = everything.arn("observability", everything.only("observability", "AWS::SNS::Topic", "AlertsTopic"))
    stopping = set()
    for budget in budgets:
        assert "BudgetName" not in budget["Budget"], "a fixed name cannot be replaced"
        notified = {
            (n["Notification"]["NotificationType"], n["Notification"]["Threshold"]): n["Subscribers"][0]["Address"]
            for n in budget["NotificationsWithSubscribers"]
        }
        assert notified["ACTUAL", 80] == notified["FORECASTED", 80] == alerts
        stopping.add(notified["ACTUAL", 100])
    assert stopping == topics
    heard = {s["TopicArn"] for s in everything.all("AWS::SNS::Subscription").values() if s["Protocol"] == "lambda"}
    assert topics <= heard


def test_a_budget_waits_until_it_may_publish(everything: Observed) -> None:
    made = everything.template["Resources"]
    policies = {
        topic["Ref"]: name
        for name, policy in resources(everything.template, "AWS::SNS::TopicPolicy").items()
        for topic in policy["Topics"]
    }
    for name, budget in resources(everything.template, "AWS::Budgets::Budget").items():
        addressed = {n["Subscribers"][0]["Address"]["Ref"] for n in budget["NotificationsWithSubscribers"]}
        assert len(addressed) == 2
        assert {policies[topic] for topic in addressed} <= set(made[name].get("DependsOn", []))


def test_a_budget_that_is_used_up_can_stop_its_stage_and_give_nobody_rights(everything: Observed) -> None:
    role = everything.role("observability", "BudgetsFunctionRole")
    environment = "arn:aws:batch:us-east-1:123456789012:compute-environment/x"
    for stage, allowed in (("test", True), ("prod", False)):
        context = {"aws:ResourceTag/trainyard:stage": stage}
        assert (role.decide_in("batch:UpdateComputeEnvironment", environment, context) == "allowed") is allowed
    member = everything.role("jobs", "Membersresearch")
    tags = {f"aws:ResourceTag/{key}": value for key, value in member.tags.items()}
    for target, of_target, keys, allowed in (
        (member.arn, tags, [STOP_TAG], True),
        (member.arn, tags, ["trainyard:role"], False),
        (member.arn, tags, [STOP_TAG, "trainyard:team"], False),
        (member.arn, {**tags, "aws:ResourceTag/trainyard:stage": "prod"}, [STOP_TAG], False),
        (role.arn, {f"aws:ResourceTag/{key}": value for key, value in role.tags.items()}, [STOP_TAG], False),
        ("arn:aws:iam::123456789012:role/admin", {}, [STOP_TAG], False),
    ):
        for action in ("iam:TagRole", "iam:UntagRole"):
            decision = role.decide_in(action, target, {**of_target, "aws:TagKeys": keys})
            assert (decision == "allowed") is allowed, (action, target, keys)
    assert not role.may("iam:AttachRolePolicy", member.arn)
    parameter = "arn:aws:ssm:us-east-1:123456789012:parameter/trainyard/test"
    assert role.may("ssm:PutParameter", f"{parameter}/budget-stop/research")
    assert not role.may("ssm:PutParameter", f"{parameter}/queue/spot")
    assert everything.published("member-role/research") == member.arn
    assert everything.environment("stop_at_budget")["PARAMETER_PATH"] == "/trainyard/test/"
    for path in ("", "/*"):
        assert role.may("ssm:GetParametersByPath", f"{parameter}{path}")


def test_stops_end_with_the_month_and_outlast_a_deployment(everything: Observed) -> None:
    assert everything.rule("BudgetsNewMonth")["ScheduleExpression"] == "cron(5 0 1 * ? *)"
    pattern = everything.rule("BudgetsDeployed")["EventPattern"]
    prefixes = [item["prefix"].rsplit("/", 2)[1] for item in pattern["detail"]["stack-id"]]
    assert prefixes == ["trainyard-test-compute", "trainyard-test-jobs", "trainyard-test-observability"]
    assert {"CREATE_COMPLETE", "UPDATE_COMPLETE"} <= set(pattern["detail"]["status-details"]["status"])


def test_without_a_budget_there_is_none(plain: Observed) -> None:
    assert not plain.all("AWS::Budgets::Budget")
