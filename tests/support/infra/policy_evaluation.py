"""Evaluate IAM policies as AWS documents it, for requests within one account.

Explicit deny wins; else a request needs an allow in an identity policy, and one in the permissions boundary too where
there is one ("Policy evaluation logic" and "IAM JSON policy elements: Condition operators" of IAM's user guide). What
it does not know, an operator for instance, it refuses to guess.
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
    """A request: what somebody asks AWS to do."""

    action: str
    resource: str = "*"
    """ARN; `*` for an action that knows no resources."""
    context: Mapping[str, str | Sequence[str]] = field(default_factory=dict)
    """Condition keys that the request carries, and their values."""

    def values(self, key: str) -> list[str] | None:
        """Return a condition key's values; its case does not count. None where the request does not carry it."""
        for name, value in self.context.items():
            if name.lower() == key.lower():
                return [value] if isinstance(value, str) else list(value)
        return None


def evaluate(request: Request, identity: Iterable[Document], *, boundary: Iterable[Document] | None = None) -> Decision:
    """Return what IAM decides, given the identity policies of the one who asks and the boundary on them."""
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
    """Return whether a statement of an identity policy speaks of the request."""
    unknown = statement.keys() - {"Sid", "Effect", "Action", "NotAction", "Resource", "NotResource", "Condition"}
    assert not unknown, f"no rule for {unknown}"
    actions, resources = (as_list(statement.get(key, statement.get(f"Not{key}"))) for key in ("Action", "Resource"))
    if any(matches(request.action.lower(), action.lower()) for action in actions) is not ("Action" in statement):
        return False
    meant = any(matches(request.resource, resource) for resource in _known(resources, request))
    return meant is ("Resource" in statement) and all(
        _condition_holds(operator, key, list(_known(as_list(wanted), request)), request.values(key))
        for operator, keys in statement.get("Condition", {}).items()
        for key, wanted in keys.items()
    )


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def matches(text: str, pattern: str) -> bool:
    """Return whether a pattern matches: `*` stands for any characters, `?` for one, all else for itself."""
    return _expression(pattern).fullmatch(text) is not None


@cache
def _expression(pattern: str) -> re.Pattern[str]:
    return re.compile("".join({"*": ".*", "?": "."}.get(letter, re.escape(letter)) for letter in pattern), re.DOTALL)


def _known(values: Iterable[Any], request: Request) -> Iterator[str]:
    """Return `values` with their policy variables put in; what names a key that the request lacks matches nothing."""
    for value in map(str, values):
        parts = re.split(r"\$\{([^}]+)\}", value)
        found = [request.values(key) for key in parts[1::2]]
        if None not in found:
            parts[1::2] = [(given or [""])[0] for given in found]
            yield "".join(parts)


def _arn_matches(text: str, pattern: str) -> bool:
    """Match ARNs part by part: a wildcard does not reach over a colon, except in the sixth part, the rest."""
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
    assert quantifier in ("", "ForAllValues", "ForAnyValue"), f"no rule for {operator}"
    if plain == "Null":
        return any((values is None) is (str(word).lower() == "true") for word in wanted)
    name = plain.removesuffix("IfExists")
    negated = name in _NEGATIONS
    compare = _COMPARISONS.get(_NEGATIONS.get(name, name))
    assert compare is not None, f"no rule for {operator} of {key}"
    if not values:
        # The operators that negate hold where the key is missing, the others do not; over all of no values, any holds.
        return negated or plain != name or quantifier == "ForAllValues"
    assert quantifier or len(values) == 1, f"{key} has several values, which {operator} is not for"
    verdicts = [any(compare(value, str(word)) for word in wanted) is not negated for value in values]
    return any(verdicts) if quantifier == "ForAnyValue" else all(verdicts)
