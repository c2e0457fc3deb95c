"""Events from Batch, clients and /trainyard/events: matched by patterns, delivered to queues and topics."""

import json
import urllib.error
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from botocore.exceptions import ClientError

from infra.emulator.events import PatternError, check_pattern, matches, message_for, target_refusal
from tests.support.emulator.batch_calls import Batch, container_of, prepare
from tests.support.emulator.event_calls import inject, messages, policy, queue_of, rule
from tests.support.running_emulator import Emulator, run_emulator


@pytest.fixture(scope="module")
def batch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Batch]:
    settings = {"TRAINYARD_STOP_TIMEOUT_SECONDS": 1}
    with run_emulator(tmp_path_factory.mktemp("events"), environment=settings) as aws:
        yield prepare(aws)
        health = aws.health()
        assert not health["server_errors"], f"{health['server_errors']}\n{aws.log.read_text()}"


@pytest.fixture
def aws(batch: Batch) -> Emulator:
    return batch.aws


def test_each_change_of_a_jobs_state_is_an_event(batch: Batch, aws: Emulator) -> None:
    url, arn = queue_of(aws)
    pattern = {"source": ["aws.batch"], "detail-type": ["Batch Job State Change"], "detail": {"jobName": ["watched"]}}
    rule(aws, pattern, {"Arn": arn})
    queue = batch.queue()
    job_id = batch.client.submit_job(
        jobName="watched",
        jobQueue=queue,
        jobDefinition=batch.definition("sh", "-c", "exit $(($AWS_BATCH_JOB_ATTEMPT == 1))"),
        retryStrategy={"attempts": 2},
        tags={"team": "research"},
    )["jobId"]
    ended = batch.wait_for_end(job_id)
    received = messages(aws, url, 8)

    states = ["SUBMITTED", *("RUNNABLE", "STARTING", "RUNNING") * 2, "SUCCEEDED"]
    assert [event["detail"]["status"] for event in received] == states
    retried, last = received[4]["detail"], received[-1]
    assert [container_of(attempt)["exitCode"] for attempt in retried["attempts"]] == [1]
    assert len(last["detail"]["attempts"]) == 2
    assert last["resources"] == [ended["jobArn"]]
    assert last["account"] == "123456789012"
    assert last["time"].endswith("Z")
    assert {key: last["detail"][key] for key in ("jobId", "jobQueue", "tags", "statusReason", "ecsProperties")} == {
        key: ended[key] for key in ("jobId", "jobQueue", "tags", "statusReason", "ecsProperties")
    }


def test_blocked_queue_is_an_event(batch: Batch, aws: Emulator) -> None:
    url, arn = queue_of(aws)
    rule(aws, {"detail-type": ["Batch Job Queue Blocked"]}, {"Arn": arn})
    queue = batch.queue(batch.environment(max_vcpus=1))
    job_id = batch.submit(batch.definition("true", vcpus=2), queue)
    batch.submit(batch.definition("true", vcpus=2), queue)  # not at the head, so it causes no event
    queue_arn = batch.job(job_id)["jobQueue"]
    (event,) = messages(aws, url, 1)
    assert event["resources"] == [batch.job(job_id)["jobArn"], queue_arn]
    assert event["detail"]["statusReason"].startswith("MISCONFIGURATION:COMPUTE_ENVIRONMENT_MAX_RESOURCE")
    assert event["detail"]["status"] == "RUNNABLE"


def test_events_of_clients_reach_queue_and_topic(aws: Emulator) -> None:
    url, arn = queue_of(aws)
    from_topic, queue_arn = queue_of(aws, "sns.amazonaws.com")
    sns, client = aws.client("sns"), aws.client("events")
    topic = sns.create_topic(Name=f"topic-{uuid.uuid4().hex[:8]}")["TopicArn"]
    statements = policy("events.amazonaws.com", "sns:Publish", topic)
    sns.set_topic_attributes(TopicArn=topic, AttributeName="Policy", AttributeValue=statements)
    sns.subscribe(TopicArn=topic, Protocol="sqs", Endpoint=queue_arn)
    source = f"test.{uuid.uuid4().hex[:8]}"
    transformer = {"InputPathsMap": {"who": "$.detail.who"}, "InputTemplate": '"Hello <who>"'}
    rule(aws, {"source": [source]}, {"Arn": arn}, {"Arn": topic, "InputTransformer": transformer})
    client.put_events(Entries=[{"Source": source, "DetailType": "Greeting", "Detail": json.dumps({"who": "you"})}])

    (event,) = messages(aws, url, 1)
    assert (event["source"], event["detail-type"], event["detail"]) == (source, "Greeting", {"who": "you"})
    assert messages(aws, from_topic, 1)[0]["Message"] == '"Hello you"'


