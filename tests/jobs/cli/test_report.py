"""`trainyard report`: from a run's files on S3 to a page in a file, or in a browser while the run goes on."""

import http.client
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest
from playwright.sync_api import expect

from jobs.aws.connection import Aws
from jobs.cli.app import app
from jobs.cli.report import LivePage, _listening, ready_spec, report, write
from jobs.core.errors import Detached, UsageError
from jobs.core.records import Inputs
from jobs.core.stage import DEFAULT_STAGE, DeployedStage
from jobs.report.page import run_page
from jobs.runs import storage
from jobs.runs.read_records import read_run
from jobs.runs.recorded_run import RecordedRun
from jobs.spec.spec import parse_spec
from tests.jobs.report.test_run_page import NOW
from tests.support.jobs.pages import OpenedPage
from tests.support.jobs.recorded_runs import files_of, three_attempts, with_samples


def put(aws: Aws, stage: DeployedStage, run: RecordedRun) -> None:
    for name, content in files_of(run).items():
        aws.s3.put_object(Bucket=stage.run_bucket, Key=f"research/{run.run_id}/{name}", Body=content)


def test_a_runs_records_become_a_file(
    emulated: Aws, stage: DeployedStage, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    inputs = Inputs(fingerprints={"s3://data/shared/more.csv": "77aa00"})
    run = replace(with_samples(three_attempts(100, run_id="told-20261101-120000-00ab")), inputs=inputs)
    put(emulated, stage, run)
    path = tmp_path / "new" / "told.html"
    app(["report", "told", "--to", str(path)], standalone_mode=False)
    assert capsys.readouterr().out == f"{path}\n"
    assert "0.874" in path.read_text()
    # What was read is what was written, but for where it lies and when S3 took the checkpoints.
    found = read_run(emulated, storage.find_run(emulated, stage, run.run_id))
    assert [checkpoint.step for checkpoint in found.checkpoints] == [each.step for each in run.checkpoints]
    assert found.receipt is not None
    assert found.receipt.stored is not None
    assert found.receipt.stored.all_bytes == sum(map(len, files_of(run).values()))
    bill = found.receipt.model_copy(update={"stored": None})
    assert replace(found, location=run.location, checkpoints=run.checkpoints, receipt=bill) == run


def test_ctrl_c_ends_the_serving_and_leaves_the_file(
    emulated: Aws, stage: DeployedStage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    put(emulated, stage, three_attempts(20, run_id="left-20261101-120000-00ab"))
    monkeypatch.setattr(ThreadingHTTPServer, "serve_forever", interrupted)
    path = tmp_path / "left.html"
    with pytest.raises(Detached, match=rf"^stopped; the report as of now is {path}"):
        report(emulated, DEFAULT_STAGE, "left", to=path, follow=True, port=0)
    assert "left-20261101" in path.read_text()
    assert 'id="live"' not in path.read_text()


def test_a_run_of_a_ready_spec_is_held_against_it() -> None:
    run = three_attempts(20)
    assert ready_spec(run) is None
    spec = parse_spec(
        {"name": "finetune-mrpc", "job": "finetune-classification", "arguments": {"model": "/m", "glue_task": "mrpc"}},
        origin="the test",
    )
    found = ready_spec(replace(run, spec=spec))
    assert found is not None
    assert found.entrypoint_arguments().model_dump()["glue_task"] == "mrpc"


@pytest.fixture
def runs() -> list[RecordedRun]:
    """What is found of the run each time it is looked at; the last of it from then on."""
    return [three_attempts(100, end="running"), three_attempts(100)]


@pytest.fixture
def served(runs: list[RecordedRun], monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr("jobs.cli.report.FRESH_SECONDS", 0)
    live = LivePage(lambda: run_page(runs[0] if len(runs) == 1 else runs.pop(0), now=NOW, live=True))
    with _listening(live, 0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield f"127.0.0.1:{server.server_port}/?token={live.token}"
        server.shutdown()
        thread.join()


def test_the_page_follows_the_run_and_says_when_it_no_longer_does(
    opened: OpenedPage, served: str, runs: list[RecordedRun]
) -> None:
    running = runs[0]
    page = opened.open(f"http://{served}")
    expect(page.locator("#head .state")).to_have_text("running")
    assert "confusion" not in opened.marks(page)
    # The run has ended: it has a section more, so that the page is loaded anew.
    expect(page.locator("#head .state")).to_have_text("succeeded", timeout=15_000)
    page.wait_for_function("document.documentElement.dataset.drawn")
    assert all(opened.marks(page).values())
    # If only figures change, they change in their places.
    before = page.locator("#curve-loss-caption").inner_text()
    further = [*running.metrics, {**running.metrics[-1], "loss": 7.5, "step": 99_999}]
    ended = runs.pop()
    runs.append(replace(ended, metrics=further))
    expect(page.locator("#curve-loss-caption")).to_contain_text("99,999", timeout=15_000)
    assert before != page.locator("#curve-loss-caption").inner_text()
    assert all(opened.marks(page).values())
    assert opened.complaints == []


def ask(address: str, **headers: str) -> tuple[int, str]:
    host, _, path = address.partition("/")
    with closing(http.client.HTTPConnection(host, timeout=30)) as connection:
        connection.request(
            "GET", f"/{path}", headers={name.replace("_", "-"): value for name, value in headers.items()}
        )
        answer = connection.getresponse()
        assert answer.headers["Access-Control-Allow-Origin"] is None
        return answer.status, answer.read().decode()


def test_only_who_has_the_token_is_answered_and_no_other_page(served: str) -> None:
    assert ask(served)[0] == 200
    assert ask(served, Host=served.replace("127.0.0.1", "localhost").partition("/")[0])[0] == 200
    for status, page in (
        ask(served.partition("?")[0]),
        ask(served[:-1]),
        ask(f"{served}_"),
        ask(served, Host="rebound.example"),
        ask(served, Sec_Fetch_Site="cross-site"),
        ask(served, Sec_Fetch_Site="same-site"),
    ):
        assert (status, "html" in page) == (403, False)
    assert ask(served.replace("/?", "/other?"))[0] == 404
    port = int(served.partition(":")[2].partition("/")[0])
    with pytest.raises(UsageError, match=rf"^--port {port}: Address already in use"):
        _listening(LivePage(str), port)


def test_what_cannot_be_read_or_written_is_an_error_and_no_traceback(tmp_path: Path) -> None:
    def make() -> str:
        raise UsageError("no receipt that this release reads")

    live = LivePage(make)
    with _listening(live, 0) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,)).start()
        answer = ask(f"127.0.0.1:{server.server_port}/?token={live.token}")
        server.shutdown()
    assert answer == (503, "no receipt that this release reads\n")
    with pytest.raises(UsageError, match=rf"^{tmp_path} cannot be written: Is a directory"):
        write(tmp_path, "")
