"""jobs/specs/finetune-yelp-ray unchanged, with a small model and few reviews."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from jobs.runs.spec_file import READY_SPECS, read_spec
from tests.support.container import launching
from tests.support.container.language_models import write_lines
from tests.support.container.launching import Run
from tests.support.container.reviews import reviews, save_tiny_bert
from tests.support.container.scripts import PACKAGES, script_flags

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client


@pytest.mark.timeout(900)
def test_ray_workers_train_and_save_model_checkpoints_result(
    run: Run,
    s3: "S3Client",
    put: Callable[[Path, str], str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = read_spec(READY_SPECS / "finetune-yelp-ray.yaml")
    model = put(save_tiny_bert(tmp_path / "model"), "ray/model")
    (tmp_path / "data").mkdir()
    for seed, split in enumerate(("train", "test")):
        write_lines(tmp_path / f"data/{split}.jsonl", reviews(128, seed=seed, labels=(0, 1)))
    command = spec.arguments["command"].replace("Yelp/yelp_review_full", "{inputs.data}")
    inputs = {"model": model, "data": put(tmp_path / "data", "ray/data")}
    small = "--epochs 6 --learning-rate 0.003 --max-length 32 --save-steps 48"
    rest = {name: spec.arguments[name] for name in ("requirements", "processes")}
    flags = script_flags(s3, READY_SPECS / "finetune-yelp-ray", f"{command} {small}", inputs=inputs, **rest)
    run = replace(run, environment={**run.environment, **PACKAGES})

    monkeypatch.setattr(launching, "PATIENCE_SECONDS", 600)  # a dozen processes of Ray start first

    done = run.attempt(*flags, kind="script")

    result = run.receipt().result
    assert result["eval_accuracy"] > 0.9
    assert any(line.startswith("held-out accuracy of 2 workers over gloo: ") for line in done.lines)
    assert run.read("output/model/model.safetensors")
    assert max(run.complete_checkpoints()) == 96


def test_optimizer_and_evaluations_of_the_source_can_be_chosen(tmp_path: Path) -> None:
    """The training of one worker, without Ray."""
    save_tiny_bert(tmp_path / "model")
    (tmp_path / "data").mkdir()
    for seed, split in enumerate(("train", "test")):
        write_lines(tmp_path / f"data/{split}.jsonl", reviews(16, seed=seed, labels=(0, 1)))
    options = "model data --output out --workers 1 --epochs 2 --save-steps 4 --optimizer sgd --evaluate-each-epoch"
    code = "import train; train.train(vars(train.arguments()))"
    places = f"{PACKAGES['PYTHONPATH']}:{READY_SPECS / 'finetune-yelp-ray'}:{READY_SPECS.parents[1]}"
    environment = {**os.environ, **PACKAGES, "PYTHONPATH": places, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", code, *options.split(), "--max-length=32"]
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, timeout=300)

    optimizer = torch.load(tmp_path / "out/checkpoint-4/optimizer.pt", weights_only=True)
    assert {(group["momentum"], group["lr"]) for group in optimizer["param_groups"]} == {(0.9, 1e-3)}
    history = json.loads((tmp_path / "out/checkpoint-4/trainer_state.json").read_bytes())["log_history"]
    assert [entry["epoch"] for entry in history if "eval_accuracy" in entry] == [1]  # saved before the next one
