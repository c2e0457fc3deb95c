"""Trainings of at most a minute, as the flags of a job with its model and data on S3."""

from pathlib import Path
from typing import TYPE_CHECKING

from jobs.core.locations import S3Location
from tests.support.container.packing import publish, save_packed, sentences
from tests.support.container.reviews import reviews, write_jsonl
from tests.support.container.s3_server import put

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

Flags = tuple[str, ...]


def finetuning(s3: "S3Client", model: Path, folder: Path) -> Flags:
    """Return a recipe of 48 steps with a checkpoint every 8.

    The number of held-out examples is a multiple of neither the batch nor the ranks, epochs (of 12 steps) end in the
    middle of a batch, and most checkpoints are in the middle of an epoch.
    """
    train = put(s3, write_jsonl(folder / "train.jsonl", reviews(188, seed=1)), "reviews/train.jsonl")
    held_out = put(s3, write_jsonl(folder / "eval.jsonl", reviews(37, seed=2)), "reviews/eval.jsonl")
    return (
        f"--model={put(s3, model, 'models/tiny-bert')}",
        f"--train-data={train}",
        f"--eval-data={held_out}",
        "--max-length=16",
        "--epochs=4",
        "--learning-rate=0.003",
        "--global-batch-size=16",
        "--eval-batch-size=4",
        "--checkpoint-every-steps=8",
        "--log-every-steps=4",
    )


def longer_finetuning(s3: "S3Client", flags: Flags, folder: Path, key: str) -> Flags:
    """Return a recipe of 120 steps of several accumulated batches, with checkpoints only at a shutdown and at the end.

    Its held-out examples are written to `key`.
    """
    held_out = put(s3, write_jsonl(folder / "eval.jsonl", reviews(200, seed=2)), f"{key}/eval.jsonl")
    return (
        *flags,
        f"--eval-data={held_out}",
        "--epochs=10",
        "--eval-batch-size=2",
        "--max-batch-size-per-rank=4",
        "--checkpoint-every-steps=100000",
        "--evaluate-every-steps=50",
        "--log-every-steps=5",
    )


def packed_sentences(model: Path, folder: Path) -> Path:
    """Save two files. Their sizes and the number of held-out sequences are not multiples of the batch or the ranks."""
    train = [sentences(130, seed=1), sentences(37, seed=2)]
    return save_packed(folder, model, train, sentences(29, seed=3))


def pretraining(s3: "S3Client", packed: Path) -> Flags:
    """Return a recipe of 48 steps, with a checkpoint and an evaluation every 16."""
    run = S3Location("runs", "research/tokenize-20260102-030405-0a1b/")
    publish(packed, s3, run)
    return (
        f"--data={run}",
        "--hidden-size=32",
        "--layers=2",
        "--heads=2",
        "--intermediate-size=64",
        "--max-steps=48",
        "--learning-rate=0.01",
        "--global-batch-size=16",
        "--eval-batch-size=4",
        "--evaluate-every-steps=16",
        "--checkpoint-every-steps=16",
        "--log-every-steps=4",
    )
