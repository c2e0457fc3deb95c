"""The page of all runs, rendered from records of runs in all states."""

import re
from dataclasses import replace
from datetime import timedelta
from html import unescape

import pytest

from jobs.report.dashboard import Board, MonthlyCost, dashboard_page, failures
from tests.jobs.report.test_run_page import text_of
from tests.support.jobs.boards import NOW, board


@pytest.fixture(scope="module")
def full() -> Board:
    return board(300, unknown=["cost and results of team search: unknown — AccessDenied for ListObjectsV2"])


def page_of(shown: Board) -> str:
    return dashboard_page(shown, query="?token=secret")


def test_page_counts_runs_and_cards_and_names_what_is_unknown(full: Board) -> None:
    text = unescape(text_of(page_of(full)))
    running = sum(run.job.state in ("RUNNING", "STARTING") for run in full.runs)
    assert f"{running} running" in text
    assert re.search(r"\d\d % of \d+ HPUs busy", text)
    for shown in (
        "stage prod at least 8,412 of 12,000 USD",
        "product 3,008 of 3,000 USD, stopped",
        "speech 1,284 USD",
        "search unknown",
        "cost and results of team search: unknown — AccessDenied for ListObjectsV2",
        "queue spot, instance limit: 16 of at most 16 instances of dl1.24xlarge are in use",
        "they wait for another run to end",
    ):
        assert shown in text


def test_a_cost_below_a_cent_and_no_cost_differ_from_an_unknown_cost(full: Board) -> None:
    def cell(usd: float | None) -> str:
        page = page_of(replace(full, runs=[replace(full.runs[0], usd=usd)]))
        found = re.search(r'<td class="number" data-v="[^"]*">([^<]*)<', page)
        return unescape(found[1]) if found else "no cell"

    assert [cell(usd) for usd in (None, 0.0, 0.004, 12.345)] == ["", "0.00", "<0.01", "12.35"]


def test_failures_that_differ_in_numbers_are_one_cause(full: Board) -> None:
    found = failures(full.runs, since=NOW - timedelta(days=7))
    assert len(found) == 3
    memory = next(reason for reason in found if "OutOfMemory" in reason.text)
    assert memory.text == "torch.OutOfMemoryError: CUDA out of memory"
    assert len(memory.runs) == max(len(reason.runs) for reason in found)
    newest = failures(full.runs, since=NOW - timedelta(hours=12))
    assert sum(len(reason.runs) for reason in newest) < sum(len(reason.runs) for reason in found)


def test_running_sweep_shows_its_points_and_leads_to_its_page(full: Board) -> None:
    sweep = next(run for run in full.runs if run.job.points and run.job.state == "RUNNING")
    assert sweep.points is not None
    page = page_of(replace(full, runs=[sweep]))
    assert f'href="/sweep/{sweep.job.run_id}?token=secret"' in page
    assert f"{sweep.points[0]} of 9 points" in text_of(page)


def test_texts_of_runs_are_escaped(full: Board) -> None:
    text = "<script>alert(1)</script>"
    run = next(run for run in full.runs if run.state == "failed")
    job = replace(run.job, kind=text, reason=text, attempts=())
    shown = replace(full, runs=[replace(run, job=job, ended_by=text)], unknown=[text])
    shown = replace(shown, costs=[MonthlyCost(name=text, usd=1.0)], teams=[text])
    page = page_of(shown)
    assert "<script>alert" not in page
    assert page.count("&lt;script&gt;alert(1)") >= 5
    assert "'unsafe-eval'" not in page, "only charts need it"
