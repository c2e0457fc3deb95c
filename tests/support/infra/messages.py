"""A topic, and what is published to it."""

import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Inbox:
    """A queue that is subscribed to a topic."""

    topic: str
    queue: str
    sqs: Any

    def read(self) -> list[str]:
        """Return the messages since the last call."""
        found: list[str] = []
        while True:
            messages = self.sqs.receive_message(QueueUrl=self.queue, MaxNumberOfMessages=10).get("Messages", [])
            if not messages:
                return found
            for message in messages:
                found.append(json.loads(message["Body"])["Message"])
                self.sqs.delete_message(QueueUrl=self.queue, ReceiptHandle=message["ReceiptHandle"])
