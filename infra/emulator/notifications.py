"""SNS topics that deliver to functions; moto's own delivery sends them an event with made-up values.

Queues are moto's. E-mail and text messages go nowhere: what a topic published can be read from a queue that subscribes.
"""

import json
import logging
from datetime import datetime, timezone
from typing import Any

import requests
from moto.sns.models import Subscription

from infra.emulator import functions
from infra.emulator.events.permissions import service_may

logger = logging.getLogger(__name__)

SERVICE = "sns.amazonaws.com"

_publish_as_moto = Subscription.publish


def install() -> None:
    """Deliver here from now on. Call it before the server starts."""
    Subscription.publish = _publish


def _publish(subscription: Any, message: str, message_id: str, **more: Any) -> None:
    if subscription.protocol != "lambda":
        try:
            _publish_as_moto(subscription, message, message_id, **more)
        except requests.RequestException as error:  # of an http(s) endpoint, which SNS would try again
            logger.warning(
                "%s does not take what %s publishes: %s", subscription.endpoint, subscription.topic_arn, error
            )
        return
    if subscription.attributes.get("FilterPolicy") or more.get("message_structure"):
        logger.warning("%s: the emulator delivers to functions whole messages only", subscription.arn)
        return
    function = functions.find(subscription.endpoint)
    if not service_may(
        function.policy.statements,
        service=SERVICE,
        action="lambda:InvokeFunction",
        source_arn=subscription.topic_arn,
        account_id=subscription.account_id,
    ):
        logger.warning("%s may not be invoked by %s: it has no such permission", function, subscription.topic_arn)
        return
    event = _event(subscription, message, message_id, more.get("subject"))
    functions.invoke_later(function, json.dumps(event))


def _event(subscription: Any, message: str, message_id: str, subject: str | None) -> dict[str, Any]:
    notification = {
        "Type": "Notification",
        "MessageId": message_id,
        "TopicArn": subscription.topic_arn,
        "Subject": subject,
        "Message": message,
        "Timestamp": f"{datetime.now(timezone.utc):%Y-%m-%dT%H:%M:%S.000Z}",
        "MessageAttributes": {},
    }
    return {"Records": [{"EventSource": "aws:sns", "EventVersion": "1.0", "Sns": notification}]}
