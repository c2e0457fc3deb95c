"""jobs/specs/sft-lora with a small model and real text: peft's adapters, interrupted once, and all weights."""

import json
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from jobs.runs.spec_file import READY_SPECS, read_spec
from tests.support.container.language_models import instructions, save_tiny_llama, write_lines
from tests.support.container.launching import Run
from tests.support.container.scripts import PACKAGES, script_flags, write_files
from tests.support.container.sharding import FSDP_ON_CPU

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client


def test_sft_saves_a_better_model_its_adapter_and_samples(
    run: Run, s3: "S3Client", put: Callable[[Path, str], str], tmp_path: Path
) -> None:
    spec = read_spec(READY_SPECS / "sft-lora.yaml")
    # The tokenizer has no chat template
    model = save_tiny_llama(tmp_path / "llama", chat_template=None)
    rows = instructions(200)
    talks = [{"messages": [{"role": "user", "content": row["prompt"]}, _said(row["completion"])]} for row in rows[:20]]
    greeting = {"messages": [_said("Good day."), *talks[0]["messages"]]}
    unanswered = [{"messages": talk["messages"][:1]} for talk in talks]
    data = write_lines(tmp_path / "talks.jsonl", [*rows[20:], *talks[1:], greeting, *unanswered])
    inputs = {"model": put(model, "sft/llama"), "data": put(data, "sft/talks.jsonl")}
    command = (
        f"{spec.arguments['command']} --max-length 96 --batch-size 4 --learning-rate 0.01 --new-tokens 8 --epochs 5"
    )
    arguments = {"inputs": inputs, "requirements": spec.arguments["requirements"]}
    flags = script_flags(s3, READY_SPECS / "sft-lora", command, **arguments)
    run = replace(run, environment={**run.environment, **PACKAGES})

    first = run.start(*flags, kind="script")
    first.wait_for_line("[progress] 10/")
    assert first.kill(signal.SIGTERM) == 75
    step = run.recorded_attempt(1).last_step
    assert "adapter_model.safetensors" in {Path(name).name for name in run.keys(f"checkpoints/step-{step}/")}
    done = run.attempt(*flags, kind="script", attempt=2)

    assert f"start: resumed from checkpoint step-{step}\n" in done.lines
    assert "warning: 20 conversations without an answer are left out\n" in done.lines
    result = run.receipt().result
    assert result["eval_loss"] < result["base_eval_loss"] - 0.05
    assert result["blocks"] < result["training_examples"] <= 190
    samples = [json.loads(line) for line in run.read("output/generations.jsonl").splitlines()]
    assert [sorted(sample) for sample in samples] == [["base", "prompt", "tuned"]] * 5
    assert any(sample["base"] != sample["tuned"] for sample in samples)
    assert sum(line.startswith("prompt: Continue: ") for line in done.lines) == 3
    output = run.download("output/", tmp_path / "output")
    assert "### " in (output / "model/chat_template.jinja").read_text()
    assert (output / "adapter/tokenizer_config.json").exists()


def test_all_weights_are_tuned_on_texts_in_shards(
    run: Run, s3: "S3Client", put: Callable[[Path, str], str], tmp_path: Path
) -> None:
    spec = read_spec(READY_SPECS / "sft-full.yaml")
    model = save_tiny_llama(tmp_path / "llama")
    rows = [{"text": f"{row['prompt']} {row['completion']}"} for row in instructions(100)]
    data = write_lines(tmp_path / "texts.jsonl", rows)
    inputs = {"model": put(model, "sft/llama"), "data": put(data, "sft/texts.jsonl")}
    command = f"{spec.arguments['command']} --max-length 64 --batch-size 2 --learning-rate 0.003 --new-tokens 8"
    # The folder's script, on CPUs that accelerate may shard a model on
    files = {name.name: name.read_text() for name in (READY_SPECS / "sft-lora").iterdir() if name.is_file()}
    files["train.py"] = files["train.py"].replace("import argparse\n", "import argparse\nimport fsdp_on_cpu\n", 1)
    code = write_files(tmp_path / "code", {**files, "fsdp_on_cpu.py": FSDP_ON_CPU})
    flags = script_flags(s3, code, f"{command} --max-steps 16", inputs=inputs)
    run = replace(run, environment={**run.environment, **PACKAGES})

    run.attempt(*flags, kind="script", nproc=2)

    assert "checkpoints/step-16/pytorch_model_fsdp_0/__1_0.distcp" in run.keys("checkpoints/")
    result = run.receipt().result
    assert result["eval_loss"] < result["base_eval_loss"] - 0.05
    assert "output/model/model.safetensors" in run.keys("output/")
    assert len(run.read("output/generations.jsonl").splitlines()) == 5


def _said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}
