"""From an event to the targets of the rules that take it: functions, topics, queues.

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

from moto.events.exceptions import InvalidEventPatternException, ValidationException
from moto.events.models import EventPattern, EventPatternParser, EventsBackend, Rule, events_backends
from moto.sns.models import sns_backends
from moto.sqs.models import sqs_backends
from moto.utilities.arns import parse_arn

from infra.emulator import functions
from infra.emulator.events.message import message_for, refusal
from infra.emulator.events.pattern import PatternError, check_pattern, matches
from infra.emulator.events.permissions import service_may

logger = logging.getLogger(__name__)

SERVICE = "events.amazonaws.com"
_KEPT_FAILURES = 50
_STOP_SECONDS = 5

_pending: "queue.SimpleQueue[tuple[Rule, Mapping[str, Any], Mapping[str, Any]] | None]" = queue.SimpleQueue()
_undelivered: deque[str] = deque(maxlen=_KEPT_FAILURES)
_threads: list[threading.Thread] = []
_put_targets_of_moto = EventsBackend.put_targets


class _DeliveryError(Exception):
    """A target does not take an event."""


def install() -> None:
    """Match and deliver here from now on. Call it once, before the server starts."""
    EventPatternParser.parse = _parse_pattern
    EventPattern.matches_event = _pattern_matches
    EventsBackend.put_targets = _put_targets
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
    """Put an event of an AWS service on the default bus; return its id. Returns before it is delivered."""
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
    """Return the latest events that a target did not take, and why."""
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


def _put_targets(backend: Any, name: str, event_bus_arn: str | None, targets: list[dict[str, Any]]) -> None:
    for target in targets:
        if problem := refusal(target):
            raise ValidationException(problem)
    _put_targets_of_moto(backend, name, event_bus_arn, targets)


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
    message = message_for(target, event)
    arn = parse_arn(target["Arn"])
    if arn.service == "lambda":
        function = functions.find(target["Arn"])
        _check_permission(rule, function.policy.statements, "lambda:InvokeFunction")
        functions.invoke_later(function, message)
    elif arn.service == "sns":
        topic = sns_backends[arn.account][arn.region].get_topic(target["Arn"])
        _check_permission(rule, json.loads(topic.policy).get("Statement", []), "sns:Publish")
        topic.sns_backend.publish(message, target["Arn"])
    elif arn.service == "sqs":
        backend = sqs_backends[arn.account][arn.region]
        policy = backend.get_queue(arn.resource_id).policy or "{}"
        statements = (json.loads(policy) if isinstance(policy, str) else policy).get("Statement", [])
        _check_permission(rule, statements, "sqs:SendMessage")
        backend.send_message(queue_name=arn.resource_id, message_body=message)
    else:
        raise _DeliveryError(f"the emulator delivers no events to {arn.service}")


def _check_permission(rule: Any, statements: list[Mapping[str, Any]], action: str) -> None:
    if not service_may(statements, service=SERVICE, action=action, source_arn=rule.arn, account_id=rule.account_id):
        raise _DeliveryError(f"its resource policy does not let {SERVICE} do {action} for {rule.arn}")


def _send_to_dead_letters(rule: Any, target: Mapping[str, Any], event: Mapping[str, Any]) -> None:
    queue_arn = (target.get("DeadLetterConfig") or {}).get("Arn")
    if not queue_arn:
        return
    arn = parse_arn(queue_arn)
    try:
        sqs_backends[arn.account][arn.region].send_message(queue_name=arn.resource_id, message_body=json.dumps(event))
    except Exception:
        logger.exception("rule %s: its dead-letter queue %s takes nothing", rule.name, queue_arn)


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
