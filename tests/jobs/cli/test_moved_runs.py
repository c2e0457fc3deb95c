"""Runs whose instances are reclaimed, from submission to receipt: moved to On-Demand or to another region, or several
nodes on Spot."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
import yaml

from infra.emulator import ACCOUNT_ID
from jobs.aws import s3 as object_store
from jobs.aws.connection import Aws
from jobs.core.errors import INTERRUPTED_EXIT_CODE, UsageError
from jobs.core.locations import S3Location
from jobs.core.queues import SPOT_WAITED_TOO_LONG
from jobs.core.stage import DEFAULT_STAGE, DeployedStage
from jobs.runs import batch, storage
from jobs.runs.job import Job
from jobs.runs.planning import plan_run
from jobs.runs.submit import send, submit_job
from jobs.spec.spec import parse_spec
from tests.jobs.cli.conftest import Trainyard
from tests.support.container.reviews import reviews, save_tiny_bert, write_jsonl
from tests.support.infra.synthesis import synthesise_for_cli
from tests.support.infra.variants import HOME, WEST
from tests.support.jobs.submitting import (
    DATA,
    DATA_KEY,
    MODEL_FILES,
    MODEL_KEY,
    SPEC,
    no_instances,
    planned_to_run,
    wait_for,
)
from tests.support.jobs.terminal import TRAINYARD
from tests.support.running_emulator import DEPLOY_SECONDS, Emulator
from tests.support.waiting import wait_until

STAGE = "prod"
"""A stage of infra/settings.py that moves a job to On-Demand after three reclaims."""

EVERY_STEPS = 20
"""Steps between checkpoints and between lines of metrics."""

STEPS_IN_EPOCH = 32


@pytest.fixture(scope="module")
def deployed(connected: Aws, emulator: Emulator) -> DeployedStage:
    deployment = subprocess.run(
        [sys.executable, "-m", "infra.emulator", "deploy", "--endpoint", emulator.endpoint, "--stage", STAGE],
        env=dict(emulator.environment),
        capture_output=True,
        text=True,
        timeout=DEPLOY_SECONDS,
        check=False,
    )
    assert deployment.returncode == 0, deployment.stderr
    return batch.read_stage(connected, STAGE)


class Following:
    """Reads the output of a `trainyard submit` process."""

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
def follow(tmp_path: Path, aws_environment: dict[str, str]) -> Follow:
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
    def submit(*settings: str, stage: str) -> Iterator[Following]:
        stderr = tmp_path / "stderr"
        options = [f"--set={setting}" for setting in settings]
        command: list[str | Path] = [TRAINYARD, "submit", "tiny.yaml", "--stage", stage, "--yes", *options]
        with stderr.open("w") as errors:
            process = subprocess.Popen(
                command, cwd=tmp_path, env=aws_environment, stdout=subprocess.PIPE, stderr=errors, text=True
            )
            with process:
                yield Following(process, stderr)
                process.kill()

    return submit


def check_curve(aws: Aws, stage: DeployedStage, run_id: str, *, epochs: int) -> None:
    """Check that the attempts together have the metrics of an uninterrupted run; the last line is the evaluation."""
    metrics = storage.read_metrics(aws, S3Location(stage.run_bucket, f"research/{run_id}/"))
    end = epochs * STEPS_IN_EPOCH
    assert [line["step"] for line in metrics] == [*range(EVERY_STEPS, end + 1, EVERY_STEPS), end]


@pytest.mark.timeout(600)
def test_a_run_continues_on_demand_after_three_reclaims(
    *, follow: Follow, emulated: Aws, deployed: DeployedStage, emulator: Emulator, aws_trainyard: Trainyard
) -> None:
    with follow("arguments.epochs=6", stage=STAGE) as following:
        run_id = following.run_id
        for number in (1, 2, 3):
            following.read_until(f"attempt {number} of s3")
            if number == 1:
                following.read_until("checkpoint: step")
            [job] = batch.find_jobs(emulated, deployed, run_id)
            assert job.queue == "spot@research"
            emulator.reclaim(job.id)
        assert following.wait() == 0, following.stderr + "".join(following.log)
    spot, on_demand = batch.find_jobs(emulated, deployed, run_id)
    # If an instance is available at once, a fourth attempt has started on Spot when the job is ended.
    assert (spot.state, spot.queue, len(spot.attempts) in (3, 4)) == ("FAILED", "spot@research", True)
    assert spot.reason.startswith("moved to On-Demand after 3 reclaims")
    moved = (on_demand.state, on_demand.queue, on_demand.moved)
    assert moved == ("SUCCEEDED", "on-demand@research", "after 3 reclaims")
    assert spot.stopped_at is not None
    assert spot.stopped_at <= on_demand.created_at, "two jobs of a run at the same time"

    def on_prod(*arguments: str) -> subprocess.CompletedProcess[str]:
        return aws_trainyard(*arguments, "--stage", STAGE, expect=0)

    receipt = json.loads(on_prod("receipt", run_id, "-o", "json").stdout)
    attempts = receipt["attempts"]
    assert (receipt["state"], [each["number"] for each in attempts]) == ("succeeded", [*range(1, len(attempts) + 1)])
    assert attempts[0]["job_id"] == spot.id
    assert [each["number"] for each in attempts if each["job_id"] == on_demand.id] == [len(attempts)]
    assert attempts[-1]["resumed_from_step"] >= EVERY_STEPS
    assert attempts[-1]["last_step"] == 6 * STEPS_IN_EPOCH
    check_curve(emulated, deployed, run_id, epochs=6)

    assert "[RUNNING] moved to On-Demand after 3 reclaims, attempt 1 of 5 of this job" in following.stderr
    assert "queue on-demand@research" in on_prod("status", run_id).stdout
    logs = on_prod("logs", run_id)
    assert all(f"attempt {number} of s3://" in logs.stdout for number in (1, 2, 3, len(attempts)))
    assert "attempt 1, moved to On-Demand after 3 reclaims" in logs.stderr
    listed = json.loads(on_prod("list", "-o", "json").stdout)
    assert [job["queue"] for job in listed if job["run_id"] == run_id] == ["on-demand@research"]


@pytest.mark.timeout(600)
def test_two_spot_nodes_restart_together_after_a_reclaim(
    *, follow: Follow, emulated: Aws, stage: DeployedStage, emulator: Emulator
) -> None:
    # GIVEN that one of the two instances of `dev` is in use
    other = submit_job(emulated, planned_to_run(emulated, stage, ["sleep", "600"]))
    wait_for(emulated, stage, other, state="RUNNING")
    with follow("resources.nnodes=2", "resources.capacity=spot", stage=DEFAULT_STAGE) as following:
        # WHEN the second node starts after a wait, and one node is reclaimed after a checkpoint
        following.read_until("[node 0] rendezvous: node 0 of 2")
        [job] = batch.find_jobs(emulated, stage, following.run_id)
        assert (job.state, job.queue, job.nodes) == ("RUNNING", "spot@research", {"RUNNABLE": 1, "RUNNING": 1})
        batch.terminate(emulated, other, reason="no longer needed")
        following.read_until("checkpoint: step ")
        emulator.reclaim(f"{job.id}:1")
        assert following.wait() == 0, following.stderr + "".join(following.log)

    # THEN the other node stopped too, both restarted, and the training finished
    [job] = batch.find_jobs(emulated, stage, following.run_id)
    assert (job.state, job.nodes) == ("SUCCEEDED", {"SUCCEEDED": 2})
    main, child = (emulated.batch.describe_jobs(jobs=[f"{job.id}:{node}"])["jobs"][0]["attempts"] for node in (0, 1))
    assert main[0]["taskProperties"][0]["containers"][0]["exitCode"] == INTERRUPTED_EXIT_CODE
    assert child[0]["statusReason"].startswith("Host EC2")
    for meeting in (1, 2):
        assert following.log.count(f"[node 1] rendezvous: meeting {meeting} of nodes 0, 1 of 2\n") == 1
    assert "1 of 2 nodes (why the others wait: trainyard why tiny-" in following.stderr
    # AND it is one run, whose second attempt resumed from a checkpoint of the first
    assert {(stream.attempt, stream.node) for stream in job.log_streams} == {(1, 0), (1, 1), (2, 0), (2, 1)}
    receipt = storage.read_receipt(emulated, S3Location(stage.run_bucket, f"research/{following.run_id}/"))
    assert receipt is not None
    assert receipt.state == "succeeded"
    first, second = receipt.attempts
    kept = [(item.job_id, item.nnodes, item.world_size, item.capacity) for item in (first, second)]
    assert kept == [(job.id, 2, 2, "spot")] * 2
    assert first.last_step >= second.resumed_from_step >= EVERY_STEPS
    check_curve(emulated, stage, following.run_id, epochs=3)


@pytest.fixture(scope="module")
def home(connected: Aws, emulator: Emulator, tmp_path_factory: pytest.TempPathFactory) -> DeployedStage:
    """A stage and its fallback in another region, both deployed; what specs read is in the first."""
    folder = tmp_path_factory.mktemp("regions")
    app = synthesise_for_cli(HOME, folder / "app", WEST)
    code, output = emulator.cdk("bootstrap", f"aws://{ACCOUNT_ID}/{WEST.region}", scratch=folder)
    assert code == 0, output
    deploy = ("deploy", "home/*", "west/*", "--app", app, "--method=direct", "--require-approval=never")
    code, output = emulator.cdk(*deploy, scratch=folder)
    assert code == 0, output
    found = batch.read_stage(connected, HOME.name)
    for name, content in {
        DATA_KEY: DATA,
        **{f"{MODEL_KEY}/{name}": file for name, file in MODEL_FILES.items()},
    }.items():
        connected.s3.put_object(Bucket=found.data_bucket, Key=name, Body=content)
    return found


def cancel_as_batch(aws: Aws, stage: DeployedStage, job_id: str) -> None:
    """Cancel a waiting job as Batch does after `spot_wait_hours`: the emulator does not count the time."""
    wait_for(aws, stage, job_id, state="RUNNABLE")
    aws.batch.cancel_job(jobId=job_id, reason=SPOT_WAITED_TOO_LONG)


@pytest.mark.timeout(600)
def test_a_run_without_spot_capacity_continues_in_another_region(
    *, follow: Follow, emulated: Aws, home: DeployedStage, emulator: Emulator, aws_trainyard: Trainyard
) -> None:
    with follow(stage="home") as following:
        # GIVEN a run with a checkpoint, whose instance is reclaimed when Spot has no others
        following.read_until("checkpoint: step")
        [job] = batch.find_jobs(emulated, home, following.run_id)
        with no_instances(emulated, home, "spot@research"):
            emulator.reclaim(job.id)
            cancel_as_batch(emulated, home, job.id)
            assert following.wait() == 0, following.stderr + "".join(following.log)

    # THEN it continues from the checkpoint in the other region, with all its files at home
    run_id = following.run_id
    here, there = batch.find_jobs(emulated, home, run_id)
    assert (here.state, here.region, here.home) == ("FAILED", "us-east-1", "")
    assert (there.state, there.region, there.queue, there.home) == ("SUCCEEDED", "us-west-2", "spot@research", "home")
    receipt = storage.read_receipt(emulated, S3Location(home.run_bucket, f"research/{run_id}/"))
    assert receipt is not None
    first, last = receipt.attempts[0], receipt.attempts[-1]
    assert (receipt.state, first.job_id, last.job_id) == ("succeeded", here.id, there.id)
    assert first.last_step >= last.resumed_from_step >= EVERY_STEPS
    assert [each.zone and each.zone[:-1] for each in (first, last)] == ["us-east-1", "us-west-2"]
    check_curve(emulated, home, run_id, epochs=3)

    # AND every command finds it
    def at_home(*arguments: str) -> subprocess.CompletedProcess[str]:
        return aws_trainyard(*arguments, "--stage", "home", expect=0)

    moved = "moved to stage west (us-west-2) for lack of Spot capacity"
    assert f"[RUNNING] {moved}, attempt 1 of 5 of this job" in following.stderr
    status = at_home("status", run_id).stdout
    assert f"{moved} after job {here.id}" in status
    assert "queue spot@research of stage west (us-west-2)" in status
    logs = at_home("logs", run_id)
    assert all(f"attempt {number} of s3://" in logs.stdout for number in (1, len(receipt.attempts)))
    assert f"attempt 1, {moved}" in logs.stderr
    assert at_home("logs", run_id, "--tail", "1").stdout.count("\n") == 1
    [listed] = json.loads(at_home("list", "-o", "json").stdout)
    assert (listed["run_id"], listed["region"]) == (run_id, "us-west-2")
    there_listed = aws_trainyard("list", "-o", "json", "--stage", "west", "--region", "us-west-2", expect=0)
    assert json.loads(there_listed.stdout) == []  # it is not a run of that stage

    # AND the next plan says what a move costs, and what is considered there
    planned = at_home("submit", "tiny.yaml", "--dry-run").stdout
    assert "may move to stage west (us-west-2), whose jobs use its files here" in planned
    row = next(line.split() for line in planned.splitlines() if "us-west-2" in line and line.startswith("g5.xlarge"))
    assert row[:2] == ["g5.xlarge", "us-west-2"]
    assert "after 1 h" in " ".join(planned.split())


@pytest.mark.timeout(600)
def test_a_moved_run_is_entered_moved_on_demand_and_cancelled_in_the_other_region(
    *, emulated: Aws, home: DeployedStage, emulator: Emulator, aws_trainyard: Trainyard
) -> None:
    def newest(condition: Callable[[Job], bool]) -> Job:
        return wait_until(lambda: batch.job_of(emulated, home, run_id), condition)

    plan = planned_to_run(emulated, home, ["sh", "-c", "echo started in $AWS_REGION; sleep 600"])
    run_id = plan.run_id
    with no_instances(emulated, home, "spot@research"):
        job_id = send(emulated, plan)
        cancel_as_batch(emulated, home, job_id)
    moved = newest(lambda job: bool(job.home) and job.state == "RUNNING")
    entered = aws_trainyard("exec", run_id, "--stage", "home", "--", "sh", "-c", "echo $AWS_BATCH_JOB_ID", expect=0)
    assert entered.stdout == f"{moved.id}\n"
    assert "started in us-west-2" in aws_trainyard("logs", run_id, "--stage", "home", expect=0).stdout
    reader = {
        **SPEC,
        "name": "reader",
        "arguments": {"model": f"run://{run_id}/model", "train_data": f"data://{DATA_KEY}"},
    }
    with pytest.raises(UsageError, match=r"moved to stage west \(us-west-2\): a run cannot wait for it there"):
        plan_run(emulated, home, parse_spec(reader, origin="the test"))
    # WHEN it is reclaimed there, THEN that stage moves it to On-Demand, and claims that among the run's files at home
    emulator.reclaim(moved.id)
    on_demand = newest(lambda job: job.queue == "on-demand@research" and job.state == "RUNNING")
    assert (on_demand.home, on_demand.origin) == ("home", "moved to On-Demand after 1 reclaim")
    claims = object_store.sizes(emulated.s3, plan.run_location / "moves")
    assert set(claims) == {f"{job_id}.json", f"{moved.id}.json"}
    # AND it is cancelled there
    aws_trainyard("cancel", run_id, "--stage", "home", expect=0)
    assert newest(lambda job: job.ended).state == "CANCELLED"
