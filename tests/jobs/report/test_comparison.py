"""Comparison of runs."""

from dataclasses import replace
from datetime import datetime, timezone

import pytest

from jobs.report.comparison import comparison_page, differing_arguments, facts, scatter, shared_curves
from jobs.runs.recorded_run import RecordedRun
from jobs.spec.spec import JobSpec
from tests.support.jobs.recorded_runs import sweep, three_attempts

NOW = datetime(2026, 11, 2, tzinfo=timezone.utc)


@pytest.fixture(scope="module")
def runs() -> list[RecordedRun]:
    return sweep()


def test_results_time_and_cost_are_compared(runs: list[RecordedRun]) -> None:
    found = {fact.label: fact for fact in facts(runs)}
    assert found["accuracy"].cells == ["0.790", "0.820", "0.850", "0.880", "0.850", "0.820", "0.790"]
    assert found["accuracy"].best == 3
    assert found["loss"].best is None, "all have the same"
    assert found["USD"].cells == ["0.36"] * 7
    assert (found["USD per % of accuracy"].cells[3], found["USD per % of accuracy"].best) == ("0.0040", 3)
    assert found["saved"].cells == ["70 %"] * 7
    assert found["ran on"].cells[0] == "1 x dl1.24xlarge (spot), 8 ranks on hpu"
    # The smallest loss is the best
    bill = runs[0].receipt
    assert bill is not None
    better = replace(runs[0], receipt=bill.model_copy(update={"result": {**bill.result, "eval_loss": 0.2}}))
    assert next(fact for fact in facts([runs[1], better]) if fact.label == "loss").best == 1


def test_metrics_of_scripts_are_compared(runs: list[RecordedRun]) -> None:
    scripts = [
        replace(run, receipt=run.receipt.model_copy(update={"job": "script", "result": {"cats_score": score}}))
        for run, score in zip(runs, (0.5, 0.75), strict=False)
        if run.receipt
    ]
    [score] = [fact for fact in facts(scripts) if fact.label == "cats score"]
    assert (score.cells, score.best) == (["0.500", "0.750"], 1)
    assert "curve-grad_norm" in [curve.id for curve in shared_curves(scripts)]
    assert "curve-grad_norm" not in [curve.id for curve in shared_curves(runs)]


def test_only_differing_arguments_are_shown(runs: list[RecordedRun]) -> None:
    assert differing_arguments(runs) == {"learning_rate": [3e-6, 1e-5, 2e-5, 3e-5, 5e-5, 1e-4, 3e-4]}
    assert differing_arguments(runs[:1] * 2) == {}
    without_spec = replace(runs[0], spec=None)
    assert differing_arguments([runs[1], without_spec])["epochs"] == [5.0, None]

    # For several kinds: only arguments that all have, and mappings key by key
    def script(rate: float) -> RecordedRun:
        arguments = {"code": "circle", "command": "train.py", "parameters": {"rate": rate, "steps": 9}}
        return replace(runs[0], spec=JobSpec.model_validate({"name": "s", "job": "script", "arguments": arguments}))

    assert differing_arguments([script(0.05), script(0.1)]) == {"parameters.rate": [0.05, 0.1]}
    differing = differing_arguments([script(0.05), runs[0]])
    assert differing["kind"] == ["script", "finetune-classification"]
    assert "learning_rate" not in differing
    assert "parameters.rate" not in differing


def test_curves_of_all_runs_share_a_chart_by_step(runs: list[RecordedRun]) -> None:
    found = {curve.id: curve for curve in shared_curves(runs)}
    assert list(found)[:2] == ["curve-loss", "curve-eval_accuracy"]
    values = found["curve-loss"].spec["data"]["values"]
    assert {value["r"] for value in values} == {f"run {number}" for number in range(1, 8)}
    assert max(value["n"] for value in values) == 2000


def test_scatter_chart_has_a_margin_even_for_equal_costs() -> None:
    chart = scatter(["a", "b"], [("a", 0.5, 1), ("b", 0.5, 3)], x="USD", y="F1", description="x")
    assert chart["encoding"]["x"]["scale"]["domain"] == pytest.approx((0.45, 0.55))
    assert chart["encoding"]["y"]["scale"]["domain"] == pytest.approx((0.8, 3.2))


def test_runs_without_results_can_be_compared() -> None:
    new = [
        RecordedRun(run_id=f"new-20261101-12000{number}-00ab", team="research", location="s3://runs/x/")
        for number in (1, 2)
    ]
    page = comparison_page(new, now=NOW)
    assert "not started" in page
    assert "All arguments are the same." in page
    assert comparison_page([new[0], three_attempts(50)], now=NOW).count("Arguments that differ") == 2
