"""What a target gets of an event: all of it, a part, a constant, or a text with parts put in. Pure.

Source: Amazon EventBridge user guide, "Input transformation".
"""

import json
import re
from collections.abc import Mapping
from typing import Any

_STEP = re.compile(r"\.([^.\[\]]+)|\[(\d+)\]")
_PLACEHOLDER = re.compile(r"<([\w.-]+)>")


def message_for(target: Mapping[str, Any], event: Mapping[str, Any], *, rule_arn: str) -> str:
    """The text that is delivered to a target, JSON in nearly all cases."""
    if target.get("Input") is not None:
        return str(target["Input"])
    if target.get("InputPath") is not None:
        return _dump(select(target["InputPath"], event))
    transformer = target.get("InputTransformer")
    if transformer:
        return _transform(transformer, event, rule_arn)
    return _dump(event)


def select(path: str, event: Mapping[str, Any]) -> Any:
    """The part of an event that a JSON path such as `$.detail.attempts[0]` names; None where there is none."""
    found: Any = event
    for name, index in _STEP.findall(path.removeprefix("$")):
        if name and isinstance(found, Mapping):
            found = found.get(name)
        elif index and isinstance(found, list) and int(index) < len(found):
            found = found[int(index)]
        else:
            return None
    return found


def _transform(transformer: Mapping[str, Any], event: Mapping[str, Any], rule_arn: str) -> str:
    template: str = transformer["InputTemplate"]
    paths = transformer.get("InputPathsMap") or {}
    known: dict[str, Any] = {
        "aws.events.rule-arn": rule_arn,
        "aws.events.rule-name": rule_arn.rsplit("/", 1)[-1],
        "aws.events.event.ingestion-time": event.get("time"),
        "aws.events.event": {name: value for name, value in event.items() if name != "detail"},
        "aws.events.event.json": event,
    }
    is_json = template.lstrip().startswith(("{", "[", '"'))

    def put_in(match: re.Match[str]) -> str:
        name = match[1]
        if name not in paths and name not in known:
            return match[0]
        value = select(paths[name], event) if name in paths else known[name]
        quoted = _is_inside_string(template, match.start())
        if value is None:
            return "" if quoted or not is_json else "null"
        text = value if isinstance(value, str) else _dump(value)
        if quoted:
            return json.dumps(text)[1:-1]
        return json.dumps(text) if is_json and isinstance(value, str) else text

    return _PLACEHOLDER.sub(put_in, template)


def _is_inside_string(template: str, position: int) -> bool:
    return len(re.findall(r'(?<!\\)"', template[:position])) % 2 == 1


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
