"""From an event to the targets of the rules that take it: Lambda, SNS, SQS, log groups, other buses.

Events are delivered one after the other in a thread of their own, in the order in which they came, so that whoever
emits one never waits.
"""

import json
import logging
import queue
import threading
import time
import uuid
from collections import deque
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

from moto.events.exceptions import InvalidEventPatternException
from moto.events.models import EventPattern, EventPatternParser, Rule, events_backends
from moto.logs.models import LogStream, logs_backends
from moto.sns.models import sns_backends
from moto.sqs.models import sqs_backends
from moto.utilities.arns import parse_arn

from infra.emulator import functions
from infra.emulator.events.message import message_for
from infra.emulator.events.pattern import PatternError, check_pattern, matches
from infra.emulator.events.permissions import service_may

logger = logging.getLogger(__name__)

SERVICE = "events.amazonaws.com"
_KEPT_FAILURES = 50
_STOP_SECONDS = 5

_pending: "queue.SimpleQueue[tuple[Rule, Mapping[str, Any], Mapping[str, Any]] | None]" = queue.SimpleQueue()
_undelivered: deque[str] = deque(maxlen=_KEPT_FAILURES)
_threads: list[threading.Thread] = []


class _DeliveryError(Exception):
    """A target does not take an event."""


def install() -> None:
    """Match and deliver here from now on. Call it once, before the server starts."""
    EventPatternParser.parse = _parse_pattern
    EventPattern.matches_event = _pattern_matches
    Rule.send_to_targets = _send_to_targets
    thread = threading.Thread(target=_deliver_all, name="events", daemon=True)
    _threads.append(thread)
    thread.start()


def shutdown() -> None:
    """Deliver nothing any more."""
    _pending.put(None)
    for thread in _threads:
        thread.join(_STOP_SECONDS)


def has_rules(account_id: str, region: str) -> bool:
    """Say whether anyone listens on the default bus: if not, an event need not even be made."""
    return bool(events_backends[account_id][region].event_buses["default"].rules)


def emit(
    *,
    account_id: str,
    region: str,
    source: str,
    detail_type: str,
    detail: Mapping[str, Any],
    resources: tuple[str, ...] = (),
) -> str:
    """Put an event of an AWS service on the default bus; its id. Returns before it is delivered."""
    event = {
        "version": "0",
        "id": str(uuid.uuid4()),
        "detail-type": detail_type,
        "source": source,
        "account": account_id,
        "time": _iso(time.time()),
        "region": region,
        "resources": list(resources),
        "detail": json.loads(json.dumps(detail)),  # as it is now, whatever becomes of it
    }
    for rule in list(events_backends[account_id][region].event_buses["default"].rules.values()):
        _send_to_targets(rule, event)
    return str(event["id"])


def undelivered() -> list[str]:
    """The latest events that a target did not take, and why."""
    return list(_undelivered)


def _parse_pattern(parser: Any) -> Any:
    try:
        pattern = json.loads(parser.pattern) if parser.pattern else {}
        if parser.pattern:
            check_pattern(pattern)
    except ValueError:
        raise InvalidEventPatternException(reason="Invalid JSON") from None
    except PatternError as error:
        raise InvalidEventPatternException(reason=str(error)) from None
    return pattern


def _pattern_matches(pattern: Any, event: Mapping[str, Any]) -> bool:
    wanted = pattern.get_pattern()
    return bool(wanted) and matches(wanted, event)


def _send_to_targets(rule: Any, event: Mapping[str, Any], transform_input: bool = True) -> None:  # noqa: ARG001 - moto's signature
    if rule.state != "ENABLED" or not _pattern_matches(rule.event_pattern, event):
        return
    shown = {name: value for name, value in event.items() if name != "ingestion-time"}
    if not isinstance(shown["time"], str) or not shown["time"].endswith("Z"):
        shown["time"] = _iso(float(shown["time"]))
    for target in rule.targets:
        _pending.put((rule, dict(target), shown))


