"""The HPU branch without optimum-habana, with the real classes of a release's transformers and accelerate.

    make contract                      every release
    make contract RELEASE=1.24.0       one release

Otherwise the default release is tested. transformers_on_hpu.py describes the replacement of Habana's bridge. No tensor
is on an HPU.
"""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from jobs.core.images import release
from tests.support.container import image_environment, transformers_on_hpu
from tests.support.container.hpu_ranks import described, train
from tests.support.container.launching import Run

MODULE = transformers_on_hpu.__name__

ROW = release(image_environment.chosen_release())

pytestmark = pytest.mark.every_release


@pytest.fixture(scope="session")
def description(gaudi_python: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    lazy = transformers_on_hpu.HPU.environment
    answer: dict[str, Any] = json.loads(described(gaudi_python, MODULE, tmp_path_factory.mktemp("home"), **lazy))
    return answer


def test_the_package_versions_match_the_release(description: dict[str, Any]) -> None:
    assert description["versions"] == {"transformers": ROW.transformers, "accelerate": ROW.accelerate}


def test_every_argument_is_accepted(description: dict[str, Any]) -> None:
    assert description["trainer"] == [
        "transformers.trainer.Trainer",
        "transformers.training_args.TrainingArguments",
    ]
    assert description["arguments"], "nothing reached TrainingArguments"
    assert set(description["arguments"]) <= set(description["arguments_known"])
    assert description["arguments_kept"] == description["arguments"]
    assert description["trainer_arguments"] == {}


def test_it_trains_on_the_hpu_in_bf16_without_optimum_habana(description: dict[str, Any]) -> None:
    """optimum-habana is installed, but not used."""
    assert (description["device"], description["of_accelerate"]) == ("hpu:0", "hpu")
    assert description["cards"] == 1, "more than one would be copied to by nn.DataParallel"
    assert description["autocast"] == {"hpu": True, "dtype": "torch.bfloat16"}
    assert description["memory"] == {"memory_gib": 1.5, "max_memory_gib": 3.25, "total_memory_gib": 32.0}
    assert description["imported"] == []


@pytest.mark.parametrize(
    "nproc", [1, 2] if image_environment.chosen_release() else [1]
)  # two ranks only in `make contract`
def test_it_trains_checkpoints_and_resumes(
    run: Run, recipe: tuple[str, ...], gaudi_python: Path, tmp_path: Path, nproc: int
) -> None:
    """Two ranks train as on several HPUs: DistributedDataParallel over a backend named HCCL."""
    command = ("finetune-classification", *recipe)

    def attempt(name: str) -> str:
        variables = transformers_on_hpu.ENVIRONMENT
        return train(run, MODULE, command, gaudi_python, tmp_path / name, nproc=nproc, **variables)

    assert "start: from the pretrained weights\n" in attempt("first")
    lines = run.metrics()
    *logged, result = lines
    assert [line["step"] for line in lines] == [*range(4, 49, 4), 48]
    assert all(math.isfinite(line[name]) for line in logged for name in ("loss", "learning_rate", "grad_norm"))
    assert logged[0]["loss"] > logged[-1]["loss"], "it did not learn"
    assert all(line["total_memory_gib"] == 32.0 for line in logged)
    assert result["eval_accuracy"] > result["eval_majority_accuracy"] + 0.2
    assert run.complete_checkpoints() == [40, 48]
    kept = [name for name in run.keys("checkpoints/step-48/") if "rng_state" in name] + ["model/model.safetensors"]
    assert len(kept) == nproc + 1
    before = [run.read(name) for name in kept]

    # A second attempt, after one that was interrupted in its last upload.
    run.s3.delete_object(Bucket=run.location.bucket, Key=f"{run.location.key}checkpoints/step-48/manifest.json")
    assert "start: resumed from checkpoint step-40\n" in attempt("second")

    assert [(line["step"], line.get("loss")) for line in run.metrics()] == [
        (line["step"], line.get("loss")) for line in lines
    ]
    after = [run.read(name) for name in kept]
    assert after == before, "the resumed run went another way, or an HPU's random numbers did"
