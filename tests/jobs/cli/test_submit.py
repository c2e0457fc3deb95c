"""`trainyard submit` on the deployed stage: output, confirmation, request, exit code."""

import json
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from jobs.aws.connection import Aws
from jobs.core.images import release
from jobs.core.run import is_run_id
from jobs.core.stage import DeployedStage
from jobs.runs import batch
from tests.jobs.cli.conftest import Trainyard
from tests.support.container.reviews import reviews, save_tiny_bert, write_jsonl
from tests.support.jobs.proxies import FaultyProxy
from tests.support.jobs.submitting import DATA_KEY, MODEL_KEY, wait_for
from tests.support.jobs.terminal import TRAINYARD, Terminal
from tests.support.running_emulator import Emulator, environment_of


@pytest.fixture
def network(emulated: Aws, deployed_aws: Emulator) -> Iterator[FaultyProxy]:
    """Return the emulator behind an address other than localhost, where submitting costs money."""
    with FaultyProxy(deployed_aws.endpoint, host="127.0.0.2") as proxy:
        yield proxy


@pytest.fixture
def pushed_images(emulated: Aws) -> Iterator[None]:
    """Set the parameters as if images were pushed and deployed."""
    names = ["job-image/finetune-classification", f"image/gaudi/{release().name}"]
    parameters = [emulated.ssm.get_parameter(Name=f"/trainyard/dev/{name}")["Parameter"] for name in names]
    for parameter in parameters:
        uri = parameter["Value"].replace(":not-built-yet", f"@sha256:{'ab' * 32}")
        emulated.ssm.put_parameter(Name=parameter["Name"], Value=uri, Overwrite=True)
    yield
    for parameter in parameters:
        emulated.ssm.put_parameter(Name=parameter["Name"], Value=parameter["Value"], Overwrite=True)


def runs_of(aws: Aws, stage: DeployedStage) -> list[str]:
    objects = aws.s3.list_objects_v2(Bucket=stage.run_bucket, Prefix="research/probe-").get("Contents", [])
    return [item["Key"] for item in objects]


def test_nothing_is_submitted_before_an_image_is_pushed(trainyard: Trainyard, spec: Path, network: FaultyProxy) -> None:
    refused = trainyard("submit", spec, "--yes", environment=environment_of(network.url))
    assert refused.returncode == 3
    image = "the image of 'finetune-classification' jobs had not been pushed when stage 'dev' was deployed"
    assert image in refused.stderr
    assert "next: trainyard --stage dev images push gaudi, then cdk deploy 'dev/jobs' -c stage=dev" in refused.stderr
    assert "submitjob" not in network.seen


def test_a_dry_run_prints_the_plan_or_the_request(
    aws_trainyard: Trainyard, spec: Path, emulated: Aws, stage: DeployedStage
) -> None:
    before = runs_of(emulated, stage)
    asked = ("--dry-run", "--set", "arguments.epochs=2", "--set", "attempts=5")
    finished = aws_trainyard("submit", spec, *asked, "-o", "json", expect=0)
    request: dict[str, Any] = json.loads(finished.stdout)
    assert is_run_id(request["jobName"])
    assert request["jobQueue"] == stage.queues["spot@research"]
    assert request["retryStrategy"]["attempts"] == 5
    [container] = request["ecsPropertiesOverride"]["taskProperties"][0]["containers"]
    assert f"--model=s3://{stage.data_bucket}/{MODEL_KEY}" in container["command"]
    assert "--epochs=2.0" in container["command"]
    assert runs_of(emulated, stage) == before
    piped = aws_trainyard("submit", "-", *asked, "-o", "json", stdin=spec.read_text(), expect=0)
    [same] = json.loads(piped.stdout)["ecsPropertiesOverride"]["taskProperties"][0]["containers"]
    assert same["command"] == container["command"]
    shown = aws_trainyard("submit", spec, *asked, expect=0)
    assert "jobQueue" not in shown.stdout
    assert "dry run: nothing was submitted" in shown.stderr
    for word in ("spot@research", "dl1.24xlarge", "13.11 USD/h On-Demand", "as of 2022-08-24", "instead of 8"):
        assert word in finished.stderr
        assert word in shown.stdout


