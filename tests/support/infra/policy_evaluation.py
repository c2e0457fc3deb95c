"""Evaluate IAM policies as documented by AWS, for requests within one account.

An explicit deny wins. Otherwise a request needs an allow in an identity policy, and in the permissions boundary if
there is one (IAM user guide, "Policy evaluation logic" and "IAM JSON policy elements: Condition operators"). Unknown
elements, such as operators, raise an error.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

Decision = Literal["allowed", "implicitly denied", "explicitly denied"]
Document = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Request:
    """A request to AWS."""

    action: str
    resource: str = "*"
    """ARN; `*` for an action without resources."""
    context: Mapping[str, str | Sequence[str]] = field(default_factory=dict)
    """The request's condition keys and their values."""

    def values(self, key: str) -> list[str] | None:
        """Return a condition key's values, or None if the request lacks the key. Case is ignored."""
        for name, value in self.context.items():
            if name.lower() == key.lower():
                return [value] if isinstance(value, str) else list(value)
        return None


def evaluate(request: Request, identity: Iterable[Document], *, boundary: Iterable[Document] | None = None) -> Decision:
    """Return IAM's decision, given the caller's identity policies and boundary."""
    granted = _effects(request, identity)
    limits = {"Allow"} if boundary is None else _effects(request, boundary)
    if "Deny" in granted | limits:
        return "explicitly denied"
    return "allowed" if "Allow" in granted and "Allow" in limits else "implicitly denied"


def _effects(request: Request, documents: Iterable[Document]) -> set[str]:
    return {
        statement["Effect"]
        for document in documents
        for statement in as_list(document["Statement"])
        if applies(request, statement)
    }


def applies(request: Request, statement: Mapping[str, Any]) -> bool:
    """Return whether a statement of an identity policy applies to the request."""
    unknown = statement.keys() - {"Sid", "Effect", "Action", "NotAction", "Resource", "NotResource", "Condition"}
    assert not unknown, f"cannot evaluate {unknown}"
    actions, resources = (as_list(statement.get(key, statement.get(f"Not{key}"))) for key in ("Action", "Resource"))
    if any(matches(request.action.lower(), action.lower()) for action in actions) is not ("Action" in statement):
        return False
    listed = any(matches(request.resource, resource) for resource in _known(resources, request))
    return listed is ("Resource" in statement) and all(
        _condition_holds(operator, key, list(_known(as_list(wanted), request)), request.values(key))
        for operator, keys in statement.get("Condition", {}).items()
        for key, wanted in keys.items()
    )


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def matches(text: str, pattern: str) -> bool:
    """Return whether a pattern with `*` (any characters) and `?` (one character) matches."""
    return _expression(pattern).fullmatch(text) is not None


@cache
def _expression(pattern: str) -> re.Pattern[str]:
    return re.compile("".join({"*": ".*", "?": "."}.get(letter, re.escape(letter)) for letter in pattern), re.DOTALL)


def _known(values: Iterable[Any], request: Request) -> Iterator[str]:
    """Yield `values` with policy variables replaced, without values that refer to a missing key."""
    for value in map(str, values):
        parts = re.split(r"\$\{([^}]+)\}", value)
        found = [request.values(key) for key in parts[1::2]]
        if None not in found:
            parts[1::2] = [(given or [""])[0] for given in found]
            yield "".join(parts)


def _arn_matches(text: str, pattern: str) -> bool:
    """Match ARNs part by part: a wildcard does not match a colon, except in the sixth and last part."""
    texts, patterns = text.split(":", 5), pattern.split(":", 5)
    return len(texts) == len(patterns) and all(map(matches, texts, patterns))


_COMPARISONS: dict[str, Callable[[str, str], bool]] = {
    "StringEquals": lambda value, wanted: value == wanted,
    "StringEqualsIgnoreCase": lambda value, wanted: value.lower() == wanted.lower(),
    "StringLike": matches,
    "ArnEquals": _arn_matches,  # AWS treats both alike
    "ArnLike": _arn_matches,
    "Bool": lambda value, wanted: value.lower() == wanted.lower(),
}
_NEGATIONS = {
    "StringNotEquals": "StringEquals",
    "StringNotEqualsIgnoreCase": "StringEqualsIgnoreCase",
    "StringNotLike": "StringLike",
    "ArnNotEquals": "ArnEquals",
    "ArnNotLike": "ArnLike",
}


def _condition_holds(operator: str, key: str, wanted: Sequence[Any], values: Sequence[str] | None) -> bool:
    quantifier, _, plain = operator.rpartition(":")
    assert quantifier in ("", "ForAllValues", "ForAnyValue"), f"cannot evaluate {operator}"
    if plain == "Null":
        return any((values is None) is (str(word).lower() == "true") for word in wanted)
    name = plain.removesuffix("IfExists")
    negated = name in _NEGATIONS
    compare = _COMPARISONS.get(_NEGATIONS.get(name, name))
    assert compare is not None, f"cannot evaluate {operator} for {key}"
    if not values:
        # If the key is missing, negated operators hold and others do not; ForAllValues holds for no values.
        return negated or plain != name or quantifier == "ForAllValues"
    assert quantifier or len(values) == 1, f"{key} has several values, but {operator} allows one"
    verdicts = [any(compare(value, str(word)) for word in wanted) is not negated for value in values]
    return any(verdicts) if quantifier == "ForAnyValue" else all(verdicts)
