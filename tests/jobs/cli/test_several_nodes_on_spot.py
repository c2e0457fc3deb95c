"""Several nodes on Spot, from the command line to the receipt: each starts, is taken away and comes again by itself."""

import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from jobs.aws.connection import Aws
from jobs.client import batch, storage
from jobs.contract.errors import INTERRUPTED_EXIT_CODE
from jobs.contract.locations import S3Location
from jobs.contract.stage import DeployedStage
from tests.support.embedded_aws import EmbeddedAws
from tests.support.jobs.submitting import planned_to_run, wait_for
from tests.support.jobs.terminal import TRAINYARD
from tests.support.train.reviews import reviews, save_tiny_bert, write_jsonl

EPOCHS = 15
"""Epochs of 8 steps each: enough to train on while a node is taken away."""
CHECKPOINT_EVERY_STEPS = LOG_EVERY_STEPS = 20


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    """A training on two nodes of one rank each, with a checkpoint every few steps."""
    save_tiny_bert(tmp_path / "model")
    write_jsonl(tmp_path / "train.jsonl", reviews(128, seed=1))
    write_jsonl(tmp_path / "eval.jsonl", reviews(32, seed=2))
    path = tmp_path / "tiny.yaml"
    path.write_text(
        yaml.safe_dump(
            {
                "name": "tiny",
                "job": "finetune-classification",
                "resources": {"nnodes": 2, "nproc_per_node": 1, "capacity": "spot"},
                "arguments": {
                    "model": "model",
                    "train_data": "train.jsonl",
                    "eval_data": "eval.jsonl",
                    "max_length": 16,
                    "epochs": EPOCHS,
                    "global_batch_size": 16,
                    "checkpoint_every_steps": CHECKPOINT_EVERY_STEPS,
                    "log_every_steps": LOG_EVERY_STEPS,
                },
            }
        )
    )
    return path


@pytest.mark.timeout(600)
def test_two_nodes_come_one_after_the_other_and_both_again_when_one_is_taken_away_while_they_train(
    *,
    embedded: Aws,
    stage: DeployedStage,
    deployed_aws: EmbeddedAws,
    deployed_environment: Mapping[str, str],
    clean_environment: Mapping[str, str],
    spec: Path,
    tmp_path: Path,
) -> None:
    # GIVEN one of the two instances that `dev` may have, in use
    other = batch.submit(embedded, planned_to_run(embedded, stage, ["sleep", "600"]))
    wait_for(embedded, stage, other, state="RUNNING")
    with (
        (tmp_path / "stderr").open("w") as stderr,
        subprocess.Popen(
            [TRAINYARD, "submit", spec],
            cwd=tmp_path,
            env={**clean_environment, **deployed_environment},
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        ) as following,
    ):
        assert following.stdout is not None
        run_id = following.stdout.readline().strip()
        seen: list[str] = []

        def read_until(words: str) -> None:
            while not (seen and words in seen[-1]):
                assert following.stdout is not None
                seen.append(following.stdout.readline())
                assert seen[-1], "".join(seen) + (tmp_path / "stderr").read_text()

        # WHEN there is room for both once one has waited for the other, and one is taken away after they saved
        read_until("[node 0] gang: this is node 0 of 2")
        [job] = batch.find_jobs(embedded, stage, run_id)
        assert (job.state, job.queue, job.nodes) == ("RUNNING", "spot@research", {"RUNNABLE": 1, "RUNNING": 1})
        batch.terminate_id(embedded, other, reason="the test goes on")
        read_until("checkpoint: step ")
        deployed_aws.reclaim(f"{job.id}:1")
        seen += following.stdout
        assert following.wait() == 0, "".join(seen) + (tmp_path / "stderr").read_text()

    # THEN the other one left with it, both came again, and trained to the end
    [job] = batch.find_jobs(embedded, stage, run_id)
    assert (job.state, job.nodes) == ("SUCCEEDED", {"SUCCEEDED": 2})
    assert {(stream.attempt, stream.node) for stream in job.log_streams} == {(1, 0), (1, 1), (2, 0), (2, 1)}
    main, child = (embedded.batch.describe_jobs(jobs=[f"{job.id}:{node}"])["jobs"][0]["attempts"] for node in (0, 1))
    assert main[0]["taskProperties"][0]["containers"][0]["exitCode"] == INTERRUPTED_EXIT_CODE
    assert child[0]["statusReason"].startswith("Host EC2")
    assert sum(line == "[node 1] gang: meeting 1, of the nodes 0, 1 of 2\n" for line in seen) == 1
    assert sum(line == "[node 1] gang: meeting 2, of the nodes 0, 1 of 2\n" for line in seen) == 1
    assert "1 of 2 nodes (what keeps the others: trainyard why tiny-" in (tmp_path / "stderr").read_text()
    # AND there is one receipt of both attempts, and one curve
    run = S3Location(stage.run_bucket, f"research/{run_id}/")
    receipt = storage.read_receipt(embedded, run)
    assert receipt is not None
    assert receipt.state == "succeeded"
    first, second = receipt.attempts
    assert [(item.job_id, item.nnodes, item.world_size, item.capacity) for item in (first, second)] == [
        (job.id, 2, 2, "spot")
    ] * 2
    assert first.last_step >= second.resumed_from_step >= CHECKPOINT_EVERY_STEPS
    assert second.last_step == 8 * EPOCHS
    steps = [line["step"] for line in storage.read_metrics(embedded, run)]
    assert steps == [*range(LOG_EVERY_STEPS, 8 * EPOCHS + 1, LOG_EVERY_STEPS), 8 * EPOCHS], "the last is the evaluation"
