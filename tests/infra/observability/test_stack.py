"""Who is told of what, what is measured, what moves and what stops: on the template, with ARNs worked out."""

import json
from dataclasses import replace
from fnmatch import fnmatchcase

from infra.stages import Stage, Team
from jobs.contract.queues import QUEUES
from tests.support.infra.observed_stage import EVERYTHING, MEMBER, OLD_POOL, Observed, observed
from tests.support.infra.synthesis import resources


def test_jobs_of_every_queue_are_reported_and_those_of_pools_that_retire(everything: Observed) -> None:
    queues = everything.queues()
    assert len(queues) == 2 * 3 + 1, "three for each of two pools, and one for CPU jobs"
    for rule in ("Jobs", "RunningJobs", "AlertsQueueBlocked"):
        pattern = everything.rule(rule)["EventPattern"]
        assert pattern["source"] == ["aws.batch"]
        assert sorted(pattern["detail"]["jobQueue"]) == sorted(queues.values())
    environment = everything.environment("report_job")
    told = json.loads(environment["QUEUES"])
    assert {environment["QUEUE_ARNS"] + queue: name for queue, name, _ in told} == {
        arn: f"{name.split('/')[1]} ({OLD_POOL.id})" if name.count("/") == 2 else name.split("/")[1]
        for name, arn in queues.items()
    }
    assert {name: capacity for _, name, capacity in told}.items() >= {
        name: queue.capacity for name, queue in QUEUES.items()
    }.items()
    prices = json.loads(everything.environment("watch_instances")["PRICES"])
    stage = Stage(name="test", teams=())
    row = stage.row
    assert prices[row.name] == {"spot": row.spot_usd_per_hour, "on-demand": row.on_demand_usd_per_hour}
    assert set(prices) == {row.name, stage.cpu_row.name, OLD_POOL.row.name}


def test_a_job_moves_to_the_on_demand_queue_of_its_own_pool(everything: Observed) -> None:
    queues = everything.queues()
    moves = _moves(everything)
    assert moves == {
        queues["queue/spot"]: queues["queue/on-demand"],
        queues[f"queue/spot/{OLD_POOL.id}"]: queues[f"queue/on-demand/{OLD_POOL.id}"],
    }
    assert sorted(everything.rule("SpotJobs")["EventPattern"]["detail"]["jobQueue"]) == sorted(moves)
    assert everything.environment("move_to_on_demand")["RECLAIMS_BEFORE_ON_DEMAND"] == "3"
    role = everything.role("observability", "MoveToOnDemandRole")
    for queue in queues.values():
        assert role.may("batch:SubmitJob", queue) is (queue in moves.values())
    definition = "arn:aws:batch:us-east-1:123456789012:job-definition/x:1"
    for stage, allowed in (("test", True), ("other", False)):
        context = {"aws:ResourceTag/trainyard:stage": stage}
        assert (role.decide_in("batch:SubmitJob", definition, context) == "allowed") is allowed
    runs = everything.arn("storage", everything.only("storage", "AWS::S3::Bucket", "Runs"))
    assert role.may("s3:PutObject", f"{runs}/research/tiny-1/moves/1.json")
    assert everything.environment("move_to_on_demand")["RUN_BUCKET"] == runs.rpartition(":")[2]
    assert not role.may("s3:PutObject", f"{runs}/research/tiny-1/receipt.json")
    assert not role.may("s3:GetObject", f"{runs}/research/tiny-1/model/config.json")
    job = "arn:aws:batch:us-east-1:123456789012:job/1"
    for stage, allowed in (("test", True), ("other", False)):
        context = {"aws:ResourceTag/trainyard:stage": stage}
        assert (role.decide_in("batch:TerminateJob", job, context) == "allowed") is allowed
    assert not role.may("batch:TerminateJob", job), "a job that is none of ours"
    asked, there = "aws:RequestTag/trainyard:stage", "aws:ResourceTag/trainyard:stage"
    for context, allowed in (
        ({asked: "test"}, True),  # with SubmitJob: the successor carries the tags of the first job
        ({asked: "test", there: "test"}, True),
        ({asked: "test", there: "other"}, False),
        ({asked: "other"}, False),
        ({}, False),
    ):
        assert (role.decide_in("batch:TagResource", job, context) == "allowed") is allowed, context
        # By its own policy too: an account may put a boundary of its own in place of the stage's.
        unbounded = replace(role, boundary=None)
        assert (unbounded.decide_in("batch:TagResource", job, context) == "allowed") is allowed, context


