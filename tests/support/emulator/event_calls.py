"""Calls for tests of events and functions: queues, rules, received messages."""

import json
import uuid
from typing import Any

from tests.support.emulator.batch_calls import until
from tests.support.running_emulator import Emulator

Event = dict[str, Any]


def queue_of(aws: Emulator, service: str = "events.amazonaws.com") -> tuple[str, str]:
    """Create a queue that a service may write to; return its URL and ARN."""
    sqs = aws.client("sqs")
    url = sqs.create_queue(QueueName=f"queue-{uuid.uuid4().hex[:8]}")["QueueUrl"]
    arn = sqs.get_queue_attributes(QueueUrl=url, AttributeNames=["QueueArn"])["Attributes"]["QueueArn"]
    sqs.set_queue_attributes(QueueUrl=url, Attributes={"Policy": policy(service, "sqs:SendMessage", arn)})
    return url, arn


def policy(service: str, action: str, resource: str) -> str:
    statement = {"Effect": "Allow", "Principal": {"Service": service}, "Action": action, "Resource": resource}
    return json.dumps({"Version": "2012-10-17", "Statement": [statement]})


def rule(aws: Emulator, pattern: Any, *targets: dict[str, Any], **more: Any) -> str:
    name = f"rule-{uuid.uuid4().hex[:8]}"
    client = aws.client("events")
    client.put_rule(Name=name, EventPattern=json.dumps(pattern), **more)
    client.put_targets(Rule=name, Targets=[{"Id": str(number), **target} for number, target in enumerate(targets)])
    return name


def messages(aws: Emulator, url: str, count: int) -> list[Event]:
    """Receive `count` messages, in order of arrival."""
    found: list[Event] = []

    def look() -> list[Event] | None:
        answer = aws.client("sqs").receive_message(QueueUrl=url, MaxNumberOfMessages=10)
        found.extend(json.loads(message["Body"]) for message in answer.get("Messages", []))
        return found if len(found) >= count else None

    return until(look, f"{count} messages in {url}")


def inject(aws: Emulator, **event: Any) -> None:
    aws.post("/trainyard/events", event)
