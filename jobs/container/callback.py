"""The base of all that accompanies a training: a Trainer calls it as its own callbacks, and so does a script's loop.

It is none of the classes of transformers, whose import takes seconds that a loop without them need not wait for.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any


class Callback:
    """Hears of what happens in a training, as a TrainerCallback of transformers does."""

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Callable[..., None]:
            """Return what does nothing for an event that a subclass has no method for: releases differ in them."""
            if name.startswith("on_"):
                setattr(
                    Callback, name, staticmethod(_nothing)
                )  # the next one does not come here: there are many a step
                return _nothing
            raise AttributeError(f"'{type(self).__name__}' has no attribute '{name}'")


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    """Do nothing."""
