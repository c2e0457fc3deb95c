"""Token ids in batches: of few widths, padded on the tokenizer's side, read back in the examples' own order."""

from pathlib import Path

import numpy as np
import pytest

from jobs.container.data.labelled_text import Examples
from jobs.container.data.labelled_tokens import InBatches, Prepared, prepare
from tests.support.container.reviews import reviews


@pytest.mark.parametrize("side", ["right", "left"])
def test_batches_are_what_the_tokenizer_makes_of_the_texts_at_that_width(
    tiny_bert: Path, tmp_path: Path, side: str
) -> None:
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
        assert prepared.widths == widths, "of both parts, in steps of 8, at most max_length"
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


def test_an_evaluation_sees_each_example_and_gives_its_results_in_their_own_order(
    tiny_bert: Path, tmp_path: Path
) -> None:
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


def test_the_share_of_padding_is_that_of_the_batches(tiny_bert: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    texts = ["the"] * 5 + ["the " * 14] * 11
    part = Examples(texts=texts, pairs=None, labels=[0, 1] * 8)
    train = _prepared(part, AutoTokenizer.from_pretrained(tiny_bert), tmp_path).train
    # Of the five with 3 tokens, four make a batch of 8; the fifth goes with those that have 16.
    for batch, expected, tokens in ((4, [8, 16], 4 * 8 + 12 * 16), (16, [16], 16 * 16)):
        widths, padding = train.shapes(batch)
        assert widths == expected
        assert padding == pytest.approx(1 - (5 * 3 + 11 * 16) / tokens)


def _prepared(part: Examples, tokenizer: object, folder: Path) -> Prepared:
    parts = {"train": part, "eval": part}
    return prepare(["bad", "good"], parts, tokenizer=tokenizer, max_length=32, folder=folder).bucketed(4, max_length=32)
