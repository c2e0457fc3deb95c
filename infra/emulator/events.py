"""EventBridge, SNS and actions of alarms: match events with rules, deliver them to functions, topics and queues.

The emulator's services call `emit`; clients call PutEvents, or POST /trainyard/events. One thread delivers events in
order, so `emit` never waits. Rules with a schedule are stored but never run.
"""

import json
import logging
import queue
import re
import threading
import time
import uuid
from collections import deque
from collections.abc import Iterable, Mapping
from datetime import datetime, timezone
from fnmatch import fnmatchcase
from typing import Any

import requests
from moto.cloudwatch.models import CloudWatchBackend
from moto.events.exceptions import InvalidEventPatternException, ValidationException
from moto.events.models import EventPattern, EventPatternParser, EventsBackend, Rule, events_backends
from moto.sns.models import Subscription, sns_backends
from moto.sqs.models import sqs_backends
from moto.utilities.arns import parse_arn

from infra.emulator import functions

logger = logging.getLogger(__name__)

EVENTS_SERVICE = "events.amazonaws.com"
SNS_SERVICE = "sns.amazonaws.com"
CLOUDWATCH_SERVICE = "cloudwatch.amazonaws.com"
_KEPT_FAILURES = 50
_STOP_SECONDS = 5
_pending: "queue.SimpleQueue[tuple[Rule, Mapping[str, Any], Mapping[str, Any]] | None]" = queue.SimpleQueue()
_undelivered: deque[str] = deque(maxlen=_KEPT_FAILURES)
_threads: list[threading.Thread] = []
_put_targets_of_moto = EventsBackend.put_targets
_publish_as_moto = Subscription.publish
_set_alarm_state_as_moto = CloudWatchBackend.set_alarm_state


class _DeliveryError(Exception):
    """A target refuses an event."""


def install() -> None:
    """Replace moto's matching and delivery. Call it once, before the server starts."""
    EventPatternParser.parse = _parse_pattern
    EventPattern.matches_event = _pattern_matches
    EventsBackend.put_targets = _put_targets
    Rule.send_to_targets = _send_to_targets
    Subscription.publish = _publish_to_subscriber
    CloudWatchBackend.set_alarm_state = _set_alarm_state
    thread = threading.Thread(target=_deliver_all, name="events", daemon=True)
    _threads.append(thread)
    thread.start()


def shutdown() -> None:
    """Stop delivering events."""
    _pending.put(None)
    for thread in _threads:
        thread.join(_STOP_SECONDS)


def has_rules(account_id: str, region: str) -> bool:
    """Return whether the default bus has rules. If not, callers need not build an event."""
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
    """Queue an event of an AWS service on the default bus, and return its id."""
    event = {
        "version": "0",
        "id": str(uuid.uuid4()),
        "detail-type": detail_type,
        "source": source,
        "account": account_id,
        "time": _iso(time.time()),
        "region": region,
        "resources": list(resources),
        "detail": json.loads(json.dumps(detail)),  # a snapshot: the caller may change it later
    }
    for rule in list(events_backends[account_id][region].event_buses["default"].rules.values()):
        _send_to_targets(rule, event)
    return str(event["id"])


def undelivered() -> list[str]:
    """Return the latest events that could not be delivered, and why."""
    return list(_undelivered)


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
        except Exception as error:  # noqa: BLE001 - an undeliverable event must not stop the next one
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
        raise _DeliveryError(f"the emulator does not deliver events to {arn.service}")


def _check_permission(rule: Any, statements: list[Mapping[str, Any]], action: str) -> None:
    if not service_may(
        statements, service=EVENTS_SERVICE, action=action, source_arn=rule.arn, account_id=rule.account_id
    ):
        raise _DeliveryError(f"its resource policy does not allow {action} by {EVENTS_SERVICE} for {rule.arn}")


def _send_to_dead_letters(rule: Any, target: Mapping[str, Any], event: Mapping[str, Any]) -> None:
    queue_arn = (target.get("DeadLetterConfig") or {}).get("Arn")
    if not queue_arn:
        return
    arn = parse_arn(queue_arn)
    try:
        sqs_backends[arn.account][arn.region].send_message(queue_name=arn.resource_id, message_body=json.dumps(event))
    except Exception:
        logger.exception("rule %s: sending to the dead-letter queue %s failed", rule.name, queue_arn)


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


