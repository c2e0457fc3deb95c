"""From an event to the targets of the rules that take it: functions, topics, queues.

Events are delivered one after the other in a thread of their own, in the order in which they came, so that whoever
emits one never waits.
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
from moto.events.exceptions import InvalidEventPatternException, ValidationException
from moto.events.models import EventPattern, EventPatternParser, EventsBackend, Rule, events_backends
from moto.sns.models import Subscription, sns_backends
from moto.sqs.models import sqs_backends
from moto.utilities.arns import parse_arn

from infra.emulator import functions

_PLACEHOLDER = re.compile(r"<([\w.-]+)>")


def message_for(target: Mapping[str, Any], event: Mapping[str, Any]) -> str:
    """Return the text that is delivered to a target, which is JSON."""
    transformer = target.get("InputTransformer")
    if not transformer:
        return json.dumps(event, ensure_ascii=False)
    paths = transformer.get("InputPathsMap") or {}

    def put_in(match: re.Match[str]) -> str:
        value = _at(paths[match[1]], event) if match[1] in paths else match[0]
        text = "" if value is None else value if isinstance(value, str) else json.dumps(value)
        return json.dumps(text, ensure_ascii=False)[1:-1]

    return _PLACEHOLDER.sub(put_in, transformer["InputTemplate"])


def target_refusal(target: Mapping[str, Any]) -> str | None:
    """Say why such a target cannot be put; None if it can."""
    if unknown := sorted(target.keys() & {"Input", "InputPath", "RoleArn", "SqsParameters"}):
        return f"the emulator does not know {unknown[0]} of targets"
    template = (target.get("InputTransformer") or {}).get("InputTemplate", '""')
    if len(re.sub(r"\\.", "", template).split('"')) != 3:
        return "of input templates the emulator knows one string in quotes only"
    return None


def _at(path: str, event: Any) -> Any:
    """Return the part of an event at a path such as `$.detail.jobName`; None if there is none."""
    for name in path.removeprefix("$.").split("."):
        if not isinstance(event, Mapping):
            return None
        event = event.get(name)
    return event


class PatternError(Exception):
    """A pattern that EventBridge would refuse, or one that is not known here."""


def check_pattern(pattern: Any) -> None:
    """Raise PatternError if PutRule must refuse a pattern."""
    if not isinstance(pattern, Mapping) or not pattern:
        raise PatternError("a pattern must be an object that is not empty")
    for name, rules in pattern.items():
        if name.startswith("$"):
            raise PatternError(f"the emulator does not know '{name}' in event patterns")
        if isinstance(rules, Mapping):
            check_pattern(rules)
        elif not isinstance(rules, list) or not rules:
            raise PatternError(f"'{name}' must be an object or an array that is not empty")
        else:
            for rule in rules:
                _check_rule(name, rule)


def matches(pattern: Mapping[str, Any], event: Mapping[str, Any]) -> bool:
    """Say whether a rule of this pattern, which has passed `check_pattern`, takes the event."""
    for name, rules in pattern.items():
        value = event.get(name)
        if isinstance(rules, Mapping):
            if not isinstance(value, Mapping) or not matches(rules, value):
                return False
        elif not any(_takes(rule, item) for rule in rules for item in (value if isinstance(value, list) else [value])):
            return False
    return True


def _takes(rule: Any, value: Any) -> bool:
    if isinstance(rule, Mapping):
        return isinstance(value, str) and value.startswith(rule["prefix"])
    return type(rule) is type(value) and bool(rule == value)  # in JSON, true is not 1


def _check_rule(name: str, rule: Any) -> None:
    if isinstance(rule, list):
        raise PatternError(f"'{name}': match value must be String, number, true, false, or null")
    if isinstance(rule, Mapping) and (rule.keys() != {"prefix"} or not isinstance(rule["prefix"], str)):
        raise PatternError(f"'{name}': of operators the emulator knows prefix only, not {', '.join(rule)}")


def service_may(
    statements: Iterable[Mapping[str, Any]], *, service: str, action: str, source_arn: str, account_id: str
) -> bool:
    """Say whether a policy's statements allow `service` (`events.amazonaws.com`) the action for `source_arn`."""
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
    """A condition on anything but the source does not hold: a service brings nothing else along."""
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
        if problem := target_refusal(target):
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


SNS_SERVICE = "sns.amazonaws.com"

_publish_as_moto = Subscription.publish


def install_topics() -> None:
    """Deliver here from now on. Call it before the server starts."""
    Subscription.publish = _publish_to_subscriber


def _publish_to_subscriber(subscription: Any, message: str, message_id: str, **more: Any) -> None:
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
        service=SNS_SERVICE,
        action="lambda:InvokeFunction",
        source_arn=subscription.topic_arn,
        account_id=subscription.account_id,
    ):
        logger.warning("%s may not be invoked by %s: it has no such permission", function, subscription.topic_arn)
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
