"""`trainyard submit` of a file with several specs: checked, submitted and followed together."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from jobs.aws.connection import Aws
from jobs.client import batch
from jobs.client.job import Job
from jobs.contract.run import is_run_id
from jobs.contract.stage import DeployedStage
from tests.jobs.cli.conftest import Trainyard
from tests.support.embedded_aws import environment_of
from tests.support.jobs.faulty_proxy import Fault, FaultyProxy
from tests.support.jobs.submitting import DATA_KEY, SPEC, wait_for


@pytest.fixture
def submit(trainyard: Trainyard, embedded: Aws, deployed_environment: Mapping[str, str]) -> Trainyard:
    return lambda *arguments: trainyard("submit", *arguments, environment=deployed_environment)


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """The first one's model is no model, so it fails in seconds; the second waits for it."""
    path = tmp_path / "two.yaml"
    arguments = {"model": "run://first/model", "train_data": f"data://{DATA_KEY}"}
    documents = [{**SPEC, "name": "first"}, {**SPEC, "name": "second", "arguments": arguments}]
    path.write_text(yaml.safe_dump_all(documents))
    return path


def jobs_of(aws: Aws, stage: DeployedStage, run_ids: list[str]) -> list[Job]:
    found = [batch.find_job(aws, stage, run_id) for run_id in run_ids]
    return [job for job in found if job is not None]


def test_a_dry_run_prints_all_requests_and_sends_none(
    submit: Trainyard, two: Path, embedded: Aws, stage: DeployedStage
) -> None:
    finished = submit(two, "--dry-run", "--set", "second.arguments.epochs=2", "--set", "attempts=2")
    assert finished.returncode == 0, finished.stderr
    first, second = json.loads(finished.stdout)
    assert second["dependsOn"] == [{"jobId": f"<job id of {first['jobName']}>"}]
    assert "dependsOn" not in first
    [container] = second["ecsPropertiesOverride"]["taskProperties"][0]["containers"]
    assert f"--model=s3://{stage.run_bucket}/research/{first['jobName']}/model" in container["command"]
    assert "--epochs=2.0" in container["command"]
    assert [request["retryStrategy"]["attempts"] for request in (first, second)] == [2, 2]
    assert jobs_of(embedded, stage, [first["jobName"], second["jobName"]]) == []
    [row] = [line for line in finished.stderr.splitlines() if line.startswith(second["jobName"])]
    assert row.endswith("first")


def test_nothing_is_sent_where_one_of_them_cannot_run(submit: Trainyard, two: Path, stage: DeployedStage) -> None:
    for override, error in (
        ("second.arguments.model=run://fisrt/model", "error: second: arguments.model: run://fisrt/model: team "),
        ("second.arguments.epoch=1", "two.yaml: document 2, line 8: arguments.epoch: unknown key"),
    ):
        finished = submit(two, "--detach", "--set", override)
        assert (finished.returncode in (2, 4), finished.stdout) == (True, "")
        assert error in finished.stderr
        assert "Traceback" not in finished.stderr


def test_all_that_is_wrong_with_them_is_told_at_once(submit: Trainyard, two: Path) -> None:
    # GIVEN faults of both, which cannot be seen in the specs alone
    wrong = ["first.arguments.train_data=data://tests/no.csv", "second.arguments.label_column=lable"]
    apart = "second.arguments.model=data://tests/model"
    set_all = [word for item in (*wrong, apart) for word in ("--set", item)]
    finished = submit(two, "--dry-run", *set_all)
    first, second = finished.stderr.splitlines()
    assert first.startswith("error: first: arguments.train_data: a table of examples was expected")
    assert second.startswith("error: second: arguments.train_data: ")
    assert "no column 'lable'; did you mean 'label'?" in second
    # AND what reads from a run that can't be is no fault of its own
    finished = submit(two, "--dry-run", "--set", wrong[0])
    [only] = [line for line in finished.stderr.splitlines() if not line.startswith("next: ")]
    assert only.startswith("error: first: ")


def test_a_run_whose_dependency_fails_never_starts_and_says_why(
    submit: Trainyard, trainyard: Trainyard, two: Path, deployed_environment: Mapping[str, str]
) -> None:
    finished = submit(two, "--wait")
    assert finished.returncode == 1, finished.stderr
    first, second = [line for line in finished.stdout.splitlines() if is_run_id(line)]
    assert f"[1/2] {first}" in finished.stderr
    assert f"[2/2] {second}" in finished.stderr
    assert f"error: {first} failed in attempt 1 of 3" in finished.stderr
    assert f"next: trainyard logs {first}" in finished.stderr
    status = trainyard("status", second, environment=deployed_environment)
    assert "Dependent Job failed" in status.stdout
    assert f"{first} (FAILED)" in status.stdout
    # AND neither is what another run may read
    refused = submit(two, "--detach", "--set", f"arguments.model=run://{second}/model")
    assert refused.returncode == 2
    assert f"is {second}, which has failed" in refused.stderr


def test_where_one_is_refused_in_the_middle_those_before_it_are_stopped(
    trainyard: Trainyard, two: Path, embedded: Aws, stage: DeployedStage, faulty: FaultyProxy
) -> None:
    faulty.faults["submitjob"].extend([None, Fault("answer", status=400, code="ClientException")])
    finished = trainyard("submit", two, "--detach", environment=environment_of(faulty.url))
    assert finished.returncode == 3, finished.stderr
    [first] = finished.stdout.splitlines()
    assert f"{first} was submitted before, and is being stopped" in finished.stderr
    [job] = jobs_of(embedded, stage, [first])
    ended = wait_for(embedded, stage, job.id)
    assert ended.state == "CANCELLED"
    assert "submitted together with it, was not taken" in ended.reason
