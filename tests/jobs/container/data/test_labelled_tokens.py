"""Token ids in batches: few widths, the tokenizer's padding side, results in the examples' order."""

from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from jobs.aws import s3 as object_store
from jobs.container.data.labelled_text import Examples
from jobs.container.data.labelled_tokens import InBatches, Prepared, prepare
from jobs.container.kinds.finetune_classification import _length_buckets
from jobs.core.locations import S3Location
from jobs.core.run import DATA
from jobs.data_checks.data_summary import DataSummary
from jobs.spec.kinds.finetune_classification import FinetuneClassification
from jobs.spec.launcher_options import ACCELERATOR_VARIABLE
from tests.support.container.reviews import reviews

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client


@pytest.mark.parametrize("side", ["right", "left"])
def test_batches_equal_the_tokenizers_output_at_their_width(tiny_bert: Path, tmp_path: Path, side: str) -> None:
    from transformers import BertTokenizerFast

    tokenizer = BertTokenizerFast.from_pretrained(tiny_bert, padding_side=side)
    train = Examples(texts=["the film", "superb"], pairs=["is dull", "a story with a plot"], labels=[0, 1])
    held_out = Examples(texts=["the " * 40], pairs=["cast"], labels=[1])
    for buckets, max_length, widths in ((1, 128, [48]), (1, 12, [12]), (4, 128, [8, 16, 48]), (2, 128, [16, 48])):
        prepared = prepare(
            ["bad", "good"],
            {"train": train, "eval": held_out},
            tokenizer=tokenizer,
            max_length=max_length,
            folder=tmp_path / f"{buckets}-{max_length}",
        ).bucketed(buckets, max_length=max_length)
        assert (prepared.train_examples, prepared.eval_examples) == (2, 1)
        assert prepared.widths == widths, "for both parts, multiples of 8, at most max_length"
        assert prepared.longest == 44, "before it is cut"
        assert [lengths.model_dump() for lengths in prepared.summary.lengths] == [
            {"unit": "tokens", "at": [9, 44, 44, 44]}
        ]
        cut = prepared.summary.cut
        assert cut is not None
        assert (cut.texts, cut.tokens) == ((1, 32) if max_length == 12 else (0, 0))
        assert prepared.train.buckets.tolist() == [0, max(0, len(widths) - 2)]
        for part, examples in ((prepared.train, train), (prepared.evaluation, held_out)):
            for bucket in set(part.buckets.tolist()) | {len(widths) - 1}:
                rows = np.flatnonzero(part.buckets <= bucket)
                expected = tokenizer(
                    [examples.texts[row] for row in rows],
                    [(examples.pairs or [])[row] for row in rows],
                    padding="max_length",
                    truncation=True,
                    max_length=widths[bucket],
                )
                batch = part.__getitems__((rows + bucket * len(examples)).tolist())
                labels = [examples.labels[row] for row in rows]
                assert {name: values.tolist() for name, values in batch.items()} == {**expected, "labels": labels}


def test_evaluation_covers_all_examples_and_restores_order(tiny_bert: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    rows = reviews(37, seed=1, labels=(0, 1))
    part = Examples(texts=[row["text"] for row in rows], pairs=None, labels=[row["label"] for row in rows])
    prepared = _prepared(part, AutoTokenizer.from_pretrained(tiny_bert), tmp_path)
    examples = prepared.evaluation

    batches = InBatches(examples, 8)

    assert len(batches) == 40
    seen = [batches.__getitems__(range(start, start + 8)) for start in range(0, 40, 8)]
    assert [batch["input_ids"].shape[1] for batch in seen] == [8, 16, 16, 16, 16]
    sums = np.concatenate([(batch["input_ids"] * batch["attention_mask"]).sum(dim=1).numpy() for batch in seen])
    assert batches.in_order(sums).tolist() == [
        int(examples[row + len(examples)]["input_ids"].sum()) for row in range(len(examples))
    ]


def test_share_of_padding_matches_the_batches(tiny_bert: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    texts = ["the"] * 5 + ["the " * 14] * 11
    part = Examples(texts=texts, pairs=None, labels=[0, 1] * 8)
    train = _prepared(part, AutoTokenizer.from_pretrained(tiny_bert), tmp_path).train
    # Of the five examples with 3 tokens, four make a batch of width 8; the fifth joins those with 16.
    for batch, expected, tokens in ((4, [8, 16], 4 * 8 + 12 * 16), (16, [16], 16 * 16)):
        widths, padding = train.shapes(batch)
        assert widths == expected
        assert padding == pytest.approx(1 - (5 * 3 + 11 * 16) / tokens)


def _prepared(part: Examples, tokenizer: object, folder: Path) -> Prepared:
    parts = {"train": part, "eval": part}
    return prepare(["bad", "good"], parts, tokenizer=tokenizer, max_length=32, folder=folder).bucketed(4, max_length=32)


@pytest.mark.parametrize(("accelerator", "number"), [("cpu", 4), ("hpu", 2)])
def test_resumed_run_keeps_its_number_of_widths(
    accelerator: str, number: int, s3: "S3Client", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ACCELERATOR_VARIABLE, accelerator)
    run = S3Location("runs", f"research/{tmp_path.name}/")
    rank: Any = SimpleNamespace(run=run)
    arguments = FinetuneClassification(model="m", train_data="t.jsonl")
    assert _length_buckets(rank, arguments, s3) == number
    summary = DataSummary(training=1, classes=[], length_buckets=3)
    object_store.write(s3, run / DATA, summary.model_dump_json().encode())
    assert _length_buckets(rank, arguments, s3) == 3
    assert _length_buckets(rank, arguments.model_copy(update={"length_buckets": 2}), s3) == 2
