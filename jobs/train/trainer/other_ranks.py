"""A checkpoint that another number of ranks has made: model, optimizer, schedule and position go on as they were.

The steps have the same examples on any number of ranks (jobs/train/trainer/batch_order.py). What belongs to single
ranks does not go on: each starts with random numbers of its own, which follow from the seed, the step and the rank.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

_STATE = "trainer_state.json"


def with_batch_of_rank(folder: Path, per_rank: int) -> None:
    """Lets a downloaded checkpoint be resumed with other batches of a rank than it was made with.

    A Trainer takes their size from it, and would come to another global batch.
    """
    path = folder / _STATE
    path.write_text(json.dumps({**json.loads(path.read_bytes()), "train_batch_size": per_rank}))


def on_other_ranks(trainer_class: type[Any], *, rank: int, seed: int, set_seed: Callable[[int], Any]) -> type[Any]:
    """The Trainer class that goes on so."""

    class OtherRanksTrainer(trainer_class):  # type: ignore[misc]  # the class is chosen at run time
        def _load_rng_state(self, *_: Any, **__: Any) -> None:
            sequence = np.random.SeedSequence([seed, self.state.global_step, rank])
            set_seed(int(sequence.generate_state(1)[0]))

    return OtherRanksTrainer
