"""pretrain-mlm: pre-train an encoder by masked language modelling on packed tokens."""

from typing import Annotated, Literal

from pydantic import Field, model_validator
from typing_extensions import Self

from jobs.spec.arguments import Artifact, Configuration, JobKind, Model, OfKind
from jobs.spec.recipe import MAX_BATCH_SIZE, Recipe

MODEL_TYPES = ("bert", "camembert", "distilbert", "modernbert", "roberta", "xlm-roberta")
"""Values of `model_type` in config.json. jobs.container.models.masked_bert has the heads of these models."""

_SHAPE = ("hidden_size", "layers", "heads", "intermediate_size")


class PretrainMlm(Recipe):
    """Pre-train an encoder by masked language modelling on packed tokens, from random weights or from a model's.

    Defaults that differ from other kinds are those of BERT's training: 256 sequences per step, a peak
    learning rate of 1e-4, weight decay 0.01, and with 100,000 steps a warm-up of 10,000.
    """

    data: Annotated[Artifact, OfKind("packed-tokens")]
    """Packed tokens from a `tokenize` run: run://…, s3://…, data://…, hf://… or a folder."""
    data_fingerprint: str | None = Field(default=None, pattern=r"^[0-9a-f]{16,64}$")
    """The first 16 to 64 digits of the data's fingerprint; other data is rejected. Default: accept any data."""
    model: Model | None = None
    """A BERT, RoBERTa, XLM-RoBERTa, CamemBERT, DistilBERT or ModernBERT to continue from, for example on texts of your
    domain: run://…/model, hf://…, data://…, s3://… or a folder. Default: random weights. The tokens must be from this
    model's tokenizer."""
    config: Configuration | None = None
    """The config.json of such a model, in place of the next four keys: hf://org/name or a folder. vocab_size follows
    from the data's tokenizer. Default: a BERT of the four keys."""
    hidden_size: int = Field(default=768, ge=8)
    """Width of the model."""
    layers: int = Field(default=12, ge=1)
    """Number of transformer layers."""
    heads: int = Field(default=12, ge=1)
    """Attention heads per layer."""
    intermediate_size: int = Field(default=3072, ge=8)
    """Width of each layer's feed-forward part."""
    mask_fraction: float = Field(default=0.15, gt=0, lt=1)
    """Share of the tokens that the model has to predict."""
    max_steps: int = Field(default=100_000, ge=1)
    """Number of optimizer steps; the data is repeated as often as needed."""
    learning_rate: float = Field(default=1e-4, gt=0)
    """Peak learning rate; lr_scheduler_type determines how it decreases."""
    weight_decay: float = Field(default=0.01, ge=0)
    """Weight decay of the optimizer."""
    global_batch_size: int = Field(default=256, ge=1, le=MAX_BATCH_SIZE)
    """Sequences per optimizer step, over all ranks."""
    log_every_steps: int = Field(default=50, ge=1)
    """Optimizer steps between logged metrics."""
    evaluate_every_steps: Annotated[int, Field(ge=1)] | Literal["epoch"] = 1000
    """Optimizer steps between evaluations, or epoch for one per epoch. There is also one at the end."""
    eval_sequences: int = Field(default=4096, ge=1)
    """Number of held-out sequences to evaluate."""
    torch_compile: bool = False
    """Compile the model with PyTorch during the first steps; GPUs only. Kernels then take a quarter less time, which
    helps if kernels are the bottleneck, not the host: with many sequences at once (max_batch_size_per_rank). On a
    laptop, compiling needs g++."""

    def evaluation_metrics(self) -> tuple[str, ...]:
        return ("eval_loss", "eval_perplexity")

    @model_validator(mode="after")
    def _check_shape(self) -> Self:
        fields = type(self).model_fields
        has_shape = any(getattr(self, name) != fields[name].default for name in _SHAPE)
        if self.config is not None and has_shape:
            raise ValueError(f"'config' sets the model's shape; remove {', '.join(_SHAPE)}")
        if self.model is not None and (self.config is not None or has_shape):
            raise ValueError(f"'model' sets the model's shape; remove config, {', '.join(_SHAPE)}")
        if self.hidden_size % self.heads:
            raise ValueError(f"hidden_size {self.hidden_size} is not divisible by {self.heads} heads")
        return self


KIND = JobKind(
    name="pretrain-mlm",
    summary="pre-train an encoder by masked language modelling",
    entrypoint="jobs.container.kinds.pretrain_mlm",
    arguments=PretrainMlm,
    accelerated=True,
    timeout_hours=24,
)
