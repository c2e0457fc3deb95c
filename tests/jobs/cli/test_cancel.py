"""`trainyard cancel` of a job that runs on the emulator."""

import json
import signal
import time
from pathlib import Path

from jobs.aws.connection import Aws
from jobs.core.stage import DeployedStage
from jobs.runs import batch
from jobs.runs.submit import send
from tests.jobs.cli.conftest import Trainyard
from tests.support.jobs.recorded_runs import three_attempts
from tests.support.jobs.submitting import planned_to_run, wait_for
from tests.support.jobs.terminal import TRAINYARD, Terminal

CTRL_C = "Ctrl-C"


def test_cancel_confirms_latest_and_stops_a_running_job(
    aws_trainyard: Trainyard, emulated: Aws, stage: DeployedStage, aws_environment: dict[str, str], tmp_path: Path
) -> None:
    time.sleep(1 - time.time() % 1)  # two runs of the same second have no order
    plan = planned_to_run(emulated, stage, ["sleep", "60"], name="asked")
    job_id = send(emulated, plan)
    wait_for(emulated, stage, job_id, state="RUNNING")
    unasked = aws_trainyard("cancel", "latest", expect=2)
    assert f"'latest' is {plan.run_id}" in unasked.stderr

    # WHEN the answer is no, or Ctrl-C
    for answer in ("n\n", CTRL_C):
        with Terminal([TRAINYARD, "cancel", "latest"], environment=aws_environment, folder=tmp_path) as terminal:
            terminal.wait_until_shown(f"Cancel {plan.run_id}, submitted ")
            if answer == CTRL_C:
                time.sleep(0.5)  # a signal between the question and the read is handled with the next key only
                terminal.process.send_signal(signal.SIGINT)
            else:
                terminal.type(answer)
            assert terminal.wait() == 1, terminal.shown
        # THEN the run continues
        assert "is being stopped" not in terminal.shown
        assert "Traceback" not in terminal.shown
    assert batch.job_of(emulated, stage, plan.run_id).state == "RUNNING"

    finished = aws_trainyard("cancel", plan.run_id, "--reason", "wrong data", expect=0)
    assert f"{plan.run_id} (RUNNING) is being stopped" in finished.stderr
    job = wait_for(emulated, stage, job_id)
    assert (job.state, len(job.attempts)) == ("CANCELLED", 1)
    assert job.reason == f"cancelled by {emulated.caller}: wrong data"

    # AND every command reports it
    place = plan.run_location / "receipt.json"
    bill = three_attempts(20, run_id=plan.run_id, end="running").receipt
    assert bill is not None
    emulated.s3.put_object(Bucket=place.bucket, Key=place.key, Body=bill.model_dump_json().encode())
    assert "has already ended: CANCELLED" in aws_trainyard("cancel", "latest", "--yes", expect=0).stderr
    assert "CANCELLED, attempt 1 of 3" in aws_trainyard("status", plan.run_id).stdout
    why = aws_trainyard("why", plan.run_id).stderr
    assert f"has ended: {job.reason}" in why
    assert f"next: trainyard resume {plan.run_id}" in why
    shown = [line.split() for line in aws_trainyard("receipt", plan.run_id).stdout.splitlines()]
    assert ["state", "cancelled"] in shown
    [listed] = json.loads(aws_trainyard("list", "--limit", "1", "-o", "json").stdout)
    assert listed["state"] == "CANCELLED"
