"""Recipe: the training arguments that all kinds share, independent of the world size."""

import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)
from typing_extensions import Self

from jobs.core.errors import UsageError, did_you_mean
from jobs.spec.arguments import Arguments, HubRepository, Input, Strict

MAX_SEED = 2**32 - 1
"""NumPy's limit."""

MAX_BATCH_SIZE = 2**20
"""Far more sequences than any recipe needs in one step."""

Tracker = Literal["wandb", "mlflow"]

TRACKER_VARIABLES: Mapping[Tracker, str] = {"wandb": "WANDB_API_KEY", "mlflow": "MLFLOW_TRACKING_URI"}
"""Environment variable that each tracker requires, from the team's secret."""

Trackers = Annotated[list[Tracker], BeforeValidator(lambda given: [given] if isinstance(given, str) else given)]
"""A list of trackers; a single tracker may be given without brackets."""

EvaluateEverySteps = Annotated[int, Field(ge=1)] | Literal["epoch"] | None

LengthBuckets = Annotated[int, Field(ge=1, le=32)] | Literal["auto"]

HpuTrainer = Literal["optimum-habana", "transformers"]
"""The library whose Trainer runs on HPUs: optimum-habana's GaudiTrainer, or the Trainer of transformers, as
elsewhere."""


def hpu_trainer(arguments: Arguments) -> HpuTrainer:
    """Return the Trainer to use on an HPU: optimum-habana for kinds without that argument."""
    chosen: HpuTrainer = getattr(arguments, "hpu_trainer", "optimum-habana")
    return chosen


SCHEDULE_PARAMETERS: Mapping[str, tuple[str, ...]] = {
    "cosine": ("num_cycles",),
    "cosine_with_restarts": ("num_cycles",),
    "cosine_with_min_lr": ("min_lr", "min_lr_rate", "num_cycles"),
    "polynomial": ("lr_end", "power"),
    "inverse_sqrt": ("timescale",),
}
"""Parameters of each lr_scheduler_type that has any (transformers/optimization.py)."""


class TrainerArguments(Strict):
    """Arguments that are passed to the TrainingArguments of transformers by their names."""

    max_grad_norm: float | None = Field(default=None, ge=0)
    """Norm to which larger gradients are scaled down; 0 disables the limit. Default: 1."""
    adam_beta1: float | None = Field(default=None, ge=0, lt=1)
    """Decay of AdamW's mean of the gradients. Default: 0.9."""
    adam_beta2: float | None = Field(default=None, ge=0, lt=1)
    """Decay of AdamW's mean of the squared gradients. Default: 0.999."""
    adam_epsilon: float | None = Field(default=None, gt=0)
    """Lower bound of AdamW's divisor. Default: 1e-6, as in BERT's training."""
    warmup_steps: int | None = Field(default=None, ge=0)
    """Steps during which the learning rate rises to its peak. Default: follows from warmup_ratio."""
    lr_scheduler_kwargs: dict[str, Annotated[float, Field(ge=0)]] | None = None
    """Parameters of lr_scheduler_type: num_cycles of cosine and cosine_with_restarts, lr_end and power of polynomial,
    timescale of inverse_sqrt, min_lr or min_lr_rate of cosine_with_min_lr. Default: the Trainer's."""
    gradient_checkpointing: bool | None = None
    """Compute activations again in the backward pass instead of storing them: less memory, more time. Default:
    false."""
    dataloader_num_workers: int | None = Field(default=None, ge=0, le=64)
    """Processes of each rank that prepare batches. Default: 0, the rank prepares them itself."""

    @model_serializer(mode="wrap")
    def _without_defaults(self, serialized: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in serialized(self).items() if value is not None}


def _or_a_name(schema: dict[str, Any]) -> None:
    mapping = dict(schema)
    schema.clear()
    schema["anyOf"] = [mapping["properties"]["repository"], mapping]


class HubPush(Strict):
    """What is pushed to the Hugging Face Hub, and when. The repository alone may be given as text."""

    model_config = ConfigDict(json_schema_extra=_or_a_name)

    repository: HubRepository
    """Repository on the Hugging Face Hub (org/name)."""
    each_save: bool = False
    """Also push the model of each checkpoint while the training continues. If a push takes longer than the next save,
    the newest checkpoint is pushed next."""

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, given: Any) -> Any:
        return {"repository": given} if isinstance(given, str) else given

    @model_serializer(mode="wrap")
    def _as_name(self, serialized: SerializerFunctionWrapHandler) -> Any:
        return serialized(self) if self.each_save else self.repository


