"""A run whose instance is taken away, from submission to receipt: it is moved, resumed by hand, or started again."""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from jobs.aws.connection import Aws
from jobs.cli.spec_file import READY_SPECS
from jobs.client import batch, storage
from jobs.contract.locations import S3Location
from jobs.contract.stage import DeployedStage
from tests.jobs.cli.conftest import Trainyard
from tests.jobs.conftest import point_at
from tests.support.embedded_aws import DEPLOY_SECONDS, EmbeddedAws, environment_of
from tests.support.jobs.terminal import TRAINYARD
from tests.support.train.reviews import reviews, save_tiny_bert, write_jsonl

STAGE = "prod"
"""A stage of infra/settings.py with On-Demand capacity and a queue for several nodes, which moves a job after three
reclaims."""

CHECKPOINT_EVERY_STEPS = 20


@pytest.fixture(scope="module")
def deployment(embedded_aws: EmbeddedAws) -> EmbeddedAws:
    deployment = subprocess.run(
        [sys.executable, "-m", "infra.emulator", "deploy", "--endpoint", embedded_aws.endpoint, "--stage", STAGE],
        env=dict(embedded_aws.environment),
        capture_output=True,
        text=True,
        timeout=DEPLOY_SECONDS,
        check=False,
    )
    assert deployment.returncode == 0, deployment.stderr
    return embedded_aws


@pytest.fixture
def stage(deployment: EmbeddedAws, monkeypatch: pytest.MonkeyPatch) -> tuple[Aws, DeployedStage]:
    point_at(monkeypatch, deployment.endpoint)
    aws = Aws()
    return aws, batch.read_stage(aws, STAGE)


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    """A training of a minute, with a checkpoint every few seconds."""
    save_tiny_bert(tmp_path / "model")
    write_jsonl(tmp_path / "train.jsonl", reviews(512, seed=1))
    write_jsonl(tmp_path / "eval.jsonl", reviews(32, seed=2))
    path = tmp_path / "tiny.yaml"
    path.write_text(
        yaml.safe_dump(
            {
                "name": "tiny",
                "job": "finetune-classification",
                "attempts": 5,
                "resources": {"nproc_per_node": 1},
                "arguments": {
                    "model": "model",
                    "train_data": "train.jsonl",
                    "eval_data": "eval.jsonl",
                    "max_length": 16,
                    "epochs": 10,
                    "global_batch_size": 16,
                    "checkpoint_every_steps": CHECKPOINT_EVERY_STEPS,
                    "log_every_steps": 20,
                },
            }
        )
    )
    return path


@pytest.fixture
def following(
    stage: tuple[Aws, DeployedStage],
    embedded_aws: EmbeddedAws,
    spec: Path,
    clean_environment: Mapping[str, str],
    tmp_path: Path,
) -> Iterator["subprocess.Popen[str]"]:
    with (
        (tmp_path / "stderr").open("w") as stderr,
        subprocess.Popen(
            [TRAINYARD, "submit", spec, "--stage", STAGE, "-y"],
            cwd=tmp_path,
            env={**clean_environment, **environment_of(embedded_aws.endpoint)},
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        ) as process,
    ):
        yield process
        process.kill()


