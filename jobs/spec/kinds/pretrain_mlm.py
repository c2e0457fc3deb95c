"""pretrain-mlm: a BERT by masked language modelling on packed tokens, from random weights or from a model's."""

from typing import Annotated

from pydantic import Field, model_validator
from typing_extensions import Self

from jobs.spec.arguments import Artifact, Configuration, JobKind, Model, OfKind
from jobs.spec.recipe import MAX_BATCH_SIZE, EvaluateEverySteps, Recipe

_SHAPE = ("hidden_size", "layers", "heads", "intermediate_size")


class PretrainMlm(Recipe):
    """Pre-train a BERT by masked language modelling, from random weights or from a model's, on packed tokens.

    Its own defaults of the recipe are those that BERT was trained with: 256 sequences a step, a peak of 1e-4, decay
    0.01, and with 100,000 steps a rise over 10,000.
    """

    data: Annotated[Artifact, OfKind("packed-tokens")]
    """Packed tokens that `tokenize` made: run://…, s3://…, data://…, hf://… or a folder."""
    data_fingerprint: str | None = Field(default=None, pattern=r"^[0-9a-f]{16,64}$")
    """First 16 to 64 digits of the data's fingerprint. Other data are refused then."""
    model: Model | None = None
    """A BERT to continue from, in a domain of yours: run://…/model, hf://…, data://…, s3://… or a folder. The tokens
    have to be those of its tokenizer. Default: random weights."""
    config: Configuration | None = None
    """A BERT's config.json in place of the four keys below: hf://org/name or a folder."""
    hidden_size: int = Field(default=768, ge=8)
    """Width of the model."""
    layers: int = Field(default=12, ge=1)
    """Transformer layers."""
    heads: int = Field(default=12, ge=1)
    """Attention heads of a layer."""
    intermediate_size: int = Field(default=3072, ge=8)
    """Width of a layer's feed-forward part."""
    mask_fraction: float = Field(default=0.15, gt=0, lt=1)
    """Share of the tokens that the model has to guess."""
    max_steps: int = Field(default=100_000, ge=1)
    """Optimizer steps, over as many passes as they take."""
    learning_rate: float = Field(default=1e-4, gt=0)
    """Peak learning rate; lr_scheduler_type says how it falls."""
    weight_decay: float = Field(default=0.01, ge=0)
    """Weight decay of the optimizer."""
    global_batch_size: int = Field(default=256, ge=1, le=MAX_BATCH_SIZE)
    """Sequences in one optimizer step over all ranks."""
    log_every_steps: int = Field(default=50, ge=1)
    """Optimizer steps between lines of metrics."""
    evaluate_every_steps: EvaluateEverySteps = 1000
    """Optimizer steps between evaluations, or epoch. There is one at the end, too."""
    eval_sequences: int = Field(default=4096, ge=1)
    """Held-out sequences that are evaluated."""
    torch_compile: bool = False
    """Has PyTorch compile the model at its first steps; on GPUs only. Its kernels then take a quarter less time, which
    pays where they are the limit and not the host: with many sequences at once (max_batch_size_per_rank). A laptop that
    stands in for GPUs needs g++."""

    def metrics(self) -> tuple[str, ...]:
        return ("eval_loss", "eval_perplexity")

    @model_validator(mode="after")
    def _one_shape(self) -> Self:
        fields = type(self).model_fields
        if self.config is not None and any(getattr(self, name) != fields[name].default for name in _SHAPE):
            raise ValueError(f"'config' says the model's shape; leave out {', '.join(_SHAPE)}")
        if self.model is not None and (
            self.config is not None or any(getattr(self, name) != fields[name].default for name in _SHAPE)
        ):
            raise ValueError(f"'model' has a shape; leave out config, {', '.join(_SHAPE)}")
        if self.hidden_size % self.heads:
            raise ValueError(f"hidden_size {self.hidden_size} does not divide over {self.heads} heads")
        return self


KIND = JobKind(
    name="pretrain-mlm",
    summary="pre-train a BERT by masked language modelling",
    entrypoint="jobs.container.kinds.pretrain_mlm",
    arguments=PretrainMlm,
    accelerated=True,
    timeout_hours=24,
)
