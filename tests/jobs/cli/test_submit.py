"""`trainyard submit` against the deployed stage: what it prints, asks, sends, and how it ends."""

import json
import re
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from jobs.aws.connection import Aws
from jobs.client import batch
from jobs.contract.releases import release
from jobs.contract.run import is_run_id
from jobs.contract.stage import DeployedStage
from tests.jobs.cli.conftest import Trainyard
from tests.support.embedded_aws import EmbeddedAws, environment_of
from tests.support.jobs.faulty_proxy import Fault, FaultyProxy
from tests.support.jobs.submitting import DATA_KEY, MODEL_KEY, wait_for
from tests.support.jobs.terminal import TRAINYARD, Terminal
from tests.support.train.reviews import reviews, save_tiny_bert, write_jsonl


@pytest.fixture
def submit(trainyard: Trainyard, embedded: Aws, deployed_environment: Mapping[str, str]) -> Trainyard:
    """`trainyard submit …`, pointed at the embedded AWS."""
    return lambda *arguments, **options: trainyard("submit", *arguments, environment=deployed_environment, **options)


@pytest.fixture
def network_environment(faulty_network: FaultyProxy) -> Mapping[str, str]:
    """The embedded AWS behind an address that is not this machine's usual loopback: there, money would be spent."""
    return environment_of(faulty_network.url)


@pytest.fixture
def pushed_images(embedded: Aws) -> Iterator[None]:
    """What a submission finds where an image was pushed and deployed, as nobody does where jobs are processes."""
    names = ["job-image/finetune-classification", f"image/gaudi/{release().name}"]
    parameters = [embedded.ssm.get_parameter(Name=f"/trainyard/dev/{name}")["Parameter"] for name in names]
    for parameter in parameters:
        uri = parameter["Value"].replace(":not-built-yet", f"@sha256:{'ab' * 32}")
        embedded.ssm.put_parameter(Name=parameter["Name"], Value=uri, Overwrite=True)
    yield
    for parameter in parameters:
        embedded.ssm.put_parameter(Name=parameter["Name"], Value=parameter["Value"], Overwrite=True)


@pytest.fixture
def faulty_network(embedded: Aws, pushed_images: None, deployed_aws: EmbeddedAws) -> Iterator[FaultyProxy]:
    with FaultyProxy(deployed_aws.endpoint, host="127.0.0.2") as proxy:
        yield proxy


def test_nothing_is_submitted_to_an_account_whose_image_was_never_pushed(
    trainyard: Trainyard, spec: Path, embedded: Aws, stage: DeployedStage, deployed_aws: EmbeddedAws
) -> None:
    before = runs_of(embedded, stage)
    with FaultyProxy(deployed_aws.endpoint, host="127.0.0.2") as proxy:
        refused = trainyard("submit", spec, "--yes", environment=environment_of(proxy.url))
    assert refused.returncode == 3
    assert (
        "the image of 'finetune-classification' jobs had not been pushed when stage 'dev' was deployed"
        in refused.stderr
    )
    assert "next: trainyard --stage dev images push gaudi, then cdk deploy 'dev/jobs' -c stage=dev" in refused.stderr
    assert runs_of(embedded, stage) == before
    assert "submitjob" not in proxy.seen


def runs_of(aws: Aws, stage: DeployedStage) -> list[str]:
    objects = aws.s3.list_objects_v2(Bucket=stage.run_bucket, Prefix="research/probe-").get("Contents", [])
    return [item["Key"] for item in objects]


def test_a_dry_run_prints_the_exact_request_and_leaves_nothing(
    submit: Trainyard, spec: Path, embedded: Aws, stage: DeployedStage
) -> None:
    before = runs_of(embedded, stage)
    finished = submit(spec, "--dry-run", "--set", "arguments.epochs=2", "--set", "attempts=5")
    assert finished.returncode == 0, finished.stderr
    request: dict[str, Any] = json.loads(finished.stdout)
    assert is_run_id(request["jobName"])
    assert request["jobQueue"] == stage.queues["spot@research"]
    assert request["retryStrategy"]["attempts"] == 5
    [container] = request["ecsPropertiesOverride"]["taskProperties"][0]["containers"]
    assert f"--model=s3://{stage.data_bucket}/{MODEL_KEY}" in container["command"]
    assert "--epochs=2.0" in container["command"]
    assert runs_of(embedded, stage) == before
    piped = submit("-", "--dry-run", "--set", "arguments.epochs=2", "--set", "attempts=5", stdin=spec.read_text())
    assert piped.returncode == 0, piped.stderr
    [same] = json.loads(piped.stdout)["ecsPropertiesOverride"]["taskProperties"][0]["containers"]
    assert same["command"] == container["command"]
    for word in ("spot@research", "dl1.24xlarge", "13.11 USD/h On-Demand", "as of 2022-08-24", "instead of 8"):
        assert word in finished.stderr


