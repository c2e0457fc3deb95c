"""The pages in a real browser: nothing to complain of, every chart drawn, on a phone as on a desk, dark and light."""

from datetime import datetime, timezone
from pathlib import Path

import pytest
from playwright.sync_api import expect

from jobs.contract.costs import Idle, month_of, spans
from jobs.contract.costs import costs as added_up
from jobs.report.comparison import comparison_page
from jobs.report.costs import costs_page
from jobs.report.page import run_page
from tests.support.jobs.pages import OpenedPage
from tests.support.jobs.recorded_runs import sweep, three_attempts, with_samples

NOW = datetime(2026, 11, 2, tzinfo=timezone.utc)
CHARTS = {
    "report": {
        "curve-loss",
        "curve-evaluation",
        "curve-learning_rate",
        "curve-samples_per_second",
        "curve-accelerator_utilization_percent",
        "curve-accelerator_memory_percent",
        "curve-grad_norm",
        "timeline",
        "confusion",
    },
    "comparison": {
        "scatter",
        "parallel",
        "curve-loss",
        "curve-eval_accuracy",
        "curve-eval_f1",
        "curve-eval_loss",
        "curve-learning_rate",
        "curve-samples_per_second",
    },
    "costs": {"shares", "spans"},
}
"""Those of each page."""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(run_page(three_attempts(), now=NOW), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("comparison") / "comparison.html"
    path.write_text(comparison_page(sweep(), now=NOW), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def costs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("costs") / "costs.html"
    path.write_text(page_of_costs(), encoding="utf-8")
    return path


def page_of_costs() -> str:
    """Of seven runs, with what the stage costs idle."""
    receipts = [run.receipt for run in sweep() if run.receipt]
    month = month_of("2026-11", now=NOW)
    parts = [(name, added_up(receipts, by="run", month=span)) for name, span in spans(month, receipts, now=NOW)]
    found = added_up(receipts, by="run", month=month)
    idle = Idle(usd_a_month=37.12, source="counted from its stacks")
    texts = {"when": "2026-11", "stage": "dev", "note": "estimated from the runs' own receipts"}
    return costs_page(found, parts, by="run", idle=idle, now=NOW, **texts)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [380, 900, 1400])
@pytest.mark.parametrize("of", CHARTS)
def test_a_page_is_shown_whole(
    *, opened: OpenedPage, request: pytest.FixtureRequest, of: str, width: int, dark: bool
) -> None:
    path = request.getfixturevalue(of)
    page = opened.open(path, width=width, dark=dark)
    marks = opened.marks(page)
    assert marks.keys() == CHARTS[of]
    assert all(marks.values()), marks
    assert page.evaluate("document.documentElement.scrollWidth") == width, "it scrolls sideways"
    assert opened.layout_shift(page) < 0.002, "more than labels within a chart moved"
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(20, 23, 27)" if dark else "rgb(255, 255, 255)")
    if of != "costs":
        line = page.locator("#curve-loss .mark-line path").first
        stroke = line.evaluate("mark => getComputedStyle(mark).stroke")
        assert stroke == ("rgb(111, 177, 247)" if dark else "rgb(22, 99, 181)"), "its colours are those of the scheme"
    assert opened.complaints == []
    assert opened.requests == [path.as_uri()], "it asked for something"


def test_samples_fit_a_phone(opened: OpenedPage, tmp_path: Path) -> None:
    path = tmp_path / "samples.html"
    path.write_text(run_page(with_samples(three_attempts(100)), now=NOW), encoding="utf-8")
    page = opened.open(path, width=380)
    assert page.evaluate("document.documentElement.scrollWidth") == 380, "it scrolls sideways"
    colors = [mark.evaluate("mark => getComputedStyle(mark).color") for mark in page.locator("mark").all()]
    assert colors == ["rgb(26, 127, 55)", "rgb(180, 35, 24)", "rgb(180, 35, 24)"]
    assert opened.complaints == []


def test_it_is_used_by_keyboard_and_read_aloud(opened: OpenedPage, report: Path) -> None:
    page = opened.open(report)
    page.keyboard.press("Tab")
    expect(page.locator(".skip")).to_be_focused()
    assert page.evaluate("document.documentElement.lang") == "en"
    headings = page.locator("h1, h2").all_inner_texts()
    assert headings[1:] == [
        "Result",
        "Curves",
        "Attempts and their money",
        "Classes",
        "What it was made of",
        "Go on from here",
    ]
    # Each chart says in words what it shows, and has its values as a table.
    figures = page.locator("figure")
    for number in range(figures.count()):
        assert figures.nth(number).get_attribute("aria-labelledby")
        assert len(figures.nth(number).locator("figcaption").inner_text()) > 40
    label = page.locator("#curve-loss").get_attribute("aria-label")
    assert label is not None
    assert label.startswith("Loss. Loss: from 4.")
    # What scrolls sideways can be reached without a mouse.
    assert page.locator(".scroll:not([tabindex='0'])").count() == 0
    assert page.locator("h1, h2, h3").first.evaluate("node => node.tagName") == "H1"


def test_a_command_is_copied(opened: OpenedPage, report: Path) -> None:
    page = opened.open(report)
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.get_by_role("button", name="Copy: Fetch model, metrics and events").click()
    expect(page.locator("button[data-copy]").first).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == "trainyard fetch massive-20261101-120000-00ab"


def test_it_prints_dark_on_white_whatever_the_scheme(opened: OpenedPage, report: Path) -> None:
    page = opened.open(report, dark=True)
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.body).color") == "rgb(0, 0, 0)"
    label = page.locator("#timeline .role-axis-label text").first
    assert label.evaluate("text => getComputedStyle(text).fill") == "rgb(68, 68, 68)"
    assert len(page.pdf()) > 20_000