def test_an_alarm_notifies_its_topics_when_its_state_changes(aws: Emulator) -> None:
    from_topic, queue_arn = queue_of(aws, "sns.amazonaws.com")
    sns, cloudwatch, name = aws.client("sns"), aws.client("cloudwatch"), f"alarm-{uuid.uuid4().hex[:8]}"
    topic = sns.create_topic(Name=name)["TopicArn"]
    statements = policy("cloudwatch.amazonaws.com", "sns:Publish", topic)
    sns.set_topic_attributes(TopicArn=topic, AttributeName="Policy", AttributeValue=statements)
    sns.subscribe(TopicArn=topic, Protocol="sqs", Endpoint=queue_arn)
    metric = {"Namespace": "x", "MetricName": "x", "Statistic": "Maximum", "Period": 300, "EvaluationPeriods": 1}
    above = {"Threshold": 1, "ComparisonOperator": "GreaterThanThreshold"}
    cloudwatch.put_metric_alarm(AlarmName=name, AlarmActions=[topic], OKActions=[topic], **metric, **above)
    for state in ("ALARM", "ALARM", "INSUFFICIENT_DATA", "OK"):
        cloudwatch.set_alarm_state(AlarmName=name, StateValue=state, StateReason="test")
    states = [json.loads(found["Message"])["NewStateValue"] for found in messages(aws, from_topic, 2)]
    assert states == ["ALARM", "OK"]


def test_events_of_services_can_be_injected(aws: Emulator) -> None:
    (silent, silent_arn), (url, arn) = queue_of(aws), queue_of(aws)
    pattern = {"source": ["aws.ec2"], "detail": {"instance-action": ["terminate"]}}
    rule(aws, pattern, {"Arn": silent_arn}, State="DISABLED")
    rule(aws, pattern, {"Arn": arn})
    warning = {"instance-id": "i-0123456789abcdef0", "instance-action": "terminate"}
    inject(aws, **{"source": "aws.ec2", "detail-type": "EC2 Spot Instance Interruption Warning", "detail": warning})
    (event,) = messages(aws, url, 1)
    assert event["detail"] == warning
    assert "Messages" not in aws.client("sqs").receive_message(QueueUrl=silent)
    with pytest.raises(urllib.error.HTTPError, match="400"):
        inject(aws, source="aws.ec2")
    with pytest.raises(ClientError, match="supports only the operator prefix, not suffix"):
        rule(aws, {"source": [{"suffix": "batch"}]})
    with pytest.raises(ClientError, match="does not support InputPath of targets"):
        rule(aws, {"source": ["any"]}, {"Arn": arn, "InputPath": "$.detail"})


def test_target_without_a_policy_gets_no_events(aws: Emulator) -> None:
    dead, dead_arn = queue_of(aws)
    sns = aws.client("sns")
    closed = sns.create_topic(Name=f"topic-{uuid.uuid4().hex[:8]}")["TopicArn"]
    source = f"test.{uuid.uuid4().hex[:8]}"
    rule(aws, {"source": [source]}, {"Arn": closed, "DeadLetterConfig": {"Arn": dead_arn}})
    aws.client("events").put_events(Entries=[{"Source": source, "DetailType": "Any", "Detail": "{}"}])
    assert messages(aws, dead, 1)[0]["source"] == source
    (failure,) = [line for line in aws.health()["undelivered"] if source in line]
    assert closed in failure
    assert "resource policy does not allow sns:Publish by events.amazonaws.com" in failure


EVENT = {
    "source": "aws.batch",
    "detail-type": "Batch Job State Change",
    "resources": ["arn:one", "arn:two"],
    "detail": {"status": "FAILED", "jobName": 'say "hi"', "attempts": 2, "spot": True, "inner": {"a": "b"}},
}


@pytest.mark.parametrize(
    ("pattern", "taken"),
    [
        ({"source": ["aws.ec2", "aws.batch"]}, True),
        ({"source": ["aws.batch"], "detail": {"status": ["SUCCEEDED"]}}, False),
        ({"detail": {"status": ["SUCCEEDED", "FAILED"], "inner": {"a": ["b"]}}}, True),
        ({"resources": ["arn:two"]}, True),
        ({"resources": [{"prefix": "arn:t"}]}, True),
        ({"detail": {"status": [{"prefix": "FAIL"}]}}, True),
        ({"detail": {"attempts": [{"prefix": "2"}]}}, False),
        ({"detail": {"attempts": [2]}}, True),
        ({"detail": {"spot": [1]}}, False),
        ({"detail": {"missing": ["x"]}}, False),
        ({"detail": {"status": {"inner": ["x"]}}}, False),
    ],
)
def test_event_matches_pattern(pattern: dict[str, Any], taken: bool) -> None:
    check_pattern(pattern)
    assert matches(pattern, EVENT) == taken


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ({}, "non-empty"),
        ({"source": "aws.batch"}, "object or a non-empty array"),
        ({"source": [["aws.batch"]]}, "match value must be"),
        ({"source": [{"suffix": "batch"}]}, "only the operator prefix, not suffix"),
        ({"$or": [{"source": ["a"]}, {"source": ["b"]}]}, "does not support '\\$or'"),
    ],
)
def test_unsupported_patterns_are_refused(pattern: Any, words: str) -> None:
    with pytest.raises(PatternError, match=words):
        check_pattern(pattern)


def test_target_gets_a_text_with_event_values() -> None:
    paths = {"job": "$.detail.jobName", "why": "$.detail.statusReason", "n": "$.detail.attempts"}
    target = {"InputTransformer": {"InputPathsMap": paths, "InputTemplate": '"<job>: <why> after <n> <other>"'}}
    assert target_refusal(target) is None
    assert message_for(target, EVENT) == '"say \\"hi\\":  after 2 <other>"'


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ({"InputPath": "$.detail"}, "InputPath"),
        ({"InputTransformer": {"InputTemplate": '{"a": "<b>"}'}}, "one string"),
    ],
)
def test_unsupported_targets_are_refused(target: dict[str, Any], words: str) -> None:
    assert words in str(target_refusal(target))
