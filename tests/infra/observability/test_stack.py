"""Who is told of what, what is measured, what moves and what stops: on the template, with ARNs worked out."""

import json
from dataclasses import replace
from fnmatch import fnmatchcase

from infra.observability.functions.queues import queues_of
from infra.stages import Stage, Team
from infra.stages.checks import check
from jobs.contract.queues import QUEUES, team_queue_name
from tests.support.infra.observed_stage import EVERYTHING, MEMBER, OLD_POOL, Observed, observed


def test_jobs_of_every_queue_are_reported_and_those_of_pools_that_retire(everything: Observed) -> None:
    queues = everything.queues()
    assert len(queues) == 2 * (2 * 3 + 1), "of each team, three for each of two pools, and one for CPU jobs"
    for rule in ("Jobs", "RunningJobs", "AlertsQueueBlocked"):
        assert sorted(everything.watched(rule)) == sorted(queues.values())
    # Functions call them what the dashboard does, which knows them from the settings, and the contract in between.
    known = queues_of(queues)
    assert known.keys() == set(queues.values())
    dashboard = str(everything.all("AWS::CloudWatch::Dashboard"))
    for name, arn in queues.items():
        _, team, queue, *pool = name.split("/")
        assert known[arn].label == f"{team_queue_name(queue, team)}{f' ({pool[0]})' if pool else ''}"
        assert f'"Reclaims {known[arn].label}"' in dashboard
        assert known[arn].name == queue
    told = json.loads(everything.environment("report_job")["SPOT_QUEUES"])
    assert set(told) == {name for name, row in QUEUES.items() if row.capacity == "spot"}
    for file in ("report_job", "move_to_on_demand"):
        path = everything.environment(file)["PARAMETER_PATH"]
        role = everything.role("observability", f"{file.title().replace('_', '')}Role")
        for kind in ("queue", "team-queue"):
            parameter = f"arn:aws:ssm:us-east-1:123456789012:parameter{path}{kind}"
            assert role.may("ssm:GetParametersByPath", parameter), parameter
        assert not role.may("ssm:GetParametersByPath", f"arn:aws:ssm:us-east-1:123456789012:parameter{path}secret")
    prices = json.loads(everything.environment("watch_instances")["PRICES"])
    stage = Stage(name="test", teams=())
    row = stage.row
    assert prices[row.name] == {"spot": row.spot_usd_per_hour, "on-demand": row.on_demand_usd_per_hour}
    assert set(prices) == {row.name, stage.cpu_row.name, OLD_POOL.row.name}


def test_a_job_moves_to_the_on_demand_queue_of_its_own_pool(everything: Observed) -> None:
    queues = everything.queues()
    moves = _moves(everything)
    assert moves == {
        queues[f"team-queue/{team}/spot{pool}"]: queues[f"team-queue/{team}/on-demand{pool}"]
        for team in ("research", "product")
        for pool in ("", f"/{OLD_POOL.id}")
    }
    assert sorted(everything.watched("SpotJobs")) == sorted(moves)
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
    # With SubmitJob, whose successor carries the tags of the first job: asked for on what the job is submitted with.
    asked, there = "aws:RequestTag/trainyard:stage", "aws:ResourceTag/trainyard:stage"
    for context, allowed in (
        ({asked: "test", there: "test"}, True),
        ({asked: "test", there: "other"}, False),
        ({asked: "test"}, False),
        ({asked: "other", there: "test"}, False),
        ({}, False),
    ):
        # By its own policy too: an account may put a boundary of its own in place of the stage's.
        for limited in (role, replace(role, boundary=None)):
            for resource in (definition, *moves.values()):
                decision = limited.decide_in("batch:TagResource", resource, context)
                assert (decision == "allowed") is allowed, (resource, context)
            assert limited.decide_in("batch:TagResource", job, context) != "allowed"


def test_queues_that_teams_share_are_watched_beside_those_of_a_team(everything: Observed) -> None:
    teams = (Team(name="own"), Team(name="one", shares_instances=True), Team(name="other", shares_instances=True))
    there = observed(**{**EVERYTHING, "teams": teams})
    queues = there.queues()
    assert len(queues) == len(everything.queues())
    assert sorted(there.watched("Jobs")) == sorted(queues.values())
    assert _moves(there) == {
        queues[f"{kind}/spot{pool}"]: queues[f"{kind}/on-demand{pool}"]
        for kind in ("queue", "team-queue/own")
        for pool in ("", f"/{OLD_POOL.id}")
    }


def test_without_on_demand_capacity_nothing_moves(plain: Observed) -> None:
    handlers = {function["Handler"] for function in plain.all("AWS::Lambda::Function").values()}
    always = ("end_sweep", "report_job", "tag_instances", "watch_instances")
    assert handlers == {f"{file}.handler" for file in always}
    assert _moves(plain) == {}
    assert not [name for name in plain.all("AWS::Events::Rule") if name.startswith("SpotJobs")]


