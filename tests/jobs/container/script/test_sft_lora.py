"""jobs/specs/sft-lora unchanged, with a small model and real text: peft's adapters, interrupted once."""

import json
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from jobs.cli.spec_file import READY_SPECS, read_spec
from tests.support.container.language_models import instructions, save_tiny_llama, write_lines
from tests.support.container.launching import Run
from tests.support.container.scripts import PACKAGES, script_flags

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
    data = write_lines(tmp_path / "talks.jsonl", [*rows[20:], *talks])
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


def _said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}
