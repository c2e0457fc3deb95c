"""Recipe: how an entrypoint that trains does it, in the same words in every kind and on any world size."""

import math
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator
from typing_extensions import Self

from jobs.core.errors import UsageError, did_you_mean
from jobs.spec.arguments import Arguments, HubRepository, Input

MAX_SEED = 2**32 - 1
"""NumPy's own limit."""

MAX_BATCH_SIZE = 2**20
"""Far more sequences than any recipe has in one step."""

SMALLER_IS_BETTER = frozenset({"eval_loss", "eval_perplexity"})
"""The metrics of which the best is the least; of all others it is the greatest."""

Tracker = Literal["wandb", "mlflow"]

TRACKER_VARIABLES: Mapping[Tracker, str] = {"wandb": "WANDB_API_KEY", "mlflow": "MLFLOW_TRACKING_URI"}
"""What each cannot do without, in the job's environment, from the team's secret."""

Trackers = Annotated[list[Tracker], BeforeValidator(lambda given: [given] if isinstance(given, str) else given)]
"""One may stand without brackets."""

EvaluateEverySteps = Annotated[int, Field(ge=1)] | Literal["epoch"] | None

LengthBuckets = Annotated[int, Field(ge=1, le=32)] | Literal["auto"]

HpuTrainer = Literal["optimum-habana", "transformers"]
"""Whose Trainer an HPU has: GaudiTrainer, or the one that every other accelerator has too."""


def hpu_trainer(arguments: Arguments) -> HpuTrainer:
    """Return the Trainer that these arguments ask for on an HPU; those of a kind without the choice have the first."""
    chosen: HpuTrainer = getattr(arguments, "hpu_trainer", "optimum-habana")
    return chosen


class Recipe(Arguments):
    """Base of the arguments of every kind that trains."""

    CHANGEABLE: ClassVar[frozenset[str]] = frozenset(
        {
            "checkpoint_every_steps",
            "mean_hours_between_reclaims",
            "keep_checkpoints",
            "keep_every_steps",
            "log_every_steps",
            "final_evaluation",
            "push_to_hub",
            "report_to",
            "stop_on_nan",
        }
    )

    learning_rate: float = Field(default=5e-5, gt=0)
    """Peak learning rate; lr_scheduler_type says how it falls."""
    warmup_ratio: float = Field(default=0.1, ge=0, lt=1)
    """Share of the steps in which the learning rate rises to its peak."""
    lr_scheduler_type: Literal[
        "linear", "cosine", "cosine_with_restarts", "polynomial", "constant_with_warmup", "inverse_sqrt"
    ] = "linear"
    """How the learning rate changes after its rise, by the Trainer's name."""
    optimizer: Literal["adamw", "adafactor", "sgd", "rmsprop", "adagrad"] = "adamw"
    """The Trainer's optimizer. adamw uses the accelerator's own kernel if there is one."""
    hpu_trainer: HpuTrainer = "optimum-habana"
    """The Trainer on an HPU: optimum-habana or transformers. The first runs in lazy mode, with which Gaudi's figures
    were published; its support ended on 31 October 2026. The second runs in eager mode, never tried on an HPU."""
    gaudi_config: Input | None = None
    """A gaudi_config.json, or a folder or hf://org/name that has one. Default: what is published for BERT. It is read
    and checked elsewhere too, where it has no effect."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Weight decay of the optimizer."""
    global_batch_size: int = Field(default=32, ge=1, le=MAX_BATCH_SIZE)
    """Sequences in one optimizer step, over all ranks."""
    max_batch_size_per_rank: int = Field(default=32, ge=1, le=MAX_BATCH_SIZE)
    """Sequences that one rank holds at once. A larger share of the global batch is accumulated."""
    eval_batch_size: int = Field(default=64, ge=1, le=MAX_BATCH_SIZE)
    """Sequences a rank evaluates at once."""
    evaluate_every_steps: EvaluateEverySteps = None
    """Optimizer steps between evaluations, or epoch. Default: one evaluation, at the end."""
    metric_for_best_model: str | None = None
    """Keep the model of the best evaluation by this metric. Default: the last step's. Of equal ones the earliest is
    kept."""
    early_stopping_patience: int | None = Field(default=None, ge=1)
    """End the training after this many evaluations in a row without a new best."""
    final_evaluation: bool = True
    """Evaluate after the last step. The model is on S3 by then: false ends a run whose evaluation fails."""
    checkpoint_every_steps: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """Optimizer steps between checkpoints. auto costs least time by Young's formula, from how long a save holds the
    training up (measured) and mean_hours_between_reclaims; between one minute and 30."""
    mean_hours_between_reclaims: float = Field(default=6.0, gt=0)
    """Expected hours between two reclaims of one instance, for `checkpoint_every_steps: auto`. It is divided by the
    number of nodes, as the reclaim of any ends the attempt. The value 6 is a cautious guess: EC2 promises nothing."""
    keep_checkpoints: int = Field(default=2, ge=1)
    """Newest complete checkpoints to keep."""
    keep_every_steps: int | None = Field(default=None, ge=1)
    """Also keep the first checkpoint at or after each multiple of it, without expiry."""
    log_every_steps: int = Field(default=10, ge=1)
    """Optimizer steps between lines of metrics."""
    stop_on_nan: bool = False
    """End the run if a logged loss is NaN or infinite."""
    seed: int = Field(default=42, ge=0, le=MAX_SEED)
    """Seed of splits, the order of the examples, new weights and masks."""
    report_to: Trackers | None = None
    """Also send the metrics to these trackers: wandb, mlflow. All attempts are one run there. Their keys and addresses
    come from the team's secret."""
    push_to_hub: HubRepository | None = None
    """org/name on the Hugging Face Hub to push the model to as well. It is private; the team's HF_TOKEN is used."""

    @model_validator(mode="after")
    def _of_optimum_habana(self) -> Self:
        if self.gaudi_config is not None and self.hpu_trainer != "optimum-habana":
            raise ValueError(
                "'gaudi_config' is for optimum-habana's Trainer; leave out either it or 'hpu_trainer: transformers'"
            )
        return self

    @model_validator(mode="after")
    def _best_of_evaluations(self) -> Self:
        metric = self.metric_for_best_model
        if metric is None:
            if self.early_stopping_patience is not None:
                raise ValueError("'early_stopping_patience' needs 'metric_for_best_model', which says what is better")
            return self
        if self.evaluate_every_steps is None:
            raise ValueError("'metric_for_best_model' chooses among evaluations: set 'evaluate_every_steps'")
        if metric not in self.metrics():
            raise ValueError(
                f"metric_for_best_model: '{metric}' is no metric of this job{did_you_mean(metric, self.metrics())}; "
                f"it has {', '.join(self.metrics())}"
            )
        return self

    def metrics(self) -> tuple[str, ...]:
        """Return the metrics that an evaluation of this job has."""
        return ("eval_loss",)

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
