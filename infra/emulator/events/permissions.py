"""Decide whether a resource's policy lets an AWS service use it: all that the emulator checks of permissions.

A target without it is the mistake that shows nowhere but in what never arrives. Roles and users are not looked at.
"""

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any


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
