"""A training whose last evaluation fails, in this process: the model is there, and the run can be ended."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
import transformers.trainer  # noqa: F401 - before `_without_datasets`, which is undone again
from torch.distributed import is_initialized
from transformers.utils import import_utils

from jobs.contract.errors import TrainyardError
from jobs.kinds.finetune_classification import FinetuneClassification
from jobs.train.accelerator import Accelerator
from jobs.train.channel import RankStatus
from jobs.train.rank import Rank
from jobs.train.trainer.training import Task, train
from tests.support.train.attempts import collate, tiny

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

STEPS = 3


class Seeded(Accelerator):
    """A CPU whose Trainer is seeded by the accelerator's own function, as an HPU's has to be."""

    seeds: ClassVar[list[int]] = []

    def set_seed(self, seed: int) -> None:
        self.seeds.append(seed)
        super().set_seed(seed)


class Examples:
    """Sequences of two tokens in two classes."""

    def __len__(self) -> int:
        return 8

    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        return [{"input_ids": [index % 8, 1], "labels": index % 2} for index in indices]


def test_a_run_whose_last_evaluation_fails_has_its_model_and_can_be_ended(
    first_rank: Callable[[int], Rank], s3: "S3Client", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(import_utils, "_datasets_available", import_utils._datasets_available)
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)  # as torchrun does
    seen: list[set[str]] = []

    def keys(below: str) -> set[str]:
        run = rank.run / below
        return {Path(item["Key"]).name for item in s3.list_objects_v2(Bucket=run.bucket, Prefix=run.key)["Contents"]}

    def evaluate(trainer: Any) -> dict[str, float]:
        seen.append(keys("model/"))
        # One rank is a plain process; of several none sends the others what no step changes
        assert not is_initialized()
        assert trainer.model_wrapped is trainer.model
        assert trainer.args.ddp_broadcast_buffers is False
        return {"eval_accuracy": 1 / 0}

    def save_beside(folder: Path) -> None:
        (folder / "vocab.txt").write_text("[PAD]")

    def attempt(**arguments: Any) -> Rank:
        begun = replace(first_rank(1), scratch=first_rank(1).scratch / str(arguments))
        begun.scratch.mkdir(parents=True)
        recipe = FinetuneClassification(model="m", train_data="t.jsonl", global_batch_size=4, **arguments)
        task = Task(
            model=lambda _: tiny(),
            start="nothing",
            train_data=Examples(),
            eval_data=Examples(),
            collate=collate,
            evaluate=evaluate,
            save_beside=save_beside,
            schedule={"max_steps": STEPS},
        )
        train(begun, recipe, task, s3=s3, accelerator=Seeded(name="cpu", devices=0, reason="asked for"))
        return begun

    rank = first_rank(1)
    # WHEN the evaluation after the last step fails, THEN the model was on S3 before, and the error says how to go on
    said = r"the evaluation after the last step failed: ZeroDivisionError: .*; the model is complete in .*model/\n"
    with pytest.raises(TrainyardError, match=said + r"Next: trainyard resume RUN --set arguments\.final_evaluation="):
        attempt()
    assert seen == [{"config.json", "model.safetensors", "vocab.txt"}]
    assert Seeded.seeds == [FinetuneClassification.model_fields["seed"].default]

    # WHEN it is resumed without it, THEN the run ends, with the result that there is
    status = RankStatus.read(attempt(final_evaluation=False).scratch)
    assert status.resumed_from_step == STEPS
    assert set(status.result) == {"train_samples_per_second", "train_runtime_seconds"}
    assert len(seen) == 1
