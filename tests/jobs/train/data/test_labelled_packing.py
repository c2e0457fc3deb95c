"""Several examples in one row: the model makes of them, and learns from them, what it would if they were padded."""

import json
import re
import shutil
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from jobs.contract.errors import UsageError
from jobs.contract.locations import S3Location
from jobs.kinds.finetune_classification import FinetuneClassification
from jobs.train.data.labelled_packing import PackedExamples, in_strata, laid_out, rooms
from jobs.train.data.labelled_text import Examples
from jobs.train.data.labelled_tokens import Prepared, prepare
from jobs.train.kinds import finetune_classification
from jobs.train.rank import Rank
from tests.support.train.launching import NewRun
from tests.support.train.reviews import reviews, write_jsonl
from tests.support.train.widths import widths_of

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client


MODEL = "model/model.safetensors"


@pytest.mark.parametrize(("count", "batch"), [(16, 16), (17, 16), (31, 16), (500, 32), (1000, 128)])
def test_an_epoch_has_every_example_in_steps_of_which_each_fits_its_rows(count: int, batch: int) -> None:
    lengths = np.random.default_rng(count).integers(3, 90, count)
    steps = set()
    for at_once in (batch, batch // 2, batch // 8):
        order = in_strata(lengths, batch, at_once, np.random.default_rng([7, 1]))
        batches = order.reshape(-1, at_once)
        assert len(order) == -(-count // batch) * batch
        assert set(order.tolist()) == set(range(count)), "an example is missing"
        assert max(np.bincount(order)) <= 2
        assert (lengths[batches] <= rooms(lengths, at_once)).all()
        steps.add(np.sort(order.reshape(-1, batch)).tobytes())
    assert len(steps) == 1, "the steps depend on the number of ranks"
    again, others = (in_strata(lengths, batch, batch // 8, np.random.default_rng([7, epoch])) for epoch in (1, 2))
    assert np.array_equal(order, again)
    assert count == batch or not np.array_equal(np.sort(order.reshape(-1, batch)), np.sort(others.reshape(-1, batch)))


def test_the_spots_of_a_row_do_not_overlap_and_the_rows_are_those_that_cost_least() -> None:
    found = np.asarray([60, 50, 41, 40, 33, 30, 12, 9])
    rows, width, starts = laid_out(found)
    assert (rows, width) == (3, 96), "288 for 275"
    taken = np.concatenate([np.arange(start, start + room) for start, room in zip(starts, found, strict=True)])
    assert len(np.unique(taken)) == len(taken)
    assert taken.max() < rows * width
    assert (starts // width == (starts + found - 1) // width).all(), "an example lies across two rows"
    assert laid_out(np.asarray([600]))[:2] == (1, 600)


@pytest.mark.every_release
@pytest.mark.parametrize("kind", ["bert", "xlm-roberta"])
def test_packed_pairs_have_the_logits_the_losses_and_the_training_of_padded_ones(
    kind: str, tiny_bert: Path, tmp_path: Path
) -> None:
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    from jobs.train.models import packed_classifiers

    tokenizer = AutoTokenizer.from_pretrained(tiny_bert)
    if kind == "xlm-roberta":
        tokenizer.model_input_names = ["input_ids", "attention_mask"]
    prepared = _prepared(tokenizer, tmp_path)
    padded, packed = prepared.train, PackedExamples(prepared.train, 16)
    widest = (len(prepared.widths) - 1) * len(padded)  # what an example's place there is more than its number
    folder = _save_random(kind, tmp_path / "model")
    # In float64, whose noise hides nothing; without dropout, which draws for each token of a batch.
    reference = AutoModelForSequenceClassification.from_pretrained(folder).double()
    model = packed_classifiers.CLASSES[kind].from_pretrained(folder).double()
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.003) for each in (reference, model)]

    for numbers in packed.order(32, np.random.default_rng(1)).reshape(-1, 16).tolist():
        batch = packed.__getitems__(numbers)
        assert batch["input_ids"].shape == (packed.rows, packed.width)
        assert packed.rows < 16
        expected = reference(**padded.__getitems__([number + widest for number in numbers]))
        found = model(**batch)
        torch.testing.assert_close(found.logits, expected.logits, atol=1e-8, rtol=0)
        torch.testing.assert_close(found.loss, expected.loss, atol=1e-8, rtol=0)
        for optimizer, loss in zip(optimizers, (expected.loss, found.loss), strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert found.logits.std() > 0.2
    # What is not packed it takes as the class that it is named for.
    batch = padded.__getitems__([widest, widest + 1])
    torch.testing.assert_close(model(**batch).logits, reference(**batch).logits, atol=1e-8, rtol=0)
    assert type(model).__name__ == type(reference).__name__


def test_a_resumed_attempt_has_the_weights_of_the_whole_run_and_two_ranks_that_accumulate_have_its_losses(
    new_run: NewRun, tiny_bert: Path, tmp_path: Path
) -> None:
    model = _with(tiny_bert, tmp_path / "model", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    flags = (
        f"--model={model}",
        f"--train-data={write_jsonl(tmp_path / 'train.jsonl', reviews(188, seed=1))}",
        f"--eval-data={write_jsonl(tmp_path / 'eval.jsonl', reviews(37, seed=2))}",
        "--packing=true",
        "--max-length=16",
        "--epochs=4",
        "--learning-rate=0.003",
        "--global-batch-size=16",
        "--checkpoint-every-steps=8",
        "--keep-checkpoints=6",
        "--log-every-steps=1",
    )
    whole = new_run()
    launched = whole.attempt(*flags)
    assert "data: 16 packed into " in launched.output
    weights = whole.read(MODEL)
    curve = [line["loss"] for line in whole.metrics()[:-1]]
    assert len(curve) == 48

    # As after a kill in the second epoch, of which four of twelve steps are done.
    for name in (MODEL, *(f"checkpoints/step-{step}/manifest.json" for step in (24, 32, 40, 48))):
        whole.s3.delete_object(Bucket=whole.location.bucket, Key=f"{whole.location.key}{name}")
    resumed = whole.attempt(*flags, attempt=2)
    assert "start: resumed from checkpoint step-16\n" in resumed.lines
    assert whole.read(MODEL) == weights
    assert [line["loss"] for line in whole.metrics()[:-1]] == curve

    run = new_run()
    first = run.start(*flags, "--max-batch-size-per-rank=4", nproc=2)
    first.wait_for_line("checkpoint: step 8,")
    assert first.kill() == -signal.SIGKILL
    run.wait_until_gone()
    second = run.attempt(*flags, "--max-batch-size-per-rank=4", nproc=2, attempt=2)

    assert "start: resumed from checkpoint step-" in second.output
    assert "batch: 16 = 2 ranks x 4 sequences x 2 accumulated\n" in second.lines
    assert [line["loss"] for line in run.metrics()[:-1]] == pytest.approx(curve, abs=2e-4)
    accuracies = [each.receipt().result["eval_accuracy"] for each in (whole, run)]
    assert accuracies[0] == accuracies[1] > 0.7


def test_a_model_of_another_type_is_refused_before_anything_is_tokenized(
    tiny_bert: Path, s3: "S3Client", tmp_path: Path
) -> None:
    from torch.distributed import HashStore  # type: ignore[attr-defined]  # re-exported from C++

    model = _with(tiny_bert, tmp_path / "model", model_type="deberta-v2")
    arguments = {"model": str(model), "train_data": "none.jsonl", "packing": True, "max_length": 32}
    rank = Rank(
        rank=0,
        local_rank=0,
        world_size=1,
        local_world_size=1,
        node=0,
        nnodes=1,
        run=S3Location("runs", "research/none/"),
        scratch=tmp_path,
    )
    vars(rank)["store"] = HashStore()
    told = f"{model} is of type 'deberta-v2': examples are packed for bert, roberta and xlm-roberta only"
    with pytest.raises(UsageError, match=f"{re.escape(told)}\nNext: set packing to false"):
        finetune_classification._prepare(rank, FinetuneClassification.model_validate(arguments), s3)


def _with(model: Path, copy: Path, **configuration: Any) -> Path:
    shutil.copytree(model, copy)
    path = copy / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **configuration}))
    return copy


def _prepared(tokenizer: Any, folder: Path) -> Prepared:
    rows = reviews(376, seed=1, labels=(0, 1))
    pairs = Examples(
        texts=[row["text"] for row in rows[:188]],
        pairs=[row["text"] for row in rows[188:]],
        labels=[row["label"] for row in rows[188:]],
    )
    parts = {"train": pairs, "eval": pairs}
    return prepare(["bad", "good"], parts, tokenizer=tokenizer, max_length=30, folder=folder).bucketed(widths_of(4, 30))


def _save_random(kind: str, folder: Path) -> Path:
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        kind,
        vocab_size=25,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=32,
        pad_token_id=0,
        type_vocab_size=2 if kind == "bert" else 1,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        initializer_range=0.3,  # logits that differ
        num_labels=2,
    )
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    return folder
