"""The gaps that transformers and accelerate of some releases leave, closed in one place.

`make contract` runs jobs/container with the packages of every release. What is here is needed by the rows of
images/releases.toml that it names, does the others no harm, and goes when those rows go.
"""

import functools
from collections.abc import Callable
from typing import Any


def keep_epoch(trainer: type[Any]) -> None:
    """Have a Trainer that goes on within an epoch take the samples of that epoch, and not those of the first.

    Releases 1.21 and 1.23 need it. Their accelerate (1.9.0 and 1.10.1) makes the data loader anew, without its first
    batches, and the new one does not know of which epoch it is: it sets the sampler back to epoch 0, on however many
    ranks. From accelerate 1.15.0 on it knows (its pull request 4071).
    """
    for part in trainer.__mro__:
        loop = vars(part).get("_inner_training_loop")
        names = loop.__globals__ if loop else {}
        skip = names.get("skip_first_batches")
        if skip is not None and not hasattr(skip, "keeps_epoch"):
            names["skip_first_batches"] = _keeping_epoch(skip)


def _keeping_epoch(skip: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(skip)
    def skip_first_batches(dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        rest = skip(dataloader, *args, **kwargs)
        if hasattr(rest, "iteration"):
            rest.iteration = dataloader.iteration
        return rest

    skip_first_batches.keeps_epoch = True  # type: ignore[attr-defined]
    return skip_first_batches
