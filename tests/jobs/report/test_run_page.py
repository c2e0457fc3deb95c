"""The report of one run, rendered from its records."""

import json
import re
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from html import unescape

import pytest

from jobs.core.records import CardUse, Inputs
from jobs.report.charts import TimeAxis
from jobs.report.curves import Point, curves, events, sections
from jobs.report.run_page import differences, run_page
from jobs.runs.recorded_run import RecordedRun
from jobs.spec.spec import parse_spec
from tests.support.jobs.recorded_runs import BEGIN, DIGEST, three_attempts, with_samples

NOW = datetime(2026, 11, 2, tzinfo=timezone.utc)


@pytest.fixture(scope="module")
def run() -> RecordedRun:
    return three_attempts()


@pytest.fixture(scope="module")
def html(run: RecordedRun) -> str:
    return run_page(run, now=NOW)


def text_of(html: str) -> str:
    """Return the text of a page, without scripts and tags."""
    bare = re.sub(r"<(script|style)[^>]*>.*?</\1>", "", html, flags=re.DOTALL)
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", bare))


def test_page_shows_result_attempts_image_code_and_data(html: str) -> None:
    text = text_of(html)
    for shown in (
        "Accuracy 0.874 largest class alone: 0.070",
        "Estimated cost 6.24 USD saved 14.57 USD, 70 % of the On-Demand price",
        "0 to 45,000 0 2.76 Spot notice: terminate at 12:45:00Z; saved step 45000",
        "45,000 to 81,200 1,200 2.23 lost without a message",
        "The run waited 5 s before the first attempt and 12 min 00 s between attempts",
        f"image trainyard/gaudi:1.21.0-0123456789ab image digest {DIGEST} versions python 3.10.12, torch 2.6.0",
        f"code 2 files from /home/me, commit {'c0ffee' * 6}, fingerprint ab12",
        "11,514 training and 2,033 held-out examples, 5 classes",
        "read: s3://data/shared/massive/train.jsonl (fingerprint 0f1e2d3c)",
    ):
        assert shown in text
    assert "The model learned nothing" not in text


def test_axis_of_a_single_value_starts_at_zero(run: RecordedRun) -> None:
    def evaluation(of: RecordedRun) -> str:
        return next(json.dumps(curve.spec) for curve in curves(of, ()) if curve.id == "curve-evaluation")

    [first, *_] = [line for line in run.metrics if "eval_accuracy" in line]
    alone = {name: first[name] for name in ("step", "time", "eval_accuracy")}
    assert '"zero": true' in evaluation(replace(run, metrics=[alone]))
    # Nor do two metrics of a single evaluation, 0.7970 and 0.8000, become the ends of the axis.
    two = {**alone, "eval_accuracy": 0.8, "eval_f1": 0.797}
    assert '"zero": true' in evaluation(replace(run, metrics=[two]))
    assert '"zero": true' not in evaluation(run)


def test_a_run_with_one_attempt_has_no_gap_between_attempts(run: RecordedRun) -> None:
    assert run.receipt is not None
    first = run.receipt.model_copy(update={"attempts": run.receipt.attempts[:1]})
    text = text_of(run_page(replace(run, receipt=first), now=NOW))
    assert "The run waited 5 s before the first attempt, at no cost." in text


def test_page_shows_fingerprints_of_a_scripts_inputs(run: RecordedRun) -> None:
    inputs = Inputs(fingerprints={"s3://data/research/<held-out>.csv": "77aa00"})
    text = unescape(text_of(run_page(replace(run, data=None, inputs=inputs), now=NOW)))
    assert "Data read: s3://data/research/<held-out>.csv (fingerprint 77aa00)" in text


def test_page_warns_if_the_largest_class_is_as_accurate(run: RecordedRun) -> None:
    assert run.receipt is not None
    worse = {**run.receipt.result, "eval_accuracy": 0.07}
    page = run_page(replace(run, receipt=run.receipt.model_copy(update={"result": worse})), now=NOW)
    assert "always predicting the largest class has accuracy 0.070, the model 0.070." in text_of(page)