# Patterns. Source: Amazon EventBridge user guide, "Creating event patterns". Of its operators, the stacks use equality
# and `prefix`; all others are refused.


class PatternError(Exception):
    """A pattern that EventBridge refuses, or that the emulator does not support."""


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


def check_pattern(pattern: Any) -> None:
    """Raise PatternError if a pattern is invalid or not supported."""
    if not isinstance(pattern, Mapping) or not pattern:
        raise PatternError("a pattern must be a non-empty object")
    for name, rules in pattern.items():
        if name.startswith("$"):
            raise PatternError(f"the emulator does not support '{name}' in event patterns")
        if isinstance(rules, Mapping):
            check_pattern(rules)
        elif not isinstance(rules, list) or not rules:
            raise PatternError(f"'{name}' must be an object or a non-empty array")
        else:
            for rule in rules:
                _check_rule(name, rule)


def matches(pattern: Mapping[str, Any], event: Mapping[str, Any]) -> bool:
    """Return whether a pattern, which has passed `check_pattern`, matches an event."""
    for name, rules in pattern.items():
        value = event.get(name)
        if isinstance(rules, Mapping):
            if not isinstance(value, Mapping) or not matches(rules, value):
                return False
        elif not any(_equals(rule, item) for rule in rules for item in (value if isinstance(value, list) else [value])):
            return False
    return True


def _equals(rule: Any, value: Any) -> bool:
    if isinstance(rule, Mapping):
        return isinstance(value, str) and value.startswith(rule["prefix"])
    return type(rule) is type(value) and bool(rule == value)  # in JSON, true is not 1


def _check_rule(name: str, rule: Any) -> None:
    if isinstance(rule, list):
        raise PatternError(f"'{name}': match value must be String, number, true, false, or null")
    if isinstance(rule, Mapping) and (rule.keys() != {"prefix"} or not isinstance(rule["prefix"], str)):
        raise PatternError(f"'{name}': the emulator supports only the operator prefix, not {', '.join(rule)}")


# What a target receives. Source: Amazon EventBridge user guide, "Input transformation".

_PLACEHOLDER = re.compile(r"<([\w.-]+)>")


def _put_targets(backend: Any, name: str, event_bus_arn: str | None, targets: list[dict[str, Any]]) -> None:
    for target in targets:
        if problem := target_refusal(target):
            raise ValidationException(problem)
    _put_targets_of_moto(backend, name, event_bus_arn, targets)


def message_for(target: Mapping[str, Any], event: Mapping[str, Any]) -> str:
    """Return the JSON text that a target receives: the whole event, or the text that its InputTransformer makes."""
    transformer = target.get("InputTransformer")
    if not transformer:
        return json.dumps(event, ensure_ascii=False)
    paths = transformer.get("InputPathsMap") or {}

    def substitute(match: re.Match[str]) -> str:
        value = _at(paths[match[1]], event) if match[1] in paths else match[0]
        text = "" if value is None else value if isinstance(value, str) else json.dumps(value)
        return json.dumps(text, ensure_ascii=False)[1:-1]

    return _PLACEHOLDER.sub(substitute, transformer["InputTemplate"])


def target_refusal(target: Mapping[str, Any]) -> str | None:
    """Return why PutTargets refuses a target, or None if it does not."""
    if unknown := sorted(target.keys() & {"Input", "InputPath", "RoleArn", "SqsParameters"}):
        return f"the emulator does not support {unknown[0]} of targets"
    template = (target.get("InputTransformer") or {}).get("InputTemplate", '""')
    if len(re.sub(r"\\.", "", template).split('"')) != 3:
        return "the emulator supports only input templates that are one string in quotes"
    return None


def _at(path: str, event: Any) -> Any:
    """Return the value in an event at a path such as `$.detail.jobName`, or None."""
    for name in path.removeprefix("$.").split("."):
        if not isinstance(event, Mapping):
            return None
        event = event.get(name)
    return event


# Resource policies are the only permissions that the emulator checks, because a target without one fails silently.


