"""Keep a step the same in every attempt: its examples, and the order in which gradients are added.

The examples of a step follow from the seed and the epoch alone, not from the number of ranks, nor from where an attempt
resumes. The Trainer's own do: GaudiTrainer before 1.21 has several ranks shuffle with a generator that starts from one
fixed seed in every attempt, and accelerate 1.9 and 1.10 tell their sampler a wrong epoch where an attempt resumes in
the middle of one. Either way a resumed run would take some examples twice and others not at all.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Sampler, SequentialSampler

Order = Callable[[np.random.Generator], NDArray[np.int64]]
"""Gives the places of an epoch, from random numbers of its own."""


class BatchOrder(Sampler[int]):
    """The places of an epoch in whole global batches, of which DataLoader and accelerate deal each rank its share.

    That the steps of an epoch are whole matters where batches are accumulated, too: transformers 4.51 counts the steps
    without the last, incomplete accumulation but takes it, so the schedule would end too early, and a resumed run
    would continue at the wrong example.
    """

    def __init__(self, order: Order, length: int, trainer: Any) -> None:
        """`order` gives the `length` places of an epoch; seed and epoch are those of `trainer`."""
        self._order = order
        self._length = length
        self._trainer = trainer

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        epoch = int(self._trainer.state.epoch or 0)  # whole where one begins, and kept in a checkpoint
        chance = np.random.default_rng([self._trainer.args.seed, epoch])
        yield from self._order(chance).tolist()


def in_order(order: Order, length: int) -> Callable[[Any], Sampler[int]]:
    """Return what makes the sampler of a Trainer that takes `length` places an epoch in this order."""
    return lambda trainer: BatchOrder(order, length, trainer)


def as_it_comes(trainer: Any) -> Sampler[int]:
    """Make the sampler of a Trainer whose training data lie in their order already."""
    return SequentialSampler(trainer.train_dataset)


def arrange_gradient_buckets(model: Any) -> None:
    """Make a DistributedDataParallel add the ranks' gradients in the order of all later steps from the first step on.

    It sends gradients in buckets, and after an attempt's first backward pass it arranges them anew, as they came. With
    more than two ranks a gradient's place decides which rank's share is added first, so the first step of an attempt
    would come to other last digits than the same step of a run that nobody interrupted. So here it gets gradients
    beforehand, all zero, from the last parameter on; they touch neither data nor random numbers, and its next forward
    pass arranges the buckets by them. Any other model stays as it is.
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
