"""Resumed trainings have the batches, gradients and final weights of uninterrupted ones."""

import functools
import itertools
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.data_loader import BatchSamplerShard
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, TensorDataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed

from jobs.container import versions
from jobs.container.data.labelled_tokens import bucket_widths, in_batches
from jobs.container.trainer.determinism import BatchOrder, Epoch
from jobs.container.trainer.trainer import Options, trainer_class
from jobs.container.versions import keep_epoch
from jobs.core.errors import TrainyardError
from tests.support.container.launching import PATIENCE_SECONDS


class Once(IterableDataset[Any]):
    """Rows without a length."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self._rows = rows

    def __iter__(self) -> Iterator[Any]:
        return iter(self._rows)


def trained(
    folder: Path,
    resumed_from: Path | None = None,
    *,
    examples: int,
    data: Callable[[Any], Any] = list,
    **arguments: Any,
) -> Any:
    set_seed(7)
    lengths = torch.randint(3, 12, (examples,)).tolist()
    rows = [
        {"input_ids": torch.randint(5, 50, (length,)), "labels": number % 2} for number, length in enumerate(lengths)
    ]

    def collate(batch: list[dict[str, Any]]) -> dict[str, Any]:
        if "train_sampling_strategy" in arguments:  # masked, as for a masked language model
            masked = [torch.where(torch.rand(len(row["input_ids"])) < 0.2, 1, row["input_ids"]) for row in batch]
            batch = [{**row, "input_ids": ids} for row, ids in zip(batch, masked, strict=True)]
        texts = torch.nn.utils.rnn.pad_sequence([row["input_ids"] for row in batch], batch_first=True)
        return {"input_ids": texts, "labels": torch.tensor([row["labels"] for row in batch])}

    model = BertForSequenceClassification(
        BertConfig(vocab_size=50, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
    )
    own: dict[str, Any] = {
        "num_train_epochs": 3,
        "save_strategy": "steps",
        "save_steps": 1,
        "learning_rate": 1e-2,
        **arguments,
    }
    settings = TrainingArguments(
        str(folder),
        per_device_train_batch_size=4,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        **own,
    )
    keep_epoch(Trainer)
    epoch = Epoch(SimpleNamespace(rank=0, is_first=True))  # type: ignore[arg-type]  # all that it needs
    trainer = trainer_class(Trainer)(
        model,
        settings,
        train_dataset=data(rows),
        eval_dataset=rows[:4],
        data_collator=collate,
        options=Options(epoch=epoch, checks_ties=False),
    )
    trainer.callback_handler.callbacks.insert(0, epoch)
    trainer.train(resume_from_checkpoint=str(resumed_from) if resumed_from else None)
    return trainer


def curve(trainer: Any) -> list[tuple[Any, ...]]:
    return [(line["step"], line["epoch"], line["loss"]) for line in trainer.state.log_history if "loss" in line]


@pytest.mark.parametrize(
    ("examples", "resumed_at", "arguments"),
    [
        (20, (2, 3, 5), {"gradient_accumulation_steps": 2}),  # 5 batches by 2: steps of 2, 2 and 1
        # 7 batches by 4: transformers 4.51 takes the last incomplete accumulation without counting a step
        (25, (1,), {"gradient_accumulation_steps": 4}),
        (24, (2, 7), {"train_sampling_strategy": "group_by_length"}),
    ],
    ids=["by 2", "by 4, one left", "grouped by length and masked"],
)
def test_resumed_trainer_ends_like_an_uninterrupted_one(
    examples: int, resumed_at: tuple[int, ...], arguments: dict[str, Any], tmp_path: Path
) -> None:
    whole = trained(tmp_path / "whole", examples=examples, **arguments)
    for step in resumed_at:
        resumed = trained(tmp_path / str(step), tmp_path / f"whole/checkpoint-{step}", examples=examples, **arguments)
        assert resumed.state.global_step == whole.state.global_step > step
        assert curve(resumed) == curve(whole)
        for name, weight in whole.model.state_dict().items():
            assert torch.equal(resumed.model.state_dict()[name], weight), (step, name)


def test_data_that_end_before_the_checkpoints_step_fail(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    arguments: dict[str, Any] = {"examples": 16, "data": Once, "max_steps": 10}
    with caplog.at_level("WARNING", logger="trainyard"):
        whole = trained(tmp_path / "whole", **arguments)
    assert whole.state.global_step == 10
    assert [record.getMessage().partition(" and ended at step 4. ")[1] != "" for record in caplog.records] == [True]
    # Within the first pass over the data it resumes
    assert trained(tmp_path / "3", tmp_path / "whole/checkpoint-3", **arguments).state.global_step == 10
    # After that pass it would end successfully at the step of its checkpoint
    with pytest.raises(TrainyardError, match=r"the training data end before step 4, .* instead of at step 10"):
        trained(tmp_path / "4", tmp_path / "whole/checkpoint-4", **arguments)


def test_late_callback_is_refused_if_an_epoch_has_a_short_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the releases whose Trainer loses that step."""
    monkeypatch.setattr(versions, "LOSES_SHORT_STEP", True)

    def check(batches: int) -> None:
        trainer = SimpleNamespace(
            callback_handler=SimpleNamespace(train_dataloader=DataLoader(TensorDataset(torch.zeros(batches)))),
            args=SimpleNamespace(gradient_accumulation_steps=2, ignore_data_skip=False),
            state=SimpleNamespace(epoch=1.5),
        )
        Epoch(SimpleNamespace(rank=0, is_first=True)).check(trainer, None)  # type: ignore[arg-type]

    check(4)
    with pytest.raises(TrainyardError, match=r"the 5 batches of an epoch are not a multiple .*\nNext: pass the "):
        check(5)


LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=80).map(np.asarray)


def order(buckets: Any, batch: int, *, epoch: float, seed: int = 7) -> BatchOrder:
    state, arguments = SimpleNamespace(epoch=epoch), SimpleNamespace(seed=seed)
    length = -(-len(buckets) // batch) * batch
    shuffled = functools.partial(in_batches, buckets, batch)
    sampler = BatchOrder(shuffled, length, SimpleNamespace(state=state, args=arguments))
    assert len(sampler) % batch == 0
    return sampler


@settings(deadline=None)
@given(sequences=LENGTHS, number=st.integers(1, 4))
def test_bucket_widths_minimize_padding(sequences: Any, number: int) -> None:
    def padded(widths: Any) -> int:
        return int(np.asarray(widths)[np.searchsorted(widths, sequences)].sum())

    found = bucket_widths(sequences, at_most=number)
    ends = range(8, int(sequences.max()) + 8, 8)
    choices = [[*inner, ends[-1]] for count in range(number) for inner in itertools.combinations(ends[:-1], count)]
    assert found[-1] == ends[-1]
    assert padded(found) == min(map(padded, choices))
    assert len(found) <= min(number, len(set(-(-sequences // 8))))


@settings(deadline=None)
@given(sequences=LENGTHS, batch=st.sampled_from([1, 4, 16]), number=st.sampled_from([1, 4]))
def test_epoch_has_every_example_in_whole_batches(sequences: Any, batch: int, number: int) -> None:
    count = len(sequences)
    widths = np.asarray(bucket_widths(sequences, at_most=number))
    places = list(order(np.searchsorted(widths, sequences), batch, epoch=3))

    padded_for, rows = np.divmod(np.asarray(places).reshape(-1, batch), count)
    assert (padded_for == padded_for[:, :1]).all(), "a batch of two widths"
    assert (sequences[rows] <= widths[padded_for]).all(), "a sequence longer than its batch"
    assert len(places) == -(-count // batch) * batch
    assert set(rows.ravel().tolist()) == set(range(count)), "an example is missing"
    assert max(np.bincount(rows.ravel())) <= max(2, -(-batch // count))
    narrowest = np.searchsorted(widths, sequences[rows])
    assert (narrowest < padded_for).sum() < len(widths) * batch, "more moved up than did not fill a batch"


@pytest.mark.parametrize(("ranks", "accumulated"), [(2, 4), (8, 1)])
def test_ranks_share_a_width_and_the_global_batch_at_each_step(ranks: int, accumulated: int) -> None:
    """Batches are distributed as accelerate does it."""
    sequences = np.clip(np.random.default_rng(1000).gamma(2.0, 9.0, 1000), 3, 90).astype(np.int64)
    widths = np.asarray(bucket_widths(sequences, at_most=4))
    sampler = order(np.searchsorted(widths, sequences), 64, epoch=0)
    batches = BatchSampler(sampler, 64 // ranks // accumulated, drop_last=False)
    dealt = [np.asarray(list(BatchSamplerShard(batches, ranks, rank))) for rank in range(ranks)]

    shapes = [(share // 1000).max(axis=1).reshape(-1, accumulated) for share in dealt]
    for share in shapes:
        assert np.array_equal(share, shapes[0]), "ranks differ"
        assert (share == share[:, :1]).all(), "a step of two shapes"
    assert len(np.unique(shapes[0])) == 4
    of_one_rank = np.asarray(list(sampler)).reshape(-1, 64)
    of_all = np.concatenate([share.reshape(len(of_one_rank), -1) for share in dealt], axis=1)
    assert np.array_equal(np.sort(of_all), np.sort(of_one_rank)), "the steps depend on the number of ranks"


def test_order_follows_from_seed_and_epoch() -> None:
    buckets = np.arange(100) % 3
    orders = {(seed, epoch): list(order(buckets, 8, seed=seed, epoch=epoch)) for seed in (1, 2) for epoch in (0, 1)}
    assert len({tuple(places) for places in orders.values()}) == 4
    # Also in the middle of an epoch, where an attempt resumes.
    assert list(order(buckets, 8, seed=1, epoch=1.6)) == orders[1, 1]
    # Without shuffling, a batch is filled with its own examples
    assert in_batches(np.asarray([1, 0, 1]), 4).tolist() == [1 + 3, 0 + 3, 2 + 3, 1 + 3]


def test_gradients_of_four_ranks_ignore_earlier_steps(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "tests.support.container.four_ranks", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    # If the first became true, the correction would no longer be needed.
    assert json.loads(ended.stdout) == {"as it is": False, "arranged": True}