def test_all_errors_are_reported_and_nothing_is_sent(
    aws_trainyard: Trainyard, spec: Path, emulated: Aws, stage: DeployedStage
) -> None:
    before = runs_of(emulated, stage)
    for override, exit_code, error in (
        ("arguments.model=data://tests/none", 4, "arguments.model: a pretrained model's folder was expected at s3://"),
        (
            "arguments.model=s3://BAD BUCKET/x",
            2,
            "arguments.model: s3://BAD BUCKET/x: 'BAD BUCKET' is not a valid bucket name",
        ),
        ("team=nobody", 2, "team 'nobody' not found in stage 'dev'"),
    ):
        finished = aws_trainyard("submit", spec, "--set", override, "--detach", expect=exit_code)
        assert finished.stdout == ""
        assert error in finished.stderr
    wrong = [f"--set=arguments.{item}" for item in ("global_batch_size=3", "label_column=lable", "max_length=513")]
    batch_size, positions, column = aws_trainyard("submit", spec, *wrong, "--dry-run", expect=2).stderr.splitlines()
    assert batch_size.startswith("error: global_batch_size 3 is not divisible by")
    assert "arguments.model: max_length 513 is more than the 512 tokens" in positions
    assert "line 1: no column 'lable'; did you mean 'label'?; next: name the columns" in column
    aws_trainyard("submit", spec, *wrong, "--set=arguments.global_batch_size=8", "--dry-run", "--no-check", expect=0)
    for arguments in (["--stage", "nowhere", "submit", spec], ["submit", spec, "--stage", "nowhere"]):
        finished = aws_trainyard(*arguments, expect=3)
        assert "error: stage 'nowhere' is not deployed here" in finished.stderr
    aws_trainyard("list", environment={"TRAINYARD_STAGE": "nowhere"}, expect=3)
    assert runs_of(emulated, stage) == before


def test_errors_that_need_no_aws_are_reported_offline(trainyard: Trainyard, spec: Path, tmp_path: Path) -> None:
    offline = {**environment_of("http://localhost:9"), "AWS_DEFAULT_REGION": "us-east-1"}
    script = tmp_path / "script.yaml"
    arguments = {"code": "nowhere", "command": "train.py", "inputs": {"data": str(tmp_path / "none")}}
    script.write_text(yaml.safe_dump({"name": "mine", "job": "script", "arguments": arguments}))
    for environment in (offline, {}):
        began = time.monotonic()
        refused = trainyard("submit", script, environment=environment)
        assert f"error: arguments.code: {tmp_path}/nowhere does not exist; next: " in refused.stderr
        assert (
            f"error: arguments.inputs.data: a file or a folder was expected at {tmp_path}/none, but" in refused.stderr
        )
        wrong = trainyard("submit", spec, "--set", "attempts=99", environment=environment)
        assert wrong.stderr.startswith(f"error: {spec}: attempts: must be at most 10")
        assert time.monotonic() - began < 10
        assert (refused.returncode, wrong.returncode) == (4, 2)


def test_the_team_and_the_node_limit_are_among_all_errors(aws_trainyard: Trainyard, spec: Path) -> None:
    wrong = ("--set", "team=reserch", "--set", "nnodes=9", "--set", "capacity=spot")
    # GIVEN a spec with an unknown key and a wrong value, THEN they are reported together
    refused = aws_trainyard("submit", spec, *wrong, "--set", "arguments.lr=1", "--set", "attempts=99", expect=2)
    team = "team 'reserch' not found in stage 'dev'; did you mean 'research'?; next: correct 'team' in the spec"
    nodes = "resources.nnodes: stage 'dev' has room for 2 nodes of dl1.24xlarge (Spot), not for 9; next: set it to"
    lines = refused.stderr.splitlines()
    for message in ("attempts: must be at most 10", "arguments.lr: unknown key; use learning_rate", team, nodes):
        assert [line for line in lines if line.startswith(f"error: {spec}: {message}")], refused.stderr
    # AND so are those of a valid spec with its inputs
    refused = aws_trainyard("submit", spec, *wrong, "--set", "arguments.train_data=data://tests/none.csv", expect=2)
    for message in (team, nodes, "arguments.train_data: "):
        assert f"error: {message}" in refused.stderr


