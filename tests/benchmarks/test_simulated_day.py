"""The arithmetic behind the benchmark of goodput."""

import random
import re
from dataclasses import replace
from pathlib import Path

import pytest

from jobs.train.launcher.shutdown import NOTICE_MARGIN_SECONDS
from jobs.train.trainer.notice import SPARE_SECONDS
from tests.benchmarks.goodput import INSTANCE_SECONDS, MEAN_HOURS, PARTS, costs_of, drawn, simulated, with_instances
from tests.support.benchmarks.simulated_day import Costs, Policy, goodput, reclaims, useful_seconds

DOCS = Path(__file__).parents[2] / "jobs/docs"

COSTS = Costs(step=2, stall=10, upload=20, restart=50)
HEEDLESS = Policy(name="periodic", save_every_seconds=90)
LEAVING = replace(HEEDLESS, at_notice="leaves")
SAVING = replace(HEEDLESS, at_notice="saves")
SAVING_TWICE = replace(HEEDLESS, at_notice="saves twice")
FORGETFUL = replace(HEEDLESS, resumes=False)
POLICIES = (HEEDLESS, LEAVING, SAVING, SAVING_TWICE, FORGETFUL)

LAST = 1.25 * 30 + 2 * 2 + SPARE_SECONDS + NOTICE_MARGIN_SECONDS
"""The last save begins so long before the instance is gone, or up to a step later."""


@pytest.mark.parametrize("policy", POLICIES)
def test_without_a_reclaim_only_the_start_and_the_saves_cost(policy: Policy) -> None:
    # 100 s are 90 s of steps and a save of 10 s.
    assert useful_seconds(policy, COSTS, [], end=50 + 100 * 7) == 7 * 90
    assert useful_seconds(policy, COSTS, [], end=50 + 100 * 7 + 12) == 7 * 90 + 12
    assert useful_seconds(policy, COSTS, [], end=49) == 0


@pytest.mark.parametrize(
    ("policy", "kept"),
    [
        # First step at 50; three checkpoints are complete at 400 (170, 270 and 370)
        (HEEDLESS, 3 * 90),
        # It works from 50 to the notice at 280: two saves, and 30 s of steps more
        (LEAVING, 2 * 90 + 30),
        (SAVING, 3 * 90),
        # Its last one would be due at 341.5, and a regular one begins at 340
        (SAVING_TWICE, 3 * 90),
        (FORGETFUL, 0),
    ],
)
def test_a_reclaim_costs_what_was_not_saved_and_the_restart(policy: Policy, kept: float) -> None:
    # Begun again at 450, ended at 1000
    assert useful_seconds(policy, COSTS, [400], end=1000) == kept + 5 * 90 + 50


def test_the_last_save_of_two_at_a_notice_begins_as_late_as_it_may() -> None:
    # The one at the notice costs 10 s of steps; three regular ones begin before, at 140, 240 and 340.
    last = 440 - LAST + COSTS.step / 2 - 10
    assert useful_seconds(SAVING_TWICE, COSTS, [440], end=440) == 3 * 90 + (last - 350)


def test_a_checkpoint_counts_once_it_is_uploaded_and_saves_that_are_too_slow_save_nothing() -> None:
    assert useful_seconds(HEEDLESS, COSTS, [50 + 100 + 19.9], end=200) == 0
    assert useful_seconds(HEEDLESS, COSTS, [50 + 100 + 20], end=200) == 90
    for policy in (LEAVING, SAVING, SAVING_TWICE):
        assert useful_seconds(policy, replace(COSTS, upload=119), [400], end=400) == 2 * 90
        # Taken away again before its first step
        assert useful_seconds(policy, COSTS, [400, 440], end=490) == useful_seconds(policy, COSTS, [400], end=400)
    # There is time for one save: it is the last
    slow = replace(COSTS, upload=60)
    assert useful_seconds(SAVING_TWICE, slow, [400], end=400) == useful_seconds(LEAVING, slow, [400], end=400)


def test_more_reclaims_leave_less_and_their_number_is_the_rate() -> None:
    for policy in POLICIES:
        found = [goodput(policy, COSTS, mean_hours=hours, days=200, seed=1) for hours in (1, 6, 24, 1e9)]
        assert found == sorted(found)
        assert found[-1] == pytest.approx(useful_seconds(policy, COSTS, []) / 86_400)
    counts = [len(reclaims(random.Random(day), mean_hours=6)) for day in range(500)]
    assert sum(counts) / 500 == pytest.approx(4, rel=0.1)


@pytest.mark.parametrize("stall", [0.02, 0.1])
@pytest.mark.parametrize("step", [0.1, 0.5])
def test_two_saves_at_the_notice_are_above_every_alternative_at_every_rate(*, step: float, stall: float) -> None:
    parts = {"instance": 60.0, "launcher": 2.0, "data": 5.0, "checkpoint": 1.0, "first-step": 2.0}
    costs = costs_of({"step": step, "stall": stall, "upload": 2.0, **parts})
    assert (costs.instance, costs.restart) == (60, 10)
    ours, *others = simulated(costs, days=50).values()
    for number, hours in enumerate(MEAN_HOURS):
        assert ours[number] > max(other[number] for other in others), hours


def test_the_page_and_its_picture_show_what_is_simulated_of_the_durations_in_the_table() -> None:
    figures = simulated(costs_of({name: part.seconds for name, part in PARTS.items()}))
    assert (DOCS / "goodput.svg").read_text() == drawn(figures), "python -m tests.benchmarks.goodput --picture …"
    page = (DOCS / "how-saving-works.md").read_text()
    rows = re.findall(r"^\| ([^:|]+): [^|]*\| (.* %) \|$", page, re.MULTILINE)
    assert dict(rows) == {
        name: " | ".join(f"{100 * share:.2f} %" for share in found) for name, found in figures.items()
    }
    found = with_instances(costs_of({name: part.seconds for name, part in PARTS.items()}))
    header = " | ".join(f"{taken:g} s" for taken in INSTANCE_SECONDS)
    assert f"| A new instance takes | {header} |" in page
    assert f"| goodput | {' | '.join(f'{100 * share:.2f} %' for share in found)} |" in page
