"""Which examples a step trains on, of an uninterrupted training and of one that goes on from a checkpoint."""

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from jobs.train.data.labelled_buckets import in_batches
from jobs.train.trainer.determinism import as_it_comes, in_order
from jobs.train.trainer.trainer import Options, trainer_class

EXAMPLES, BATCH, EPOCHS = 40, 8, 3
STEPS = EXAMPLES // BATCH * EPOCHS


class Examples:
    """Whose items are their own numbers. A place of an epoch's order names the bucket, too."""

    def __init__(self, places: list[int]) -> None:
        self._places = places

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, place: int) -> int:
        return self._places[place % len(self)]


class Noted(torch.nn.Module):
    """Notes what it is trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.seen: list[int] = []

    def forward(self, numbers: torch.Tensor) -> dict[str, torch.Tensor]:
        self.seen += numbers.tolist()
        return {"loss": (self.weight * numbers).mean()}


class SaveAndStop(TrainerCallback):  # type: ignore[misc]  # transformers has no types
    """As an attempt that is interrupted."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, _args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self._step:
            control.should_save = control.should_training_stop = True


def trained(
    folder: Path, *, shuffles: bool, accumulated: int, stop: int | None = None, resumed: int | None = None
) -> list[list[int]]:
    """The examples of each step."""
    if shuffles:  # as a fine-tuning
        buckets = np.arange(EXAMPLES) % 3
        places, schedule = list(range(EXAMPLES)), {"num_train_epochs": EPOCHS}
        options = Options(sampler=in_order(functools.partial(in_batches, buckets, BATCH), EXAMPLES))
    else:  # as a pre-training
        chance = np.random.default_rng(1)
        places = [int(place) for _ in range(EPOCHS) for place in chance.permutation(EXAMPLES)]
        options, schedule = Options(sampler=as_it_comes), {"max_steps": STEPS}
    model = Noted()
    trainer = trainer_class(Trainer)(
        model=model,
        args=TrainingArguments(
            output_dir=str(folder),
            per_device_train_batch_size=BATCH // accumulated,
            gradient_accumulation_steps=accumulated,
            save_strategy="no",
            remove_unused_columns=False,
            use_cpu=True,
            disable_tqdm=True,
            report_to=[],
            **schedule,
        ),
        train_dataset=Examples(places),
        data_collator=lambda numbers: {"numbers": torch.tensor(numbers)},
        callbacks=[SaveAndStop(stop)] if stop else [],
        options=options,
    )
    trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{resumed}") if resumed else None)
    return np.asarray(model.seen).reshape(-1, BATCH).tolist()


@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize("shuffles", [True, False], ids=["fine-tuning", "pre-training"])
def test_two_interruptions_leave_no_example_out_and_take_none_twice(
    *, shuffles: bool, accumulated: int, tmp_path: Path
) -> None:
    attempt = functools.partial(trained, tmp_path, shuffles=shuffles, accumulated=accumulated)
    whole = attempt()
    # Once in the midst of the second epoch, once at its end.
    interrupted = [*attempt(stop=7), *attempt(resumed=7, stop=10), *attempt(resumed=10)]
    assert interrupted == whole
    epochs = np.asarray(interrupted).reshape(EPOCHS, EXAMPLES)
    assert np.array_equal(np.sort(epochs), [np.arange(EXAMPLES)] * EPOCHS)
    assert len({tuple(epoch) for epoch in epochs.tolist()}) == EPOCHS, "the epochs have one order"
