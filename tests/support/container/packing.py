"""Packed tokens for pre-training: sentences in which each word follows from its neighbours."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from jobs.aws import s3 as object_store
from jobs.container.data import packed_tokens
from jobs.container.data.artifacts import Builder
from jobs.container.data.packed_tokens import INDEX, TOKENIZER, Index, pack
from jobs.core.locations import S3Location
from tests.support.container.reviews import FILLER

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client


def sentences(count: int, *, seed: int) -> list[str]:
    """Return sentences that each follow a part of one cycle of words."""
    chance = random.Random(seed)
    circle = (*FILLER, *FILLER)
    starts = [chance.randrange(len(FILLER)) for _ in range(count)]
    return [" ".join(circle[start : start + chance.randint(6, 12)]) for start in starts]


def save_packed(
    folder: Path,
    tokenizer_folder: Path,
    train: Sequence[Sequence[str]],
    held_out: Sequence[str],
    *,
    sequence_length: int = 16,
) -> Path:
    """Write packed tokens as the job `tokenize` does, with one file for each list of training texts."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    tokenizer.save_pretrained(folder / TOKENIZER)

    def packed(name: str, texts: Sequence[str]) -> packed_tokens.PackedFile:
        ids = np.concatenate([np.asarray(row, np.uint32) for row in tokenizer(list(texts))["input_ids"]])
        return pack(
            [ids],
            folder / name,
            sequence_length=sequence_length,
            vocabulary_size=len(tokenizer),
            pad_id=tokenizer.pad_token_id,
        )

    index = Index(
        sequence_length=sequence_length,
        vocabulary_size=len(tokenizer),
        special_ids={name: getattr(tokenizer, f"{name}_token_id") for name in ("pad", "unk", "cls", "sep", "mask")},
        files={
            "train": [packed(f"train-{number:05}.npy", texts) for number, texts in enumerate(train)],
            "held-out": [packed("held-out-00000.npy", held_out)],
        },
    )
    (folder / INDEX).write_text(index.model_dump_json())
    return folder


def publish(folder: Path, s3: "S3Client", run: S3Location, *, kind: str = packed_tokens.KIND) -> Builder:
    """Upload the files of `folder` as the artifact of a run."""
    builder = Builder(s3, run, kind=kind, version=packed_tokens.VERSION, options={"folder": str(folder)}, inputs={})
    for name in object_store.files_below(folder):
        builder.put_file(folder / name, name)
    builder.finish({})
    return builder
