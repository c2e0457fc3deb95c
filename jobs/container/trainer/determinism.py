"""Make every attempt repeat a step exactly: the same examples, and gradients added in the same order.

The examples of a step follow from the seed and the epoch alone, not from the number of ranks or the step at which an
attempt resumes. The Trainer does not guarantee this: on several ranks, GaudiTrainer before 1.21 shuffles with a
generator that starts from one fixed seed in every attempt, and accelerate 1.9 and 1.10 give the sampler a wrong epoch
if an attempt resumes within one (versions.py). A resumed run would see some examples twice and others not at all.

A script's Trainer has more problems if it resumes within an epoch, because it computes its position from the step alone
and restores the random state after the epoch's first batch:

- If the batches of an epoch are not a multiple of `gradient_accumulation_steps`, its last step has fewer batches, and
  transformers 4 loses it (versions.py).
- If a sampler draws from the global random state when an epoch begins (`group_by_length`), the rest of a resumed epoch
  is in another order.
- If the collator draws random numbers (masked language modelling), batches prefetched before a save have already drawn
  theirs, so the resumed run draws others.
- If the data have no length, the Trainer cannot compute how often it has read them, skips everything, and ends.

So `Epoch` takes the position from the epoch that the Trainer has saved, saves the random state of the epoch's beginning
in each checkpoint, gives each batch its own random numbers, and raises an error if no data are left. Our kinds do not
need `Epoch`, because their order follows from seed and epoch, in whole steps.
"""

import logging
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Sampler, SequentialSampler

from jobs.container import versions
from jobs.container.rank import Callback
from jobs.container.saving.snapshot import random_state, random_state_preserved, set_random_state
from jobs.core.errors import TrainyardError

if TYPE_CHECKING:
    from jobs.container.rank import Rank


log = logging.getLogger("trainyard")

Order = Callable[[np.random.Generator], NDArray[np.int64]]
"""Returns the positions of an epoch in order, given a random generator."""


class BatchOrder(Sampler[int]):
    """Yields the positions of an epoch in whole global batches. DataLoader and accelerate split them among the ranks.

    Whole batches matter for gradient accumulation as well: transformers 4.51 takes a last, incomplete accumulation but
    does not count its step. The schedule would end too early, and a resumed run would continue at the wrong example.
    """

    def __init__(self, order: Order, length: int, trainer: Any) -> None:
        """`order` returns the `length` positions of an epoch. Seed and epoch come from `trainer`."""
        self._order = order
        self._length = length
        self._trainer = trainer

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        epoch = int(self._trainer.state.epoch or 0)  # a whole number when an epoch begins; saved in checkpoints
        chance = np.random.default_rng([self._trainer.args.seed, epoch])
        yield from self._order(chance).tolist()


def ordered_sampler(order: Order, length: int) -> Callable[[Any], Sampler[int]]:
    """Return a function that makes a Trainer's sampler: `length` positions an epoch, in the given order."""
    return lambda trainer: BatchOrder(order, length, trainer)


def sequential_sampler(trainer: Any) -> Sampler[int]:
    """Make the sampler of a Trainer whose training data are already in order."""
    return SequentialSampler(trainer.train_dataset)


def arrange_gradient_buckets(model: Any) -> None:
    """Make a DistributedDataParallel model add gradients in the same order from the first step on.

    DistributedDataParallel sends gradients in buckets, and rearranges them after an attempt's first backward pass in
    the order in which gradients arrived. With more than two ranks, a gradient's place in its bucket decides which
    rank's share is added first, so an attempt's first step would differ in its last digits from the same step of an
    uninterrupted run. This function first computes zero gradients, starting with the last parameter, and the model's
    next forward pass arranges the buckets by them. It changes neither data nor random state, and ignores other models.
    """
    if not isinstance(model, DistributedDataParallel):
        return
    inner = model.module
    parameters = [parameter for parameter in inner.parameters() if parameter.requires_grad]
    own = inner.__dict__.get("forward")
    synchronises, model.require_backward_grad_sync = model.require_backward_grad_sync, True
    inner.forward = lambda zero: sum((parameter.sum() * zero for parameter in parameters), zero)
    try:
        model(torch.zeros((), device=parameters[0].device)).backward()
    finally:
        model.require_backward_grad_sync = synchronises
        del inner.forward
        if own is not None:
            inner.forward = own
    inner.zero_grad()