def test_messages_go_to_each_address(everything: Observed) -> None:
    subscriptions = list(everything.all("AWS::SNS::Subscription").values())
    assert {s["Endpoint"] for s in subscriptions if s["Protocol"] == "email"} == {"a@example.org", "b@example.org"}


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
    by_metric = {alarm.get("MetricName", "MatchedEvents"): alarm for alarm in alarms.values()}
    assert set(by_metric) == {"FailedJobs", "MatchedEvents", "ApproximateNumberOfMessagesVisible"}
    # Of queues that are blocked, the events that all rules match: there are two of them here.
    counted = [item["MetricStat"] for item in by_metric["MatchedEvents"]["Metrics"] if "MetricStat" in item]
    rules = [name for name in everything.all("AWS::Events::Rule") if name.startswith("AlertsQueueBlocked")]
    assert len({str(item["Metric"]["Dimensions"]) for item in counted}) == len(counted) == len(rules) == 2
    assert {item["Metric"]["MetricName"] for item in counted} == {"MatchedEvents"}
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


def test_only_workers_of_arrays_can_be_cancelled_when_a_sweep_has_no_point_left(plain: Observed) -> None:
    role = plain.role("observability", "EndSweepRole")
    job = "arn:aws:batch:us-east-1:123456789012:job/0f1e2d3c-1111-2222-3333-444455556666"
    of_stage = {"aws:ResourceTag/trainyard:stage": "test"}
    assert role.decide_in("batch:CancelJob", f"{job}:7", {}) == "allowed", "Batch tags no child"
    assert role.decide_in("batch:CancelJob", f"{job}:7", {"aws:ResourceTag/trainyard:stage": "prod"}) != "allowed"
    assert role.decide_in("batch:CancelJob", job, of_stage) != "allowed"
    assert role.decide_in("batch:TerminateJob", f"{job}:7", of_stage) != "allowed"


def test_many_teams_fit() -> None:
    # GIVEN as many queues as Batch takes, of teams with the longest names, each with a budget and a role for its people
    names = [f"{number:02}-".ljust(31, "t") for number in range(10)]
    teams = tuple(Team(name=name, monthly_budget_usd=100.0, member_principals=(MEMBER,)) for name in names)
    settings = {**EVERYTHING, "teams": teams, "max_multinode_nodes": 0}
    check(Stage(name="test", **settings))
    many = observed(**settings)
    queues = many.queues()
    assert len(queues) == 50
    for name in ("Jobs", "RunningJobs", "AlertsQueueBlocked"):
        assert sorted(many.watched(name)) == sorted(queues.values())
    assert sorted(many.watched("SpotJobs")) == sorted(_moves(many))
    # THEN what AWS limits stays below it: environments of functions,
    for function in many.all("AWS::Lambda::Function").values():
        assert len(json.dumps(function.get("Environment", {}).get("Variables", {}))) < 4096
    # parameters of the kind that is free,
    for parameter in many.all("AWS::SSM::Parameter").values():
        assert parameter["Type"] == "String"
        assert len(parameter["Value"]) < 4096
    # statements of a queue's policy (one lets in what no function took, from whichever rule), and who may call one
    for policy in many.all("AWS::SQS::QueuePolicy").values():
        assert len(policy["PolicyDocument"]["Statement"]) <= 20
        assert len(json.dumps(policy["PolicyDocument"], separators=(",", ":"))) <= 8_192
    callers = [p["FunctionName"] for p in many.all("AWS::Lambda::Permission").values()]
    assert max(map(callers.count, callers)) <= 20
    # inline policies of a role, patterns of rules, and resources of a stack
    for policy in many.all("AWS::IAM::Policy").values():
        assert len(json.dumps(policy["PolicyDocument"], separators=(",", ":"))) < 10_240
    for rule in many.all("AWS::Events::Rule").values():
        pattern = rule.get("EventPattern", {})
        arns = pattern.get("detail", {}).get("jobQueue", [])
        # In the region with the longest name, with names as long as Batch takes them.
        longest = "arn:aws-us-gov:batch:ap-southeast-1:123456789012:job-queue/".ljust(59 + 128, "x")
        longer = sum(len(longest) - len(arn) for arn in arns)
        assert len(json.dumps(pattern, separators=(",", ":"))) + longer <= 2_048
    assert len(many.template["Resources"]) < 500
    # AND each team's end is heard
    heard = {s["TopicArn"] for s in many.all("AWS::SNS::Subscription").values() if s["Protocol"] == "lambda"}
    for name in names:
        assert json.loads(many.published(f"budget/{name}"))["topic"] in heard
    sources = [p.get("SourceArn", "") for p in many.all("AWS::Lambda::Permission").values()]
    [allowed] = [source for source in sources if source.startswith("arn:aws:sns:") and "*" in source]
    assert all(fnmatchcase(topic, allowed) for topic in heard)


def _moves(stage: Observed) -> dict[str, str]:
    """Return the ARNs of Spot queues, with those of the queues that their jobs move to."""
    return {arn: queue.on_demand for arn, queue in queues_of(stage.queues()).items() if queue.on_demand}
