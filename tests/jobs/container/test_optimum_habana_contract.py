"""The HPU branch with the real classes of a release's optimum-habana, on a CPU.

    make contract                      every release
    make contract RELEASE=1.24.0       one release

Otherwise the default release is tested. optimum-habana is not in the tests' environment, because it needs versions that
only the Gaudi image has. The image's packages are installed into a separate environment (image_environment.py).
"""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jobs.container.channel import RequestFiles
from jobs.container.trainer import arguments
from jobs.core.images import release
from tests.support.container import image_environment, optimum_habana_on_cpu
from tests.support.container.hpu_ranks import REPOSITORY, described, run_python, train
from tests.support.container.language_models import instructions, save_tiny_llama, write_lines
from tests.support.container.launching import Run
from tests.support.container.optimum_habana_on_cpu import SEEDED
from tests.support.container.scripts import PACKAGES

MODULE = optimum_habana_on_cpu.__name__

LANGUAGE_MODEL = ("--max-steps=12", "--max-length=96", "--batch-size=2", "--learning-rate=0.01", "--new-tokens=4")

pytestmark = pytest.mark.every_release


@pytest.fixture(scope="session")
def with_peft(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The path of peft among the packages of scripts. The others include a SciPy for a newer NumPy than the image's."""
    folder = tmp_path_factory.mktemp("packages")
    for path in Path(PACKAGES["PYTHONPATH"]).glob("peft*"):
        (folder / path.name).symlink_to(path)
    return {"PYTHONPATH": f"{folder}:{REPOSITORY}"}


@pytest.fixture(scope="session")
def description(gaudi_python: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(described(gaudi_python, MODULE, tmp_path_factory.mktemp("home")))
    return answer


def test_the_package_versions_match_the_release(description: dict[str, Any]) -> None:
    row = release(image_environment.chosen_release())
    assert description["versions"] == {
        "optimum-habana": row.optimum_habana,
        "transformers": row.transformers,
        "accelerate": row.accelerate,
    }


def test_every_training_argument_is_accepted(description: dict[str, Any]) -> None:
    """The arguments for an HPU, with lazy mode, but without a device."""
    assert description["trainer"] == ["GaudiTrainer", "GaudiTrainingArguments"]
    assert description["arguments"]["use_habana"]
    assert description["arguments"]["use_lazy_mode"]
    assert set(description["arguments"]) <= set(description["arguments_known"])
    assert description["arguments_kept"] == description["arguments"]
    for name in ("distribution_strategy", "ddp_bucket_cap_mb"):
        assert description["arguments"][name] == description["arguments_default"][name], "written down as its default"
    assert description["model_arguments"] == {"attn_implementation": description["attention_default"]}


def test_every_key_of_the_gaudi_config_is_accepted(description: dict[str, Any]) -> None:
    """GaudiConfig silently drops unknown keys."""
    assert description["trainer_arguments"] == ["gaudi_config"]
    assert "gaudi_config" in description["trainer_arguments_known"]
    assert description["config"], "nothing reached GaudiConfig"
    assert set(description["config"]) <= set(description["config_known"])
    assert description["config_kept"] == description["config"]
    assert set(arguments.KEYS) <= set(description["config_known"])
    # A file replaces the default, and an optimizer other than AdamW replaces the fused kernel
    assert description["config_of_a_file"] == {
        "use_fused_adam": False,
        "autocast_bf16_ops": ["mm"],
        "use_torch_autocast": False,
    }


def test_gaudi_trainer_trains_checkpoints_and_resumes(
    run: Run, recipe: tuple[str, ...], gaudi_python: Path, tmp_path: Path
) -> None:
    further = {"gradient_checkpointing": True, "max_grad_norm": 2, "warmup_steps": 2, "adam_beta2": 0.99}
    flags = (f"--training-arguments={json.dumps(further)}", "--class-weights=balanced", "--max-batch-size-per-rank=4")
    recipe = ("finetune-classification", *recipe, *flags)
    output = train(run, MODULE, recipe, gaudi_python, tmp_path / "first", nproc=2)

    assert "batch: 16 = 2 ranks x 4 sequences x 2 accumulated\n" in output
    assert "start: from the pretrained weights\n" in output
    assert f"{SEEDED} 42\n" in output, "the cards' own random numbers are not the seed's"
    lines = run.metrics()
    *logged, result = lines
    assert [line["step"] for line in lines] == [*range(4, 49, 4), 48]
    # No grad_norm: GaudiTrainer logs only the one of Habana's FusedClipNorm.
    assert all(math.isfinite(line[name]) for line in logged for name in ("loss", "learning_rate"))
    assert logged[0]["loss"] > logged[-1]["loss"], "it did not learn"
    memory = {"memory_gib": 1.5, "max_memory_gib": 3.25, "total_memory_gib": 31.73}
    assert all({name: line[name] for name in memory} == memory for line in logged)
    assert result["eval_samples"] == 37
    assert result["eval_accuracy"] > result["eval_majority_accuracy"] + 0.1
    assert run.complete_checkpoints() == [40, 48]
    weights = run.read("model/model.safetensors")
    config = json.loads(run.read("model/config.json"))
    assert config["id2label"] == {"0": "bad", "1": "good"}

    # A second attempt, after one that was interrupted in its last upload.
    run.s3.delete_object(Bucket=run.location.bucket, Key=f"{run.location.key}checkpoints/step-48/manifest.json")
    output = train(run, MODULE, recipe, gaudi_python, tmp_path / "second", nproc=2)

    assert "start: resumed from checkpoint step-40\n" in output
    assert [(line["step"], line.get("loss")) for line in run.metrics()] == [
        (line["step"], line.get("loss")) for line in lines
    ]
    assert run.read("model/model.safetensors") == weights, "the resumed run went another way"


def test_gaudi_trainer_pre_trains_and_evaluates(
    run: Run, pretraining: tuple[str, ...], gaudi_python: Path, tmp_path: Path
) -> None:
    output = train(run, MODULE, ("pretrain-mlm", *pretraining), gaudi_python, tmp_path, nproc=2)

    assert "start: from random weights\n" in output
    lines = run.metrics()
    assert [line["step"] for line in lines if "loss" in line] == [*range(4, 49, 4)]
    evaluated = [line for line in lines if "eval_perplexity" in line]
    assert [line["step"] for line in evaluated] == [16, 32, 48]
    assert lines[0]["loss"] > evaluated[-1]["eval_loss"] + 1, "it did not learn"
    assert run.complete_checkpoints() == [32, 48]
    config = json.loads(run.read("model/config.json"))
    assert config["architectures"] == ["BertForMaskedLM"]


def test_a_script_tunes_with_gaudi_trainer_and_resumes(
    run: Run, gaudi_python: Path, with_peft: dict[str, str], tmp_path: Path
) -> None:
    """jobs/specs/sft-lora with peft, whose call of the library makes GaudiTrainer interruptible."""
    model = save_tiny_llama(tmp_path / "llama")
    data = write_lines(tmp_path / "talks.jsonl", instructions(120))
    script = str(REPOSITORY / "jobs/specs/sft-lora/train.py")
    command = ("script", script, str(model), str(data), *LANGUAGE_MODEL)
    run = replace(run, environment={**run.environment, **with_peft})

    # WHEN the attempt receives a request to stop
    first, second = tmp_path / "first", tmp_path / "second"
    (first / "scratch").mkdir(parents=True)
    RequestFiles(first / "scratch").ask("stop", "notice")
    train(run, MODULE, command, gaudi_python, first, nproc=1)
    [saved] = run.complete_checkpoints()
    assert not (first / "output/adapter").exists()
    # THEN the next attempt saves an adapter, and a merged model that gives the same answers
    output = train(run, MODULE, command, gaudi_python, second, nproc=1)
    assert f"start: resumed from checkpoint step-{saved}\n" in output
    assert "held-out loss on " in output
    compared = (str(model), str(second / "output/adapter"), str(second / "output/model"))
    done = run_python(gaudi_python, run.environment, "-m", "tests.support.container.language_models", *compared)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 0.2  # bf16 has a precision of eight bits
