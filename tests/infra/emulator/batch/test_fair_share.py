"""Shares of a queue: by usage, weight and time."""

from dataclasses import replace

import pytest

from infra.emulator.batch.scheduler import MINIMUM_USE_SECONDS, Usage, is_forgotten, weight_factor, weighted_usage

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


def test_recent_usage_counts_more() -> None:
    recent, old = used(from_age=100, to_age=0), used(from_age=900, to_age=800)
    assert weigh(recent) == pytest.approx(10 * 95)
    assert weigh(old) == pytest.approx(10 * 15)
    assert weigh(replace(recent, share="research"), share="research") == pytest.approx(weigh(recent) / 2)
    assert weigh(used(from_age=0, to_age=None)) == 10 * MINIMUM_USE_SECONDS  # was just started


def test_what_left_the_window_counts_for_nothing() -> None:
    usage = used(from_age=3000, to_age=1001)
    assert weigh(usage) == 0
    assert is_forgotten(POLICY, usage, NOW)
    assert not is_forgotten(POLICY, used(from_age=3000, to_age=None), NOW)
    # A decay of zero is ten minutes.
    ages = [is_forgotten({"shareDecaySeconds": 0}, used(from_age=700, to_age=age), NOW) for age in (599, 601)]
    assert ages == [False, True]