class Epoch(Callback):
    """One rank's position in the epoch. Must be the first callback, so that all others see the right epoch."""

    def __init__(self, rank: "Rank") -> None:
        self._rank = rank
        self._batches: int | None = None
        """Batches in a whole epoch, or None if the data have no length."""
        self._rest: int | None = None
        """Batches from where the attempt resumes to the end of that epoch."""
        self._has_smaller_step = self._is_counted = False
        self._resumed_epoch: int | None = None
        self._passes = 0
        self._first_step = 0
        self._number = -1
        """The epoch that the attempt is in; -1 before the first."""
        self._random: Any = None
        self._kept: Any = None
        self._fetched = 0

    def set_loader(self, loader: Any, accumulated: int) -> None:
        """Take the number of batches in an epoch from the loader. A step has `accumulated` batches."""
        try:
            self._batches = len(loader)
        except (TypeError, NotImplementedError):
            return
        self._has_smaller_step = self._batches % accumulated != 0 and versions.LOSES_SHORT_STEP
        if self._has_smaller_step:
            whole = self._batches
            versions.shorten(loader.batch_sampler, lambda: whole if self._rest is None else self._rest)

    def check(self, trainer: Any, folder: Path | None) -> None:
        """Raise TrainyardError if an epoch ends with a smaller step and this Trainer cannot resume after it.

        `folder` is the checkpoint from which the training resumes, if any. If the callback was added late, `Epoch`
        cannot correct this any more.
        """
        loader, accumulated = trainer.callback_handler.train_dataloader, trainer.args.gradient_accumulation_steps
        if self._is_counted:
            return
        if self._batches is None:  # the callback was added late
            self.set_loader(loader, accumulated)
            if folder is not None and not self._has_smaller_step:
                self.resume(trainer, folder)
        if self._has_smaller_step:
            raise TrainyardError(
                f"the {self._batches} batches of an epoch are not a multiple of gradient_accumulation_steps "
                f"({accumulated}), so this training could not be resumed as if uninterrupted",
                next_step="pass the callback to the constructor, Trainer(…, callbacks=[trainyard.Callback()])",
            )

    def collating(self, collate: Callable[[Any], Any], args: Any) -> Callable[[Any], Any]:
        """Return a collator whose random numbers follow from the seed, the epoch, the batch and the rank alone.

        The collator is unchanged if the data loader has workers, because they have no access to the batch's number.
        """
        return collate if args.dataloader_num_workers else _Collator(collate, lambda: self._seed(args.seed))

    def _seed(self, seed: int) -> int:
        self._fetched += 1
        return int(np.random.SeedSequence([seed, self._number, self._fetched, self._rank.rank]).generate_state(1)[0])

    def steps_of_epoch(self, steps: int, trainer: Any) -> int:
        """Return the steps of an epoch, for a Trainer that divides the step at which it resumes by this number."""
        self._is_counted = True
        return versions.Steps(steps).of(self, trainer) if self._has_smaller_step else steps

    def position(self, trainer: Any) -> tuple[int, int]:
        """Return the epoch in the Trainer's state, and the number of its batches that are done."""
        epoch = int(trainer.state.epoch or 0.0)
        return epoch, round(((trainer.state.epoch or 0.0) - epoch) * (self._batches or 0))

    def resume(self, trainer: Any, folder: Path) -> None:
        """Continue from the Trainer's state, which was just loaded from the checkpoint in `folder`."""
        epoch, done = self.position(trainer)
        self._number, self._fetched = epoch - 1, 0 if trainer.args.ignore_data_skip else done
        if self._batches is None:  # the data are read from their beginning, and skipped batches are fetched again
            self._number, self._fetched = -1, 0
        if trainer.args.ignore_data_skip or (self._batches is not None and not done):
            return  # the attempt begins at the start of an epoch
        kept = folder / _file(self._rank.rank)
        if kept.exists():
            self._kept = torch.load(kept, map_location="cpu", weights_only=False)  # our own file, verified
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
            # The Trainer has divided by the rest of the epoch instead of the whole epoch.
            done = round((state.epoch - self._resumed_epoch) * self._rest)
            state.epoch = self._resumed_epoch + done / self._batches

    def on_epoch_end(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        """Raise TrainyardError if the attempt has resumed and its data end before its first step."""
        if self._batches is None and self._passes == 1 and 0 < state.global_step == self._first_step < state.max_steps:
            raise TrainyardError(
                f"the training data end before step {state.global_step}, the step of the checkpoint: the training "
                f"would end here instead of at step {state.max_steps}",
                next_step="give the dataset a length, or have it repeat itself without end, then trainyard resume RUN "
                "--set arguments.code=. --allow-changes",
            )
        self._resumed_epoch = self._rest = None

    def save(self, folder: Path) -> None:
        """Write the random state of the epoch's beginning into the folder of a checkpoint."""
        if self._random is not None:
            torch.save(self._random, folder / _file(self._rank.rank))


class _Collator:
    """Gives the script's collator its own random numbers and preserves the training's."""

    def __init__(self, collate: Callable[[Any], Any], seed: Callable[[], int]) -> None:
        self._collate = collate
        self._next_seed = seed

    def __call__(self, rows: Any) -> Any:
        seed = self._next_seed()
        with random_state_preserved():
            random.seed(seed)
            np.random.seed(seed)
            torch.default_generator.manual_seed(seed)  # torch.manual_seed would also seed the cards
            return self._collate(rows)

    def __getattr__(self, name: str) -> Any:
        """Return the attribute of the script's collator, which Trainers of other libraries look for."""
        return getattr(self._collate, name)


def _file(rank: int) -> str:
    return f"random-of-epoch-{rank}.pt"
