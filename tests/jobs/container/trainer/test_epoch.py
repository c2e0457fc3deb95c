"""A Trainer of a script that resumes within an epoch ends with the weights of one that nobody interrupted."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed

from jobs.container.trainer import compat
from jobs.container.trainer.epoch import Epoch
from jobs.container.trainer.trainer import Options, trainer_class
from jobs.core.errors import TrainyardError


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
        if arguments.get("group_by_length"):  # and masks, as for a masked language model
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
    compat.keep_epoch(Trainer)
    epoch = Epoch(SimpleNamespace(rank=0, is_first=True))  # type: ignore[arg-type]  # all that it asks of a rank
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
        # 7 by 4, of which transformers 4.51 trains on one and makes no step of it
        (25, (1,), {"gradient_accumulation_steps": 4}),
        (24, (2, 7), {"group_by_length": True}),
    ],
    ids=["by 2", "by 4, one left", "grouped by length and masked"],
)
def test_a_resumed_trainer_ends_as_an_uninterrupted_one(
    examples: int, resumed_at: tuple[int, ...], arguments: dict[str, Any], tmp_path: Path
) -> None:
    whole = trained(tmp_path / "whole", examples=examples, **arguments)
    for step in resumed_at:
        resumed = trained(tmp_path / str(step), tmp_path / f"whole/checkpoint-{step}", examples=examples, **arguments)
        assert resumed.state.global_step == whole.state.global_step > step
        assert curve(resumed) == curve(whole)
        for name, weight in whole.model.state_dict().items():
            assert torch.equal(resumed.model.state_dict()[name], weight), (step, name)


def test_data_that_end_before_the_step_of_the_checkpoint_fail_the_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    arguments: dict[str, Any] = {"examples": 16, "data": Once, "max_steps": 10}
    with caplog.at_level("WARNING", logger="trainyard"):
        whole = trained(tmp_path / "whole", **arguments)
    assert whole.state.global_step == 10
    assert [record.getMessage().partition(" and ended at step 4. ")[1] != "" for record in caplog.records] == [True]
    # Within the first reading of the data it resumes
    assert trained(tmp_path / "3", tmp_path / "whole/checkpoint-3", **arguments).state.global_step == 10
    # After it, it would end at the step of its checkpoint, and well
    with pytest.raises(TrainyardError, match=r"the training data end before step 4, .* not at step 10"):
        trained(tmp_path / "4", tmp_path / "whole/checkpoint-4", **arguments)


def test_a_callback_that_comes_late_is_refused_if_an_epoch_ends_with_a_smaller_step() -> None:
    def check(batches: int) -> None:
        trainer = SimpleNamespace(
            callback_handler=SimpleNamespace(train_dataloader=DataLoader(TensorDataset(torch.zeros(batches)))),
            args=SimpleNamespace(gradient_accumulation_steps=2, ignore_data_skip=False),
            state=SimpleNamespace(epoch=1.5),
        )
        Epoch(SimpleNamespace(rank=0, is_first=True)).check(trainer, None)  # type: ignore[arg-type]

    check(4)
    with pytest.raises(TrainyardError, match=r"the 5 batches of an epoch are no multiple .*\nNext: give the "):
        check(5)
