"""finetune-classification: an encoder that puts single sentences, or pairs, into classes."""

from typing import Literal

from pydantic import Field, model_validator
from typing_extensions import Self

from jobs.contract.arguments import Model, Tables
from jobs.contract.job_kind import JobKind
from jobs.contract.recipe import Recipe

GlueTask = Literal["cola", "sst2", "mrpc", "qqp", "mnli", "qnli", "rte", "wnli"]
"""GLUE's classification tasks (all but STS-B, which is a regression)."""


class FinetuneClassification(Recipe):
    """Fine-tune a pretrained encoder to put single sentences, or pairs, into classes."""

    model: Model
    """Pretrained weights and tokenizer: hf://org/name, data://…, s3://… or a folder."""
    glue_task: GlueTask | None = None
    """A GLUE task by name; brings its own columns and metrics, and the hub's data where train_data names no other."""
    train_data: Tables | None = None
    """Labelled examples: a .jsonl, .csv, .tsv or .parquet file, or hf://org/name?config=…&split=…, or a list of such
    tables."""
    eval_data: Tables | None = None
    """Held-out examples; without it, eval_fraction of the training data is held out."""
    eval_fraction: float = Field(default=0.1, gt=0, lt=1)
    """Share of train_data that is held out where eval_data is not given; drawn by the seed."""
    text_column: str = "text"
    """Column of the sentence (of a pair: the first)."""
    text_pair_column: str | None = None
    """Column of the second sentence of a pair."""
    label_column: str = "label"
    """Column of the class, a number or a name."""
    max_length: int = Field(default=128, ge=8, le=8192)
    """Tokens a sequence is cut at."""
    length_buckets: int = Field(default=4, ge=1, le=32)
    """Lengths that sequences are padded to, chosen to pad least. Gaudi compiles a graph for each; 1: all alike."""
    packing: bool = False
    """Trains on several examples in one row, each of which attends to itself alone, in one shape; for BERT, RoBERTa and
    XLM-R. It pays where a rank holds 16 or more at once: of film reviews in pairs, 4 % is padding with 32 of them and
    20 % with 4; in four length buckets 17 %."""
    epochs: float = Field(default=3.0, gt=0)
    """Passes over the training data."""

    @model_validator(mode="after")
    def _one_data_set(self) -> Self:
        if self.train_data is None:
            if self.glue_task is None:
                raise ValueError("name 'train_data' or a 'glue_task'")
            if self.eval_data is not None:
                raise ValueError(
                    "without 'train_data', 'glue_task' brings its own held-out data; leave 'eval_data' out"
                )
        return self


KIND = JobKind(
    name="finetune-classification",
    summary="fine-tune an encoder on labelled sentences or pairs",
    entrypoint="jobs.train.kinds.finetune_classification",
    arguments=FinetuneClassification,
    accelerated=True,
    timeout_hours=12,
)