def test_json_output_is_one_object_and_the_log_is_on_stderr(
    aws_trainyard: Trainyard, spec: Path, emulated: Aws, stage: DeployedStage
) -> None:
    finished = aws_trainyard("submit", spec, "-o", "json", expect=1)
    result = json.loads(finished.stdout)
    assert is_run_id(result["run_id"])
    assert result["job"]["state"] == "FAILED"
    assert result["job"]["attempts"][0]["exit_code"] == 1
    assert result["receipt"]["state"] == "failed"
    lines = finished.stderr.splitlines()
    assert any(line.startswith("accelerator: ") for line in lines)
    assert sum("no column 'label'" in line for line in lines) == 1, "the error is not repeated"
    assert json.loads(lines[-1])["exit_code"] == 1
    key = f"research/{result['run_id']}/spec.yaml"
    resolved = emulated.s3.get_object(Bucket=stage.run_bucket, Key=key)["Body"].read()
    assert yaml.safe_load(resolved)["arguments"]["train_data"] == f"s3://{stage.data_bucket}/{DATA_KEY}"


@pytest.mark.usefixtures("pushed_images")
def test_spending_money_needs_confirmation(
    *,
    trainyard: Trainyard,
    spec: Path,
    emulated: Aws,
    stage: DeployedStage,
    clean_environment: dict[str, str],
    network: FaultyProxy,
) -> None:
    before, on_aws = runs_of(emulated, stage), environment_of(network.url)
    unasked = trainyard("submit", spec, "--detach", environment=on_aws)
    assert unasked.returncode == 2
    assert "confirming the costs needs a terminal" in unasked.stderr
    assert "next: add --yes" in unasked.stderr
    assert "free on the emulator" not in unasked.stderr
    for answer, exit_code in (("n\n", 1), ("y\n", 0)):
        assert runs_of(emulated, stage) == before
        with Terminal(
            [TRAINYARD, "submit", spec, "--detach"], environment={**clean_environment, **on_aws}, folder=spec.parent
        ) as terminal:
            terminal.wait_until_shown("Submit to queue spot@research?")
            assert "13.11 USD/h On-Demand, 3.93 USD/h Spot" in terminal.shown
            terminal.type(answer)
            assert terminal.wait() == exit_code
    job = batch.job_of(emulated, stage, next(word for word in reversed(terminal.shown.split()) if is_run_id(word)))
    batch.terminate(emulated, job.id, reason="the test is over")
    wait_for(emulated, stage, job.id)


def test_a_training_is_followed_and_its_files_fetched(aws_trainyard: Trainyard, tmp_path: Path) -> None:
    save_tiny_bert(tmp_path / "model")
    write_jsonl(tmp_path / "train.jsonl", reviews(64, seed=1))
    write_jsonl(tmp_path / "eval.jsonl", reviews(32, seed=2))
    arguments: Mapping[str, object] = {
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

    finished = aws_trainyard("submit", spec, expect=0)
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

    receipt = json.loads(aws_trainyard("receipt", run_id, "-o", "json").stdout)
    assert receipt["state"] == "succeeded"
    assert [attempt["exit_code"] for attempt in receipt["attempts"]] == [0]
    aws_trainyard("fetch", run_id, expect=0)
    for name in ("receipt.json", "metrics.jsonl", "model/config.json", "model/model.safetensors", "spec.yaml"):
        assert (tmp_path / "runs" / run_id / name).stat().st_size
    assert list((tmp_path / "runs" / run_id / "tensorboard").iterdir())
