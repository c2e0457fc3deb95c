"""Attempts of one run in this process, on one rank, with a tiny model and given evaluation results."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import is_initialized

from jobs.aws import s3 as object_store
from jobs.container.accelerator import Accelerator
from jobs.container.channel import RankStatus, RequestFiles, write_comparison
from jobs.container.rank import Rank
from jobs.container.saving.manifest import Retention, Throughput
from jobs.container.saving.metrics import RunMetrics
from jobs.container.saving.upload import CheckpointUploads
from jobs.container.trainer.training import Task, train
from jobs.core.locations import S3Location
from jobs.spec.kinds.finetune_classification import FinetuneClassification
from jobs.spec.kinds.pretrain_mlm import PretrainMlm
from jobs.spec.sweep import Comparison

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client


LOSSES = {3: 0.9, 6: 0.5, 9: 0.7, 12: 0.5, 15: 0.4, 18: 0.3}
"""The loss of the evaluation at each step. After two evaluations without an improvement, the training stops."""


class Examples:
    """Ten examples of two tokens in two classes. With four per step, an epoch has three steps."""

    def __len__(self) -> int:
        return 10

    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        return [{"input_ids": [index % 8, 1], "labels": index % 2} for index in indices]


@dataclass
class Attempts:
    """Attempts of one run in this process."""

    rank: Rank
    s3: "S3Client"
    run: S3Location
    losses: dict[int, float] = field(default_factory=lambda: dict(LOSSES))
    """The loss of the evaluation at each step."""
    comparison: Comparison | None = None
    """The comparison with other points, if the run is a point of a sweep."""
    evaluated: list[tuple[int, bytes]] = field(default_factory=list)
    """Step and weights of each evaluation."""
    number: int = 0

    def train(self, *, interrupt_at: int | None = None, fail_at: int | None = None, **arguments: Any) -> dict[str, Any]:
        """Train and return the result. The evaluation after a given step is interrupted by the launcher, or fails."""
        self.number += 1
        scratch = self.rank.scratch / f"{self.run.key}{self.number}"
        rank = replace(self.rank, run=self.run, scratch=scratch, attempt=self.number)
        # As with a real launcher, threads of a failed attempt no longer write.
        object_store.write(self.s3, self.run / f"attempts/{self.number}.json", b"{}")
        rank.scratch.mkdir(parents=True)
        self.scratch = rank.scratch
        if self.comparison is not None:
            write_comparison(rank.scratch, self.comparison)

        def evaluate(trainer: Any) -> Mapping[str, float]:
            step = trainer.state.global_step
            assert not is_initialized(), "one rank is a plain process"
            assert trainer.model_wrapped is trainer.model
            if step == fail_at:
                raise RuntimeError("cut off")
            if step == interrupt_at:
                RequestFiles(rank.scratch).ask("stop", "SIGTERM")
                trainer.callback_handler.on_prediction_step(trainer.args, trainer.state, trainer.control)
            self.evaluated.append((step, weights(trainer.model.state_dict())))
            return {"eval_loss": self.losses[step]}

        recipe = FinetuneClassification(
            **{
                "model": "m",
                "train_data": "t.jsonl",
                "global_batch_size": 4,
                "learning_rate": 0.01,
                "checkpoint_every_steps": 4,
                "evaluate_every_steps": "epoch",
                "metric_for_best_model": "eval_loss",
                "early_stopping_patience": 2,
                "keep_checkpoints": 1,
                "log_every_steps": 1,
                **arguments,
            }
        )
        task = Task(
            model=lambda _: tiny(),
            start="nothing",
            train_data=Examples(),
            order=lambda chance: chance.permutation(12) % 10,
            eval_data=Examples(),
            collate=collate,
            evaluate=evaluate,
            save_beside=lambda folder: (folder / "vocab.txt").touch(),
            schedule={"num_train_epochs": 6},
        )
        accelerator = Accelerator(name="cpu", devices=0, reason="asked for")
        train(rank, recipe, task, s3=self.s3, accelerator=accelerator)
        return dict(RankStatus.read(rank.scratch).result)

    def read(self, name: str) -> bytes:
        place = self.run / name
        return self.s3.get_object(Bucket=place.bucket, Key=place.key)["Body"].read()

    def model(self) -> bytes:
        from safetensors.torch import load

        return weights(load(self.read("model/model.safetensors")))

    def curve(self) -> list[dict[str, Any]]:
        rows = [json.loads(line) for line in self.read("metrics.jsonl").splitlines()]
        kept = [{name: row[name] for name in row if not name.endswith(("time", "second", "seconds"))} for row in rows]
        # An evaluation that a resumed run catches up on comes after the other line of its step, not before.
        return sorted(kept, key=lambda row: (row["step"], sorted(row)))


def uploads_of(rank: Rank, s3: "S3Client | None" = None, **retention: int) -> CheckpointUploads:
    """Return the uploads of a rank whose training a test simulates."""
    arguments = PretrainMlm(data="run://tokens")
    return CheckpointUploads(rank, s3, arguments, metrics_of(rank), Retention(**retention))


def metrics_of(rank: Rank, s3: "S3Client | None" = None, **options: Any) -> RunMetrics:
    """Return the metrics of a new run, with changes by `options`."""
    begins: dict[str, Any] = {
        "resumed_from_step": 0,
        "throughput": Throughput(),
        "samples_per_step": 1,
        "warmup_steps": 0,
    }
    return RunMetrics(rank, s3, **{**begins, **options})


def weights(state: Mapping[str, torch.Tensor]) -> bytes:
    return b"".join(state[name].numpy().tobytes() for name in sorted(state))


def collate(examples: list[dict[str, Any]]) -> dict[str, Any]:
    return {name: torch.tensor([example[name] for example in examples]) for name in examples[0]}


def tiny() -> Any:
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"vocab_size": 8, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    return BertForSequenceClassification(BertConfig(**sizes, intermediate_size=8, max_position_embeddings=8))