def test_queues_of_an_isolated_team_are_watched_and_its_jobs_move_among_its_own() -> None:
    teams = (Team(name="h" * 31, isolated=True), Team(name="product"))
    there = observed(**{**EVERYTHING, "teams": teams})
    queues = there.queues()
    own = {name.removeprefix(f"team-queue/{teams[0].name}/"): arn for name, arn in queues.items() if "team-" in name}
    assert len(own) == len(queues) / 2 == 7
    assert (
        _moves(there).items()
        >= {
            own["spot"]: own["on-demand"],
            own[f"spot/{OLD_POOL.id}"]: own[f"on-demand/{OLD_POOL.id}"],
            queues["queue/spot"]: queues["queue/on-demand"],
        }.items()
    )
    for rule in ("Jobs", "RunningJobs", "AlertsQueueBlocked"):
        pattern = there.rule(rule)["EventPattern"]
        assert sorted(pattern["detail"]["jobQueue"]) == sorted(queues.values())
    labels = [name for _, name, _ in json.loads(there.environment("report_job")["QUEUES"])]
    assert f"spot@{teams[0].name}" in labels
    assert f"spot@{teams[0].name} ({OLD_POOL.id})" in labels
    # It is the longest name that a team can have, and the settings take no more such teams: both limits hold.
    longest = max(
        len(json.dumps(rule["EventPattern"]))
        for rule in there.all("AWS::Events::Rule").values()
        if rule.get("EventPattern")
    )
    assert longest <= 2_048
    for file in ("report_job", "move_to_on_demand"):
        assert sum(len(name) + len(value) for name, value in there.environment(file).items()) <= 4_096


def test_without_on_demand_capacity_nothing_moves(plain: Observed) -> None:
    handlers = {function["Handler"] for function in plain.all("AWS::Lambda::Function").values()}
    assert handlers == {"report_job.handler", "tag_instances.handler", "watch_instances.handler"}
    assert json.loads(plain.environment("report_job")["ON_DEMAND_QUEUES"]) == []
    assert not [name for name in plain.all("AWS::Events::Rule") if name.startswith("SpotJobs")]


def test_functions_run_the_newest_python_without_the_policy_that_writes_to_every_log(everything: Observed) -> None:
    functions = everything.all("AWS::Lambda::Function")
    assert len(functions) == 6
    dead_letters = everything.arn("observability", everything.only("observability", "AWS::SQS::Queue"))
    for function in functions.values():
        assert function["Runtime"] == "python3.14"
        assert function["DeadLetterConfig"] == {"TargetArn": dead_letters}
        assert "LogGroup" in function["LoggingConfig"]
    for role in resources(everything.template, "AWS::IAM::Role").values():
        assert "ManagedPolicyArns" not in role
    for group in resources(everything.template, "AWS::Logs::LogGroup").values():
        assert group["RetentionInDays"] == 90


def test_messages_go_to_each_address_and_to_the_chat(everything: Observed) -> None:
    subscriptions = list(everything.all("AWS::SNS::Subscription").values())
    assert {s["Endpoint"] for s in subscriptions if s["Protocol"] == "email"} == {"a@example.org", "b@example.org"}
    webhook = everything.role("observability", "PostToWebhookRole")
    secret = "arn:aws:secretsmanager:us-east-1:123456789012:secret"
    assert webhook.may("secretsmanager:GetSecretValue", f"{secret}:chat-AbCdEf")
    assert not webhook.may("secretsmanager:GetSecretValue", f"{secret}:chat-of-others-AbCdEf")
    assert everything.environment("post_to_webhook") == {"WEBHOOK_SECRET": "chat"}


def test_topics_are_encrypted_with_the_stages_key_and_take_tls_only(everything: Observed) -> None:
    topics = everything.all("AWS::SNS::Topic")
    assert len(topics) == 3, "alerts, and one for each budget"
    assert all("KmsMasterKeyId" in topic for topic in topics.values())
    policies = [policy["PolicyDocument"]["Statement"] for policy in everything.all("AWS::SNS::TopicPolicy").values()]
    assert len(policies) == 3
    for statements in policies:
        assert [s["Condition"] for s in statements if s["Effect"] == "Deny"] == [
            {"Bool": {"aws:SecureTransport": "false"}}
        ]
        publishers = {s["Principal"]["Service"] for s in statements if s["Effect"] == "Allow"}
        assert publishers <= {"budgets.amazonaws.com", "cloudwatch.amazonaws.com", "events.amazonaws.com"}
        assert "budgets.amazonaws.com" in publishers