@pytest.mark.timeout(900)
def test_after_three_reclaims_a_run_goes_on_on_demand_and_leaves_one_receipt(
    stage: tuple[Aws, DeployedStage],
    following: "subprocess.Popen[str]",
    embedded_aws: EmbeddedAws,
    trainyard: Trainyard,
    tmp_path: Path,
) -> None:
    aws, deployed = stage
    assert following.stdout is not None
    run_id = following.stdout.readline().strip()
    reclaims = 0
    log: list[str] = []
    for line in following.stdout:
        log.append(line)
        # Only what has saved something can show that it is resumed.
        if line.startswith("checkpoint: step") and reclaims < 3:
            if f"attempt {reclaims + 1} of s3" not in "".join(log):
                continue
            [job] = batch.find_jobs(aws, deployed, run_id)
            assert job.queue == "spot@research"
            reclaim(embedded_aws, job.id)
            reclaims += 1
    assert following.wait() == 0, (tmp_path / "stderr").read_text() + "".join(log)
    assert reclaims == 3

    spot, on_demand = batch.find_jobs(aws, deployed, run_id)
    # Where an instance is there at once, a fourth attempt has begun on Spot when the job is ended.
    assert (spot.state, spot.queue, len(spot.attempts)) in [
        ("FAILED", "spot@research", 3),
        ("FAILED", "spot@research", 4),
    ]
    assert spot.reason.startswith("moved to On-Demand after 3 reclaims")
    assert (on_demand.state, on_demand.queue, on_demand.moved) == (
        "SUCCEEDED",
        "on-demand@research",
        "after 3 reclaims",
    )
    assert spot.stopped_at is not None
    assert spot.stopped_at <= on_demand.created_at, "two jobs at one run"

    environment = environment_of(embedded_aws.endpoint)
    receipt = json.loads(trainyard("receipt", run_id, "--stage", STAGE, "-o", "json", environment=environment).stdout)
    assert receipt["state"] == "succeeded"
    attempts = receipt["attempts"]
    assert [attempt["number"] for attempt in attempts] == list(range(1, len(attempts) + 1))
    assert [attempt["job_id"] for attempt in attempts[:3]] == [spot.id] * 3
    assert [attempt["number"] for attempt in attempts if attempt["job_id"] == on_demand.id] == [len(attempts)]
    assert attempts[0]["resumed_from_step"] == 0
    for before, after in pairwise(attempts[:3]):
        # A checkpoint at each multiple of 20: an attempt that goes on from step 23 has its first one at 40.
        first_checkpoint = (before["resumed_from_step"] // CHECKPOINT_EVERY_STEPS + 1) * CHECKPOINT_EVERY_STEPS
        assert before["last_step"] >= after["resumed_from_step"] >= first_checkpoint
    assert attempts[-1]["resumed_from_step"] >= 3 * CHECKPOINT_EVERY_STEPS
    assert attempts[-1]["last_step"] == 320

    shown = (tmp_path / "stderr").read_text()
    assert "[RUNNING] moved to On-Demand after 3 reclaims, attempt 1 of 5 there" in shown
    status = trainyard("status", run_id, "--stage", STAGE, environment=environment).stdout
    assert "to On-Demand after 3 reclaims" in status
    assert "queue on-demand@research" in status
    logs = trainyard("logs", run_id, "--stage", STAGE, environment=environment)
    for number in (1, 2, 3, len(attempts)):
        assert f"attempt {number} of s3://" in logs.stdout
    assert "attempt 1, moved to On-Demand after 3 reclaims" in logs.stderr
    listed = json.loads(trainyard("list", "--stage", STAGE, "-o", "json", environment=environment).stdout)
    assert [job["queue"] for job in listed if job["run_id"] == run_id] == ["on-demand@research"]


@pytest.mark.timeout(600)
def test_a_run_whose_attempts_are_spent_is_resumed_on_demand_as_the_same_run(
    *,
    stage: tuple[Aws, DeployedStage],
    embedded_aws: EmbeddedAws,
    spec: Path,
    trainyard: Trainyard,
    clean_environment: Mapping[str, str],
    tmp_path: Path,
) -> None:
    aws, deployed = stage
    environment = environment_of(embedded_aws.endpoint)
    with subprocess.Popen(
        [TRAINYARD, "submit", spec, "--stage", STAGE, "--set", "attempts=1", "--set", "arguments.epochs=3"],
        cwd=tmp_path,
        env={**clean_environment, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as submitted:
        assert submitted.stdout is not None
        run_id = submitted.stdout.readline().strip()
        next(line for line in submitted.stdout if line.startswith("checkpoint: step 20,"))
        [spot] = batch.find_jobs(aws, deployed, run_id)
        reclaim(embedded_aws, spot.id)
        _, said = submitted.communicate(timeout=120)
    assert submitted.returncode == 1
    assert f"next: trainyard resume {run_id}" in said
    receipt = trainyard("receipt", run_id, "--stage", STAGE, environment=environment).stdout
    assert "\nended by              SIGTERM; saved step " in receipt

    resumed = trainyard(
        *("resume", run_id, "--stage", STAGE, "--set", "resources.capacity=on-demand", "-o", "json"),
        environment=environment,
        timeout_seconds=300,
    )
    assert resumed.returncode == 0, resumed.stderr
    result = json.loads(resumed.stdout)
    assert (result["run_id"], result["queue"]) == (run_id, "on-demand@research")
    assert result["job"]["resumed"] == spot.id
    first, second = result["receipt"]["attempts"]
    assert [(item["number"], item["job_id"]) for item in (first, second)] == [(1, spot.id), (2, result["job"]["id"])]
    assert second["resumed_from_step"] >= 20
    assert second["last_step"] == 96
    assert f"start: resumed from checkpoint step-{second['resumed_from_step']}" in resumed.stderr
    metrics = storage.read_metrics(aws, S3Location(deployed.run_bucket, f"research/{run_id}/"))
    assert [line["step"] for line in metrics] == [20, 40, 60, 80, 96], "one curve"

    [listed] = json.loads(trainyard("list", "--stage", STAGE, "-o", "json", environment=environment).stdout)[:1]
    assert (listed["run_id"], listed["id"]) == (run_id, result["job"]["id"])
    status = trainyard("status", run_id, "--stage", STAGE, environment=environment).stdout
    assert f"resumed after job {spot.id}" in status
    assert "2        " in status.splitlines()[-1]
    logs = trainyard("logs", run_id, "--stage", STAGE, environment=environment)
    assert [line for line in logs.stdout.splitlines() if line.startswith("attempt ")][1].startswith(
        "attempt 2 of s3://"
    )
    assert "attempt 1, resumed" in logs.stderr
    again = trainyard("resume", run_id, "--stage", STAGE, environment=environment)
    assert again.returncode == 2
    assert "has succeeded: there is nothing to go on with" in again.stderr


@pytest.mark.timeout(600)
def test_two_nodes_that_start_together_start_again_together_when_the_main_one_is_lost(
    *,
    stage: tuple[Aws, DeployedStage],
    embedded_aws: EmbeddedAws,
    spec: Path,
    trainyard: Trainyard,
    clean_environment: Mapping[str, str],
    tmp_path: Path,
) -> None:
    aws, deployed = stage
    environment = environment_of(embedded_aws.endpoint)
    settings = ("resources.nnodes=2", "arguments.epochs=3")
    with (
        (tmp_path / "stderr").open("w") as stderr,
        subprocess.Popen(
            [TRAINYARD, "submit", spec, "--stage", STAGE, "-y", *sets(settings)],
            cwd=tmp_path,
            env={**clean_environment, **environment},
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        ) as following,
    ):
        assert following.stdout is not None
        run_id = following.stdout.readline().strip()
        log: list[str] = []
        for line in following.stdout:
            log.append(line)
            if "checkpoint: step" in line and not any("checkpoint: step" in earlier for earlier in log[:-1]):
                [job] = batch.find_jobs(aws, deployed, run_id)
                reclaim(embedded_aws, job.id)  # of several nodes: the main one's
        assert following.wait() == 0, (tmp_path / "stderr").read_text() + "".join(log)

    [job] = batch.find_jobs(aws, deployed, run_id)
    assert (job.state, job.queue) == ("SUCCEEDED", "multinode@research")
    assert job.attempts[0].reason.startswith("Host EC2")
    assert [(stream.attempt, stream.node) for stream in job.log_streams] == [(1, 0), (1, 1), (2, 0), (2, 1)]
    shown = trainyard("receipt", run_id, "--stage", STAGE, "-o", "json", environment=environment).stdout
    receipt = json.loads(shown)
    assert receipt["state"] == "succeeded"
    first, second = receipt["attempts"]
    assert [(item["job_id"], item["nnodes"], item["world_size"]) for item in (first, second)] == [(job.id, 2, 2)] * 2
    assert first["last_step"] >= second["resumed_from_step"] >= CHECKPOINT_EVERY_STEPS
    assert second["last_step"] == 96
    metrics = storage.read_metrics(aws, S3Location(deployed.run_bucket, f"research/{run_id}/"))
    assert [line["step"] for line in metrics] == [20, 40, 60, 80, 96], "one curve"


@pytest.mark.timeout(300)
def test_the_ready_spec_for_several_nodes_checks_what_is_between_them(
    stage: tuple[Aws, DeployedStage], embedded_aws: EmbeddedAws, trainyard: Trainyard
) -> None:
    settings = (
        "resources.nproc_per_node=1",
        "arguments.largest_message_bytes=4096",
        "arguments.seconds_per_measurement=0.02",
    )
    environment = environment_of(embedded_aws.endpoint)
    finished = trainyard(
        *("submit", READY_SPECS / "fabric-check-multinode.yaml", "--stage", STAGE, "-y", *sets(settings)),
        environment=environment,
    )
    assert finished.returncode == 0, finished.stderr + finished.stdout
    run_id = finished.stdout.splitlines()[0]
    receipt = json.loads(trainyard("receipt", run_id, "--stage", STAGE, "-o", "json", environment=environment).stdout)
    [attempt] = receipt["attempts"]
    assert (receipt["state"], attempt["nnodes"], attempt["world_size"]) == ("succeeded", 2, 2)
    assert receipt["result"]["wrong_results"] == 0
    assert receipt["result"]["across_nodes_bus_gigabytes_per_second"] > 0


def sets(settings: tuple[str, ...]) -> list[str]:
    """As options of `trainyard submit`."""
    return [part for setting in settings for part in ("--set", setting)]


def reclaim(aws: EmbeddedAws, job_id: str) -> None:
    aws.reclaim(job_id)
