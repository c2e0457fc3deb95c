"""The job kinds: name, entrypoint, arguments and default resources of each, one row a kind.

A new kind is a row here, one entrypoint file under jobs/train and a ready spec under jobs/specs; its job definitions
follow from the row. Entrypoints are named as strings, so that nothing here imports torch; a test resolves them.
"""

import math
import re
from dataclasses import dataclass
from typing import Literal

from pydantic import Field, field_validator, model_validator
from typing_extensions import Self

from jobs.arguments import Arguments, Folder, Model, Table
from jobs.errors import UsageError, did_you_mean

GlueTask = Literal["cola", "sst2", "mrpc", "qqp", "mnli", "qnli", "rte", "wnli"]
"""GLUE's classification tasks (all but STS-B, which is a regression)."""


class FinetuneClassification(Arguments):
    """Fine-tune a pretrained encoder to put single sentences, or pairs, into classes."""

    model: Model
    """Pretrained weights and tokenizer: hf://org/name, data://…, s3://… or a folder."""
    glue_task: GlueTask | None = None
    """A GLUE task by name; brings its own data and columns."""
    train_data: Table | None = None
    """Labelled examples: a .jsonl, .csv, .tsv or .parquet file, or hf://org/name?config=…&split=…"""
    eval_data: Table | None = None
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
    """Tokens a sequence is cut at and padded to; one static shape, since Gaudi compiles a graph for each new one."""
    epochs: float = Field(default=3.0, gt=0)
    """Passes over the training data."""
    learning_rate: float = Field(default=5e-5, gt=0)
    """Peak learning rate; it falls linearly to zero."""
    warmup_ratio: float = Field(default=0.1, ge=0, lt=1)
    """Share of the steps in which the learning rate rises to its peak."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW's weight decay."""
    global_batch_size: int = Field(default=32, ge=1)
    """Sequences in one optimizer step over all ranks, so that a recipe means the same on 8 HPUs and on a laptop."""
    max_batch_size_per_rank: int = Field(default=32, ge=1)
    """What one rank holds at once; a larger share of the global batch is accumulated."""
    eval_batch_size: int = Field(default=64, ge=1)
    """Sequences a rank evaluates at once."""
    checkpoint_every_steps: int = Field(default=500, ge=1)
    """Optimizer steps between checkpoints."""
    log_every_steps: int = Field(default=10, ge=1)
    """Optimizer steps between lines of metrics."""
    seed: int = 42
    """Seeds the split, the order of the examples and the new weights."""

    @model_validator(mode="after")
    def _one_data_set(self) -> Self:
        if (self.glue_task is None) == (self.train_data is None):
            raise ValueError("name exactly one of 'glue_task' and 'train_data'")
        if self.glue_task is not None and self.eval_data is not None:
            raise ValueError("'glue_task' brings its own held-out data; leave 'eval_data' out")
        return self

    def check(self, *world_sizes: int) -> None:
        """Raises UsageError, naming sizes that work, where the global batch does not divide over the ranks."""
        for world_size in world_sizes:
            if self.global_batch_size % world_size:
                together = math.lcm(*world_sizes)
                below = self.global_batch_size // together * together
                sizes = [str(size) for size in (below, below + together) if size]
                raise UsageError(
                    f"global_batch_size {self.global_batch_size} does not divide over {world_size} ranks",
                    next_step=f"set it to {' or '.join(sizes)}",
                )


class Notebook(Arguments):
    """JupyterLab and TensorBoard on an instance with all its cards, reached with `trainyard connect`."""

    files: Folder | None = None
    """What the notebook's folder begins with: that of an earlier run (s3://…/<run id>/notebook/), or any other.
    A run's own second attempt goes on with what the first has saved."""
    tensorboard_logdir: str = "."
    """What TensorBoard shows: a folder below the notebook's, or s3://…, a run's tensorboard/ for instance."""
    idle_timeout_hours: float = Field(default=2.0, gt=0)
    """Ends the job once no cell and no terminal's command has run, and no file was saved, for that long."""

    @field_validator("tensorboard_logdir")
    @classmethod
    def _below_the_notebooks(cls, logdir: str) -> str:
        if not logdir.startswith("s3://") and (re.match(r"/|\w+://", logdir) or ".." in logdir.split("/")):
            raise ValueError(f"'{logdir}' is neither a folder below the notebook's nor s3://…")
        return logdir


@dataclass(frozen=True, kw_only=True)
class JobKind:
    """One kind of job: what runs, with which arguments, on what."""

    name: str
    summary: str
    entrypoint: str
    """Module that `python -m` runs in every rank."""
    arguments: type[Arguments]
    accelerated: bool
    """True: runs on the stage's accelerator instances. False: on its CPU instances."""
    timeout_hours: float
    """Wall-clock limit of one attempt where the spec gives none."""
    one_process: bool = False
    """True: one process on one node, to which all its cards belong. False: one rank a card."""
    image: str | None = None
    """Child under images/ of the instance type's image that it runs in; None: that image itself."""


_ROWS = (
    JobKind(
        name="finetune-classification",
        summary="fine-tune an encoder on labelled sentences or pairs",
        entrypoint="jobs.train.finetune_classification",
        arguments=FinetuneClassification,
        accelerated=True,
        timeout_hours=12,
    ),
    JobKind(
        name="notebook",
        summary="JupyterLab and TensorBoard on the instance",
        entrypoint="jobs.train.notebook",
        arguments=Notebook,
        accelerated=True,
        timeout_hours=12,
        one_process=True,
        image="notebook",
    ),
)

CATALOG = {row.name: row for row in _ROWS}


def job_kind(name: str) -> JobKind:
    """The kind called `name`. Raises UsageError with the closest name if there is none."""
    try:
        return CATALOG[name]
    except KeyError:
        raise UsageError(f"job kind '{name}' not found{did_you_mean(name, CATALOG)}") from None
