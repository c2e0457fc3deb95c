"""Shares of a queue: by usage, weight and time."""

import pytest

from infra.emulator.batch.fair_share import Usage, is_forgotten, weight_factor, weighted_usage

POLICY = {
    "shareDecaySeconds": 1000,
    "shareDistribution": [
        {"shareIdentifier": "research", "weightFactor": 0.5},
        {"shareIdentifier": "guest*", "weightFactor": 4.0},
    ],
}
NOW = 10_000.0


def used(*, from_age: float, to_age: float | None, vcpus: float = 10, share: str = "product") -> Usage:
    return Usage(share=share, vcpus=vcpus, started=NOW - from_age, stopped=None if to_age is None else NOW - to_age)


def weigh(*usages: Usage, share: str = "product") -> float:
    return weighted_usage(POLICY, usages, share, NOW)


@pytest.mark.parametrize(
    ("share", "weight"), [("research", 0.5), ("guest7", 4.0), ("guest", 4.0), ("product", 1.0), ("researcher", 1.0)]
)
def test_the_weight_of_a_share(share: str, weight: float) -> None:
    assert weight_factor(POLICY, share) == weight


def test_half_the_weight_factor_is_half_the_usage() -> None:
    usages = [used(from_age=100, to_age=0), used(from_age=100, to_age=0, share="research")]
    assert weigh(*usages, share="research") == pytest.approx(weigh(*usages) / 2)


def test_recent_usage_counts_more() -> None:
    recent, old = used(from_age=100, to_age=0), used(from_age=900, to_age=800)
    assert weigh(recent) > 5 * weigh(old) > 0


def test_what_left_the_window_counts_for_nothing() -> None:
    usage = used(from_age=3000, to_age=1001)
    assert weigh(usage) == 0
    assert is_forgotten(POLICY, usage, NOW)
    assert not is_forgotten(POLICY, used(from_age=3000, to_age=None), NOW)


def test_a_job_that_was_just_started_counts() -> None:
    assert weigh(used(from_age=0, to_age=None)) > weigh()


def test_a_decay_of_zero_is_ten_minutes() -> None:
    policy = {"shareDecaySeconds": 0}
    assert not is_forgotten(policy, used(from_age=700, to_age=599), NOW)
    assert is_forgotten(policy, used(from_age=700, to_age=601), NOW)
