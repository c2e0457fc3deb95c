"""The ready-made specs of published trainings. One trains on the emulator with little data."""

import json
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

import pytest

from jobs.aws.connection import Aws
from jobs.core.run import new_run_id
from jobs.core.stage import DeployedStage
from jobs.runs.spec_file import READY_SPECS, read_spec
from jobs.spec.plan import plan
from tests.jobs.cli.conftest import Trainyard
from tests.support.container.reviews import reviews, save_tiny_bert

FINETUNING = {
    "finetune-mrpc": (1, 0),
    "finetune-mrpc-8hpu": (8, 0),
    "finetune-banking77": (8, 2),
    "finetune-massive": (8, 14),
}
"""Number of ranks, and number of tables from the hub."""


@pytest.mark.parametrize("name", FINETUNING)
def test_a_published_training_can_be_planned_unchanged(name: str, stage: DeployedStage) -> None:
    spec = read_spec(READY_SPECS / f"{name}.yaml")
    on_aws = replace(stage, emulated_processes=None)
    planned = plan(spec, on_aws, run_id=new_run_id(name, now=datetime.now(timezone.utc)))
    tables = [location for argument, location, _ in planned.inputs if argument.startswith(("train", "eval"))]
    assert (planned.nproc_per_node, len(tables)) == FINETUNING[name]
    assert all(location.startswith("hf://") for _, location, _ in planned.inputs)
    assert "Source: " in (READY_SPECS / f"{name}.yaml").read_text().partition("name:")[0]


@pytest.mark.timeout(600)
def test_a_published_training_learns_from_other_data(
    aws_trainyard: Trainyard, emulated: Aws, stage: DeployedStage, tmp_path: Path
) -> None:
    for path in save_tiny_bert(tmp_path / "model").iterdir():
        emulated.s3.upload_file(str(path), stage.data_bucket, f"ready/model/{path.name}")
    for part, count in (("train", 384), ("eval", 64)):
        rows = reviews(count, seed=count, labels=("no", "yes"))
        pairs = [{"sentence1": row["text"], "sentence2": "the", "label": row["label"]} for row in rows]
        lines = "".join(json.dumps(row) + "\n" for row in pairs)
        emulated.s3.put_object(Bucket=stage.data_bucket, Key=f"ready/{part}.jsonl", Body=lines.encode())
    given = {
        "model": "data://ready/model",
        "train_data": "data://ready/train.jsonl",
        "eval_data": "data://ready/eval.jsonl",
        "learning_rate": 0.003,  # for random weights
        "max_length": 32,  # the small model has no more positions
        "epochs": 16,
    }
    settings = [f"--set=arguments.{key}={json.dumps(value)}" for key, value in given.items()]
    spec = READY_SPECS / "finetune-mrpc-8hpu.yaml"
    receipt = json.loads(aws_trainyard("submit", spec, "-o", "json", *settings, expect=0).stdout)["receipt"]
    assert receipt["attempts"][0]["world_size"] == 2
    result = receipt["result"]
    assert result["eval_samples"] == 64
    assert result["eval_accuracy"] > result["eval_majority_accuracy"] + 0.25
    assert result["eval_f1"] > 0.7
    assert result["eval_combined_score"] == pytest.approx((result["eval_accuracy"] + result["eval_f1"]) / 2)
