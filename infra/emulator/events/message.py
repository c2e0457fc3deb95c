"""What a target gets of an event: all of it, or a text with parts of it put in. Pure.

Source: Amazon EventBridge user guide, "Input transformation".
"""

import json
import re
from collections.abc import Mapping
from typing import Any

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


def refusal(target: Mapping[str, Any]) -> str | None:
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
