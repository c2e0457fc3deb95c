"""A run that goes on with other arguments than its checkpoint was made with: not by accident, and on request really."""

from tests.support.train.launching import Run


def test_changed_arguments_are_refused_by_name_and_hold_from_the_checkpoint_on_where_they_were_asked_for(
    run: Run, recipe: tuple[str, ...]
) -> None:
    run.attempt(*recipe, "--epochs=1")
    # An interval decides nothing of the result: it may be another one at any time.
    changed = (*recipe, "--epochs=2", "--learning-rate=0.0001", "--log-every-steps=6")
    changes = "learning_rate 0.003 -> 0.0001, epochs 1.0 -> 2.0"

    refused = run.attempt(*changed, attempt=2, expect=1)
    said = f"error: checkpoint step-12 of this run was made with other arguments. Next: take back {changes}, or "
    assert refused.lines[-1].startswith(said)
    assert "Traceback" not in refused.output

    resumed = run.attempt(*changed, attempt=3, options=["--allow-changes"])
    assert f"changed since checkpoint step-12, as asked: {changes}\n" in resumed.lines
    # The optimizer and the scheduler of a checkpoint bring its learning rate along.
    rates = {row["step"]: row["learning_rate"] for row in run.metrics() if "learning_rate" in row}
    assert list(rates) == [4, 8, 12, 18, 24]
    assert rates[4] > 0.001
    assert 0 < rates[18] < 0.0001
    assert run.recorded_attempt(3).changed == {"learning_rate": (0.003, 0.0001), "epochs": (1.0, 2.0)}
    assert run.receipt().attempts[0].changed == {}