def service_may(
    statements: Iterable[Mapping[str, Any]], *, service: str, action: str, source_arn: str, account_id: str
) -> bool:
    """Return whether a policy lets `service` (such as `events.amazonaws.com`) perform `action` for `source_arn`."""
    context = {
        "aws:sourcearn": source_arn,
        "aws:sourceaccount": account_id,
        "aws:securetransport": "true",
        "aws:principalisawsservice": "true",
    }
    effects = {
        statement["Effect"]
        for statement in statements
        if _names(statement.get("Principal"), service)
        and any(fnmatchcase(action.lower(), pattern.lower()) for pattern in _listed(statement.get("Action")))
        and all(_holds(operator, wanted, context) for operator, wanted in (statement.get("Condition") or {}).items())
    }
    return effects == {"Allow"}


def _names(principal: Any, service: str) -> bool:
    if principal == "*":
        return True
    if not isinstance(principal, Mapping):
        return False
    return service in _listed(principal.get("Service")) or "*" in _listed(principal.get("AWS"))


def _holds(operator: str, wanted: Mapping[str, Any], context: Mapping[str, str]) -> bool:
    """Return whether a condition holds. Only the source can be checked: a service's request has nothing else."""
    for key, values in wanted.items():
        value = context.get(key.lower())
        if value is None:
            return False
        patterns = [str(item).lower() if operator == "Bool" else str(item) for item in _listed(values)]
        if operator in ("StringEquals", "Bool"):
            held = value in patterns
        elif operator in ("StringLike", "ArnLike", "ArnEquals"):
            held = any(fnmatchcase(value, pattern) for pattern in patterns)
        else:
            held = False
        if not held:
            return False
    return True


def _listed(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


# SNS topics with functions as subscribers. moto's delivery would send the functions an event with made-up values.
# moto delivers to queues. E-mail and text messages are dropped; subscribe a queue to read them.


def _publish_to_subscriber(subscription: Any, message: str, message_id: str, **more: Any) -> None:
    if subscription.protocol != "lambda":
        try:
            _publish_as_moto(subscription, message, message_id, **more)
        except requests.RequestException as error:  # from an HTTP(S) endpoint; SNS would retry
            logger.warning("%s refused a message of %s: %s", subscription.endpoint, subscription.topic_arn, error)
        return
    if subscription.attributes.get("FilterPolicy") or more.get("message_structure"):
        logger.warning("%s: the emulator delivers only whole messages to functions", subscription.arn)
        return
    function = functions.find(subscription.endpoint)
    if not service_may(
        function.policy.statements,
        service=SNS_SERVICE,
        action="lambda:InvokeFunction",
        source_arn=subscription.topic_arn,
        account_id=subscription.account_id,
    ):
        logger.warning("%s does not allow %s to invoke it", function, subscription.topic_arn)
        return
    event = _sns_event(subscription, message, message_id, more.get("subject"))
    functions.invoke_later(function, json.dumps(event))


def _sns_event(subscription: Any, message: str, message_id: str, subject: str | None) -> dict[str, Any]:
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


# Alarms. Their metrics are not evaluated. Source: CloudWatch API reference, "SetAlarmState": if the state differs from
# the previous one, the alarm's actions for it are invoked.


def _set_alarm_state(backend: Any, alarm_name: str, reason: str, reason_data: str, state_value: str) -> None:
    before = backend.alarms[alarm_name].state_value if alarm_name in backend.alarms else None
    _set_alarm_state_as_moto(backend, alarm_name, reason, reason_data, state_value)
    alarm = backend.alarms[alarm_name]
    change = {"AlarmName": alarm_name, "OldStateValue": before, "NewStateValue": state_value, "NewStateReason": reason}
    source = {"source_arn": alarm.alarm_arn, "account_id": backend.account_id}
    actions = {"ALARM": alarm.alarm_actions, "OK": alarm.ok_actions}.get(state_value, [])
    for arn in actions if state_value != before else ():
        topic = sns_backends[backend.account_id][backend.region_name].get_topic(arn)
        policy = json.loads(topic.policy).get("Statement", [])
        if service_may(policy, service=CLOUDWATCH_SERVICE, action="sns:Publish", **source):
            topic.sns_backend.publish(json.dumps(change), arn)
        else:
            _undelivered.append(f"alarm {alarm_name}: the policy of {arn} does not admit {CLOUDWATCH_SERVICE}")
