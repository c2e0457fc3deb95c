"""What asks before something is lost, answered at a keyboard."""

import signal
import time
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path

import pytest

from jobs.aws.connection import Aws
from jobs.cli.local.app import STATE_FILE
from jobs.cli.submit import send
from jobs.client import batch
from jobs.contract.run import new_run_id
from jobs.contract.stage import DeployedStage, parameter_path
from tests.support.embedded_aws import EmbeddedAws, run_embedded_aws
from tests.support.emulator.batch_calls import prepare
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


def stage_with_a_job(server: EmbeddedAws) -> str:
    """Give a server what a stage is found by, and a run of it that goes on; return its id."""
    made = prepare(server)
    queue = made.queue()
    [described] = made.client.describe_job_queues(jobQueues=[queue])["jobQueues"]
    parameters = {
        "bucket/data": "data",
        "bucket/run": "runs",
        "log-group": "logs",
        "instance-type": "dl1.24xlarge",
        "cpu-instance-type": "m6i.4xlarge",
        "queue/spot": described["jobQueueArn"],
    }
    for name, value in parameters.items():
        server.client("ssm").put_parameter(Name=f"{parameter_path('dev')}{name}", Value=value, Type="String")
    run_id = new_run_id("asked", now=datetime.now(timezone.utc))
    definition = made.definition("sleep", "60")
    job = made.client.submit_job(jobName=run_id, jobDefinition=definition, jobQueue=queue)
    made.reached(job["jobId"], "RUNNING")
    return run_id


def test_whether_the_embedded_aws_may_go_with_what_runs_in_it(
    clean_environment: dict[str, str], tmp_path: Path
) -> None:
    with run_embedded_aws(tmp_path, environment={"TRAINYARD_STOP_TIMEOUT_SECONDS": 1}) as server:
        run_id = stage_with_a_job(server)
        (tmp_path / STATE_FILE).parent.mkdir()
        (tmp_path / STATE_FILE).symlink_to(server.state_file)
        command: list[str | Path] = [TRAINYARD, "local", "down"]
        for answer in REFUSALS:
            with Terminal(command, environment=clean_environment, folder=tmp_path) as terminal:
                terminal.wait_until_shown("Stop the embedded AWS and lose that?")
                assert f"1 job not ended yet: {run_id}" in terminal.shown
                give(terminal, answer)
                assert terminal.wait() == 1, terminal.shown
            assert "Traceback" not in terminal.shown
            assert server.health()["jobs"]["RUNNING"] == 1
        with Terminal(command, environment=clean_environment, folder=tmp_path) as terminal:
            terminal.wait_until_shown("Stop the embedded AWS and lose that?")
            terminal.type("y\n")
            assert server.process.wait(30) in (0, -signal.SIGTERM)
            assert terminal.wait() == 0, terminal.shown
        assert "stopped the embedded AWS" in terminal.shown
