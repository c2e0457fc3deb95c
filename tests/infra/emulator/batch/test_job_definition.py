"""Retry rules (evaluateOnExit), as in the API reference."""

from typing import Any

import pytest

from infra.emulator.batch.job_definition import Outcome, check_strategy, should_retry
from jobs.core.retries import RETRY_RULES

FAILED = Outcome(exit_code=1, reason=None, status_reason="Essential container in task exited")
RECLAIMED = Outcome(exit_code=None, reason=None, status_reason="Host EC2 (instance i-0123) terminated.")
NOT_PULLED = Outcome(
    exit_code=None, reason="CannotPullContainerError: i/o timeout", status_reason="Task failed to start"
)
NO_SECRET = Outcome(
    exit_code=None, reason=None, status_reason="Fetching secret data from AWS Secrets Manager in region us-east-1: …"
)


def retries(outcome: Outcome, *rules: dict[str, str], attempts: int = 3, attempt: int = 1) -> bool:
    return should_retry({"attempts": attempts, "evaluateOnExit": list(rules)}, attempt, outcome)


def test_without_rules_every_failure_is_retried() -> None:
    assert [retries(FAILED, attempts=3, attempt=attempt) for attempt in (1, 2, 3)] == [True, True, False]
    assert not should_retry({}, 1, FAILED)


def test_first_rule_whose_conditions_all_match_decides() -> None:
    retry, leave = {"onExitCode": "1", "action": "retry"}, {"onExitCode": "*", "action": "EXIT"}
    assert retries(FAILED, retry, leave)
    assert not retries(FAILED, leave, retry)
    assert retries(FAILED, {"onStatusReason": "Essential*", "onExitCode": "2", "action": "EXIT"})
    assert not retries(FAILED, {"onStatusReason": "Essential*", "onExitCode": "1", "action": "EXIT"})
    # A missing exit code matches no pattern.
    assert retries(RECLAIMED, leave)


@pytest.mark.parametrize(
    ("pattern", "matches"),
    [("1", True), ("1*", True), ("*", True), ("", False), ("11", False), ("11*", False)],
)
def test_trailing_asterisk_matches_anything(pattern: str, matches: bool) -> None:
    assert retries(FAILED, {"onExitCode": pattern, "action": "EXIT"}) is not matches


def test_rules_of_every_trainyard_job() -> None:
    rules = [dict(rule) for rule in RETRY_RULES]
    interrupted = Outcome(exit_code=75, reason=None, status_reason="Essential container in task exited")
    assert all(retries(outcome, *rules) for outcome in (RECLAIMED, interrupted, NOT_PULLED))
    # The guide documents no reason of a container that lacks a secret, so the rules must not need one.
    assert not any(retries(outcome, *rules) for outcome in (FAILED, NO_SECRET))
    assert all("onReason" not in rule for rule in rules)


@pytest.mark.parametrize(
    ("strategy", "complaint"),
    [
        ({"attempts": 0}, "between 1 and 10"),
        ({"attempts": 11}, "between 1 and 10"),
        ({"evaluateOnExit": [{"onReason": "*", "action": "EXIT"}]}, "attempts must be specified"),
        ({"attempts": 1, "evaluateOnExit": [{"onReason": "*", "action": "EXIT"}] * 6}, "at most 5"),
        ({"attempts": 1, "evaluateOnExit": [{"onReason": "*"}]}, "RETRY or EXIT"),
        (
            {"attempts": 1, "evaluateOnExit": [{"onReason": "*out of memory", "action": "EXIT"}]},
            "asterisk only at the end",
        ),
        ({"attempts": 1, "evaluateOnExit": [{"onExitCode": "1?", "action": "EXIT"}]}, "digits"),
        ({"attempts": 10, "evaluateOnExit": [{"onExitCode": "13*", "action": "RETRY"}] * 5}, "nothing"),
    ],
)
def test_wrong_strategies_are_refused(strategy: dict[str, Any], complaint: str) -> None:
    assert complaint in (check_strategy(strategy) or "nothing")
