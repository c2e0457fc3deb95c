"""The gaps that transformers and accelerate of some releases leave, closed in one place.

`make contract` runs jobs/train with the packages of every release. What is here is needed by the rows of
images/releases.toml that it names, does the others no harm, and goes when those rows go.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np


def with_modes(optimizer: Any) -> Any:
    """Return `optimizer`, which then can be put into a mode for training or evaluation.

    Releases 1.18 to 1.20 need it without an HPU. Trainer of transformers 4.45 puts every optimizer into a mode that has
    the methods. The one that accelerate 0.33 wraps around PyTorch's has them, and calls those of PyTorch's without
    looking whether there are any.
    """
    for mode in ("train", "eval"):
        if not hasattr(optimizer, mode):
            setattr(optimizer, mode, lambda: None)
    return optimizer


def keep_epoch(trainer: type[Any]) -> None:
    """Have a Trainer that goes on within an epoch take the samples of that epoch, and not those of the first.

    Releases 1.21 and 1.23 need it. Their accelerate (1.9.0 and 1.10.1) makes the data loader anew, without its first
    batches, and the new one does not know of which epoch it is: it sets the sampler back to epoch 0, on however many
    ranks. From accelerate 1.15.0 on it knows (its pull request 4071), and in 0.33.0 it does not come to the sampler.
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


@contextlib.contextmanager
def arrays_allowed() -> Iterator[None]:
    """Let torch load NumPy's random state, an array, which torch from 2.6 on has to be told to.

    Releases before 1.20 need it without an HPU: transformers does so itself from 4.47 on, and the images cpu and cuda
    have a newer PyTorch than their release's row.
    """
    try:
        from torch.serialization import safe_globals
    except ImportError:  # torch 2.4, of release 1.18 on HPUs, which loads whatever a file holds
        yield
        return
    array = np.empty(0, np.uint32)
    # What pickle rebuilds an array with lies elsewhere in NumPy 2 than in NumPy 1: the array knows.
    rebuild = cast("Callable[..., Any]", array.__reduce__()[0])
    with safe_globals([rebuild, np.ndarray, np.dtype, type(array.dtype)]):
        yield
