"""Runs that come to the end of their budget, with a real rank."""

import pytest

from jobs.core.instance_types import instance_type
from jobs.money.budget import SAVE_SECONDS
from tests.support.container.launching import Run
from tests.support.container.metadata_service import LIFE_CYCLE, MetadataService

SECONDS = 30.0
"""That the attempt may train: on a slow machine the rank only begins in half of them."""


def test_a_run_saves_and_stops_before_it_passes_its_budget_and_does_not_start_again(
    run: Run, recipe: tuple[str, ...]
) -> None:
    # GIVEN a budget for an On-Demand instance, which Batch took since Spot had no room
    budget = (SAVE_SECONDS + SECONDS) / 3600 * instance_type("dl1.24xlarge").on_demand_usd_per_hour
    options = ("--capacity=spot", f"--max-usd={budget}", "--max-hours=9")
    with MetadataService() as metadata:
        metadata.news[LIFE_CYCLE] = "on-demand"
        # WHEN the training takes longer
        launched = run.start(*recipe, nproc=1, attempt=1, options=options, **metadata.environment)
        launched.wait_for_line("[progress] 4/")
        [rank] = launched.ranks()
        rank.suspend()
        stopped = f"budget: max_usd {budget:g} is nearly used up"
        launched.wait_for_line(f"{stopped}: the training saves and stops")
        rank.resume()
        # THEN it ends for good
        assert launched.wait() == 1, launched.output
    name = str(run.location).strip("/").rpartition("/")[2]
    said = launched.lines[-1].removeprefix("error: ").strip()
    assert said.startswith("budget: 0.")
    assert f" USD of max_usd {budget:.2f} used, " in said
    assert "; the rest is reserved for saving, 2 minutes. " in said
    assert said.endswith(f"Next: trainyard resume {name} --set max_usd={2 * budget:g}")
    assert "Traceback" not in launched.output
    # AND what it did is saved, and counted at the dearer price
    receipt = run.receipt()
    assert receipt.state == "failed"
    [attempt] = receipt.attempts
    assert (attempt.reason, attempt.capacity) == (said, "on-demand")
    # A checkpoint of its rhythm may have come before the rank was held.
    assert max(run.complete_checkpoints()) == attempt.last_step
    assert f"{stopped}: saving step {attempt.last_step}\n" in launched.lines
    assert receipt.instance_hours * 3600 == pytest.approx(receipt.duration_seconds, abs=0.1)
    assert receipt.estimated_usd is not None
    assert SECONDS / (SAVE_SECONDS + SECONDS) * budget < receipt.estimated_usd < budget
    used = f"{receipt.estimated_usd:.2f} of {budget:.2f} USD, {receipt.instance_hours:.2f} of 9 instance hours"
    assert receipt.budget == used

    # Resumed without a larger one it starts no rank
    options = ("--capacity=on-demand", *options[1:])
    resumed = run.attempt(*recipe, options=options, expect=1, AWS_BATCH_JOB_ID="9e3a")
    assert f" of max_usd {budget:.2f} used, " in resumed.lines[-1]
    assert "start: " not in resumed.output
    assert run.recorded_attempt(2).last_step == 0
