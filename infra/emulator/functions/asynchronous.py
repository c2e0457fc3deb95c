"""Invocations that nobody waits for: tried again on an error, and sent where failures go when nothing helps.

Source: AWS Lambda developer guide, "How Lambda handles errors and retries with asynchronous invocation": two more
tries, one minute and then two minutes later; then the dead-letter queue and the destination on failure.
"""

import heapq
import json
import logging
import threading
import time
import uuid
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from typing import Any

from moto.events.models import events_backends
from moto.sns.models import sns_backends
from moto.sqs.models import sqs_backends
from moto.utilities.arns import parse_arn

from infra.emulator.functions import environment, invocation
from infra.emulator.functions.function import Function
from infra.emulator.functions.invocation import MAX_CONCURRENT, Outcome
from infra.emulator.server_errors import record_exception
from infra.emulator.settings import number_setting

logger = logging.getLogger(__name__)

RETRY_VARIABLE = "TRAINYARD_FUNCTION_RETRY_SECONDS"
"""Server's environment: seconds before the second try of an invocation; the third comes after twice as many."""
DEFAULT_RETRIES = 2
_STOP_SECONDS = 10


@dataclass(order=True, kw_only=True)
class _Invocation:
    """An invocation that waits for its turn."""

    due: float
    """When it may begin, by the monotonic clock."""
    request_id: str
    function: Function = field(compare=False)
    event: str = field(compare=False)
    """JSON."""
    number: int = field(default=1, compare=False)
    """Which try it is."""


_waiting: list[_Invocation] = []
"""A heap: what is due first comes first."""
_changed = threading.Condition()
_threads: list[threading.Thread] = []
"""As many as can run at once, however many wait."""
_stopping = threading.Event()


def check_settings() -> None:
    """Raise ConfigurationError where the variable is no number of seconds."""
    _retry_seconds()


def invoke_later(function: Function, event: str) -> str:
    """Have a function run in the background; return the request's id. `event` is JSON."""
    request_id = str(uuid.uuid4())
    _put(_Invocation(due=time.monotonic(), request_id=request_id, function=function, event=event))
    return request_id


def shutdown() -> None:
    """Kill what runs and forget what waits; return when it is gone."""
    with _changed:
        _stopping.set()
        _changed.notify_all()
    environment.close()
    for thread in _threads:
        thread.join(_STOP_SECONDS)


def _put(invocation: _Invocation) -> None:
    with _changed:
        heapq.heappush(_waiting, invocation)
        if len(_threads) < MAX_CONCURRENT:
            _threads.append(threading.Thread(target=_work, name=f"functions-{len(_threads)}", daemon=True))
            _threads[-1].start()
        _changed.notify()


def _work() -> None:
    """Run one invocation after the other, each when it is due."""
    while (waiting := _next()) is not None:
        _run_safely(waiting)


def _run_safely(waiting: _Invocation) -> None:
    try:
        _run(waiting)
    except Exception as error:  # noqa: BLE001 - nobody else would hear of it
        record_exception("Lambda", f"invoking {waiting.function.function_name}", error)


def _next() -> _Invocation | None:
    """Wait for an invocation that is due; None when there will be no more."""
    with _changed:
        while not _stopping.is_set():
            left = _waiting[0].due - time.monotonic() if _waiting else None
            if left is not None and left <= 0:
                return heapq.heappop(_waiting)
            _changed.wait(left)
    return None


def _run(waiting: _Invocation) -> None:
    function, event, number = waiting.function, waiting.event, waiting.number
    tries = 1 + int(function.invoke_config.get("MaximumRetryAttempts", DEFAULT_RETRIES))
    outcome = invocation.run(function, event, request_id=waiting.request_id)
    if _stopping.is_set():
        return
    if not outcome.failed:
        _send(function, "OnSuccess", _record(function, event, outcome, number, "Success"))
    elif number < tries:
        _put(replace(waiting, number=number + 1, due=time.monotonic() + _retry_seconds() * number))
    else:
        _send_to_dead_letters(function, event, outcome)
        _send(function, "OnFailure", _record(function, event, outcome, tries, "RetriesExhausted"))


def _retry_seconds() -> float:
    return number_setting(RETRY_VARIABLE, 60)


def _record(function: Function, event: str, outcome: Outcome, number: int, condition: str) -> dict[str, Any]:
    context: dict[str, Any] = {"statusCode": 200, "executedVersion": function.shown_version}
    if outcome.failed:
        context["functionError"] = "Unhandled"
    return {
        "version": "1.0",
        "timestamp": f"{datetime.now(timezone.utc):%Y-%m-%dT%H:%M:%S.000Z}",
        "requestContext": {
            "requestId": outcome.request_id,
            "functionArn": f"{function.function_arn}:{function.shown_version}",
            "condition": condition,
            "approximateInvokeCount": number,
        },
        "requestPayload": json.loads(event),
        "responseContext": context,
        "responsePayload": json.loads(outcome.payload),
    }


def _send(function: Function, kind: str, record: dict[str, Any]) -> None:
    destinations = function.invoke_config.get("DestinationConfig") or {}
    destination = (destinations.get(kind) or {}).get("Destination")
    if not destination:
        return
    arn = parse_arn(destination)
    if arn.service == "lambda":
        invoke_later(function.backend.get_function(destination), json.dumps(record))
    elif arn.service == "events":
        entry = {"Source": "lambda", "DetailType": f"Lambda Function Invocation Result - {kind[2:]}"}
        events_backends[arn.account][arn.region].put_events(
            [{**entry, "Detail": json.dumps(record), "EventBusName": arn.resource_id}]
        )
    else:
        _send_message(destination, json.dumps(record), {})


def _send_to_dead_letters(function: Function, event: str, outcome: Outcome) -> None:
    target = (function.dead_letter_config or {}).get("TargetArn")
    if target:
        error = json.loads(outcome.payload).get("errorMessage", "")
        attributes = {"RequestID": outcome.request_id, "ErrorCode": "200", "ErrorMessage": error[:1024]}
        _send_message(target, event, attributes)


def _send_message(target: str, body: str, attributes: dict[str, str]) -> None:
    arn = parse_arn(target)
    if arn.service == "sns":
        sns_backends[arn.account][arn.region].publish(body, target)
        return
    shaped = {name: {"DataType": "String", "StringValue": value} for name, value in attributes.items() if value}
    sqs_backends[arn.account][arn.region].send_message(arn.resource_id, body, message_attributes=shaped)
