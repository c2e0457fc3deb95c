"""jobs/specs/sft-lora as it stands, with a small model and real text."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors.torch import load_file, save_file

from jobs.cli.spec_file import READY_SPECS, read_spec
from tests.support.train.language_models import instructions, save_tiny_llama, write_lines
from tests.support.train.launching import Run
from tests.support.train.scripts import PACKAGES, REPOSITORY, script_flags

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client


def test_it_leaves_a_model_that_answers_better_its_adapter_and_samples(
    run: Run, s3: "S3Client", put: Callable[[Path, str], str], tmp_path: Path
) -> None:
    spec = read_spec(READY_SPECS / "sft-lora.yaml")
    # The tokenizer has no chat template
    model = save_tiny_llama(tmp_path / "llama", chat_template=None)
    rows = instructions(200)
    talks = [{"messages": [{"role": "user", "content": row["prompt"]}, _said(row["completion"])]} for row in rows[:20]]
    data = write_lines(tmp_path / "talks.jsonl", [*rows[20:], *talks])
    inputs = {"model": put(model, "sft/llama"), "data": put(data, "sft/talks.jsonl")}
    command = f"{spec.arguments['command']} --max-length 96 --batch-size 4 --learning-rate 0.03 --new-tokens 8"
    arguments = {"inputs": inputs, "requirements": spec.arguments["requirements"]}
    flags = script_flags(s3, READY_SPECS / "sft-lora", command, **arguments)
    run = replace(run, environment={**run.environment, **PACKAGES})

    done = run.attempt(*flags, kind="script")

    result = run.receipt().result
    assert result["eval_loss"] < result["base_eval_loss"] - 0.05
    assert result["blocks"] < result["training_examples"] <= 190
    samples = [json.loads(line) for line in run.read("output/generations.jsonl").splitlines()]
    assert [sorted(sample) for sample in samples] == [["base", "prompt", "tuned"]] * 5
    assert any(sample["base"] != sample["tuned"] for sample in samples)
    assert sum(line.startswith("asked: Continue: ") for line in done.lines) == 3
    output = run.download("output/", tmp_path / "output")
    assert "### " in json.dumps(json.loads((output / "model/tokenizer_config.json").read_text()))
    assert (output / "adapter/tokenizer_config.json").exists()


def test_a_model_that_lacks_weights_is_refused(tmp_path: Path) -> None:
    model = save_tiny_llama(tmp_path / "llama", chat_template=None)
    weights = load_file(model / "model.safetensors")
    del weights["model.layers.0.mlp.up_proj.weight"]
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    data = write_lines(tmp_path / "data.jsonl", instructions(40))
    done = subprocess.run(
        [sys.executable, READY_SPECS / "sft-lora/train.py", model, data],
        cwd=tmp_path,
        env={**os.environ, **PACKAGES, "PYTHONPATH": f"{REPOSITORY}:{PACKAGES.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith("its files lack 1 weights: model.layers.0.mlp.up_proj.weight, …")


def _said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}
