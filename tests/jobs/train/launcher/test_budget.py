"""Runs that come to the end of their budget, with real ranks."""

from collections.abc import Iterator

import pytest

from jobs.contract.budget import SAVE_SECONDS
from jobs.contract.instance_types import instance_type
from tests.support.train.gangs import JOB, child
from tests.support.train.launching import Launched, Run
from tests.support.train.metadata_service import LIFE_CYCLE, MetadataService

SECONDS = 60.0
"""That the attempt may train: on a slow machine the ranks only begin in half of them."""


@pytest.fixture
def metadata() -> Iterator[MetadataService]:
    with MetadataService() as service:
        yield service


@pytest.mark.timeout(600)
def test_two_nodes_save_and_stop_before_they_pass_a_budget_and_do_not_start_again(
    run: Run, recipe: tuple[str, ...], metadata: MetadataService
) -> None:
    # GIVEN a budget that pays for two nodes, for one of which Spot had no room
    budget = 2 * (SAVE_SECONDS + SECONDS) / 3600 * instance_type("dl1.24xlarge").on_demand_usd_per_hour
    options = ("--capacity=spot", f"--max-usd={budget}", "--max-hours=9")
    metadata.news[LIFE_CYCLE] = "on-demand"
    environments: list[dict[str, str]] = [{}, metadata.environment]

    def both(job: str) -> list[Launched]:
        return [
            child(run, index, *recipe, attempt=1, options=options, job=job, **environment)
            for index, environment in enumerate(environments)
        ]

    # WHEN the training takes longer
    nodes = both(JOB)
    nodes[0].wait_for_line("[progress] 4/")
    ranks = [rank for node in nodes for rank in node.ranks()]
    for rank in ranks:
        rank.suspend()
    stopped = f"budget: max_usd {budget:g} is nearly used up"
    nodes[0].wait_for_line(f"{stopped}: the training saves and stops")
    for rank in ranks:
        rank.resume()
    codes = [node.wait() for node in nodes]

    # THEN both end for good, with one reason
    assert codes == [1, 1], nodes[1].output
    name = str(run.location).strip("/").rpartition("/")[2]
    said = nodes[0].lines[-1].removeprefix("error: ").strip()
    assert said.startswith("budget: 0.")
    assert f" USD of max_usd {budget:.2f} used, " in said
    assert "; the rest is kept for saving, 2 minutes. " in said
    assert said.endswith(f"Next: trainyard resume {name} --set max_usd={2 * budget:g}")
    assert nodes[1].lines[-1] == f"error: the run has ended: {said}\n"
    assert not any("Traceback" in node.output for node in nodes)
    run.wait_until_gone()
    # AND what they did is saved, and counted for both, at the dearer price
    receipt = run.receipt()
    assert receipt.state == "failed"
    [attempt] = receipt.attempts
    assert (attempt.reason, attempt.capacity, attempt.nnodes) == (said, "on-demand", 2)
    # A checkpoint of its rhythm may have come before the ranks were held.
    assert max(run.complete_checkpoints()) == attempt.last_step
    assert f"{stopped}: saving step {attempt.last_step}\n" in nodes[0].lines
    assert receipt.instance_hours * 3600 == pytest.approx(
        2 * receipt.duration_seconds + attempt.waited_instance_seconds, abs=0.1
    )
    assert receipt.estimated_usd is not None
    assert SECONDS / (SAVE_SECONDS + SECONDS) * budget < receipt.estimated_usd < budget
    used = f"{receipt.estimated_usd:.2f} of {budget:.2f} USD, {receipt.instance_hours:.2f} of 9 instance hours"
    assert receipt.budget == used

    # Resumed without a larger one they start no ranks, and no node waits for the other
    nodes = both("9e3a")
    assert [node.wait() for node in nodes] == [1, 1]
    for node in nodes:
        assert f" of max_usd {budget:.2f} used, " in node.lines[-1]
        assert "start: " not in node.output
    assert run.recorded_attempt(2).last_step == 0
