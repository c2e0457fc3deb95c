"""`trainyard report`: a run's records as a page in a file, or in a browser while the run continues."""

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
from jobs.cli.report import ready_spec
from jobs.cli.serving import LivePages, serving
from jobs.cli.terminal import write_page
from jobs.core.errors import Detached, NotFoundError, UsageError
from jobs.core.records import Inputs
from jobs.core.stage import DeployedStage
from jobs.report.run_page import run_page
from jobs.runs import storage
from jobs.runs.recorded_run import RecordedRun
from jobs.runs.run_records import read_run
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
    run = replace(with_samples(three_attempts(100, run_id="early-20261101-120000-00ab")), inputs=inputs)
    put(emulated, stage, run)
    path = tmp_path / "new" / "early.html"
    app(["report", "early", "--to", str(path)], standalone_mode=False)
    assert capsys.readouterr().out == f"{path}\n"
    assert "0.874" in path.read_text()
    # What is read equals what was written, except for its location and the times of checkpoints on S3.
    found = read_run(emulated, storage.find_run(emulated, stage, run.run_id))
    assert [checkpoint.step for checkpoint in found.checkpoints] == [each.step for each in run.checkpoints]
    assert found.receipt is not None
    assert found.receipt.stored is not None
    assert found.receipt.stored.all_bytes == sum(map(len, files_of(run).values()))
    bill = found.receipt.model_copy(update={"stored": None})
    assert replace(found, location=run.location, checkpoints=run.checkpoints, receipt=bill) == run


def test_ctrl_c_ends_serving_and_writes_the_file(
    emulated: Aws, stage: DeployedStage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    put(emulated, stage, three_attempts(20, run_id="left-20261101-120000-00ab"))
    monkeypatch.setattr(ThreadingHTTPServer, "serve_forever", interrupted)
    path = tmp_path / "left.html"
    with pytest.raises(Detached, match=rf"^stopped; wrote the current report to {path}"):
        app(["report", "left", "--to", str(path), "--follow"], standalone_mode=False)
    assert "left-20261101" in path.read_text()
    assert 'id="live"' not in path.read_text()


def test_a_run_of_a_ready_made_spec_is_compared_with_it() -> None:
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
    """Return the states of the run, one for each time it is read; the last one repeats."""
    return [three_attempts(100, end="running"), three_attempts(100)]


@pytest.fixture
def served(runs: list[RecordedRun], monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    def render(path: str) -> str:
        if path != "/":
            raise NotFoundError("this server has only one page")
        return run_page(runs[0] if len(runs) == 1 else runs.pop(0), now=NOW, live=True)

    monkeypatch.setattr("jobs.cli.serving.FRESH_SECONDS", 0)
    live = LivePages(render)
    with serving(live, 0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield f"127.0.0.1:{server.server_port}/?token={live.token}"
        server.shutdown()
        thread.join()


def test_the_page_is_updated_while_the_run_continues(opened: OpenedPage, served: str, runs: list[RecordedRun]) -> None:
    running = runs[0]
    page = opened.open(f"http://{served}")
    expect(page.locator("#head .state")).to_have_text("running")
    assert "confusion" not in opened.marks(page)
    # The run has ended and has another section, so the page is reloaded.
    expect(page.locator("#head .state")).to_have_text("succeeded", timeout=15_000)
    page.wait_for_function("document.documentElement.dataset.drawn")
    assert all(opened.marks(page).values())
    # If only figures change, they are updated in place.
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
        assert "default-src 'none'" in str(answer.headers["Content-Security-Policy"])
        return answer.status, answer.read().decode()


def test_the_page_needs_its_token_and_its_own_origin(served: str) -> None:
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
        serving(LivePages(str), port)


def test_unreadable_records_and_files_are_errors(tmp_path: Path) -> None:
    def render(_: str) -> str:
        raise UsageError("no receipt that this release reads")

    live = LivePages(render)
    with serving(live, 0) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,)).start()
        answer = ask(f"127.0.0.1:{server.server_port}/?token={live.token}")
        server.shutdown()
    assert answer == (503, "no receipt that this release reads\n")
    with pytest.raises(UsageError, match=rf"^{tmp_path} cannot be written: Is a directory"):
        write_page(tmp_path, "")