def test_markup_in_data_is_escaped(html: str) -> None:
    assert "<script>alert(1)" not in html
    assert "<b>calendar</b>" not in html
    assert "wake me &lt;script&gt;alert(1)&lt;/script&gt; at nine" in html


def test_only_a_live_page_may_connect_to_its_server(run: RecordedRun, html: str) -> None:
    assert "default-src 'none'" in html
    assert "connect-src 'none'" in unescape(html)
    live = run_page(run, now=NOW, live=True)
    assert "connect-src 'self'" in unescape(live)
    assert 'id="live"' in live
    assert 'id="live"' not in html


def test_events_are_in_order(run: RecordedRun) -> None:
    found = [event for event in events(run) if event.kind not in ("checkpoint", "evaluation")]
    assert [event.kind for event in found] == ["attempt", "reclaim", "attempt", "resume", "end", "attempt", "resume"]
    assert found[4].text == "attempt 2 ends at step 81200: it was lost without a message"
    kinds = [event.kind for event in events(run)]
    assert (kinds.count("evaluation"), kinds.count("checkpoint")) == (8, 2)


def test_time_axis_shows_the_step_reached_by_then() -> None:
    steps = [(BEGIN + timedelta(minutes=at), step) for at, step in ((50, 1000), (110, 2000), (170, 1500))]
    axis = TimeAxis(begin=BEGIN, end=BEGIN + timedelta(minutes=200), steps=steps).encoding_with_steps("t")["axis"]
    assert axis["values"] == [0, 0.5, 1, 1.5, 2, 2.5, 3]
    [at] = re.findall(r"{.*}", axis["labelExpr"])
    reached = {"0": 0, "0.5": 0, "1": 1000, "1.5": 1000, "2": 2000, "2.5": 2000, "3": 1500}  # repeated after a loss
    assert json.loads(at) == {time: f"step {step:,}" for time, step in reached.items()}


def test_thinned_curve_keeps_peaks_and_separates_attempts() -> None:
    heights = [1.0] * 10_000
    heights[4321], heights[7654] = 99.0, -99.0
    values = [Point(BEGIN + timedelta(seconds=row), row, height, "loss") for row, height in enumerate(heights)]
    drawn = sections(values, [BEGIN, BEGIN + timedelta(seconds=5000)])
    assert len(drawn) <= 302
    assert max(part.high for part in drawn) == 99
    assert min(part.low for part in drawn) == -99
    assert [part.attempt for part in drawn] == sorted(part.attempt for part in drawn)
    assert {part.attempt for part in drawn} == {1, 2}
    few = sections(values[:50], [BEGIN])
    assert [(part.low, part.value, part.high) for part in few] == [(1, 1, 1)] * 50


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        ("running", "HPUs busy 93 % 61 % of their memory in use"),
        ("succeeded", "HPUs busy on average 88 % of attempt 3; idle for 4 min 00 s"),
    ],
)
def test_tiles_show_utilization_and_idle_time(end: str, expected: str) -> None:
    run = three_attempts(200, end=end)
    assert run.receipt is not None
    cards = CardUse(utilization_percent=93.0, memory_percent=61.0, mean_utilization_percent=88.0, idle_seconds=240.0)
    attempts = [*run.attempts[:-1], run.attempts[-1].model_copy(update={"cards": cards})]
    text = text_of(run_page(replace(run, receipt=run.receipt.model_copy(update={"attempts": attempts})), now=NOW))
    assert expected in text


def test_custom_metrics_get_a_curve_if_they_are_numbers(run: RecordedRun) -> None:
    lines = [{"step": 1, "time": BEGIN, "my_reward": 3, "note": "text", "broken": None, "loss": None, "yes": True}]
    assert [curve.id for curve in curves(replace(run, metrics=lines, utilization=()), [])] == ["curve-my_reward"]


def test_values_of_a_script_without_steps_are_numbered(run: RecordedRun) -> None:
    lines = [{"step": n, "time": BEGIN + timedelta(seconds=n), "numbered": True, "val_loss": 1 / n} for n in (1, 2)]
    of_script = replace(run, metrics=lines, utilization=())
    [curve] = curves(of_script, ())
    assert curve.title == "Loss"
    assert "from 1.000 as value 1 to 0.500 as value 2" in curve.summary
    assert '"title": "value"' in json.dumps(curve.spec)
    assert "step" not in json.dumps(curve.spec["layer"])