def test_a_blocked_queue_is_told_of_with_the_command_that_explains_it(plain: Observed) -> None:
    rule = plain.rule("AlertsQueueBlocked")
    assert rule["EventPattern"]["detail-type"] == ["Batch Job Queue Blocked"]
    [target] = rule["Targets"]
    transformer = target["InputTransformer"]
    paths = {f"<{name}>": path for name, path in transformer["InputPathsMap"].items()}
    text = transformer["InputTemplate"]
    for name, path in paths.items():
        text = text.replace(name, path)
    assert "blocked by $.detail.jobName at its head: $.detail.statusReason" in text
    assert "trainyard why $.detail.jobName --stage test" in text


def test_alarms_act_and_count_what_the_settings_say(everything: Observed) -> None:
    alarms = {
        name.removeprefix("Alerts").split("Alarm")[0][:12]: alarm
        for name, alarm in everything.all("AWS::CloudWatch::Alarm").items()
    }
    topic = everything.arn("observability", everything.only("observability", "AWS::SNS::Topic", "AlertsTopic"))
    assert all(alarm["AlarmActions"] == [topic] for alarm in alarms.values())
    by_metric = {alarm["MetricName"]: alarm for alarm in alarms.values()}
    assert set(by_metric) == {"FailedJobs", "MatchedEvents", "ApproximateNumberOfMessagesVisible"}
    failed = by_metric["FailedJobs"]
    assert (failed["Threshold"], failed["Period"], failed["Statistic"]) == (5, 3600, "Sum")
    assert failed["Namespace"] == "trainyard/test"
    assert failed["TreatMissingData"] == "notBreaching", "while nothing runs nothing is published"


def test_instances_get_their_teams_tag_and_no_other(plain: Observed) -> None:
    role = plain.role("observability", "TagInstancesRole")
    instance = "arn:aws:ec2:us-east-1:123456789012:instance/i-0123456789abcdef0"
    ours = {"aws:ResourceTag/trainyard:stage": "test"}
    for context, allowed in (
        ({**ours, "aws:TagKeys": ["trainyard:team", "trainyard:run"]}, True),
        ({**ours, "aws:TagKeys": ["trainyard:team", "trainyard:stage"]}, False),
        ({"aws:ResourceTag/trainyard:stage": "prod", "aws:TagKeys": ["trainyard:team"]}, False),
        ({"aws:TagKeys": ["trainyard:team"]}, False),
    ):
        assert (role.decide_in("ec2:CreateTags", instance, context) == "allowed") is allowed
    assert plain.rule("RunningJobs")["EventPattern"]["detail"]["status"] == ["RUNNING"]


def test_instances_of_the_stage_are_watched_and_no_others_ended(plain: Observed) -> None:
    role = plain.role("observability", "WatchInstancesRole")
    instance = "arn:aws:ec2:us-east-1:123456789012:instance/i-0123456789abcdef0"
    environment = "arn:aws:batch:us-east-1:123456789012:compute-environment/any"
    for stage, verdict in (("test", True), ("prod", False)):
        context = {"aws:ResourceTag/trainyard:stage": stage}
        joined = {**context, "aws:TagKeys": ["trainyard:joined"]}
        assert (role.decide_in("ec2:TerminateInstances", instance, context) == "allowed") is verdict
        assert (role.decide_in("batch:UpdateComputeEnvironment", environment, context) == "allowed") is verdict
        assert (role.decide_in("ec2:CreateTags", instance, joined) == "allowed") is verdict
    run = {"aws:ResourceTag/trainyard:stage": "test", "aws:TagKeys": ["trainyard:run"]}
    assert role.decide_in("ec2:CreateTags", instance, run) != "allowed"
    assert plain.rule("InstancesSeen")["ScheduleExpression"] == "rate(5 minutes)"
    assert plain.rule("InstanceStates")["EventPattern"]["source"] == ["aws.ec2"]
    assert plain.rule("InstancesJoined")["EventPattern"]["detail"] == {"status": ["ACTIVE"]}


