"""Events on their way: from Batch, from clients and from /trainyard/events, to queues, topics and functions."""

import json
import urllib.error
import uuid
from collections.abc import Iterator

import pytest
from botocore.exceptions import ClientError

from tests.support.emulator.batch_calls import Batch, main, prepare
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
    ended = batch.ended(job_id)
    received = messages(aws, url, 8)

    states = ["SUBMITTED", *("RUNNABLE", "STARTING", "RUNNING") * 2, "SUCCEEDED"]
    assert [event["detail"]["status"] for event in received] == states
    retried, last = received[4]["detail"], received[-1]
    assert [main(attempt)["exitCode"] for attempt in retried["attempts"]] == [1]
    assert len(last["detail"]["attempts"]) == 2
    assert last["resources"] == [ended["jobArn"]]
    assert last["account"] == "123456789012"
    assert last["time"].endswith("Z")
    assert {key: last["detail"][key] for key in ("jobId", "jobQueue", "tags", "statusReason", "ecsProperties")} == {
        key: ended[key] for key in ("jobId", "jobQueue", "tags", "statusReason", "ecsProperties")
    }


def test_a_blocked_queue_is_an_event(batch: Batch, aws: Emulator) -> None:
    url, arn = queue_of(aws)
    rule(aws, {"detail-type": ["Batch Job Queue Blocked"]}, {"Arn": arn})
    queue = batch.queue(batch.environment(max_vcpus=1))
    job_id = batch.submit(batch.definition("true", vcpus=2), queue)
    batch.submit(batch.definition("true", vcpus=2), queue)  # is not at the head, so says nothing
    queue_arn = batch.job(job_id)["jobQueue"]
    (event,) = messages(aws, url, 1)
    assert event["resources"] == [batch.job(job_id)["jobArn"], queue_arn]
    assert event["detail"]["statusReason"].startswith("MISCONFIGURATION:COMPUTE_ENVIRONMENT_MAX_RESOURCE")
    assert event["detail"]["status"] == "RUNNABLE"


def test_what_clients_put_reaches_queue_and_topic(aws: Emulator) -> None:
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
    with pytest.raises(ClientError, match="knows prefix only, not suffix"):
        rule(aws, {"source": [{"suffix": "batch"}]})
    with pytest.raises(ClientError, match="does not know InputPath of targets"):
        rule(aws, {"source": ["any"]}, {"Arn": arn, "InputPath": "$.detail"})


def test_a_target_that_does_not_let_events_in_gets_none_and_says_so(aws: Emulator) -> None:
    dead, dead_arn = queue_of(aws)
    sns = aws.client("sns")
    closed = sns.create_topic(Name=f"topic-{uuid.uuid4().hex[:8]}")["TopicArn"]
    source = f"test.{uuid.uuid4().hex[:8]}"
    rule(aws, {"source": [source]}, {"Arn": closed, "DeadLetterConfig": {"Arn": dead_arn}})
    aws.client("events").put_events(Entries=[{"Source": source, "DetailType": "Any", "Detail": "{}"}])
    assert messages(aws, dead, 1)[0]["source"] == source
    (failure,) = [line for line in aws.health()["undelivered"] if source in line]
    assert closed in failure
    assert "resource policy does not let events.amazonaws.com do sns:Publish" in failure
