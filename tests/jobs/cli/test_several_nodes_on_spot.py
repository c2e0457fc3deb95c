"""Several nodes on Spot, from the command line to the receipt: each starts, is taken away and comes again by itself."""

import json
import subprocess
import urllib.request
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from jobs import batch, storage
from jobs.aws import Aws
from jobs.runs import S3Location
from jobs.stage import DeployedStage
from tests.conftest import EmbeddedAws
from tests.jobs.cli.terminal import TRAINYARD
from tests.jobs.submitting import planned_to_run, wait_for
from tests.jobs.train.reviews import reviews, save_tiny_bert, write_jsonl


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    """A short training on two nodes of one rank each."""
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
                    "epochs": 1,
                    "global_batch_size": 16,
                },
            }
        )
    )
    return path


@pytest.mark.timeout(600)
def test_two_nodes_come_one_after_the_other_one_again_after_a_reclaim_and_train_as_one_run(
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

        def read_until(start: str) -> None:
            while not (seen and seen[-1].startswith(start)):
                assert following.stdout is not None
                seen.append(following.stdout.readline())
                assert seen[-1], "".join(seen) + (tmp_path / "stderr").read_text()

        # WHEN the node that waits for the other one is taken away, and then there is room for both
        read_until("[node 0] gang: this is node 0 of 2")
        [job] = batch.find_jobs(embedded, stage, run_id)
        assert (job.state, job.queue, job.nodes) == ("RUNNING", "gaudi-spot", {"RUNNABLE": 1, "RUNNING": 1})
        url = f"{deployed_aws.endpoint}/trainyard/jobs/{job.id}:0/reclaim"
        with urllib.request.urlopen(urllib.request.Request(url, method="POST"), timeout=30) as answer:
            assert json.load(answer)["reclaimed"]
        batch.terminate_id(embedded, other, reason="the test goes on")
        read_until("[node 0] attempt ")
        seen += following.stdout
        assert following.wait() == 0, "".join(seen) + (tmp_path / "stderr").read_text()

    # THEN the one came again, and both trained to the end
    [job] = batch.find_jobs(embedded, stage, run_id)
    assert (job.state, job.nodes) == ("SUCCEEDED", {"SUCCEEDED": 2})
    assert job.attempts[0].reason.startswith("Host EC2")
    assert {stream.node for stream in job.log_streams if stream.attempt == 1} == {0, 1}
    assert "[node 1] gang: meeting 1, of the nodes 0, 1 of 2\n" in seen
    assert "1 of 2 nodes (what keeps the others: trainyard why tiny-" in (tmp_path / "stderr").read_text()
    # AND there is one receipt, of both
    receipt = storage.read_receipt(embedded, S3Location(stage.run_bucket, f"research/{run_id}/"))
    assert receipt is not None
    assert receipt.state == "succeeded"
    [attempt] = receipt.attempts
    assert (attempt.job_id, attempt.nnodes, attempt.world_size, attempt.last_step) == (job.id, 2, 2, 8)
    assert attempt.capacity == "spot"
