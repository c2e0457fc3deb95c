"""A notebook as its user sees it: submitted, used, reclaimed and shut down, with real processes."""

import contextlib
from collections.abc import Iterator, Mapping
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from jobs.aws.connection import Aws
from jobs.container.kinds.notebook import _save_until_end
from jobs.core.errors import INTERRUPTED_EXIT_CODE
from jobs.core.locations import S3Location
from jobs.core.records import NotebookServer
from jobs.core.run import NOTEBOOK
from jobs.core.stage import DeployedStage
from jobs.runs import batch, storage
from jobs.runs.job import Job
from jobs.runs.logs import LogReader
from jobs.runs.planning import plan_run
from jobs.runs.spec_file import read_spec
from jobs.runs.submit import send
from jobs.spec.plan import Plan
from tests.support.infra.synthesis import ROOT
from tests.support.jobs.notebooks import Browser
from tests.support.running_emulator import Emulator
from tests.support.waiting import wait_until

SPEC = ROOT / "jobs/specs/notebook.yaml"

WORK = """
import json, os, torch
from torch.utils.tensorboard import SummaryWriter

with SummaryWriter("runs/first") as writer:
    writer.add_scalar("loss", 0.25, 7)
with open("weights.json", "w") as file:
    json.dump(torch.ones(2).tolist(), file)
os.makedirs("__pycache__", exist_ok=True)
open("__pycache__/left_out", "w").close()
os.symlink("/etc", "linked")
print(sorted(name for name in os.environ if name.startswith(("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER"))))
print(os.environ["TRAINYARD_RUN_URI"])
"""


class Submitted:
    """A submitted notebook."""

    def __init__(self, aws: Aws, stage: DeployedStage, *overrides: str) -> None:
        self.plan: Plan = plan_run(aws, stage, read_spec(SPEC, overrides))
        self._aws, self._stage = aws, stage
        self.job_id = send(aws, self.plan)

    @property
    def location(self) -> S3Location:
        return self.plan.run_location

    @property
    def job(self) -> Job:
        [job] = batch.describe(self._aws, self._stage, [self.job_id])
        return job

    @property
    def log(self) -> str:
        reader = LogReader(self._aws, self._stage.log_group)
        return "\n".join(line.text for line in reader.read(self.job.log_streams))

    def server(self, *, attempt: int = 1) -> NotebookServer:
        """Wait until an attempt answers, and return its server."""

        def answers() -> bool:
            assert not self.job.ended, self.log
            found = storage.read_notebook(self._aws, self.location)
            return found is not None and found.attempt == attempt

        wait_until(answers, bool)
        found = storage.read_notebook(self._aws, self.location)
        assert found is not None
        return found

    def saved(self) -> Mapping[str, bytes]:
        """Return the files of the notebook's folder on S3."""
        prefix = f"{self.location.key}notebook/"
        found = self._aws.s3.list_objects_v2(Bucket=self.location.bucket, Prefix=prefix).get("Contents", [])
        return {
            item["Key"].removeprefix(prefix): self._aws.s3.get_object(Bucket=self.location.bucket, Key=item["Key"])[
                "Body"
            ].read()
            for item in found
        }

    def ended(self) -> Job:
        wait_until(lambda: self.job.ended, bool)
        return self.job

    def processes(self) -> Iterator[psutil.Process]:
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                if process.environ().get("TRAINYARD_RUN_URI") == str(self.location):
                    yield process


EARLIER = f"research/earlier-20260101-120000-0a1b/{NOTEBOOK}"


@pytest.fixture
def notebook(emulated: Aws, stage: DeployedStage) -> Iterator[Submitted]:
    """The ready-made spec, submitted to start with the folder of an earlier run."""
    emulated.s3.put_object(Bucket=stage.run_bucket, Key=f"{EARLIER}deep/analysis.txt", Body=b"42")
    submitted = Submitted(emulated, stage, f"arguments.files=s3://{stage.run_bucket}/{EARLIER}")
    yield submitted
    if not submitted.job.ended:
        batch.terminate(emulated, submitted.job.id, reason="the test is over")
        submitted.ended()


