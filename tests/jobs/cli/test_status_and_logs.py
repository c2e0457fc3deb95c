"""`trainyard status` and `logs`, on jobs that the embedded AWS really runs."""

import json
import signal
from collections.abc import Mapping
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from jobs.aws.connection import Aws
from jobs.cli.submit import send
from jobs.client import batch
from jobs.contract.stage import DeployedStage
from tests.jobs.cli.conftest import Trainyard
from tests.support.embedded_aws import environment_of
from tests.support.jobs.faulty_proxy import Fault, FaultyProxy
from tests.support.jobs.submitting import RunCommand, planned_to_run, wait_for
from tests.support.jobs.terminal import TRAINYARD, Terminal

TWO_ATTEMPTS = ["sh", "-c", 'echo "hello from attempt $AWS_BATCH_JOB_ATTEMPT"; exit $((76 - AWS_BATCH_JOB_ATTEMPT))']


def wait_for_file(path: Path) -> str:
    """What a job's shell does until `path` is there."""
    return f"while [ ! -e {path} ]; do sleep 0.05; done"


def test_status_and_logs_tell_of_each_attempt(aws_trainyard: Trainyard, run_command: RunCommand) -> None:
    run = run_command(TWO_ATTEMPTS)
    shown = aws_trainyard("status", run.plan.run_id).stdout
    assert "FAILED, attempt 2 of 3" in shown
    attempts = [line.split() for line in shown.splitlines() if line[:1] in "12" and line[1:2] == " "]
    assert [(row[0], row[5]) for row in attempts] == [("1", "75"), ("2", "74")]
    assert str(run.plan.run_location) in shown
    as_json = json.loads(aws_trainyard("status", run.plan.run_id, "-o", "json").stdout)
    assert as_json["job"]["state"] == "FAILED"
    assert as_json["receipt"] is None

    printed = aws_trainyard("logs", run.plan.run_id)
    assert printed.stdout.splitlines() == ["hello from attempt 1", "hello from attempt 2"]
    lines = [json.loads(line) for line in aws_trainyard("logs", run.plan.run_id, "-o", "json").stdout.splitlines()]
    assert [(line["attempt"], line["node"], line["text"]) for line in lines] == [
        (1, None, "hello from attempt 1"),
        (2, None, "hello from attempt 2"),
    ]
    later = (datetime.now(timezone.utc) + timedelta(hours=1)).isoformat()
    none = aws_trainyard("logs", run.plan.run_id, "--since", later)
    assert none.stdout == ""
    assert "has logged nothing since" in none.stderr
    assert aws_trainyard("logs", run.plan.run_id, "--since", "1h").stdout == printed.stdout


@pytest.mark.parametrize("interrupt", [signal.SIGINT, signal.SIGTERM])
def test_followed_logs_come_live_and_ctrl_c_leaves_the_job_alone(
    *,
    interrupt: signal.Signals,
    embedded: Aws,
    stage: DeployedStage,
    clean_environment: dict[str, str],
    deployed_environment: Mapping[str, str],
    tmp_path: Path,
) -> None:
    plan = planned_to_run(embedded, stage, ["sh", "-c", "echo ready; exec sleep 60"])
    job_id = send(embedded, plan)
    with Terminal(
        [TRAINYARD, "logs", plan.run_id, "--follow"],
        environment={**clean_environment, **deployed_environment},
        folder=tmp_path,
    ) as terminal:
        terminal.wait_until_shown("ready")
        terminal.process.send_signal(interrupt)
        assert terminal.wait() == 130
    assert f"detached from {plan.run_id}; it goes on" in terminal.shown
    assert f"next: trainyard logs {plan.run_id} --follow" in terminal.shown
    [job] = batch.describe(embedded, stage, [job_id])
    assert job.state == "RUNNING"
    batch.terminate(embedded, job, reason="the test is over")
    wait_for(embedded, stage, job_id)


def test_following_waits_out_throttling_and_loses_no_line(
    trainyard: Trainyard, embedded: Aws, stage: DeployedStage, faulty: FaultyProxy, tmp_path: Path
) -> None:
    over = tmp_path / "over"
    script = f"for i in 1 2 3; do echo line $i; done; {wait_for_file(over)}; for i in 4 5 6; do echo line $i; done"
    plan = planned_to_run(embedded, stage, ["sh", "-c", script])
    send(embedded, plan)
    throttled = Fault("answer", status=429, code="TooManyRequestsException")
    # The first call finds the run; then more in a row fail than boto3 itself tries again.
    faulty.faults["describejobs"].extend([None, *[throttled] * 6])
    faulty.faults["getlogevents"].extend([Fault("cut"), *[Fault("answer", status=500)] * 6])
    faulty.when_over = over.touch
    finished = trainyard("logs", plan.run_id, "--follow", environment=environment_of(faulty.url))
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.splitlines() == [f"line {number}" for number in range(1, 7)]
