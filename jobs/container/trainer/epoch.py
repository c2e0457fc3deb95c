"""Resume the Trainer of a script within an epoch, at the batch and in the order of an uninterrupted run.

The Trainer computes its place in an epoch from the step alone, and restores the random numbers after the epoch's first
batch. Both are wrong in some trainings:

- If the batches of an epoch are no multiple of `gradient_accumulation_steps`, its last step has fewer of them.
  transformers 4.49 and 4.51 do not count that step when they resume, and no release makes it in the epoch that it
  resumes in.
- If a sampler draws from the global random numbers as an epoch begins (`group_by_length`), the rest of a resumed epoch
  has another order.
- If the collator draws random numbers (masked language modelling), the batches that are fetched ahead of a save have
  taken theirs before it, so the resumed run draws others.
- If the data have no length, the Trainer does not know how often it has read them, skips all, and ends.

So `Epoch` takes the place from the epoch that the Trainer has saved, keeps the random numbers of the epoch's beginning
in each checkpoint, gives each batch random numbers of its own, and raises an error if nothing is left to train on. Our
own kinds need none of it: their order follows from the seed and the epoch, in whole steps (determinism.py).
"""

import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from jobs.container.callback import Callback
from jobs.container.saving.random_state import random_state, set_random_state
from jobs.core.errors import TrainyardError

if TYPE_CHECKING:
    from jobs.container.rank import Rank

log = logging.getLogger("trainyard")


