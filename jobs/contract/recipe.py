"""Recipe: how an entrypoint that trains does it, in the same words in every kind and on any world size."""

import math
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from jobs.contract.arguments import Arguments, HubRepository
from jobs.contract.errors import UsageError

MAX_SEED = 2**32 - 1
"""NumPy's own limit."""

MAX_BATCH_SIZE = 2**20
"""Far more sequences than any recipe has in one step."""


class Recipe(Arguments):
    """Base of the arguments of every kind that trains."""

    FREE: ClassVar[frozenset[str]] = frozenset(
        {
            "checkpoint_every_steps",
            "mean_hours_between_reclaims",
            "keep_checkpoints",
            "keep_every_steps",
            "log_every_steps",
            "push_to_hub",
            "stop_on_nan",
        }
    )

    learning_rate: float = Field(default=5e-5, gt=0)
    """Peak learning rate; it falls linearly to zero."""
    warmup_ratio: float = Field(default=0.1, ge=0, lt=1)
    """Share of the steps in which the learning rate rises to its peak."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW's weight decay."""
    global_batch_size: int = Field(default=32, ge=1, le=MAX_BATCH_SIZE)
    """Sequences in one optimizer step over all ranks, so that a recipe means the same on 8 HPUs and on a laptop."""
    max_batch_size_per_rank: int = Field(default=32, ge=1, le=MAX_BATCH_SIZE)
    """Sequences that one rank holds at once; a larger share of the global batch is accumulated."""
    eval_batch_size: int = Field(default=64, ge=1, le=MAX_BATCH_SIZE)
    """Sequences a rank evaluates at once."""
    evaluate_every_steps: int | None = Field(default=None, ge=1)
    """Optimizer steps between evaluations; without it there is one, at the end."""
    checkpoint_every_steps: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """Optimizer steps between checkpoints, at least one; auto: what costs least time by Young's formula, from how long
    the training stands still for a checkpoint (measured) and mean_hours_between_reclaims; between one minute and 30."""
    mean_hours_between_reclaims: float = Field(default=6.0, gt=0)
    """Expected hours between two reclaims of one instance, for checkpoint_every_steps: auto; it is divided by the
    number of nodes, as the reclaim of any ends the attempt. The default is a cautious guess, no measurement: EC2
    promises nothing."""
    keep_checkpoints: int = Field(default=2, ge=1)
    """So many of the newest complete checkpoints stay."""
    keep_every_steps: int | None = Field(default=None, ge=1)
    """The first checkpoint at or after each multiple of it stays too, and never expires."""
    log_every_steps: int = Field(default=10, ge=1)
    """Optimizer steps between lines of metrics."""
    stop_on_nan: bool = False
    """Ends the run, for good, where a line of metrics has a loss that is no number (NaN) or infinite."""
    seed: int = Field(default=42, ge=0, le=MAX_SEED)
    """Seeds whatever is drawn: splits, the order of the examples, new weights, masks."""
    push_to_hub: HubRepository | None = None
    """org/name on the Hugging Face Hub that the model goes to as well, into a private repository, with the team's
    HF_TOKEN."""

    @property
    def hub_repository(self) -> str | None:
        return self.push_to_hub

    def check(self, *world_sizes: int) -> None:
        """Raise UsageError, naming sizes that work, where the global batch does not divide over the ranks."""
        for world_size in world_sizes:
            if self.global_batch_size % world_size:
                together = math.lcm(*world_sizes)
                below = self.global_batch_size // together * together
                sizes = [str(size) for size in (below, below + together) if size]
                raise UsageError(
                    f"global_batch_size {self.global_batch_size} does not divide over {world_size} ranks",
                    next_step=f"set it to {' or '.join(sizes)}",
                )

    def batch_of_rank(self, world_size: int) -> tuple[int, int]:
        """Return the sequences that a rank holds at once, and how many such batches make its share of the global batch.

        Raises UsageError, naming sizes that work, where the global batch does not divide over the ranks.
        """
        self.check(world_size)
        share = self.global_batch_size // world_size
        at_once = next(size for size in range(min(share, self.max_batch_size_per_rank), 0, -1) if share % size == 0)
        return at_once, share // at_once
