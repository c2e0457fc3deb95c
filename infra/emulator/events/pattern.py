"""Event patterns: which events a rule takes. Pure.

Source: Amazon EventBridge user guide, "Creating event patterns". Of its operators this knows equality and `prefix`,
which the stacks use, and refuses all others.
"""

from collections.abc import Mapping
from typing import Any


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
