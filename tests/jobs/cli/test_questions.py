"""What asks before something is lost, answered at a keyboard."""

import signal
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from jobs.aws.connection import Aws
from jobs.cli.submit import send
from jobs.client import batch
from jobs.contract.stage import DeployedStage
from tests.support.jobs.submitting import planned_to_run, wait_for
from tests.support.jobs.terminal import TRAINYARD, Terminal

CTRL_C = "Ctrl-C"
REFUSALS = ("n\n", "\n", CTRL_C)
"""What keeps things as they are; on a yes they go."""


@pytest.fixture
def run_id(embedded: Aws, stage: DeployedStage) -> str:
    """The team's newest run, which goes on until it is cancelled."""
    time.sleep(1 - time.time() % 1)  # of two runs in one second neither is the newest
    plan = planned_to_run(embedded, stage, ["sleep", "60"], name="asked")
    wait_for(embedded, stage, send(embedded, plan), state="RUNNING")
    return plan.run_id


def state(aws: Aws, stage: DeployedStage, run_id: str) -> str:
    job = batch.find_job(aws, stage, run_id)
    assert job is not None
    return job.state


def give(terminal: Terminal, answer: str) -> None:
    if answer == CTRL_C:
        time.sleep(0.5)  # what comes between the question and the read is taken with the next key only
        terminal.process.send_signal(signal.SIGINT)
    else:
        terminal.type(answer)


def cancelling(environment: Mapping[str, str], folder: Path) -> Terminal:
    return Terminal([TRAINYARD, "cancel", "latest"], environment=environment, folder=folder)


@pytest.fixture
def environment(clean_environment: dict[str, str], deployed_environment: Mapping[str, str]) -> dict[str, str]:
    return {**clean_environment, **deployed_environment}


def test_whether_latest_is_the_run_that_was_meant(
    *, embedded: Aws, stage: DeployedStage, run_id: str, environment: dict[str, str], tmp_path: Path
) -> None:
    # WHEN the answer is no, nothing, or Ctrl-C
    for answer in REFUSALS:
        with cancelling(environment, tmp_path) as terminal:
            terminal.wait_until_shown(f"Cancel {run_id}, submitted ")
            give(terminal, answer)
            assert terminal.wait() == 1, terminal.shown
        # THEN the run goes on
        assert "is being stopped" not in terminal.shown
        assert "Traceback" not in terminal.shown
        assert state(embedded, stage, run_id) == "RUNNING"
    # AND a yes ends it
    with cancelling(environment, tmp_path) as terminal:
        terminal.wait_until_shown(f"Cancel {run_id}, submitted ")
        terminal.type("y\n")
        assert terminal.wait() == 0, terminal.shown
    assert f"{run_id} (RUNNING) is being stopped" in terminal.shown
    job = batch.find_job(embedded, stage, run_id)
    assert job is not None
    assert wait_for(embedded, stage, job.id).state == "CANCELLED"
