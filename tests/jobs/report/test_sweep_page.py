"""The page of a sweep, rendered from records of its points."""

from dataclasses import replace
from datetime import datetime, timezone

from jobs.report.sweep_page import DRAWN_RUNS, SweepPoint, objective_curve, sweep_page
from tests.jobs.report.test_run_page import text_of
from tests.support.jobs.boards import sweep_points, sweep_summary

NOW = datetime(2026, 11, 2, tzinfo=timezone.utc)


def test_page_shows_the_ranking_and_links_only_if_it_is_served() -> None:
    points = sweep_points()
    page = sweep_page(sweep_summary(points), points, now=NOW)
    text = text_of(page)
    for shown in (
        "running sweep of finetune-classification, team research, submitted 2026-11-01 12:00:00 UTC",
        "Points 12 of 20 2 failed, 3 running",
        "Best accuracy 0.900 point 1",
        "78.12 of 200.00 USD used",
        "Point learning_rate seed schedule accuracy USD State 1 3e-05 1 cosine 0.900 6.24 succeeded 8 3.9e-05",
        "stopped early : ranked 5 of 6 at step 100",
    ):
        assert shown in text
    assert "/run/" not in page
    served = sweep_page(sweep_summary(points), points, now=NOW, live=True, home="/?token=x", query="?token=x")
    assert f'href="/run/{points[0].run.run_id}?token=x"' in served
    [waiting] = [point for point in points if point.state == "waiting"]
    assert f"/run/{waiting.run.run_id}" not in served, "it has no report yet"
    assert '<a href="/?token=x">All runs</a>' in served


def test_curves_are_those_of_the_metric_that_ranks_and_of_the_best_points() -> None:
    def curve(points: list[SweepPoint], metric: str | None = None) -> str:
        found = objective_curve(
            replace(sweep_summary(points), metric=metric), points, {point.label: "red" for point in points}
        )
        return found.id if found else ""

    points = sweep_points()
    assert curve(points) == "curve-eval_accuracy"
    # Before the first result it is the main metric that the points log, or the metric of the spec.
    unranked = [replace(point, metric=None) for point in points]
    assert curve(unranked) == "curve-eval_accuracy"
    assert curve(unranked, "eval_loss") == "curve-eval_loss"
    assert curve([replace(point, run=replace(point.run, metrics=[])) for point in points]) == ""
    many = sweep_points(DRAWN_RUNS + 20)
    page = sweep_page(sweep_summary(many), many, now=NOW)
    assert "Without the last 20 points of the ranking." in text_of(page)


def test_page_of_a_sweep_without_a_started_point() -> None:
    points = [replace(point, state="waiting", usd=None, metric=None, reason="") for point in sweep_points()]
    points = [replace(point, run=replace(point.run, receipt=None, metrics=[])) for point in points]
    page = sweep_page(replace(sweep_summary(points, state="runnable"), budget=""), points, now=NOW)
    assert "Points 0 of 20" in text_of(page)
    assert 'class="chart"' not in page


def test_values_of_points_are_escaped() -> None:
    [first, *_] = sweep_points()
    point = replace(first, values={"<b>x</b>": "<script>alert(1)</script>"}, reason="<script>alert(2)</script>")
    page = sweep_page(sweep_summary([point]), [point], now=NOW)
    assert "<script>alert" not in page
    assert "<b>x</b>" not in page
