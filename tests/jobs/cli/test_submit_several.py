"""`trainyard submit` of a file with several specs, which are checked, submitted and followed together."""

import json
from pathlib import Path

import pytest
import yaml

from jobs.aws.connection import Aws
from jobs.core.run import is_run_id
from jobs.core.stage import DeployedStage
from jobs.runs import batch
from tests.jobs.cli.conftest import Trainyard
from tests.support.jobs.proxies import Fault, FaultyProxy
from tests.support.jobs.submitting import DATA_KEY, SPEC, wait_for
from tests.support.running_emulator import environment_of


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """Return a file with two specs. The first fails within seconds at a bad row; the second waits for it."""
    path = tmp_path / "two.yaml"
    arguments = {"model": "run://first/model", "train_data": f"data://{DATA_KEY}"}
    documents = [{**SPEC, "name": "first"}, {**SPEC, "name": "second", "arguments": arguments}]
    path.write_text(yaml.safe_dump_all(documents))
    return path


def test_a_dry_run_prints_all_requests_and_sends_none(
    aws_trainyard: Trainyard, two: Path, emulated: Aws, stage: DeployedStage
) -> None:
    asked = ("--dry-run", "--set", "second.arguments.epochs=2", "--set", "attempts=2")
    finished = aws_trainyard("submit", two, *asked, "-o", "json", expect=0)
    first, second = json.loads(finished.stdout)
    assert second["dependsOn"] == [{"jobId": f"<job id of {first['jobName']}>"}]
    assert "dependsOn" not in first
    [container] = second["ecsPropertiesOverride"]["taskProperties"][0]["containers"]
    assert f"--model=s3://{stage.run_bucket}/research/{first['jobName']}/model" in container["command"]
    assert "--epochs=2.0" in container["command"]
    assert [request["retryStrategy"]["attempts"] for request in (first, second)] == [2, 2]
    assert [batch.find_job(emulated, stage, request["jobName"]) for request in (first, second)] == [None, None]
    [row] = [line for line in finished.stderr.splitlines() if line.startswith(second["jobName"])]
    assert row.endswith("first")


def test_errors_of_all_specs_are_reported_together(aws_trainyard: Trainyard, two: Path) -> None:
    for override, error in (
        ("second.arguments.model=run://fisrt/model", "error: second: arguments.model: run://fisrt/model: team "),
        ("second.arguments.epoch=1", "two.yaml: document 2, line 8: arguments.epoch: unknown key"),
    ):
        finished = aws_trainyard("submit", two, "--detach", "--set", override)
        assert (finished.returncode in (2, 4), finished.stdout) == (True, "")
        assert error in finished.stderr
    # GIVEN errors of both specs, which only their inputs show
    wrong = ["first.arguments.train_data=data://tests/no.csv", "second.arguments.label_column=lable"]
    apart = "second.arguments.model=data://tests/model"
    set_all = [word for item in (*wrong, apart) for word in ("--set", item)]
    first, second = aws_trainyard("submit", two, "--dry-run", *set_all).stderr.splitlines()
    assert first.startswith("error: first: arguments.train_data: a table of examples was expected")
    assert second.startswith("error: second: arguments.train_data: ")
    assert "no column 'lable'; did you mean 'label'?" in second
    # AND a spec that reads from a refused run is not an error by itself
    finished = aws_trainyard("submit", two, "--dry-run", "--set", wrong[0])
    [only] = [line for line in finished.stderr.splitlines() if not line.startswith("next: ")]
    assert only.startswith("error: first: ")


def test_a_run_does_not_start_if_its_dependency_fails(aws_trainyard: Trainyard, two: Path) -> None:
    finished = aws_trainyard("submit", two, "--wait", expect=1)
    first, second = [line for line in finished.stdout.splitlines() if is_run_id(line)]
    assert f"[1/2] {first}" in finished.stderr
    assert f"[2/2] {second}" in finished.stderr
    assert f"error: {first} failed in attempt 1 of 3" in finished.stderr
    assert f"next: trainyard logs {first}" in finished.stderr
    # The last lines of its log name the bad row, which submit had not read.
    assert "no column 'label'" in finished.stderr, finished.stderr
    assert "Essential container" not in finished.stderr
    status = aws_trainyard("status", second).stdout
    assert "Dependent Job failed" in status
    assert f"{first} (FAILED)" in status
    # AND another run cannot read from it
    refused = aws_trainyard("submit", two, "--detach", "--set", f"arguments.model=run://{second}/model", expect=2)
    assert f"is {second}, which has failed" in refused.stderr


def test_jobs_before_a_refused_one_are_stopped(
    trainyard: Trainyard, two: Path, emulated: Aws, stage: DeployedStage, faulty: FaultyProxy
) -> None:
    faulty.faults["submitjob"].extend([None, Fault("answer", status=400, code="ClientException")])
    finished = trainyard("submit", two, "--detach", environment=environment_of(faulty.url))
    assert finished.returncode == 3, finished.stderr
    [first] = finished.stdout.splitlines()
    assert f"{first} was already submitted and is being stopped" in finished.stderr
    ended = wait_for(emulated, stage, batch.job_of(emulated, stage, first).id)
    assert ended.state == "CANCELLED"
    assert "submitted together with it, was refused" in ended.reason