def _deliver_all() -> None:
    while (item := _pending.get()) is not None:
        rule, target, event = item
        try:
            _deliver(rule, target, event)
        except Exception as error:  # noqa: BLE001 - whatever a target says, the next event has to be delivered
            reason = f"{type(error).__name__}: {getattr(error, 'message', None) or error}"
            what = f"{event['source']} '{event['detail-type']}' by rule {rule.name} to {target['Arn']}: {reason}"
            logger.warning("event not delivered: %s", what)
            _undelivered.append(what)
            _send_to_dead_letters(rule, target, event)


def _deliver(rule: Any, target: Mapping[str, Any], event: Mapping[str, Any]) -> None:
    message = message_for(target, event, rule_arn=rule.arn)
    arn = parse_arn(target["Arn"])
    if arn.service == "lambda":
        function = functions.find(target["Arn"])
        _check_permission(rule, target, function.policy.statements, "lambda:InvokeFunction")
        functions.invoke_later(function, message)
    elif arn.service == "sns":
        topic = sns_backends[arn.account][arn.region].get_topic(target["Arn"])
        _check_permission(rule, target, json.loads(topic.policy).get("Statement", []), "sns:Publish")
        topic.sns_backend.publish(message, target["Arn"])
    elif arn.service == "sqs":
        backend = sqs_backends[arn.account][arn.region]
        policy = backend.get_queue(arn.resource_id).policy or "{}"
        statements = (json.loads(policy) if isinstance(policy, str) else policy).get("Statement", [])
        _check_permission(rule, target, statements, "sqs:SendMessage")
        group = (target.get("SqsParameters") or {}).get("MessageGroupId")
        backend.send_message(queue_name=arn.resource_id, message_body=message, group_id=group)
    elif arn.service == "logs":
        _write(arn, rule, message)
    elif arn.service == "events" and arn.resource_type == "event-bus":
        entry = {"Source": event["source"], "DetailType": event["detail-type"], "Detail": json.dumps(event["detail"])}
        events_backends[arn.account][arn.region].put_events([{**entry, "EventBusName": arn.resource_id}])
    else:
        raise _DeliveryError(f"the embedded AWS delivers no events to {arn.service}")


def _check_permission(rule: Any, target: Mapping[str, Any], statements: list[Mapping[str, Any]], action: str) -> None:
    if target.get("RoleArn"):
        return  # then the role's policies count, which are not looked at here
    if not service_may(statements, service=SERVICE, action=action, source_arn=rule.arn, account_id=rule.account_id):
        raise _DeliveryError(f"its resource policy does not let {SERVICE} do {action} for {rule.arn}")


def _write(arn: Any, rule: Any, message: str) -> None:
    group_name = arn.resource_id.removesuffix(":*")
    group = logs_backends[arn.account][arn.region].groups.get(group_name)
    if group is None:
        raise _DeliveryError("there is no such log group")
    stream = LogStream(group, str(uuid.uuid4()))
    group.streams = {**group.streams, stream.log_stream_name: stream}
    stream.put_log_events([{"timestamp": time.time_ns() // 1_000_000, "message": message}])
    logger.debug("rule %s wrote to %s", rule.name, group_name)


def _send_to_dead_letters(rule: Any, target: Mapping[str, Any], event: Mapping[str, Any]) -> None:
    queue_arn = (target.get("DeadLetterConfig") or {}).get("Arn")
    if not queue_arn:
        return
    arn = parse_arn(queue_arn)
    attributes = {
        name: {"DataType": "String", "StringValue": value}
        for name, value in {"RULE_ARN": rule.arn, "TARGET_ARN": target["Arn"], "ERROR_CODE": "DELIVERY_FAILED"}.items()
    }
    try:
        sqs_backends[arn.account][arn.region].send_message(
            queue_name=arn.resource_id, message_body=json.dumps(event), message_attributes=attributes
        )
    except Exception:
        logger.exception("rule %s: its dead-letter queue %s takes nothing", rule.name, queue_arn)


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
