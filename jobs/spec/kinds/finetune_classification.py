"""finetune-classification: an encoder that puts single sentences, or pairs, into classes."""

from dataclasses import dataclass
from typing import Literal

from pydantic import Field, model_validator
from typing_extensions import Self

from jobs.spec.arguments import ClassName, Columns, JobKind, Model, Tables
from jobs.spec.recipe import LengthBuckets, Recipe

GlueTask = Literal["cola", "sst2", "mrpc", "qqp", "mnli", "qnli", "rte", "wnli"]
"""GLUE's classification tasks (all but STS-B, which is a regression)."""


GLUE = "hf://nyu-mll/glue"

COLUMNS_NEXT = "name the columns with text_column, text_pair_column and label_column"


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The tables and columns that a job reads."""

    train: list[str]
    evaluation: list[str]
    """Empty: a share of `train` is held out."""
    text: str
    text_pair: str | None
    label: str

    @property
    def columns(self) -> list[str]:
        return [self.text, *([self.text_pair] if self.text_pair else []), self.label]


_GLUE_COLUMNS: dict[GlueTask, tuple[str, str | None]] = {
    "cola": ("sentence", None),
    "sst2": ("sentence", None),
    "mrpc": ("sentence1", "sentence2"),
    "qqp": ("question1", "question2"),
    "mnli": ("premise", "hypothesis"),
    "qnli": ("question", "sentence"),
    "rte": ("sentence1", "sentence2"),
    "wnli": ("sentence1", "sentence2"),
}
"""As the data set's own card on the hub lists them; `label` is the class in all of them."""


GLUE_TRAINING_EXAMPLES: dict[GlueTask, int] = {
    "cola": 8_551,
    "sst2": 67_349,
    "mrpc": 3_668,
    "qqp": 363_846,
    "mnli": 392_702,
    "qnli": 104_743,
    "rte": 2_490,
    "wnli": 635,
}
"""Rows of each task's split `train`, as the card of nyu-mll/glue has them."""


class FinetuneClassification(Recipe):
    """Fine-tune a pretrained encoder to put single sentences, or pairs, into classes."""

    model: Model
    """Pretrained weights and tokenizer: hf://org/name, data://…, s3://… or a folder."""
    glue_task: GlueTask | None = None
    """A GLUE task, with its columns and metrics. Without train_data it is read from the hub."""
    train_data: Tables | None = None
    """Labelled examples: a .jsonl, .csv, .tsv or .parquet file, hf://org/name?config=…&split=…, or a list of them."""
    eval_data: Tables | None = None
    """Held-out examples. Default: eval_fraction of the training data."""
    eval_fraction: float = Field(default=0.1, gt=0, lt=1)
    """Share of train_data that is held out without eval_data. The seed draws it."""
    text_column: str = Field(default="text", min_length=1)
    """Column of the sentence (of a pair: the first)."""
    text_pair_column: str | None = Field(default=None, min_length=1)
    """Column of the second sentence of a pair."""
    label_column: str = Field(default="label", min_length=1)
    """Column of the class, a number or a name."""
    positive_class: ClassName | None = None
    """The class whose F1 is eval_f1. Default: class 1 of two that are numbers or a GLUE task's, else the mean over the
    classes."""
    max_length: int = Field(default=128, ge=8, le=8192)
    """Tokens a sequence is cut at."""
    length_buckets: LengthBuckets = "auto"
    """Lengths that sequences are padded to. 1: all alike. auto: 4, or 2 on HPUs, which compile a graph for each."""
    epochs: float = Field(default=3.0, gt=0)
    """Passes over the training data."""
    on_bad_rows: Literal["error", "skip"] = "error"
    """error: a row that cannot be read, or has no text or no class, ends the job; skip: it is left out."""
    max_bad_rows: int = Field(default=100, ge=0)
    """Most bad rows that `on_bad_rows: skip` leaves out, of all tables together."""

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

    def inputs(self) -> Inputs:
        """Return the tables and columns that the arguments name.

        A GLUE task has its own columns, but for those that the arguments name too. Without other tables it is read
        from the hub, and its public validation split is the held-out data.
        """
        task = self.glue_task
        text, text_pair, label = self.text_column, self.text_pair_column, self.label_column
        if task is not None:
            glue_text, glue_pair = _GLUE_COLUMNS[task]
            defaults = FinetuneClassification.model_fields
            text = glue_text if text == defaults["text_column"].default else text
            text_pair = text_pair or glue_pair
            label = "label" if label == defaults["label_column"].default else label
        train, evaluation = _listed(self.train_data), _listed(self.eval_data)
        if task is not None and self.train_data is None:
            validation = "validation_matched" if task == "mnli" else "validation"
            train = [f"{GLUE}?config={task}&split=train"]
            evaluation = [f"{GLUE}?config={task}&split={validation}"]
        return Inputs(train=train, evaluation=evaluation, text=text, text_pair=text_pair, label=label)

    def metrics(self) -> tuple[str, ...]:
        scores = {
            "mrpc": ("eval_combined_score",),
            "qqp": ("eval_combined_score",),
            "cola": ("eval_matthews_correlation",),
        }
        return (
            "eval_accuracy",
            "eval_f1",
            "eval_f1_macro",
            "eval_f1_micro",
            "eval_loss",
            *scores.get(self.glue_task or "", ()),
        )

    @property
    def longest_sequence(self) -> int | None:
        return self.max_length

    def columns(self, argument: str) -> Columns | None:
        if argument.partition(".")[0] not in ("train_data", "eval_data"):
            return None
        source = self.inputs()
        pair = (source.text_pair,) if source.text_pair else ()
        return Columns(
            texts=(source.text, *pair), label=source.label, missing_next=COLUMNS_NEXT, skips=self.on_bad_rows == "skip"
        )


def _listed(tables: str | list[str] | None) -> list[str]:
    return [tables] if isinstance(tables, str) else tables or []


KIND = JobKind(
    name="finetune-classification",
    summary="fine-tune an encoder on labelled sentences or pairs",
    entrypoint="jobs.container.kinds.finetune_classification",
    arguments=FinetuneClassification,
    accelerated=True,
    timeout_hours=12,
)