def test_what_jobs_report_of_their_accelerators_becomes_a_metric_of_the_dashboard(plain: Observed) -> None:
    [metric_filter] = plain.all("AWS::Logs::MetricFilter").values()
    [transformation] = metric_filter["MetricTransformations"]
    assert metric_filter["LogGroupName"] == plain.published("log-group")
    assert transformation["MetricValue"] == "$.accelerator_utilization_percent"
    [dashboard] = plain.all("AWS::CloudWatch::Dashboard").values()
    text = json.dumps(json.loads(dashboard["DashboardBody"]))
    for metric in ("QueueDepth", "RunningNodes", "SpendUsdPerHour", "Reclaims", transformation["MetricName"]):
        assert f'"{metric}"' in text
    assert "Spend is an estimate" in text
    assert "FILL(queuedepth0, REPEAT)" in text


def test_many_teams_fit() -> None:
    # GIVEN thirteen teams with long names, each with a budget and a role for its people
    names = [f"a-team-with-a-long-name-{number:03}" for number in range(13)]
    teams = tuple(Team(name=name, monthly_budget_usd=100.0, member_principals=(MEMBER,)) for name in names)
    many = observed(**{**EVERYTHING, "teams": teams})
    # THEN what AWS limits stays below it: environments of functions,
    for function in many.all("AWS::Lambda::Function").values():
        assert len(json.dumps(function.get("Environment", {}).get("Variables", {}))) < 4096
    # parameters of the kind that is free,
    for parameter in many.all("AWS::SSM::Parameter").values():
        assert parameter["Type"] == "String"
        assert len(parameter["Value"]) < 4096
    # statements of a queue's policy, and who may call a function
    for policy in many.all("AWS::SQS::QueuePolicy").values():
        assert len(policy["PolicyDocument"]["Statement"]) <= 20
    callers = [p["FunctionName"] for p in many.all("AWS::Lambda::Permission").values()]
    assert max(map(callers.count, callers)) <= 20
    # inline policies of a role, patterns of rules, and resources of a stack
    for policy in many.all("AWS::IAM::Policy").values():
        assert len(json.dumps(policy["PolicyDocument"], separators=(",", ":"))) < 10_240
    for rule in many.all("AWS::Events::Rule").values():
        assert len(json.dumps(rule.get("EventPattern", ""))) < 2048
    assert len(many.template["Resources"]) < 500
    # AND each team's end is heard
    heard = {s["TopicArn"] for s in many.all("AWS::SNS::Subscription").values() if s["Protocol"] == "lambda"}
    for name in names:
        assert json.loads(many.published(f"budget/{name}"))["topic"] in heard
    sources = [p.get("SourceArn", "") for p in many.all("AWS::Lambda::Permission").values()]
    [allowed] = [source for source in sources if source.startswith("arn:aws:sns:") and "*" in source]
    assert all(fnmatchcase(topic, allowed) for topic in heard)


def test_nothing_costs_by_the_hour(everything: Observed) -> None:
    # Alarms, one dashboard and what is called by events; no table, no stream, no provisioned concurrency, no schedule
    # but the month's, and a look at the instances whose calls a month cost under a cent.
    assert {resource["Type"] for resource in everything.template["Resources"].values()} <= {
        *("AWS::Lambda::Function", "AWS::Lambda::Permission", "AWS::Lambda::EventInvokeConfig"),
        *("AWS::SNS::Topic", "AWS::SNS::TopicPolicy", "AWS::SNS::Subscription"),
        *("AWS::SQS::Queue", "AWS::SQS::QueuePolicy", "AWS::Events::Rule", "AWS::Budgets::Budget"),
        *("AWS::CloudWatch::Alarm", "AWS::CloudWatch::Dashboard", "AWS::Logs::MetricFilter", "AWS::Logs::LogGroup"),
        *("AWS::IAM::Role", "AWS::IAM::Policy", "AWS::SSM::Parameter"),
    }
    schedules = [rule for rule in everything.all("AWS::Events::Rule").values() if "ScheduleExpression" in rule]
    assert len(schedules) == 2


def _moves(stage: Observed) -> dict[str, str]:
    """Return the ARNs of Spot queues, with those of the queues that their jobs move to."""
    environment = stage.environment("move_to_on_demand")
    arns = environment["QUEUE_ARNS"]
    return {arns + spot: arns + other for spot, other in json.loads(environment["ON_DEMAND_QUEUES"])}