def test_notebook_survives_a_reclaim_and_shuts_down(notebook: Submitted, emulated: Aws, deployed_aws: Emulator) -> None:
    server = notebook.server()
    browser = Browser.at(server.url())

    # THEN JupyterLab answers only requests with the token
    status, page = browser.ask("/lab")
    assert (status, b"JupyterLab" in page) == (200, True)
    for token in ("", "guessed"):
        assert browser.ask("/api/contents", token=token)[0] == 403
        assert browser.ask("/lab", token=token)[0] == 302  # to the login page
    # AND the browser saves open notebooks every 30 s
    settings = browser.json("/lab/api/settings/@jupyterlab/docmanager-extension:plugin")
    assert settings["schema"]["properties"]["autosaveInterval"]["default"] == 30

    # WHEN a cell works with torch and leaves files
    printed = browser.run(browser.start_kernel(), WORK)
    # THEN the cell has no variables of ranks, but knows its run
    assert printed.splitlines() == ["[]", str(notebook.location)]
    # AND TensorBoard, which starts on the first request, shows the values, with the token only
    scalars = "/tensorboard/data/plugin/scalars/scalars?run=runs%2Ffirst&tag=loss"
    wait_until(lambda: browser.ask(scalars)[0] == 200, bool)
    assert [(step, value) for _, step, value in browser.json(scalars)] == [(7, 0.25)]
    for token in ("", "guessed"):
        assert browser.ask(scalars, token=token) == (302, b"")

    # AND all processes listen only on loopback, and none shows the token
    processes = list(notebook.processes())
    assert any("tensorboard_server" in " ".join(process.cmdline()) for process in processes)
    listening = {
        connection.laddr.ip
        for process in processes
        for connection in process.net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert listening == {"127.0.0.1"}
    for process in processes:
        assert server.token not in " ".join([*process.cmdline(), *process.environ().values()])
    assert str(server.port) in notebook.log
    assert server.token not in notebook.log

    # AND files are saved while it runs, except caches and links out of the folder
    wait_until(lambda: "weights.json" in notebook.saved(), bool)
    event_files = [name for name in notebook.saved() if name.startswith("runs/first/events.")]
    assert set(notebook.saved()) == {"deep/analysis.txt", "weights.json", *event_files}

    # WHEN EC2 reclaims the instance just after another file was written
    browser.run(browser.start_kernel(), "open('last.txt', 'w').write('before the reclaim')")
    deployed_aws.reclaim(notebook.job_id)
    # THEN the next attempt has restored all files, at another address
    second = notebook.server(attempt=2)
    assert second.token != server.token
    browser = Browser.at(second.url())
    read = "import json; print(json.load(open('weights.json')), open('last.txt').read())"
    assert browser.run(browser.start_kernel(), read) == "[1.0, 1.0] before the reclaim\n"

    # WHEN a file is deleted, and the notebook is shut down from its menu
    browser.run(browser.start_kernel(), "import os; os.remove('weights.json')")
    browser.shut_down()
    # THEN the job has succeeded, with its files and a receipt, and the token is gone
    assert notebook.ended().state == "SUCCEEDED"
    assert set(notebook.saved()) == {"deep/analysis.txt", "last.txt", *event_files}
    receipt = storage.read_receipt(emulated, notebook.location)
    assert receipt is not None
    assert receipt.state == "succeeded"
    assert [attempt.exit_code for attempt in receipt.attempts] == [INTERRUPTED_EXIT_CODE, 0], notebook.log
    assert storage.read_notebook(emulated, notebook.location) is None
    assert list(notebook.processes()) == []


@pytest.mark.parametrize(("lab", "code"), [({}, 0), ({"wait": lambda _: 3}, 3)], ids=["idle", "shut down"])
def test_notebook_ends_when_idle_or_shut_down(lab: dict[str, Any], code: int) -> None:
    idle: Any = SimpleNamespace(**{"wait": lambda _: None, "last_activity": lambda: "at noon", **lab})
    saved: Any = SimpleNamespace(save=lambda: False)
    assert _save_until_end(idle, saved, idle_timeout=timedelta(milliseconds=20)) == code
