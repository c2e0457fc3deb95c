"""`trainyard dashboard`: all runs of a stage on one page, and a page for each, served with the caller's own rights."""

import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from datetime import timedelta
from html import unescape
from http.server import ThreadingHTTPServer

import pytest
from playwright.sync_api import expect

from jobs.aws.connection import Aws
from jobs.cli.app import app
from jobs.cli.dashboard import Site
from jobs.cli.serving import LivePages, serving
from jobs.core.errors import Detached, UsageError
from jobs.core.stage import DeployedStage, parameter_path
from jobs.report.dashboard import dashboard_page
from jobs.runs.submit import send
from tests.jobs.cli.test_report import ask, put
from tests.jobs.report.test_run_page import text_of
from tests.support.jobs.boards import board
from tests.support.jobs.pages import OpenedPage
from tests.support.jobs.proxies import LimitedRole
from tests.support.jobs.recorded_runs import BEGIN, three_attempts
from tests.support.jobs.submitting import RunCommand, no_instances, planned_to_run, wait_for
from tests.support.running_emulator import Emulator

NOW = BEGIN + timedelta(days=2)


@contextmanager
def served(site: Site) -> Iterator[str]:
    """Yield the address of the page of all runs, without `http://`."""
    pages = LivePages(lambda path: site.page(path, token=pages.token))
    with serving(pages, 0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield f"127.0.0.1:{server.server_port}/?token={pages.token}"
        server.shutdown()
        thread.join()


def test_page_of_all_runs_leads_to_a_page_of_each(emulated: Aws, stage: DeployedStage, run_command: RunCommand) -> None:
    run_id, failed = (run_command([command]).plan.run_id for command in ("true", "false"))
    put(emulated, stage, three_attempts(20, run_id=run_id))
    with served(Site(emulated, "dev", team=None, since="1h")) as address:
        status, page = ask(address)
        assert status == 200
        assert "Failures of the last 7 days, by cause" in page
        row = next(line for line in page.splitlines() if f'id="{run_id}"' in line)
        assert "succeeded" in row
        assert f'title="{emulated.caller}">{emulated.caller.removeprefix("user/")}<' in row
        assert "accuracy 0.874" in row
        assert "Essential container" in next(line for line in page.splitlines() if f'id="{failed}"' in line)
        status, report = ask(address.replace("/?", f"/run/{run_id}?"))
        assert status == 200
        assert "Attempts and costs" in report
        assert 'id="live"' not in report, "the run has ended"
        status, report = ask(address.replace("/?", f"/run/{failed}?"))
        assert (status, 'id="live"' in report) == (200, True)


def test_server_answers_only_its_own_pages_to_its_own_origin(emulated: Aws, stage: DeployedStage) -> None:
    with served(Site(emulated, "dev", team=None, since="1h")) as address:
        for path in (
            "/etc/passwd",
            "/run/../../etc/passwd",
            "/run/%2e%2e%2f%2e%2e%2fetc%2fpasswd",
            "/run/latest",
            "/run/massive-20200101-120000-00ab",
            "/run/massive-20200101-120000-00ab/receipt.json",
            "/other/massive-20200101-120000-00ab",
        ):
            status, text = ask(address.replace("/?", f"{path}?"))
            assert (status, "html" in text) == (404, False), path
        assert ask(address, Host="rebound.example")[0] == 403
        assert ask(address, Sec_Fetch_Site="cross-site")[0] == 403
        assert ask(address.partition("?")[0])[0] == 403
        host, _, path = address.partition("/")
        with closing(http.client.HTTPConnection(host, timeout=30)) as connection:
            connection.request("POST", f"/{path}")
            assert connection.getresponse().status == 501


def test_cost_of_the_month_is_compared_with_budgets(emulated: Aws, stage: DeployedStage) -> None:
    run = three_attempts(100, run_id="spent-20261101-120000-00ab")
    put(emulated, stage, run)
    path = parameter_path("dev")
    budgets = {f"{path}stage-budget": 50.0, f"{path}budget/research": 20.0}
    for name, limit in budgets.items():
        emulated.ssm.put_parameter(Name=name, Value=json.dumps({"limit_usd": limit, "topic": "t"}), Type="String")
    try:
        site = Site(emulated, "dev", team=None, since="1h")
        of_stage, *of_teams = site.board(now=NOW).costs
        [research] = [cost for cost in of_teams if cost.name == "research"]
        assert (of_stage.budget_usd, research.budget_usd) == (50, 20)
        assert run.receipt is not None
        assert research.usd is not None
        assert research.usd >= (run.receipt.estimated_usd or 0) > 0
        assert of_stage.usd == pytest.approx(sum(cost.usd or 0 for cost in of_teams))
        # A receipt of a forgotten run is read once.
        emulated.s3.delete_object(Bucket=stage.run_bucket, Key=f"research/{run.run_id}/receipt.json")
        [again] = [cost for cost in site.board(now=NOW).costs if cost.name == "research"]
        assert again.usd == pytest.approx(research.usd)
    finally:
        emulated.ssm.delete_parameters(Names=[*budgets])


def test_what_the_caller_may_not_read_is_unknown(
    emulated: Aws, stage: DeployedStage, deployed_aws: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LimitedRole(deployed_aws.endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.url)
        found = Site(Aws(), "dev", team=None, since="1h").board(now=NOW)
    others = [team for team in stage.teams if team != "research"]
    assert {cost.name for cost in found.costs if cost.usd is None} == set(others)
    assert found.costs[0].is_partial
    assert f"cost and results of team {others[0]}" in found.unknown[0]
    assert found.unknown[0].endswith("unknown — AccessDenied for ListObjectsV2")


def test_waiting_runs_show_what_they_wait_for(emulated: Aws, stage: DeployedStage) -> None:
    plan = planned_to_run(emulated, stage, ["true"])
    with no_instances(emulated, stage, "spot@research"):
        job_id = send(emulated, plan)
        wait_for(emulated, stage, job_id, state="RUNNABLE")
        with served(Site(emulated, "dev", team="research", since="1h")) as address:
            text = unescape(text_of(ask(address)[1]))
    wait_for(emulated, stage, job_id)
    assert "1 waiting" in text
    assert "queue spot@research, Batch's reason: CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY" in text
    assert f"{plan.run_id} " in text


def test_refresh_keeps_filter_and_scroll_and_says_since_when_it_fails(
    opened: OpenedPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = board(300)
    succeeded = next(run for run in first.runs if run.state == "succeeded")
    boards = [first, replace(first, runs=[run for run in first.runs if run is not succeeded])]
    monkeypatch.setattr("jobs.report.dashboard.REFRESH_SECONDS", 1)
    monkeypatch.setattr("jobs.cli.serving.FRESH_SECONDS", 0)

    def render(_: str) -> str:
        if not boards:
            raise UsageError("AWS denied ListJobs: no permission")
        return dashboard_page(boards.pop(0), query="?token=x")

    pages = LivePages(render)
    with serving(pages, 0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        page = opened.open(f"http://127.0.0.1:{server.server_port}/?token={pages.token}")
        page.get_by_label("State").select_option("succeeded")
        page.evaluate("scrollTo(0, 700)")
        expect(page.locator("#count")).to_contain_text("of 299 runs", timeout=15_000)
        assert page.evaluate("scrollY") == 700
        assert page.locator("#runs tr[data-state=failed]:visible").count() == 0
        stale = page.locator("#live.stale")
        expect(stale).to_contain_text("Not updated since", timeout=15_000)
        expect(stale).to_contain_text("AWS denied ListJobs: no permission.")
        server.shutdown()
        thread.join()
    expect(stale).to_contain_text("the command that serves this page has ended", timeout=15_000)


def test_command_prints_the_address_and_ctrl_c_ends_it(
    emulated: Aws, stage: DeployedStage, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ThreadingHTTPServer, "serve_forever", interrupted)
    with pytest.raises(Detached, match=r"^stopped serving; runs continue$"):
        app(["dashboard", "--since", "1h"], standalone_mode=False)
    assert capsys.readouterr().out.startswith("http://127.0.0.1:")
    with pytest.raises(UsageError, match="--since yesterday"):
        app(["dashboard", "--since", "yesterday"], standalone_mode=False)