class Recipe(Arguments):
    """Base class of the arguments of every kind that trains."""

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
    """Peak learning rate; lr_scheduler_type determines how it decreases."""
    warmup_ratio: float = Field(default=0.1, ge=0, lt=1)
    """Share of the steps during which the learning rate rises to its peak."""
    lr_scheduler_type: Literal[
        "linear",
        "cosine",
        "cosine_with_restarts",
        "cosine_with_min_lr",
        "polynomial",
        "constant_with_warmup",
        "inverse_sqrt",
    ] = "linear"
    """Learning-rate schedule after the warm-up, by the Trainer's name."""
    optimizer: Literal["adamw", "adafactor", "sgd", "rmsprop", "adagrad"] = "adamw"
    """Optimizer of the Trainer. adamw uses the accelerator's fused kernel if there is one."""
    hpu_trainer: HpuTrainer = "optimum-habana"
    """Library of the Trainer on HPUs. optimum-habana runs in lazy mode, as in Gaudi's published results; its support
    ended on 31 October 2026. transformers runs in eager mode and is untested on HPUs."""
    gaudi_config: Input | None = None
    """A gaudi_config.json, or a folder or hf://org/name that contains one. Default: the published configuration for
    BERT. On other accelerators it is checked but has no effect."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Weight decay of the optimizer."""
    training_arguments: TrainerArguments | None = None
    """Further arguments of the Trainer, by their names in transformers' TrainingArguments. Default: none."""
    global_batch_size: int = Field(default=32, ge=1, le=MAX_BATCH_SIZE)
    """Sequences per optimizer step, over all ranks."""
    max_batch_size_per_rank: int = Field(default=32, ge=1, le=MAX_BATCH_SIZE)
    """Sequences that a rank processes at once. A larger share of the global batch is accumulated over several
    passes."""
    eval_batch_size: int = Field(default=64, ge=1, le=MAX_BATCH_SIZE)
    """Sequences that a rank evaluates at once."""
    evaluate_every_steps: EvaluateEverySteps = None
    """Optimizer steps between evaluations, or epoch for one per epoch. Default: one evaluation, at the end."""
    metric_for_best_model: str | None = None
    """Keep the model of the best evaluation by this metric. Default: keep the model of the last step. If evaluations
    are equally good, the earliest is kept."""
    early_stopping_patience: int | None = Field(default=None, ge=1)
    """End the training after this many evaluations in a row without a new best. Default: no early stopping."""
    final_evaluation: bool = True
    """Evaluate after the last step. The model is already on S3 then: if that evaluation fails, resume with false."""
    checkpoint_every_steps: Annotated[int, Field(ge=1)] | Literal["auto", "epoch"] = "auto"
    """Optimizer steps between checkpoints, epoch for one per epoch, or auto. auto minimizes the expected lost time by
    Young's formula, from the measured pause of a save and mean_hours_between_reclaims; the interval is between 1 and 30
    minutes."""
    mean_hours_between_reclaims: float = Field(default=6.0, gt=0)
    """Expected hours between reclaims of one instance, for `checkpoint_every_steps: auto`. It is divided by the number
    of nodes, because a reclaim of any node ends the attempt. 6 is a cautious guess, because EC2 guarantees nothing."""
    keep_checkpoints: int = Field(default=2, ge=1)
    """Number of complete checkpoints to keep, the newest ones."""
    keep_every_steps: int | None = Field(default=None, ge=1)
    """Also keep the first checkpoint at or after each multiple of this step, without expiry. Default: none."""
    log_every_steps: int = Field(default=10, ge=1)
    """Optimizer steps between logged metrics."""
    stop_on_nan: bool = False
    """End the run if a logged loss is NaN or infinite."""
    seed: int = Field(default=42, ge=0, le=MAX_SEED)
    """Seed of data splits, example order, new weights and masks."""
    report_to: Trackers | None = None
    """Also report the metrics to these trackers: wandb, mlflow. Default: none. All attempts are one run there. Keys and
    addresses come from the team's secret."""
    push_to_hub: HubPush | None = None
    """Repository on the Hugging Face Hub (org/name) that the model is also pushed to. Default: none. The repository is
    private; the team's HF_TOKEN is used. {repository: org/name, each_save: true} also pushes the model of each
    checkpoint."""

    @model_validator(mode="after")
    def _check_gaudi_config(self) -> Self:
        if self.gaudi_config is not None and self.hpu_trainer != "optimum-habana":
            raise ValueError(
                "'gaudi_config' is for optimum-habana's Trainer; remove it, or remove 'hpu_trainer: transformers'"
            )
        return self

    @model_validator(mode="after")
    def _check_best_model(self) -> Self:
        metric = self.metric_for_best_model
        if metric is None:
            if self.early_stopping_patience is not None:
                raise ValueError("'early_stopping_patience' needs 'metric_for_best_model' to compare evaluations")
            return self
        if self.evaluate_every_steps is None:
            raise ValueError("'metric_for_best_model' compares evaluations: set 'evaluate_every_steps'")
        if metric not in self.evaluation_metrics():
            raise ValueError(
                f"metric_for_best_model: unknown metric '{metric}'{did_you_mean(metric, self.evaluation_metrics())}"
            )
        return self

    @model_validator(mode="after")
    def _check_training_arguments(self) -> Self:
        if errors := [*self._errors_of_training_arguments()]:
            raise ValueError("; ".join(errors))
        return self

    def _errors_of_training_arguments(self) -> Iterator[str]:
        given = self.training_arguments or TrainerArguments()
        if given.warmup_steps is not None and self.warmup_ratio not in (0, Recipe.model_fields["warmup_ratio"].default):
            yield "set either 'warmup_ratio' or 'training_arguments.warmup_steps'"
        of_adam = [name for name in given.model_dump() if name.startswith("adam_")]
        if of_adam and self.optimizer != "adamw":
            yield f"training_arguments: {', '.join(of_adam)} needs 'optimizer: adamw'"
        schedule, parameters = self.lr_scheduler_type, given.lr_scheduler_kwargs or {}
        known = SCHEDULE_PARAMETERS.get(schedule, ())
        if unknown := [name for name in parameters if name not in known]:
            what = f"has only {', '.join(known)}" if known else "has no parameters"
            yield f"training_arguments.lr_scheduler_kwargs: '{schedule}' {what}; remove {', '.join(unknown)}"
        if schedule == "cosine_with_min_lr" and len(parameters.keys() & {"min_lr", "min_lr_rate"}) != 1:
            yield "'cosine_with_min_lr' needs min_lr or min_lr_rate in training_arguments.lr_scheduler_kwargs"
        if parameters.get("lr_end", 0) >= self.learning_rate or parameters.get("min_lr", 0) >= self.learning_rate:
            yield f"training_arguments.lr_scheduler_kwargs: the lowest rate must be below {self.learning_rate:g}"

    def evaluation_metrics(self) -> tuple[str, ...]:
        """Return the metrics of an evaluation of this job."""
        return ("eval_loss",)

    @property
    def hub_repository(self) -> str | None:
        return self.push_to_hub.repository if self.push_to_hub else None

    def check(self, *world_sizes: int) -> None:
        """Raise UsageError, naming sizes that work, if the global batch is not divisible by the number of ranks."""
        for world_size in world_sizes:
            if self.global_batch_size % world_size:
                together = math.lcm(*world_sizes)
                below = self.global_batch_size // together * together
                sizes = [str(size) for size in (below, below + together) if size]
                raise UsageError(
                    f"global_batch_size {self.global_batch_size} is not divisible by {world_size} ranks",
                    next_step=f"set it to {' or '.join(sizes)}",
                )

    def batch_of_rank(self, world_size: int) -> tuple[int, int]:
        """Return the sequences that a rank processes at once, and the number of such batches in one optimizer step.

        Raises UsageError, naming sizes that work, if the global batch is not divisible by the number of ranks.
        """
        self.check(world_size)
        share = self.global_batch_size // world_size
        at_once = next(size for size in range(min(share, self.max_batch_size_per_rank), 0, -1) if share % size == 0)
        return at_once, share // at_once
