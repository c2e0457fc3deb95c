"""A run whose instance is taken away, from submission to receipt: it is moved, resumed by hand, or started again.

Several nodes start together On-Demand, or each for itself on Spot.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from jobs.aws.connection import Aws
from jobs.client import batch, storage
from jobs.client.job import Job
from jobs.contract.errors import INTERRUPTED_EXIT_CODE
from jobs.contract.locations import S3Location
from jobs.contract.stage import DEFAULT_STAGE, DeployedStage
from tests.jobs.cli.conftest import Trainyard
from tests.support.embedded_aws import DEPLOY_SECONDS, EmbeddedAws
from tests.support.jobs.submitting import planned_to_run, wait_for
from tests.support.jobs.terminal import TRAINYARD
from tests.support.train.reviews import reviews, save_tiny_bert, write_jsonl

STAGE = "prod"
"""A stage of infra/settings.py with On-Demand capacity and a queue for several nodes, which moves a job after three
reclaims."""

EVERY_STEPS = 20
"""Steps between checkpoints, and between lines of metrics."""

STEPS_IN_EPOCH = 32


@pytest.fixture(scope="module")
def deployed(connected: Aws, embedded_aws: EmbeddedAws) -> DeployedStage:
    deployment = subprocess.run(
        [sys.executable, "-m", "infra.emulator", "deploy", "--endpoint", embedded_aws.endpoint, "--stage", STAGE],
        env=dict(embedded_aws.environment),
        capture_output=True,
        text=True,
        timeout=DEPLOY_SECONDS,
        check=False,
    )
    assert deployment.returncode == 0, deployment.stderr
    return batch.read_stage(connected, STAGE)


class Following:
    """`trainyard submit` of a training with a checkpoint every few steps, in a process whose log is read here."""

    def __init__(self, process: "subprocess.Popen[str]", stderr: Path) -> None:
        assert process.stdout is not None
        self._stdout = process.stdout
        self._stderr = stderr
        self.process = process
        self.run_id = self._stdout.readline().strip()
        self.log: list[str] = []

    @property
    def stderr(self) -> str:
        return self._stderr.read_text()

    def read_until(self, text: str) -> None:
        while not (self.log and text in self.log[-1]):
            self.log.append(self._stdout.readline())
            assert self.log[-1], "".join(self.log) + self.stderr

    def wait(self) -> int:
        self.log += self._stdout
        return self.process.wait()


Follow = Callable[..., AbstractContextManager[Following]]


@pytest.fixture
def follow(
    tmp_path: Path, embedded: Aws, clean_environment: Mapping[str, str], deployed_environment: Mapping[str, str]
) -> Follow:
    save_tiny_bert(tmp_path / "model")
    write_jsonl(tmp_path / "train.jsonl", reviews(16 * STEPS_IN_EPOCH, seed=1))
    write_jsonl(tmp_path / "eval.jsonl", reviews(32, seed=2))
    arguments = {
        "model": "model",
        "train_data": "train.jsonl",
        "eval_data": "eval.jsonl",
        "max_length": 16,
        "epochs": 3,
        "global_batch_size": 16,
        "checkpoint_every_steps": EVERY_STEPS,
        "log_every_steps": EVERY_STEPS,
    }
    spec = {"name": "tiny", "job": "finetune-classification", "attempts": 5, "resources": {"nproc_per_node": 1}}
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump({**spec, "arguments": arguments}))

    @contextmanager
    def submit(*settings: str, stage: str = STAGE) -> Iterator[Following]:
        stderr = tmp_path / "stderr"
        options = [f"--set={setting}" for setting in settings]
        command: list[str | Path] = [TRAINYARD, "submit", "tiny.yaml", "--stage", stage, "--yes", *options]
        environment = {**clean_environment, **deployed_environment}
        with stderr.open("w") as errors:
            process = subprocess.Popen(
                command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True
            )
            with process:
                yield Following(process, stderr)
                process.kill()

    return submit


@pytest.fixture
def on_prod(trainyard: Trainyard, deployed_environment: Mapping[str, str]) -> Trainyard:
    return lambda *arguments: trainyard(*arguments, "--stage", STAGE, environment=deployed_environment)


def check_curve(aws: Aws, stage: DeployedStage, run_id: str, *, epochs: int = 3) -> None:
    """Check that the metrics of all attempts are those of one that nobody interrupted; the last is the evaluation."""
    metrics = storage.read_metrics(aws, S3Location(stage.run_bucket, f"research/{run_id}/"))
    end = epochs * STEPS_IN_EPOCH
    assert [line["step"] for line in metrics] == [*range(EVERY_STEPS, end + 1, EVERY_STEPS), end]


@pytest.mark.timeout(900)
def test_after_three_reclaims_a_run_goes_on_on_demand_and_leaves_one_receipt(
    *, follow: Follow, embedded: Aws, deployed: DeployedStage, embedded_aws: EmbeddedAws, on_prod: Trainyard
) -> None:
    with follow("arguments.epochs=10") as following:
        run_id = following.run_id
        for number in (1, 2, 3):
            # Only what has saved something can show that it is resumed.
            following.read_until(f"attempt {number} of s3")
            following.read_until("checkpoint: step")
            [job] = batch.find_jobs(embedded, deployed, run_id)
            assert job.queue == "spot@research"
            embedded_aws.reclaim(job.id)
        assert following.wait() == 0, following.stderr + "".join(following.log)
    spot, on_demand = batch.find_jobs(embedded, deployed, run_id)
    # Where an instance is there at once, a fourth attempt has begun on Spot when the job is ended.
    assert (spot.state, spot.queue, len(spot.attempts) in (3, 4)) == ("FAILED", "spot@research", True)
    assert spot.reason.startswith("moved to On-Demand after 3 reclaims")
    assert (on_demand.state, on_demand.queue, on_demand.moved) == (
        "SUCCEEDED",
        "on-demand@research",
        "after 3 reclaims",
    )
    assert spot.stopped_at is not None
    assert spot.stopped_at <= on_demand.created_at, "two jobs at one run"

    receipt = json.loads(on_prod("receipt", run_id, "-o", "json").stdout)
    attempts = receipt["attempts"]
    assert (receipt["state"], [each["number"] for each in attempts]) == ("succeeded", [*range(1, len(attempts) + 1)])
    assert [each["job_id"] for each in attempts[:3]] == [spot.id] * 3
    assert [each["number"] for each in attempts if each["job_id"] == on_demand.id] == [len(attempts)]
    for before, after in pairwise(attempts[:3]):
        # A checkpoint at each multiple of 20: an attempt that goes on from step 23 has its first one at 40.
        first_checkpoint = (before["resumed_from_step"] // EVERY_STEPS + 1) * EVERY_STEPS
        assert before["last_step"] >= after["resumed_from_step"] >= first_checkpoint
    assert attempts[-1]["resumed_from_step"] >= 3 * EVERY_STEPS
    assert attempts[-1]["last_step"] == 10 * STEPS_IN_EPOCH
    check_curve(embedded, deployed, run_id, epochs=10)

    assert "[RUNNING] moved to On-Demand after 3 reclaims, attempt 1 of 5 there" in following.stderr
    assert "queue on-demand@research" in on_prod("status", run_id).stdout
    logs = on_prod("logs", run_id)
    assert all(f"attempt {number} of s3://" in logs.stdout for number in (1, 2, 3, len(attempts)))
    assert "attempt 1, moved to On-Demand after 3 reclaims" in logs.stderr
    listed = json.loads(on_prod("list", "-o", "json").stdout)
    assert [job["queue"] for job in listed if job["run_id"] == run_id] == ["on-demand@research"]


@pytest.mark.timeout(600)
def test_a_run_whose_attempts_are_spent_is_resumed_on_demand_as_the_same_run(
    *, follow: Follow, embedded: Aws, deployed: DeployedStage, embedded_aws: EmbeddedAws, on_prod: Trainyard
) -> None:
    with follow("attempts=1") as following:
        run_id = following.run_id
        following.read_until("checkpoint: step 20,")
        [spot] = batch.find_jobs(embedded, deployed, run_id)
        embedded_aws.reclaim(spot.id)
        assert following.wait() == 1
    assert f"next: trainyard resume {run_id}" in following.stderr
    assert "\nended by              SIGTERM; saved step " in on_prod("receipt", run_id).stdout

    resumed = on_prod("resume", run_id, "--set", "resources.capacity=on-demand", "-o", "json")
    assert resumed.returncode == 0, resumed.stderr
    result = json.loads(resumed.stdout)
    assert (result["run_id"], result["queue"], result["job"]["resumed"]) == (run_id, "on-demand@research", spot.id)
    first, second = result["receipt"]["attempts"]
    assert [(item["number"], item["job_id"]) for item in (first, second)] == [(1, spot.id), (2, result["job"]["id"])]
    assert second["resumed_from_step"] >= EVERY_STEPS
    assert f"start: resumed from checkpoint step-{second['resumed_from_step']}" in resumed.stderr
    check_curve(embedded, deployed, run_id)
    status = on_prod("status", run_id).stdout
    assert f"resumed after job {spot.id}" in status
    assert status.splitlines()[-1].startswith("2  ")
    assert "attempt 1, resumed" in on_prod("logs", run_id).stderr


@pytest.mark.timeout(600)
def test_two_nodes_that_start_together_start_again_together_when_the_main_one_is_lost(
    *, follow: Follow, embedded: Aws, deployed: DeployedStage, embedded_aws: EmbeddedAws
) -> None:
    with follow("resources.nnodes=2") as following:
        following.read_until("checkpoint: step")
        [job] = batch.find_jobs(embedded, deployed, following.run_id)
        embedded_aws.reclaim(job.id)  # of several nodes: the main one's
        assert following.wait() == 0, following.stderr + "".join(following.log)
    [job] = batch.find_jobs(embedded, deployed, following.run_id)
    assert (job.state, job.queue) == ("SUCCEEDED", "multinode@research")
    assert job.attempts[0].reason.startswith("Host EC2")
    check_two_attempts(embedded, deployed, following.run_id, job, capacity="on-demand")


@pytest.mark.timeout(600)
def test_two_nodes_on_spot_come_one_after_the_other_and_both_again_when_one_is_taken_away(
    *, follow: Follow, embedded: Aws, stage: DeployedStage, embedded_aws: EmbeddedAws
) -> None:
    # GIVEN one of the two instances that `dev` may have, in use
    other = batch.submit(embedded, planned_to_run(embedded, stage, ["sleep", "600"]))
    wait_for(embedded, stage, other, state="RUNNING")
    with follow("resources.nnodes=2", "resources.capacity=spot", stage=DEFAULT_STAGE) as following:
        # WHEN there is room for both once one has waited for the other, and one is taken away after they saved
        following.read_until("[node 0] gang: this is node 0 of 2")
        [job] = batch.find_jobs(embedded, stage, following.run_id)
        assert (job.state, job.queue, job.nodes) == ("RUNNING", "spot@research", {"RUNNABLE": 1, "RUNNING": 1})
        batch.terminate_id(embedded, other, reason="the test goes on")
        following.read_until("checkpoint: step ")
        embedded_aws.reclaim(f"{job.id}:1")
        assert following.wait() == 0, following.stderr + "".join(following.log)

    # THEN the other one left with it, both came again, and trained to the end
    [job] = batch.find_jobs(embedded, stage, following.run_id)
    assert (job.state, job.nodes) == ("SUCCEEDED", {"SUCCEEDED": 2})
    main, child = (embedded.batch.describe_jobs(jobs=[f"{job.id}:{node}"])["jobs"][0]["attempts"] for node in (0, 1))
    assert main[0]["taskProperties"][0]["containers"][0]["exitCode"] == INTERRUPTED_EXIT_CODE
    assert child[0]["statusReason"].startswith("Host EC2")
    for meeting in (1, 2):
        assert following.log.count(f"[node 1] gang: meeting {meeting}, of the nodes 0, 1 of 2\n") == 1
    assert "1 of 2 nodes (what keeps the others: trainyard why tiny-" in following.stderr
    check_two_attempts(embedded, stage, following.run_id, job, capacity="spot")


def check_two_attempts(aws: Aws, stage: DeployedStage, run_id: str, job: Job, *, capacity: str) -> None:
    """Check that two nodes trained twice, the second time from a checkpoint of the first, as one run."""
    assert {(stream.attempt, stream.node) for stream in job.log_streams} == {(1, 0), (1, 1), (2, 0), (2, 1)}
    receipt = storage.read_receipt(aws, S3Location(stage.run_bucket, f"research/{run_id}/"))
    assert receipt is not None
    assert receipt.state == "succeeded"
    first, second = receipt.attempts
    kept = [(item.job_id, item.nnodes, item.world_size, item.capacity) for item in (first, second)]
    assert kept == [(job.id, 2, 2, capacity)] * 2
    assert first.last_step >= second.resumed_from_step >= EVERY_STEPS
    check_curve(aws, stage, run_id)