class Epoch(Callback):
    """One rank's place in the epoch. It is the first callback, so that all others see the right epoch."""

    def __init__(self, rank: "Rank") -> None:
        self._rank = rank
        self._batches: int | None = None
        """Batches of a whole epoch; None if the data have no length."""
        self._rest: int | None = None
        """Batches of the epoch that the attempt resumes in, from there to its end."""
        self._has_smaller_step = self._is_counted = False
        self._resumed_epoch: int | None = None
        self._passes = 0
        self._first_step = 0
        self._number = -1
        """The epoch that the attempt is in; it has not begun one yet."""
        self._random: Any = None
        self._kept: Any = None
        self._fetched = 0

    def take_loader(self, loader: Any, accumulated: int) -> None:
        """Note how many batches an epoch has, before the Trainer asks. `accumulated`: batches of a step."""
        try:
            self._batches = len(loader)
        except (TypeError, NotImplementedError):
            return
        self._has_smaller_step = self._batches % accumulated != 0
        if self._has_smaller_step:
            whole = self._batches
            _shorten(loader.batch_sampler, lambda: whole if self._rest is None else self._rest)

    def check(self, trainer: Any, folder: Path | None) -> None:
        """Raise TrainyardError if an epoch has a smaller step that this Trainer could not resume after.

        `folder` is that of the checkpoint that the training resumes from, if there is one.

        A Trainer that got its callback late is past the point where this can be changed.
        """
        loader, accumulated = trainer.callback_handler.train_dataloader, trainer.args.gradient_accumulation_steps
        if self._is_counted:
            return
        if self._batches is None:  # it came late
            self.take_loader(loader, accumulated)
            if folder is not None and not self._has_smaller_step:
                self.resume(trainer, folder)
        if self._has_smaller_step:
            raise TrainyardError(
                f"the {self._batches} batches of an epoch are no multiple of gradient_accumulation_steps "
                f"({accumulated}), and this training could not be resumed as if uninterrupted",
                next_step="give the Trainer the callback when it is made, Trainer(…, callbacks=[trainyard.Callback()])",
            )

    def collating(self, collate: Callable[[Any], Any], args: Any) -> Callable[[Any], Any]:
        """Return a collator whose random numbers follow from the seed, the epoch, the batch and the rank alone.

        Workers of the data loader do not know which batch they have: theirs stays as it is.
        """
        return collate if args.dataloader_num_workers else _Collator(collate, lambda: self._seed(args.seed))

    def _seed(self, seed: int) -> int:
        self._fetched += 1
        return int(np.random.SeedSequence([seed, self._number, self._fetched, self._rank.rank]).generate_state(1)[0])

    def steps_of_epoch(self, steps: int, trainer: Any) -> int:
        """Return the steps of an epoch, for a Trainer that will divide the step that it resumes at by them."""
        self._is_counted = True
        return _Steps(steps).of(self, trainer) if self._has_smaller_step else steps

    def place(self, trainer: Any) -> tuple[int, int]:
        """Return the epoch that the Trainer's state is in, and the number of its batches that are done."""
        epoch = int(trainer.state.epoch or 0.0)
        return epoch, round(((trainer.state.epoch or 0.0) - epoch) * (self._batches or 0))

    def resume(self, trainer: Any, folder: Path) -> None:
        """Continue where the Trainer's state, just loaded from the checkpoint in `folder`, is."""
        epoch, done = self.place(trainer)
        self._number, self._fetched = epoch - 1, 0 if trainer.args.ignore_data_skip else done
        if self._batches is None:  # read from its beginning, and what was trained on is fetched again
            self._number, self._fetched = -1, 0
        if trainer.args.ignore_data_skip or (self._batches is not None and not done):
            return  # it begins an epoch
        kept = folder / _file(self._rank.rank)
        if kept.exists():
            self._kept = torch.load(kept, map_location="cpu", weights_only=False)  # our own, of a verified checkpoint
        if self._has_smaller_step and self._batches is not None:
            self._resumed_epoch, self._rest = epoch, self._batches - done

    def on_epoch_begin(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        self._passes += 1
        self._number += 1
        if self._passes > 1:
            self._fetched = 0
        self._first_step = state.global_step
        if self._kept is not None:
            set_random_state(self._kept)
            self._kept = None
        self._random = random_state()
        if self._passes == 2 and self._batches is None and self._rank.is_first:
            log.warning(
                "warning: the training data have no length and ended at step %s. An attempt that resumes after that "
                "step finds no data and fails. Next: give the dataset a length, or have it repeat itself without end",
                state.global_step,
            )

    def on_step_end(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        if self._resumed_epoch is not None and self._rest and self._batches:
            # The Trainer has divided by the rest of the epoch.
            done = round((state.epoch - self._resumed_epoch) * self._rest)
            state.epoch = self._resumed_epoch + done / self._batches

    def on_epoch_end(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        """Raise TrainyardError if the attempt has resumed, and its data have ended before its first step."""
        if self._batches is None and self._passes == 1 and 0 < state.global_step == self._first_step < state.max_steps:
            raise TrainyardError(
                f"the training data end before step {state.global_step}, which the checkpoint is of: the training "
                f"would end here, and not at step {state.max_steps}",
                next_step="give the dataset a length, or have it repeat itself without end, then trainyard resume RUN "
                "--set arguments.code=. --allow-changes",
            )
        self._resumed_epoch = self._rest = None

    def save(self, folder: Path) -> None:
        """Write the random numbers of the epoch's beginning into the folder of a checkpoint."""
        if self._random is not None:
            torch.save(self._random, folder / _file(self._rank.rank))


class _Collator:
    """A collator of the script's that is given random numbers, and leaves those of the training as they are."""

    def __init__(self, collate: Callable[[Any], Any], seed: Callable[[], int]) -> None:
        self._collate = collate
        self._next_seed = seed

    def __call__(self, rows: Any) -> Any:
        states = random.getstate(), np.random.get_state(), torch.get_rng_state()
        seed = self._next_seed()
        random.seed(seed)
        np.random.seed(seed)
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed the cards, too
        try:
            return self._collate(rows)
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
            torch.set_rng_state(states[2])

    def __getattr__(self, name: str) -> Any:
        """Return what the script's own has: Trainers of other libraries ask it."""
        return getattr(self._collate, name)


class _Steps(int):
    """The steps of an epoch, which divide a step that was saved into the epoch and the place that were saved with it.

    `_inner_training_loop` has no other place at which these could be set.
    """

    def of(self, epoch: Epoch, trainer: Any) -> "_Steps":
        self._epoch, self._trainer = epoch, trainer
        return self

    def __rfloordiv__(self, _step: int) -> int:
        return self._epoch.place(self._trainer)[0]

    def __rmod__(self, _step: int) -> int:
        done = self._epoch.place(self._trainer)[1]
        return done // int(self._trainer.args.gradient_accumulation_steps)


def _shorten(batches: Any, length: Callable[[], int]) -> None:
    """Give a sampler of batches another length, by which the Trainer knows an epoch's last one. It gives the same."""
    own = type(batches)
    batches.__class__ = type(own.__name__, (own,), {"__len__": lambda _: length(), "__module__": own.__module__})


def _file(rank: int) -> str:
    return f"random-of-epoch-{rank}.pt"
