"""The ranks' gradients are added in the same order in every step of a run, the first after a resume included.

DistributedDataParallel sends gradients in buckets, and after an attempt's first backward pass it arranges them anew, as
they came. With more than two ranks a gradient's place decides which rank's share is added first, so the first step of
an attempt came to other last digits than the same step of a run that nobody interrupted. So it is made to arrange them
before the first step: by a backward pass of zeros, which touches neither data nor random numbers.
"""

from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel


def adding_in_one_order(trainer_class: type[Any]) -> type[Any]:
    """The Trainer class that does."""

    class OneOrderTrainer(trainer_class):  # type: ignore[misc]  # the class is chosen at run time
        _is_arranged = False

        def training_step(self, model: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._is_arranged:
                self._is_arranged = True
                if isinstance(model, DistributedDataParallel):
                    arrange(model)
            return super().training_step(model, *args, **kwargs)

    return OneOrderTrainer


def arrange(model: DistributedDataParallel) -> None:
    """Gives it gradients, all zero, from the last parameter on; its next forward pass arranges the buckets by them."""
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
