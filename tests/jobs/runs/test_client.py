"""`trainyard.submit` and its kin, from Python and in a real Jupyter kernel, on the deployed stage."""

import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

import trainyard
from jobs.aws.connection import Aws
from jobs.core.stage import DeployedStage
from tests.support.jobs.proxies import Fault, FaultyProxy
from tests.support.jobs.submitting import SPEC, no_instances

SCRIPT = """
import sys
import trainyard

print("hello from", sys.argv[1])
(trainyard.output() / "answer.txt").write_text("42")
trainyard.result(accuracy=0.5)
sys.exit(int(sys.argv[2]))
"""

CELLS = (
    "import trainyard\nspec = {'name': 'cells', 'job': 'script', 'resources': {'nproc_per_node': 1}}",
    "spec['arguments'] = {'code': 'code', 'command': 'answer.py jupyter 0'}\nrun = trainyard.submit(spec)\nrun.id",
    "receipt = run.wait(on_line=print)\nreceipt.result",
    "trainyard.submit(spec, changes={'arguments.comand': 'x'})",
)


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the spec of a script, and change to the folder of its code."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code/answer.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    arguments = {"code": Path("code"), "command": "answer.py python 0"}
    return {"name": "client", "job": "script", "resources": {"nproc_per_node": 1}, "arguments": arguments}


def test_a_run_is_submitted_watched_and_fetched(emulated: Aws, stage: DeployedStage, script: dict[str, Any]) -> None:
    planned = trainyard.plan(script, changes={"max_usd": 3, "priority": 2})
    assert (planned.queue, planned.spec.max_usd, planned.spec.priority) == ("spot@research", 3.0, 2)
    lines: list[str] = []
    run = trainyard.submit(script)
    receipt = run.wait(on_line=lines.append)
    assert "hello from python" in lines
    assert receipt is not None
    assert receipt.result == {"accuracy": 0.5}
    assert run.status().state == "SUCCEEDED"
    assert run.logs(tail=3) == run.logs()[-3:]
    assert (run.fetch("mine") / "output/answer.txt").read_text() == "42"
    assert trainyard.find_run("client") == run
    assert run in trainyard.runs(since=timedelta(hours=1), team="research")
    assert not run.cancel()

    failing = trainyard.submit(script, changes={"arguments.command": "answer.py python 9"})
    with pytest.raises(trainyard.JobFailedError, match="failed in attempt 1 of 3"):
        failing.wait()


def test_waiting_ends_in_time_and_cancelling_stops(emulated: Aws, stage: DeployedStage, script: dict[str, Any]) -> None:
    with no_instances(emulated, stage, "spot@research"):
        run = trainyard.submit(script)
        with pytest.raises(trainyard.TimedOutError, match=r"has not ended within 0\.1 s; it continues"):
            run.wait(timeout_seconds=0.1)
        assert run.cancel("no longer needed")
        with pytest.raises(trainyard.JobFailedError, match="no longer needed"):
            run.wait()


def test_what_is_wrong_is_said_as_by_the_command(refusing_service: FaultyProxy, tmp_path: Path) -> None:
    with pytest.raises(trainyard.UsageError, match="the spec: nam: unknown key; did you mean 'name'"):
        trainyard.submit({**SPEC, "nam": "x"})
    with pytest.raises(trainyard.UsageError, match="team: a set cannot stand in a spec"):
        trainyard.submit(SPEC, changes={"team": {"research"}})
    with pytest.raises(trainyard.TrainyardError, match="no such file"):
        trainyard.submit(tmp_path / "none.yaml")
    refusing_service.faults["getparametersbypath"].append(Fault("answer", status=400, code="ExpiredTokenException"))
    with pytest.raises(trainyard.TrainyardError) as refused:
        trainyard.runs()
    assert refused.value.__cause__ is not None


def test_a_run_is_submitted_in_a_notebook(emulated: Aws, script: dict[str, Any], tmp_path: Path) -> None:
    notebook = nbformat.from_dict(  # type: ignore[no-untyped-call]
        {
            "nbformat": 4,
            "nbformat_minor": 4,
            "metadata": {},
            "cells": [
                {"cell_type": "code", "source": cell, "metadata": {}, "outputs": [], "execution_count": None}
                for cell in CELLS
            ],
        }
    )
    client = NotebookClient(notebook, timeout=120, allow_errors=True, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    _, submitted, waited, refused = (cell["outputs"] for cell in notebook.cells)
    assert submitted[-1]["data"]["text/plain"].startswith("'cells-")
    assert "hello from jupyter\n" in "".join(output.get("text", "") for output in waited)
    assert waited[-1]["data"]["text/plain"] == "{'accuracy': 0.5}"
    assert refused[-1]["ename"] == "UsageError"
    assert "did you mean 'command'" in refused[-1]["evalue"]


def test_training_scripts_do_not_load_the_client() -> None:
    probe = "import sys, trainyard; print([m for m in ('boto3', 'jobs.runs', 'yaml', 'pydantic') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True).stdout == "[]\n"
