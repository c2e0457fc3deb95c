"""Event patterns: which events a rule takes. Pure.

Source: Amazon EventBridge user guide, "Creating event patterns" and "Comparison operators". A field that the pattern
names must be there with one of the listed values, except for `exists: false`; objects inside arrays are looked into.
"""

import ipaddress
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

_COMPARISONS: Mapping[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    "=": operator.eq,
    ">=": operator.ge,
    ">": operator.gt,
}
_NEGATABLE = frozenset({"prefix", "suffix", "equals-ignore-case", "wildcard"})
"""What `anything-but` may hold in place of values."""


class PatternError(Exception):
    """A pattern that EventBridge would refuse, or one with an operator that is not known here."""


def check_pattern(pattern: Mapping[str, Any]) -> None:
    """Raise PatternError where PutRule must refuse a pattern."""
    if not pattern:
        raise PatternError("Empty patterns are not allowed")
    for name, rules in pattern.items():
        if name == "$or":
            if not isinstance(rules, list) or len(rules) < 2:
                raise PatternError("'$or' must be an array of two patterns or more")
            for alternative in rules:
                check_pattern(alternative)
        elif isinstance(rules, Mapping):
            check_pattern(rules)
        elif not isinstance(rules, list):
            raise PatternError(f"'{name}' must be an object or an array")
        elif not rules:
            raise PatternError("Empty arrays are not allowed")
        else:
            for rule in rules:
                _check_rule(name, rule)


def matches(pattern: Mapping[str, Any], event: Mapping[str, Any]) -> bool:
    """Say whether a rule of this pattern, which has passed `check_pattern`, takes the event."""
    for name, rules in pattern.items():
        if name == "$or":
            if not any(matches(alternative, event) for alternative in rules):
                return False
        elif isinstance(rules, Mapping):
            inner = event.get(name)
            candidates = [item for item in _items(inner) if isinstance(item, Mapping)]
            # Without the object, only what must not exist can match.
            if not any(matches(rules, candidate) for candidate in candidates or [{}]):
                return False
        elif not _takes(rules, name in event, event.get(name)):
            return False
    return True


def _takes(rules: Sequence[Any], there: bool, value: Any) -> bool:
    leaves = [item for item in _items(value) if not isinstance(item, Mapping)] if there else []
    for rule in rules:
        if isinstance(rule, Mapping) and "exists" in rule:
            if bool(leaves) == rule["exists"]:
                return True
        elif any(_matches_value(rule, leaf) for leaf in leaves):
            return True
    return False


def _items(value: Any) -> Iterator[Any]:
    if isinstance(value, list):
        for item in value:
            yield from _items(item)
    else:
        yield value


def _matches_value(rule: Any, value: Any) -> bool:
    if not isinstance(rule, Mapping):
        return _same(rule, value)
    ((name, operand),) = rule.items()
    return _OPERATORS[name](operand, value)


def _same(one: Any, other: Any) -> bool:
    # In JSON, true is not 1.
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)


def _alternatives(operand: Any) -> list[Any]:
    return operand if isinstance(operand, list) else [operand]


def _begins(operand: Any, value: Any) -> bool:
    return _compare_text(operand, value, str.startswith)


def _ends(operand: Any, value: Any) -> bool:
    return _compare_text(operand, value, str.endswith)


def _compare_text(operand: Any, value: Any, compare: Callable[[str, str], bool]) -> bool:
    if not isinstance(value, str):
        return False
    for text in _alternatives(operand):
        if isinstance(text, Mapping):
            if compare(value.lower(), text["equals-ignore-case"].lower()):
                return True
        elif compare(value, text):
            return True
    return False


def _equals_ignoring_case(operand: Any, value: Any) -> bool:
    return isinstance(value, str) and any(value.lower() == text.lower() for text in _alternatives(operand))


def _is_like(operand: Any, value: Any) -> bool:
    return isinstance(value, str) and any(
        _wildcard(text).fullmatch(value) is not None for text in _alternatives(operand)
    )


def _differs(operand: Any, value: Any) -> bool:
    if isinstance(operand, Mapping):
        return not _matches_value(operand, value)
    return not any(_same(other, value) for other in _alternatives(operand))


def _is_in_range(operand: Sequence[Any], value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    pairs = zip(operand[::2], operand[1::2], strict=True)
    return all(_COMPARISONS[comparison](value, bound) for comparison, bound in pairs)


def _is_in_network(operand: str, value: Any) -> bool:
    try:
        return ipaddress.ip_address(value) in ipaddress.ip_network(operand)
    except ValueError:
        return False


_OPERATORS: Mapping[str, Callable[[Any, Any], bool]] = {
    "prefix": _begins,
    "suffix": _ends,
    "equals-ignore-case": _equals_ignoring_case,
    "wildcard": _is_like,
    "anything-but": _differs,
    "numeric": _is_in_range,
    "cidr": _is_in_network,
}


@cache
def _wildcard(text: str) -> re.Pattern[str]:
    parts = re.findall(r"\\[*\\]|\*|[^*\\]+|\\", text)
    return re.compile("".join(".*" if part == "*" else re.escape(re.sub(r"\\([*\\])", r"\1", part)) for part in parts))


def _check_rule(name: str, rule: Any) -> None:
    if not isinstance(rule, Mapping):
        if isinstance(rule, list):
            raise PatternError(f"'{name}': match value must be String, number, true, false, or null")
        return
    if len(rule) != 1:
        raise PatternError(f"'{name}': only one key allowed in match expression")
    ((kind, operand),) = rule.items()
    problem = None
    if kind == "exists":
        problem = None if isinstance(operand, bool) else "must be true or false"
    elif kind not in _OPERATORS:
        raise PatternError(f"'{name}': Unrecognized match type {kind}")
    elif kind == "numeric":
        problem = _numeric_problem(operand)
    elif kind == "anything-but":
        problem = _negation_problem(operand)
    elif kind == "cidr":
        problem = _network_problem(operand)
    else:
        problem = _text_problem(kind, operand)
    if problem:
        raise PatternError(f"'{name}': {kind} {problem}")


def _numeric_problem(operand: Any) -> str | None:
    whole = isinstance(operand, list) and len(operand) in (2, 4)
    if not whole or any(comparison not in _COMPARISONS for comparison in operand[::2]):
        return "must be an array of a comparison and a number, or of two of each"
    if any(isinstance(bound, bool) or not isinstance(bound, (int, float)) for bound in operand[1::2]):
        return "compares with numbers only"
    return None


def _negation_problem(operand: Any) -> str | None:
    if isinstance(operand, Mapping):
        if len(operand) == 1 and next(iter(operand)) in _NEGATABLE:
            ((kind, inner),) = operand.items()
            return _text_problem(kind, inner)
        return f"may hold one of {', '.join(sorted(_NEGATABLE))}, or values"
    simple = all(isinstance(item, (str, int, float)) for item in _alternatives(operand))
    return None if simple and operand != [] else "may hold strings and numbers"


def _network_problem(operand: Any) -> str | None:
    try:
        ipaddress.ip_network(operand)
    except ValueError:
        return f"{operand} is no range of addresses"
    return None


def _text_problem(kind: str, operand: Any) -> str | None:
    for text in _alternatives(operand):
        inner = text.get("equals-ignore-case") if isinstance(text, Mapping) and kind in ("prefix", "suffix") else text
        if not isinstance(inner, str):
            return "must be a string"
    return None