@pytest.mark.parametrize(
    ("override", "exit_code", "error"),
    [
        ("arguments.model=data://tests/none", 4, "arguments.model: a pretrained model's folder was expected at s3://"),
        ("arguments.model=s3://BAD BUCKET/x", 2, "arguments.model: s3://BAD BUCKET/x: 'BAD BUCKET' cannot be"),
        ("team=nobody", 2, "team 'nobody' not found in stage 'dev'"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_is_sent(
    *, submit: Trainyard, spec: Path, embedded: Aws, stage: DeployedStage, override: str, exit_code: int, error: str
) -> None:
    before = runs_of(embedded, stage)
    finished = submit(spec, "--set", override, "--detach")
    assert finished.returncode == exit_code
    assert finished.stdout == ""
    assert error in finished.stderr
    assert "Traceback" not in finished.stderr
    assert runs_of(embedded, stage) == before


def test_all_that_is_wrong_with_a_spec_and_its_data_is_told_at_once(submit: Trainyard, spec: Path) -> None:
    wrong = [f"--set=arguments.{item}" for item in ("global_batch_size=3", "label_column=lable", "max_length=513")]
    finished = submit(spec, *wrong, "--dry-run")
    assert finished.returncode == 2
    batch_size, positions, column = finished.stderr.splitlines()
    assert batch_size.startswith("error: global_batch_size 3 does not divide over")
    assert "arguments.model: max_length 513 is more than the 512 tokens" in positions
    assert "line 1: no column 'lable'; did you mean 'label'?; next: name the columns" in column
    unchecked = submit(spec, *wrong, "--set=arguments.global_batch_size=8", "--dry-run", "--no-check")
    assert unchecked.returncode == 0, unchecked.stderr


def test_a_stage_that_is_not_deployed(
    trainyard: Trainyard, spec: Path, deployed_environment: Mapping[str, str]
) -> None:
    for arguments in (["--stage", "nowhere", "submit", spec], ["submit", spec, "--stage", "nowhere"]):
        finished = trainyard(*arguments, environment=deployed_environment)
        assert finished.returncode == 3
        assert "error: stage 'nowhere' is not deployed here" in finished.stderr
    by_variable = trainyard("list", environment={**deployed_environment, "TRAINYARD_STAGE": "nowhere"})
    assert by_variable.returncode == 3


def test_detached_it_prints_the_run_id_and_returns(
    submit: Trainyard, spec: Path, embedded: Aws, stage: DeployedStage
) -> None:
    finished = submit(spec, "--detach")
    assert finished.returncode == 0, finished.stderr
    run_id = finished.stdout.strip()
    job = batch.find_job(embedded, stage, run_id)
    assert job is not None
    resolved = embedded.s3.get_object(Bucket=stage.run_bucket, Key=f"research/{run_id}/spec.yaml")["Body"].read()
    assert yaml.safe_load(resolved)["arguments"]["train_data"] == f"s3://{stage.data_bucket}/{DATA_KEY}"
    batch.terminate(embedded, job, reason="the test is over")
    wait_for(embedded, stage, job.id)


def test_a_job_that_fails_by_its_own_fault_ends_with_1_and_the_end_of_its_log(submit: Trainyard, spec: Path) -> None:
    finished = submit(spec, "--wait")
    assert finished.returncode == 1, finished.stderr
    run_id = finished.stdout.splitlines()[0]
    assert f"error: {run_id} failed in attempt 1 of 3" in finished.stderr
    assert f"next: trainyard logs {run_id}" in finished.stderr
    # What the entrypoint said of a row that submit had not looked at, in place of what Batch says of any job.
    assert "no column 'label'" in finished.stderr, finished.stderr
    assert "Essential container" not in finished.stderr


def test_as_json_stdout_is_one_object_and_the_log_goes_to_stderr(submit: Trainyard, spec: Path) -> None:
    finished = submit(spec, "-o", "json")
    assert finished.returncode == 1
    result = json.loads(finished.stdout)
    assert is_run_id(result["run_id"])
    assert result["job"]["state"] == "FAILED"
    assert result["job"]["attempts"][0]["exit_code"] == 1
    assert result["receipt"]["state"] == "failed"
    lines = finished.stderr.splitlines()
    assert any("no column 'label'" in line for line in lines[:-1])
    assert json.loads(lines[-1])["exit_code"] == 1


def test_ctrl_c_detaches_from_a_submission(
    spec: Path,
    embedded: Aws,
    stage: DeployedStage,
    clean_environment: dict[str, str],
    deployed_environment: Mapping[str, str],
) -> None:
    with Terminal(
        [TRAINYARD, "submit", spec],
        environment={**clean_environment, **deployed_environment},
        folder=spec.parent,
    ) as terminal:
        terminal.wait_until_shown("attempt 1 of 3")
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.wait() == 130
    assert "it goes on" in terminal.shown
    run_id = next(word for word in terminal.shown.split() if is_run_id(word))
    job = batch.find_job(embedded, stage, run_id)
    assert job is not None
    batch.terminate(embedded, job, reason="the test is over")
    wait_for(embedded, stage, job.id)


def test_money_is_not_spent_unasked(
    *,
    trainyard: Trainyard,
    spec: Path,
    embedded: Aws,
    stage: DeployedStage,
    clean_environment: dict[str, str],
    network_environment: Mapping[str, str],
) -> None:
    before = runs_of(embedded, stage)
    unasked = trainyard("submit", spec, "--detach", environment=network_environment)
    assert unasked.returncode == 2
    assert "there is no terminal to ask on" in unasked.stderr
    assert "next: add --yes" in unasked.stderr
    assert "nothing here" not in unasked.stderr
    with Terminal(
        [TRAINYARD, "submit", spec, "--detach"],
        environment={**clean_environment, **network_environment},
        folder=spec.parent,
    ) as terminal:
        terminal.wait_until_shown("Submit to queue spot@research?")
        assert "13.11 USD/h On-Demand, 3.93 USD/h Spot" in terminal.shown
        terminal.type("n\n")
        assert terminal.wait() == 1
    assert runs_of(embedded, stage) == before

    with Terminal(
        [TRAINYARD, "submit", spec, "--detach"],
        environment={**clean_environment, **network_environment},
        folder=spec.parent,
    ) as terminal:
        terminal.wait_until_shown("Submit to queue spot@research?")
        terminal.type("y\n")
        assert terminal.wait() == 0
    run_id = next(word for word in reversed(terminal.shown.split()) if is_run_id(word))
    job = batch.find_job(embedded, stage, run_id)
    assert job is not None
    batch.terminate(embedded, job, reason="the test is over")
    wait_for(embedded, stage, job.id)


def test_one_job_exists_though_the_service_failed_in_mid_submit(
    trainyard: Trainyard, spec: Path, embedded: Aws, stage: DeployedStage, faulty: FaultyProxy
) -> None:
    faulty.faults["submitjob"].extend([Fault("answer", status=500), Fault("cut", taken="before")])
    finished = trainyard("submit", spec, "--detach", environment=environment_of(faulty.url))
    assert finished.returncode == 0, finished.stderr
    named = embedded.batch.list_jobs(
        jobQueue=stage.queues["spot@research"], filters=[{"name": "JOB_NAME", "values": [finished.stdout.strip()]}]
    )["jobSummaryList"]
    assert len(named) == 1
    [job] = batch.describe(embedded, stage, [named[0]["jobId"]])
    batch.terminate(embedded, job, reason="the test is over")
    wait_for(embedded, stage, job.id)


def test_a_training_is_followed_to_its_result_and_fetched(
    submit: Trainyard, trainyard: Trainyard, deployed_environment: Mapping[str, str], tmp_path: Path
) -> None:
    save_tiny_bert(tmp_path / "model")
    write_jsonl(tmp_path / "train.jsonl", reviews(64, seed=1))
    write_jsonl(tmp_path / "eval.jsonl", reviews(32, seed=2))
    arguments = {
        "model": "model",
        "train_data": "train.jsonl",
        "eval_data": "eval.jsonl",
        "max_length": 16,
        "epochs": 1,
        "global_batch_size": 16,
        "log_every_steps": 1,
    }
    spec = tmp_path / "tiny.yaml"
    spec.write_text(yaml.safe_dump({"name": "tiny", "job": "finetune-classification", "arguments": arguments}))

    finished = submit(spec)
    assert finished.returncode == 0, finished.stderr
    lines = finished.stdout.splitlines()
    run_id = lines[0]
    assert is_run_id(run_id)
    assert any("[progress] 4/4" in line for line in lines)
    state = next(number for number, line in enumerate(lines) if re.fullmatch("state +succeeded", line))
    table = dict(re.split(r" {2,}", line, maxsplit=1) for line in lines[state : lines.index("", state)])
    assert 0 <= float(table["accuracy"]) <= 1
    headings = next(number for number, line in enumerate(lines) if line.startswith("class "))
    assert lines[headings].split() == ["class", "held", "out", "precision", "recall", "F1"]
    assert [line.split()[:2] for line in lines[headings + 1 : headings + 3]] == [["bad", "16"], ["good", "16"]]
    assert table["majority class"] == "0.500"
    assert table["held-out examples"] == "32"
    assert table["in AWS it would cost"].endswith("of dl1.24xlarge)")
    states = [line for line in finished.stderr.splitlines() if line.startswith("[")]
    assert states[-1].startswith("[SUCCEEDED] ")
    assert any(line.startswith("[RUNNING] attempt 1 of 3") for line in states)

    receipt = json.loads(trainyard("receipt", run_id, "-o", "json", environment=deployed_environment).stdout)
    assert receipt["state"] == "succeeded"
    assert [attempt["exit_code"] for attempt in receipt["attempts"]] == [0]
    fetched = trainyard("fetch", run_id, environment=deployed_environment)
    assert fetched.returncode == 0
    for name in ("receipt.json", "metrics.jsonl", "model/config.json", "model/model.safetensors", "spec.yaml"):
        assert (tmp_path / "runs" / run_id / name).stat().st_size
    assert list((tmp_path / "runs" / run_id / "tensorboard").iterdir())
