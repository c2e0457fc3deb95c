"""Posts the topic's messages to a chat's incoming webhook, as Slack's and Mattermost's take them.

The webhook's URL lets whoever has it write to the chat: it is read from Secrets Manager at each call, and no log, error
or answer names it.
"""

import json
import os
import urllib.error
import urllib.request
from typing import Any
from urllib.parse import urlsplit

TIMEOUT_SECONDS = 10
_LOOPBACK = ("localhost", "127.0.0.1")


class WebhookError(Exception):
    """The message was not delivered. Lambda tries again; after that it lies in the dead-letter queue."""


def text_of(notification: dict[str, Any]) -> str:
    """Return what people read of a message; a CloudWatch alarm's is JSON for machines."""
    message = str(notification.get("Message", ""))
    try:
        alarm = json.loads(message)
    except ValueError:
        return message
    if not isinstance(alarm, dict) or "AlarmName" not in alarm:
        return message
    return f"{alarm.get('NewStateValue', 'ALARM')}: {alarm.get('AlarmDescription') or alarm['AlarmName']}"


def post(url: str, text: str) -> None:
    """Post `text` to the webhook. Raises WebhookError, which never carries the URL."""
    try:
        parts = urlsplit(url)
        if parts.scheme != "https" and parts.hostname not in _LOOPBACK:
            raise WebhookError("the secret does not hold an https:// URL")
        request = urllib.request.Request(  # noqa: S310 - the scheme was looked at
            url, data=json.dumps({"text": text}).encode(), headers={"Content-Type": "application/json"}, method="POST"
        )
        with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS):  # noqa: S310 - as above
            pass
    except urllib.error.HTTPError as error:
        with error:
            raise WebhookError(f"the webhook answered {error.code}") from None
    except (OSError, ValueError) as error:
        # The reasons of some name the host, or the whole URL.
        raise WebhookError(f"the webhook could not be reached: {type(error).__name__}") from None


def handler(event: dict[str, Any], _context: object) -> None:
    """Lambda's entry; `event` comes from SNS."""
    import boto3  # noqa: PLC0415 - the posting is used and tested without it

    secrets = boto3.client("secretsmanager")
    url = secrets.get_secret_value(SecretId=os.environ["WEBHOOK_SECRET"])["SecretString"].strip()
    for record in event["Records"]:
        post(url, text_of(record["Sns"]))
