"""Trainings of TRL and sentence-transformers, interrupted and resumed.

Their packages lie in .venv/scripts, since they would make every other Trainer of the tests start slower.
"""

import json
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
from tests.support.train.reviews import save_tiny_bert
from tests.support.train.scripts import PACKAGES, REPOSITORY, WARM_WITH_PACKAGES, script_flags, write_files

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

SENTENCES = """
import sys
from pathlib import Path
import torch
from datasets import load_dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.losses import CosineSimilarityLoss
from transformers import set_seed
from transformers.trainer_utils import get_last_checkpoint

model, data, output = sys.argv[1:]
set_seed(7)
model = SentenceTransformer(model, device="cpu")
trainer = SentenceTransformerTrainer(
    model=model,
    args=SentenceTransformerTrainingArguments(
        output, max_steps=80, per_device_train_batch_size=4, save_steps=10, logging_steps=4, report_to=[],
        use_cpu=True, disable_tqdm=True,
    ),
    train_dataset=load_dataset("json", data_files=data, split="train"),
    loss=CosineSimilarityLoss(model),
)
Path(output).mkdir(exist_ok=True)
last = get_last_checkpoint(output)
print("goes on from", last and last.rpartition("/")[2], flush=True)
trainer.train(resume_from_checkpoint=last)
model.save(f"{output}/model")
"""

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

SENTENCES_WITH_CALLBACK = (
    SENTENCES.replace("    loss=Cos", "    callbacks=[trainyard.Callback(checkpoint_every_steps=6)],\n    loss=Cos")
    .replace("get_last_checkpoint(output)", "trainyard.checkpoint()")
    .replace("import torch\n", "import torch\nimport trainyard\n")
    .replace("import sys", "import sys", 1)
)

Files = dict[str, str]


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models and data."""
    folder = tmp_path_factory.mktemp("inputs")
    save_tiny_llama(folder / "llama")
    save_tiny_bert(folder / "bert")
    rows = instructions(80)
    write_lines(folder / "talks/train.jsonl", rows[:64])
    pairs = [{"sentence1": row["prompt"], "sentence2": row["completion"], "score": 0.5} for row in rows]
    write_lines(folder / "pairs.jsonl", [json.loads(json.dumps(pair)) for pair in pairs])
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


def test_with_the_callback_they_end_as_if_nobody_had_interrupted_them(
    new_run_of_script: NewRun, inputs: dict[str, str], here: Path, s3: "S3Client", tmp_path: Path
) -> None:
    # WHEN both are run bare, where the library does nothing
    bare = write_files(tmp_path / "bare", {"sft.py": TUNED, "sentences.py": SENTENCES_WITH_CALLBACK})
    both = (
        "import runpy, sys\n"
        f"sys.argv = ['sft.py', '{here}/llama', '{here}/talks/train.jsonl']\n"
        "runpy.run_path('sft.py', run_name='__main__')\n"
        f"sys.argv = ['sentences.py', '{here}/bert', '{here}/pairs.jsonl', 'output']\n"
        "runpy.run_path('sentences.py', run_name='__main__')\n"
    )
    environment = {**os.environ, **PACKAGES, "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] += f":{REPOSITORY}"
    done = subprocess.run(
        [sys.executable, "-c", both], cwd=bare, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr

    # THEN adapters that were interrupted by SIGTERM are the same
    code = write_files(tmp_path / "code", {"sft.py": TUNED, "sentences.py": SENTENCES_WITH_CALLBACK})
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

    # AND sentence embeddings whose node was lost without a word
    given = {name: inputs[name] for name in ("bert", "pairs")}
    flags = script_flags(s3, code, "sentences.py {inputs.bert} {inputs.pairs} {output}", inputs=given)
    run = new_run_of_script()
    first = run.start(*flags, **WARM_WITH_PACKAGES)
    first.wait_for_line("[progress] 40/80")
    first.wait_for_line("checkpoint: step")
    first.kill()
    run.wait_until_gone()
    second = run.attempt(*flags, attempt=2, **WARM_WITH_PACKAGES)
    assert any("start: resumed from checkpoint step-" in line for line in second.lines)
    assert run.read("output/model/model.safetensors") == (bare / "output/model/model.safetensors").read_bytes()
