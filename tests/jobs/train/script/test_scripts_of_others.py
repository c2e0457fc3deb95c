"""Trainings of TRL with adapters of peft, interrupted and resumed.

Their packages lie in .venv/scripts, since they would make every other Trainer of the tests start slower.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.train.language_models import instructions, save_tiny_llama, write_lines
from tests.support.train.launching import NewRun, Run
from tests.support.train.scripts import PACKAGES, REPOSITORY, WARM_WITH_PACKAGES, script_flags, write_files

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

TUNED = """
import sys
from datasets import load_dataset
from peft import LoraConfig
from transformers import set_seed
from trl import SFTConfig, SFTTrainer
import trainyard

model, data = sys.argv[1:3]
set_seed(7)
rows = load_dataset("json", data_files=data, split="train")
trainer = SFTTrainer(
    model,
    args=SFTConfig(
        "out", max_steps=40, per_device_train_batch_size=4, max_length=64, learning_rate=1e-2, logging_steps=7,
        report_to=[], use_cpu=True, bf16=False, disable_tqdm=True, eval_strategy="steps", eval_steps=10,
        save_strategy="steps", save_steps=10, load_best_model_at_end=True, label_names=["labels"],
    ),
    train_dataset=rows,
    eval_dataset=rows.select(range(8)),
    peft_config=LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj"]),
    callbacks=[trainyard.Callback(checkpoint_every_steps=4)],
)
trainer.train(resume_from_checkpoint=trainyard.checkpoint())
print("best", trainer.state.best_model_checkpoint, flush=True)
trainer.save_model(str(trainyard.output() / "adapter"))
trainyard.result(words=len(rows), kind="adapter")
"""


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models and data."""
    folder = tmp_path_factory.mktemp("inputs")
    save_tiny_llama(folder / "llama")
    write_lines(folder / "talks/train.jsonl", instructions(64))
    return folder


@pytest.fixture
def new_run_of_script(new_run: NewRun) -> NewRun:
    """Runs whose ranks find the packages of scripts."""

    def new() -> Run:
        run = new_run()
        return replace(run, environment={**run.environment, **PACKAGES})

    return new


@pytest.fixture
def inputs(here: Path, put: Callable[[Path, str], str]) -> dict[str, str]:
    return {path.name.partition(".")[0]: put(path, f"others/{path.name}") for path in here.iterdir()}


def test_adapters_end_as_if_nobody_had_interrupted_them(
    new_run_of_script: NewRun, inputs: dict[str, str], here: Path, s3: "S3Client", tmp_path: Path
) -> None:
    # WHEN it is run bare, where the library does nothing
    bare = write_files(tmp_path / "bare", {"sft.py": TUNED})
    environment = {**os.environ, **PACKAGES, "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] += f":{REPOSITORY}"
    done = subprocess.run(
        [sys.executable, "sft.py", f"{here}/llama", f"{here}/talks/train.jsonl"],
        cwd=bare,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr

    # THEN adapters that were interrupted by SIGTERM are the same
    code = write_files(tmp_path / "code", {"sft.py": TUNED})
    given = {name: inputs[name] for name in ("llama", "talks")}
    flags = script_flags(s3, code, "sft.py {inputs.llama} {inputs.talks}/train.jsonl", inputs=given)
    run = new_run_of_script()
    first = run.start(*flags, **WARM_WITH_PACKAGES)
    first.wait_for_line("[progress] 14/40")
    assert first.kill(signal.SIGTERM) == 75
    step = run.recorded_attempt(1).last_step
    names = [Path(name).name for name in run.keys(f"checkpoints/step-{step}/")]
    assert "adapter_model.safetensors" in names
    second = run.attempt(*flags, attempt=2, **WARM_WITH_PACKAGES)
    assert f"start: resumed from checkpoint step-{step}\n" in second.lines
    assert (
        run.read("output/adapter/adapter_model.safetensors")
        == (bare / "output/adapter/adapter_model.safetensors").read_bytes()
    )
    result = run.receipt().result
    assert (result["words"], result["kind"]) == (64, "adapter")
    assert result["eval_loss"] > 0
