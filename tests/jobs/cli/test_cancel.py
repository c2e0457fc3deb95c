"""`trainyard cancel`, on jobs that the embedded AWS really runs."""

import json

from jobs.aws.connection import Aws
from jobs.cli.submit import send
from jobs.contract.stage import DeployedStage
from tests.jobs.cli.conftest import Trainyard
from tests.support.jobs.submitting import planned_to_run, wait_for


def test_cancel_stops_what_runs(aws_trainyard: Trainyard, embedded: Aws, stage: DeployedStage) -> None:
    plan = planned_to_run(embedded, stage, ["sleep", "60"])
    job_id = send(embedded, plan)
    wait_for(embedded, stage, job_id, state="RUNNING")
    finished = aws_trainyard("cancel", plan.run_id, "--reason", "wrong data")
    assert finished.returncode == 0
    assert f"{plan.run_id} (RUNNING) is being stopped" in finished.stderr
    job = wait_for(embedded, stage, job_id)
    assert (job.state, len(job.attempts)) == ("CANCELLED", 1)
    assert job.reason == f"cancelled by {embedded.caller}: wrong data"
    again = aws_trainyard("cancel", plan.run_id)
    assert again.returncode == 0
    assert "had ended before: CANCELLED" in again.stderr
    assert "CANCELLED, attempt 1 of 3" in aws_trainyard("status", plan.run_id).stdout
    assert f"has ended: {job.reason}" in aws_trainyard("why", plan.run_id).stderr
    [listed] = json.loads(aws_trainyard("list", "--limit", "1", "-o", "json").stdout)
    assert listed["state"] == "CANCELLED"


def test_the_latest_run_is_asked_about_before_it_is_cancelled(
    aws_trainyard: Trainyard, embedded: Aws, stage: DeployedStage
) -> None:
    plan = planned_to_run(embedded, stage, ["sleep", "60"])
    job_id = send(embedded, plan)
    unasked = aws_trainyard("cancel", "latest")
    assert unasked.returncode == 2
    assert f"'latest' is {plan.run_id}" in unasked.stderr
    assert aws_trainyard("cancel", "latest", "--yes").returncode == 0
    assert wait_for(embedded, stage, job_id).state == "CANCELLED"
