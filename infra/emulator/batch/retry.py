"""Decide whether Batch starts a job again after a failed attempt: retryStrategy and evaluateOnExit. Pure.

Source: AWS Batch user guide, "Automated job retries", and the API reference of EvaluateOnExit.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from infra.emulator.batch.quotas import MAX_ATTEMPTS, MAX_EVALUATE_ON_EXIT

_PATTERNS = {
    # Letters, digits, periods, colons and white space, then maybe an asterisk; of an exit code digits only.
    "onStatusReason": re.compile(r"[A-Za-z0-9.:\s]{0,512}\*?"),
    "onReason": re.compile(r"[A-Za-z0-9.:\s]{0,512}\*?"),
    "onExitCode": re.compile(r"[0-9]{0,512}\*?"),
}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a failed attempt ended, as DescribeJobs shows it."""

    exit_code: int | None
    """None where no container reported one: the host was reclaimed, say."""
    reason: str | None
    """The container's: an error of the container runtime, mostly absent."""
    status_reason: str
    """The attempt's."""


def should_retry(strategy: Mapping[str, Any], attempt: int, outcome: Outcome) -> bool:
    """Say whether attempt number `attempt` (the first is 1) is to be followed by another.

    Rules are tried in order and the first that matches decides; where there are some and none matches, the job is
    started again, as where there are none.
    """
    if attempt >= strategy.get("attempts", 1):
        return False
    for rule in strategy.get("evaluateOnExit", ()):
        if _matches(rule, outcome):
            return bool(rule["action"].upper() == "RETRY")
    return True


def check_strategy(strategy: Mapping[str, Any]) -> str | None:
    """Say what is wrong with a retryStrategy; None where nothing is."""
    attempts = strategy.get("attempts")
    rules = strategy.get("evaluateOnExit") or []
    if attempts is None:
        return "attempts must be specified when evaluateOnExit is specified" if rules else None
    if not 1 <= attempts <= MAX_ATTEMPTS:
        return f"RetryStrategy attempts must be between 1 and {MAX_ATTEMPTS}, but was {attempts}"
    if len(rules) > MAX_EVALUATE_ON_EXIT:
        return f"evaluateOnExit can have at most {MAX_EVALUATE_ON_EXIT} entries, but has {len(rules)}"
    for number, rule in enumerate(rules, start=1):
        if str(rule.get("action", "")).upper() not in ("RETRY", "EXIT"):
            return f"evaluateOnExit entry {number}: action must be RETRY or EXIT, but was {rule.get('action')}"
        for name, pattern in _PATTERNS.items():
            if name in rule and not pattern.fullmatch(rule[name]):
                return (
                    f"evaluateOnExit entry {number}: {name} may have letters, digits, periods, colons and white space "
                    f"(an exit code: digits), and an asterisk at its end only, but was {rule[name]}"
                )
    return None


def _matches(rule: Mapping[str, str], outcome: Outcome) -> bool:
    # A reason that is absent counts as empty: the guide's own catch-all is {"onReason": "*", "action": "EXIT"}, and a
    # container that just exited has none. An exit code that is absent matches nothing, not even "*".
    exit_code = None if outcome.exit_code is None else str(outcome.exit_code)
    values = {"onStatusReason": outcome.status_reason, "onReason": outcome.reason or "", "onExitCode": exit_code}
    return all(_glob(rule[name], value) for name, value in values.items() if name in rule)


def _glob(pattern: str, value: str | None) -> bool:
    if value is None:
        return False
    return value.startswith(pattern[:-1]) if pattern.endswith("*") else value == pattern
