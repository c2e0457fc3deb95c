"""The order in which a Trainer takes its examples: from the seed and the epoch alone.

So it does not depend on the number of ranks, nor on where an attempt resumes. The Trainer's own does: GaudiTrainer
before 1.21 has several ranks shuffle with a generator that starts from one fixed seed in every attempt, and accelerate
1.10 tells its sampler a wrong epoch where an attempt resumes in the middle of one; either way a resumed run would take
some examples twice and others not at all.
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.utils.data import Sampler, SequentialSampler

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Order = Callable[[np.random.Generator], NDArray[np.int64]]


class BatchOrder(Sampler[int]):
    """The places of an epoch in whole global batches, of which DataLoader and accelerate deal each rank its share."""

    def __init__(self, order: "Order", length: int, trainer: Any) -> None:
        self._order = order
        self._length = length
        self._trainer = trainer

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        epoch = int(self._trainer.state.epoch or 0)  # whole where one begins, and kept in a checkpoint
        chance = np.random.default_rng([self._trainer.args.seed, epoch])
        yield from self._order(chance).tolist()


def ordered(trainer_class: type[Any], order: "Order", length: int) -> type[Any]:
    """The Trainer class that trains in this order.

    That the steps of an epoch are whole matters where batches are accumulated, too: transformers 4.51 counts the steps
    without the last, incomplete accumulation but takes it, so the schedule would end too early, and a resumed run
    continue at the wrong example.
    """

    class OrderedTrainer(trainer_class):  # type: ignore[misc]  # the class is chosen at run time
        def _get_train_sampler(self, *_: Any, **__: Any) -> Sampler[int]:
            return BatchOrder(order, length, self)

    return OrderedTrainer


def as_it_comes(trainer_class: type[Any]) -> type[Any]:
    """The Trainer class that takes the training data as they come: they lie in their order already."""

    class SequentialTrainer(trainer_class):  # type: ignore[misc]  # the class is chosen at run time
        def _get_train_sampler(self, *_: Any, **__: Any) -> Sampler[int]:
            return SequentialSampler(self.train_dataset)

    return SequentialTrainer