def test_only_a_trainers_mean_loss_has_no_curve(run: RecordedRun) -> None:
    assert run.receipt is not None
    lines = [{"step": n, "time": BEGIN + timedelta(seconds=n), "train_loss": 1 / n} for n in (1, 2)]
    for result, titles in ({"train_runtime": 1.0}, []), ({}, ["Loss"]):
        receipt = run.receipt.model_copy(update={"result": result})
        found = curves(replace(run, receipt=receipt, metrics=lines, utilization=()), ())
        assert [curve.title for curve in found] == titles


def test_main_metric_of_a_script_has_a_tile(run: RecordedRun) -> None:
    assert run.receipt is not None
    receipt = run.receipt.model_copy(update={"result": {"rate": 0.5, "val_loss": 1.5}})
    assert "Val loss 1.500" in text_of(run_page(replace(run, receipt=receipt), now=NOW))


def test_arguments_are_compared_with_a_spec_or_the_defaults(run: RecordedRun) -> None:
    assert run.spec is not None
    assert ("learning_rate", "3e-05", "5e-05") in differences(run.spec, None)
    assert ("epochs", "5.0", "3.0") in differences(run.spec, None)
    changed = {**run.spec.arguments, "epochs": 2.0, "eval_data": ["a.csv", "b.csv"]}
    recipe = parse_spec({"name": "massive", "job": run.spec.job, "arguments": changed}, origin="the test")
    assert differences(run.spec, recipe) == [("eval_data", "", "a.csv, b.csv"), ("epochs", "5.0", "2.0")]


def test_page_evaluates_on_a_table_of_the_same_format(run: RecordedRun) -> None:
    assert run.spec is not None
    given = {**run.spec.arguments, "delimiter": ";", "text_column": "A text", "max_length": 64}
    spec = parse_spec({"name": "massive", "job": run.spec.job, "arguments": given}, origin="the test")
    html = unescape(run_page(replace(run, spec=spec), now=NOW))
    command = html[html.index("trainyard submit jobs/specs/evaluate-reviews.yaml") :].partition("</code>")[0]
    assert [option.strip(" \\\n") for option in command.split("--set ")[3:]] == [
        "arguments.max_length=64",
        "'arguments.text_column=A text'",
        "'arguments.delimiter=;'",
    ]


def test_page_offers_follow_or_resume_depending_on_the_state() -> None:
    running = three_attempts(100, end="running")
    assert "trainyard logs massive-20261101-120000-00ab --follow" in run_page(running, now=NOW)
    assert running.receipt is not None
    failed = replace(running, receipt=running.receipt.model_copy(update={"state": "failed"}))
    assert "trainyard resume massive-20261101-120000-00ab" in run_page(failed, now=NOW)
    assert "Current loss" in run_page(failed, now=NOW)


def test_run_that_was_only_submitted_has_a_page(run: RecordedRun) -> None:
    text = text_of(run_page(replace(run, receipt=None, metrics=(), checkpoints=(), classes=None), now=NOW))
    assert "no attempt has started" in text
    assert "hf://FacebookAI/xlm-roberta-large" in text
    nothing = RecordedRun(run_id=run.run_id, team="research", location="s3://runs/x/")
    assert "not started" in text_of(run_page(nothing, now=NOW))


def test_page_shows_generated_text(run: RecordedRun) -> None:
    html = run_page(with_samples(run), now=NOW)
    text = text_of(html)
    assert "prompt base tuned What is &lt;b&gt;tar&lt;/b&gt;? tar tar tar It packs files into one." in text
    assert 'id="samples"' not in run_page(run, now=NOW)


@pytest.mark.parametrize(
    ("seconds", "unit"), [(0, "seconds"), (179, "seconds"), (600, "minutes"), (20_000, "hours"), (400_000, "days")]
)
def test_axis_has_a_unit_that_suits_its_length(seconds: float, unit: str) -> None:
    axis = TimeAxis(begin=BEGIN, end=BEGIN + timedelta(seconds=seconds))
    assert axis.unit[0] == unit
    assert axis.value(BEGIN) == 0
