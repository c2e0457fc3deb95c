"""What transformers, accelerate and optimum-habana of some releases leave undone, in one place.

`make contract` runs jobs/train with the packages of every release. Each mend below is needed by the rows of
images/releases.toml that it names, does the others no harm, and goes when those rows go.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np


def mended(trainer_class: type[Any]) -> type[Any]:
    """The Trainer class, mended."""

    class MendedTrainer(trainer_class):  # type: ignore[misc]  # the class is chosen at run time
        def create_optimizer(self) -> Any:
            return _with_modes(super().create_optimizer())

        def _load_rng_state(self, *args: Any, **kwargs: Any) -> Any:
            with _arrays_allowed():
                return super()._load_rng_state(*args, **kwargs)

    return MendedTrainer


def _with_modes(optimizer: Any) -> Any:
    """For releases 1.18 to 1.20 without an HPU: an optimizer that can be put into a mode for training or evaluation.

    Trainer of transformers 4.45 does so with every optimizer that has the methods. The one that accelerate 0.33 wraps
    around PyTorch's has them, and calls those of PyTorch's without looking whether there are any.
    """
    for mode in ("train", "eval"):
        if not hasattr(optimizer, mode):
            setattr(optimizer, mode, lambda: None)
    return optimizer


@contextlib.contextmanager
def _arrays_allowed() -> Iterator[None]:
    """For releases before 1.20 without an HPU: NumPy's random state is an array, which torch from 2.6 on must be told.

    transformers does so itself from 4.47 on. The images cpu and cuda have a newer PyTorch than their release's row.
    """
    try:
        from torch.serialization import safe_globals
    except ImportError:  # before torch 2.5, which loads whatever a file holds
        yield
        return
    array = np.empty(0, np.uint32)
    # What pickle rebuilds an array with lies elsewhere in NumPy 2 than in NumPy 1: the array knows.
    rebuild = cast("Callable[..., Any]", array.__reduce__()[0])
    with safe_globals([rebuild, np.ndarray, np.dtype, type(array.dtype)]):
        yield
