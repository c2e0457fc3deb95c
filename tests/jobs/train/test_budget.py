"""A run that comes to the end of its budget, with real ranks."""

from jobs.budget import SAVE_SECONDS
from jobs.instance_types import instance_type
from tests.jobs.train.launching import Run


def test_a_run_stops_before_it_passes_its_budget_and_does_not_start_again(run: Run, recipe: tuple[str, ...]) -> None:
    price = instance_type("dl1.24xlarge").spot_usd_per_hour
    budget = (SAVE_SECONDS + 8) / 3600 * price
    options = ["--capacity=spot", f"--max-usd={budget}", "--max-hours=9"]

    # The training itself would take minutes.
    stopped = run.attempt(*recipe, "--epochs=400", options=options, expect=1)

    name = str(run.location).strip("/").rpartition("/")[2]
    said = stopped.lines[-1]
    assert said.startswith(f"error: budget: max_usd {budget:.2f} reached: 0.")
    assert said.endswith(f"Next: trainyard resume {name} --max-usd {2 * budget:g}\n")
    assert "Traceback" not in stopped.output
    run.wait_until_gone()
    receipt = run.receipt()
    assert receipt.state == "failed"
    assert receipt.attempts[0].reason == said.removeprefix("error: ").strip()
    assert receipt.attempts[0].capacity == "spot"
    assert receipt.estimated_usd is not None
    assert receipt.estimated_usd < budget
    assert (
        receipt.budget
        == f"{receipt.estimated_usd:.2f} of {budget:.2f} USD, {receipt.instance_hours:.2f} of 9 instance hours"
    )

    # What the ranks had done by then is saved, unless they had hardly begun.
    done = receipt.attempts[0].last_step
    assert done == 0 or max(run.complete_checkpoints()) >= done

    # Started again by whatever it is, it starts no ranks.
    again = run.attempt(*recipe, "--epochs=400", options=options, attempt=2, expect=1)
    assert again.lines[-1].startswith(f"error: budget: max_usd {budget:.2f} reached: ")
    assert "start: " not in again.output
    assert run.recorded_attempt(2).last_step == 0
