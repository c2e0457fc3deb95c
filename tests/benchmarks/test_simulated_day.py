"""The arithmetic behind the benchmark of goodput."""

import random
from dataclasses import replace

import pytest

from tests.support.benchmarks.simulated_day import Costs, Policy, goodput, reclaims, useful_seconds

COSTS = Costs(step=1, stall=10, upload=30, ending=20, restart=50)
PERIODIC = Policy(name="periodic", save_every_seconds=90, resumes=True, heeds_notice=False)
HEEDING = replace(PERIODIC, heeds_notice=True)
FORGETFUL = replace(PERIODIC, resumes=False)


@pytest.mark.parametrize("policy", [PERIODIC, HEEDING, FORGETFUL])
def test_without_a_reclaim_only_the_start_and_the_saves_cost(policy: Policy) -> None:
    # 100 s are 90 s of steps and a save of 10 s.
    assert useful_seconds(policy, COSTS, [], end=50 + 100 * 7) == 7 * 90
    assert useful_seconds(policy, COSTS, [], end=50 + 100 * 7 + 12) == 7 * 90 + 12
    assert useful_seconds(policy, COSTS, [], end=49) == 0


@pytest.mark.parametrize(
    ("policy", "useful"),
    [
        # First step at 50; three checkpoints are complete at 400 (180, 280 and 380); begun again at 450, ended at 1000.
        (PERIODIC, 3 * 90 + 5 * 90 + 50),
        # It works from 50 to the notice at 280: two saves, and 30 s of steps more.
        (HEEDING, 2 * 90 + 30 + 5 * 90 + 50),
        (FORGETFUL, 5 * 90 + 50),
    ],
)
def test_a_reclaim_costs_what_was_not_saved_and_the_restart(policy: Policy, useful: float) -> None:
    assert useful_seconds(policy, COSTS, [400], end=1000) == useful


def test_a_checkpoint_counts_once_it_is_uploaded_and_an_ending_that_is_too_slow_saves_nothing() -> None:
    assert useful_seconds(PERIODIC, COSTS, [50 + 100 + 29.9], end=200) == 0
    assert useful_seconds(PERIODIC, COSTS, [50 + 100 + 30], end=200) == 90
    assert useful_seconds(HEEDING, replace(COSTS, ending=121), [400], end=1000) == 3 * 90 + 5 * 90 + 50
    # Taken away again before its first step
    assert useful_seconds(HEEDING, COSTS, [400, 440], end=490) == 2 * 90 + 30


def test_more_reclaims_leave_less_and_their_number_is_the_rate() -> None:
    for policy in (PERIODIC, HEEDING, FORGETFUL):
        found = [goodput(policy, COSTS, mean_hours=hours, days=200, seed=1) for hours in (1, 6, 24, 1e9)]
        assert found == sorted(found)
        assert found[-1] == pytest.approx(useful_seconds(policy, COSTS, []) / 86_400)
    counts = [len(reclaims(random.Random(day), mean_hours=6)) for day in range(500)]
    assert sum(counts) / 500 == pytest.approx(4, rel=0.1)
    waited = goodput(HEEDING, COSTS, mean_hours=6, days=200, seed=1, waiting_seconds=600)
    assert waited < goodput(HEEDING, COSTS, mean_hours=6, days=200, seed=1)
