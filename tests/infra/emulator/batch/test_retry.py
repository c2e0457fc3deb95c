"""evaluateOnExit, as the API reference words it."""

from typing import Any

import pytest

from infra.emulator.batch.retry import Outcome, check_strategy, should_retry
from jobs.contract.retries import RETRY_RULES

FAILED = Outcome(exit_code=1, reason=None, status_reason="Essential container in task exited")
RECLAIMED = Outcome(exit_code=None, reason=None, status_reason="Host EC2 (instance i-0123) terminated.")
NOT_PULLED = Outcome(
    exit_code=None, reason="CannotPullContainerError: i/o timeout", status_reason="Task failed to start"
)


def retries(outcome: Outcome, *rules: dict[str, str], attempts: int = 3, attempt: int = 1) -> bool:
    return should_retry({"attempts": attempts, "evaluateOnExit": list(rules)}, attempt, outcome)


def test_without_rules_every_failure_is_retried_until_the_attempts_are_used_up() -> None:
    assert [retries(FAILED, attempts=3, attempt=attempt) for attempt in (1, 2, 3)] == [True, True, False]
    assert not should_retry({}, 1, FAILED)


def test_what_no_rule_matches_is_retried() -> None:
    assert retries(FAILED, {"onExitCode": "2", "action": "EXIT"})


def test_the_first_matching_rule_decides() -> None:
    retry, leave = {"onExitCode": "1", "action": "RETRY"}, {"onExitCode": "*", "action": "EXIT"}
    assert retries(FAILED, retry, leave)
    assert not retries(FAILED, leave, retry)


def test_all_conditions_of_a_rule_must_hold() -> None:
    rule = {"onStatusReason": "Essential*", "onExitCode": "2", "action": "EXIT"}
    assert retries(FAILED, rule)
    assert not retries(FAILED, {**rule, "onExitCode": "1"})


@pytest.mark.parametrize(
    ("pattern", "matches"),
    [("1", True), ("1*", True), ("*", True), ("", False), ("11", False), ("11*", False)],
)
def test_an_asterisk_at_the_end_stands_for_anything(pattern: str, matches: bool) -> None:
    assert retries(FAILED, {"onExitCode": pattern, "action": "EXIT"}) is not matches


def test_the_rules_of_every_trainyard_job() -> None:
    rules = [dict(rule) for rule in RETRY_RULES]
    interrupted = Outcome(exit_code=75, reason=None, status_reason="Essential container in task exited")
    assert all(retries(outcome, *rules) for outcome in (RECLAIMED, interrupted, NOT_PULLED))
    assert not retries(FAILED, *rules)


def test_an_absent_exit_code_matches_no_pattern_of_one() -> None:
    assert retries(RECLAIMED, {"onExitCode": "*", "action": "EXIT"})


@pytest.mark.parametrize("action", ["retry", "Retry", "RETRY"])
def test_the_action_is_not_case_sensitive(action: str) -> None:
    assert retries(FAILED, {"onExitCode": "1", "action": action}, {"onExitCode": "*", "action": "EXIT"})


@pytest.mark.parametrize(
    ("strategy", "complaint"),
    [
        ({"attempts": 0}, "between 1 and 10"),
        ({"attempts": 11}, "between 1 and 10"),
        ({"evaluateOnExit": [{"onReason": "*", "action": "EXIT"}]}, "attempts must be specified"),
        ({"attempts": 1, "evaluateOnExit": [{"onReason": "*", "action": "EXIT"}] * 6}, "at most 5"),
        ({"attempts": 1, "evaluateOnExit": [{"onReason": "*"}]}, "RETRY or EXIT"),
        ({"attempts": 1, "evaluateOnExit": [{"onReason": "*out of memory", "action": "EXIT"}]}, "asterisk at its end"),
        ({"attempts": 1, "evaluateOnExit": [{"onExitCode": "1?", "action": "EXIT"}]}, "digits"),
    ],
)
def test_a_strategy_that_batch_refuses(strategy: dict[str, Any], complaint: str) -> None:
    assert complaint in (check_strategy(strategy) or "nothing")


def test_a_strategy_that_batch_takes() -> None:
    rules = [{"onStatusReason": "Host EC2*", "onExitCode": "13*", "action": "RETRY"}] * 5
    assert check_strategy({"attempts": 10, "evaluateOnExit": rules}) is None
