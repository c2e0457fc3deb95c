"""The pages in a real browser: no complaints and every chart drawn, on a phone and a desktop, dark and light."""

from datetime import datetime, timezone
from pathlib import Path

import pytest
from playwright.sync_api import expect

from jobs.money.costs import costs, month_of, spans
from jobs.report.comparison import comparison_page
from jobs.report.costs import costs_page
from jobs.report.dashboard import dashboard_page
from jobs.report.run_page import run_page
from jobs.report.sweep_page import sweep_page
from tests.support.jobs.boards import board, sweep_points, sweep_summary
from tests.support.jobs.pages import OpenedPage
from tests.support.jobs.recorded_runs import sweep, three_attempts, with_samples

NOW = datetime(2026, 11, 2, tzinfo=timezone.utc)

CHARTS = {
    "report": {
        *(f"curve-{name}" for name in ("loss", "evaluation", "learning_rate", "samples_per_second", "grad_norm")),
        *("curve-accelerator_utilization_percent", "curve-accelerator_memory_percent", "timeline", "confusion"),
    },
    "comparison": {
        *(f"curve-{name}" for name in ("loss", "eval_accuracy", "eval_f1", "eval_loss", "learning_rate")),
        *("curve-samples_per_second", "scatter"),
    },
    "costs": {"shares", "spans"},
    "sweep": {"curve-eval_accuracy"},
}
"""The charts of each page."""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    runs = sweep()
    receipts = [run.receipt for run in runs if run.receipt]
    month = month_of("2026-11", now=NOW)
    parts = [(name, costs(receipts, by="run", month=span)) for name, span in spans(month, receipts, now=NOW)]
    of_month = costs(receipts, by="run", month=month)
    html = {
        "report": run_page(with_samples(three_attempts()), now=NOW),
        "comparison": comparison_page(runs, now=NOW),
        "costs": costs_page(of_month, parts, by="run", when="2026-11", stage="dev", note="estimated", now=NOW),
        "sweep": sweep_page(sweep_summary(sweep_points()), sweep_points(), now=NOW),
        "dashboard": dashboard_page(board(1000), query="?token=secret"),
    }
    folder = tmp_path_factory.mktemp("pages")
    for name, page in html.items():
        (folder / f"{name}.html").write_text(page, encoding="utf-8")
    return {name: folder / f"{name}.html" for name in html}


@pytest.mark.parametrize(
    ("of", "width", "dark"),
    [
        ("report", 1400, True),
        ("report", 380, False),
        ("comparison", 380, True),
        ("costs", 380, False),
        ("sweep", 420, True),
    ],
)
def test_page_shows_all_charts_without_complaints(
    *, opened: OpenedPage, pages: dict[str, Path], of: str, width: int, dark: bool
) -> None:
    page = opened.open(pages[of], width=width, dark=dark)
    marks = opened.marks(page)
    assert marks.keys() == CHARTS[of]
    assert all(marks.values()), marks
    assert page.evaluate("document.documentElement.scrollWidth") == width, "it scrolls sideways"
    assert opened.layout_shift(page) < 0.002, "more than labels within a chart moved"
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(20, 23, 27)" if dark else "rgb(255, 255, 255)")
    if of in ("report", "comparison"):
        line = page.locator("#curve-loss .mark-line path").first
        stroke = line.evaluate("mark => getComputedStyle(mark).stroke")
        assert stroke == ("rgb(111, 177, 247)" if dark else "rgb(22, 99, 181)"), "its colours follow the scheme"
    assert opened.complaints == []
    assert opened.requests == [pages[of].as_uri()], "it requested something"


def test_page_works_by_keyboard_screen_reader_and_in_print(opened: OpenedPage, pages: dict[str, Path]) -> None:
    page = opened.open(pages["report"], dark=True)
    page.keyboard.press("Tab")
    expect(page.locator(".skip")).to_be_focused()
    # Each chart is described in words.
    figures = page.locator("figure")
    for number in range(figures.count()):
        assert figures.nth(number).get_attribute("aria-labelledby")
        assert len(figures.nth(number).locator("figcaption").inner_text()) > 40
    assert str(page.locator("#curve-loss").get_attribute("aria-label")).startswith("Loss. Loss: from 4.")
    # Areas that scroll sideways can be reached without a mouse.
    assert page.locator(".scroll:not([tabindex='0'])").count() == 0
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.get_by_role("button", name="Copy: Fetch model, metrics and events").click()
    expect(page.locator("button[data-copy]").first).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == "trainyard fetch massive-20261101-120000-00ab"
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.body).color") == "rgb(0, 0, 0)"
    label = page.locator("#timeline .role-axis-label text").first
    assert label.evaluate("text => getComputedStyle(text).fill") == "rgb(68, 68, 68)"


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (1280, True), (420, False), (420, True)])
def test_a_thousand_runs_are_painted_at_once(
    *, opened: OpenedPage, pages: dict[str, Path], width: int, dark: bool
) -> None:
    page = opened.open(pages["dashboard"], width=width, dark=dark)
    assert page.locator("#runs tr").count() == 1000
    ages = "[...document.querySelectorAll('#runs td:nth-child(8)')].map((age) => age.getBoundingClientRect().right)"
    assert len(set(page.evaluate(ages))) == 1, "the ages are not aligned"
    assert page.evaluate("document.documentElement.scrollWidth") == width, "it scrolls sideways"
    # On an idle machine it takes a fifth of a second; the limit is for people, and leaves room for busy machines.
    assert opened.first_paint_milliseconds(page) < 2000
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(20, 23, 27)" if dark else "rgb(255, 255, 255)")
    assert opened.complaints == []
    assert opened.requests == [pages["dashboard"].as_uri()], "it requested something"


def test_runs_are_filtered_and_sorted(opened: OpenedPage, pages: dict[str, Path]) -> None:
    page = opened.open(pages["dashboard"])
    shown = page.locator("#runs tr:visible")
    page.get_by_label("State").select_option("failed")
    page.get_by_label("Team").select_option("speech")
    page.get_by_label("Filter by text").fill("outofmemory bert")
    expect(page.locator("#count")).to_contain_text(f"{shown.count()} of 1,000 runs")
    assert 0 < shown.count() < 20
    assert all("bert-large" in text and "speech" in text for text in shown.all_inner_texts())
    page.get_by_label("State").select_option("")
    page.get_by_label("Team").select_option("")
    page.get_by_label("Filter by text").fill("")
    page.get_by_role("button", name="USD").click()
    costs = [float(text or -1) for text in page.locator("#runs td:nth-child(6)").all_inner_texts()]
    assert costs == sorted(costs, reverse=True)
    page.get_by_role("button", name="Run", exact=True).press("Enter")
    names = page.locator("#runs th a").all_inner_texts()
    assert names == sorted(names)
