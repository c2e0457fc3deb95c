"""finetune-classification: fine-tune an encoder to classify or score texts or pairs of texts."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, model_validator
from typing_extensions import Self

from jobs.core.labels import SINGLE_LABEL, LabelFormat, Problem
from jobs.spec.arguments import ClassName, Columns, Delimiter, Encoding, JobKind, Model, Tables, TextFormat
from jobs.spec.recipe import LengthBuckets, Recipe

GlueTask = Literal["cola", "sst2", "mrpc", "qqp", "mnli", "qnli", "rte", "wnli", "stsb"]

GLUE = "hf://nyu-mll/glue"

COLUMNS_NEXT = "name the columns with text_column, text_pair_column and label_column"


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The tables and columns that a job reads."""

    train: list[str]
    evaluation: list[str]
    """Empty if a share of `train` is held out instead."""
    text: str
    text_pair: str | None
    label: str
    labels: LabelFormat = SINGLE_LABEL

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
    "stsb": ("sentence1", "sentence2"),
}
"""Columns as listed on the data set's card on the hub; the label column is `label` in all of them."""

GLUE_TRAINING_EXAMPLES: dict[GlueTask, int] = {
    "cola": 8_551,
    "sst2": 67_349,
    "mrpc": 3_668,
    "qqp": 363_846,
    "mnli": 392_702,
    "qnli": 104_743,
    "rte": 2_490,
    "wnli": 635,
    "stsb": 5_749,
}
"""Rows of each task's split `train`, from the card of nyu-mll/glue."""


class FinetuneClassification(Recipe):
    """Fine-tune a pretrained encoder to classify or score texts or pairs of texts."""

    model: Model
    """Pretrained model with its tokenizer: hf://org/name, data://…, s3://… or a folder."""
    glue_task: GlueTask | None = None
    """A GLUE task, which sets columns, problem and metrics. Default: none. Without train_data, its data is read from
    the hub."""
    train_data: Tables | None = None
    """Labelled examples: a .csv, .tsv, .jsonl, .json or .parquet file, hf://org/name?config=…&split=…, or a list of
    them. Default: the data of glue_task."""
    eval_data: Tables | None = None
    """Held-out examples. Default: eval_fraction of the training data."""
    eval_fraction: float = Field(default=0.1, gt=0, lt=1)
    """Share of train_data that is held out if there is no eval_data. The seed determines the selection."""
    text_column: str = Field(default="text", min_length=1)
    """Column of the text, or of the first text of a pair."""
    text_pair_column: str | None = Field(default=None, min_length=1)
    """Column of the second text of a pair. Default: no pairs."""
    label_column: str = Field(default="label", min_length=1)
    """Column of the label: a class, as a number or a name; several classes; or a number. See problem."""
    problem: Problem = "single-label"
    """What a label is: one class; any number of classes, as a list or as text with label_delimiter; or a number that
    the model learns to predict."""
    label_delimiter: str = Field(default=",", min_length=1)
    """Separates the classes in a text with several (problem: multi-label)."""
    positive_class: ClassName | None = None
    """The class whose F1 is eval_f1. Default: class 1 if there are two classes that are numeric or a GLUE task's, else
    the mean F1 of all classes."""
    class_weights: Literal["balanced"] | dict[ClassName, Annotated[float, Field(gt=0)]] | None = None
    """Weight of each class in the loss, by its name, as if its examples occurred that often: fraud: 20. Other classes
    have weight 1. balanced gives all classes the same total. Weights are scaled to a mean of 1 over the training
    examples. Default: all 1."""
    label_smoothing_factor: float = Field(default=0.0, ge=0, lt=1)
    """Share of each training example's label that is spread over all classes."""
    max_length: int = Field(default=128, ge=8, le=8192)
    """Tokens at which sequences are truncated."""
    length_buckets: LengthBuckets = "auto"
    """Number of lengths that sequences are padded to; 1 pads all to the same length. auto is 4, or 2 on HPUs, which
    compile a graph for each length."""
    epochs: float = Field(default=3.0, gt=0)
    """Passes over the training data."""
    delimiter: Delimiter | None = None
    """Character between the columns of .csv and .tsv files, or tab. Default: a comma in .csv, a tab in .tsv."""
    encoding: Encoding = "utf-8"
    """Encoding of text files, such as cp1252 (Windows) or mac-roman. UTF-16 with a byte order mark needs no key."""
    quotes_are_text: bool = False
    """Read double quotes in .csv and .tsv files as text. By default they enclose texts with delimiters or newlines."""
    strip: bool = False
    """Remove spaces and invisible characters around texts, classes and column names, and compose accents (NFC)."""
    drop_duplicates: bool = False
    """Drop training examples that repeat the text and class of an earlier one, or the text of a held-out one."""
    on_bad_rows: Literal["error", "skip"] = "error"
    """error ends the job at a row that cannot be read or has no text or label; skip leaves such rows out."""
    max_bad_rows: int = Field(default=100, ge=0)
    """Maximum number of rows, over all tables, that `on_bad_rows: skip` may leave out."""

    @model_validator(mode="after")
    def _check_data(self) -> Self:
        if self.train_data is None:
            if self.glue_task is None:
                raise ValueError("set 'train_data' or 'glue_task'")
            if self.eval_data is not None:
                raise ValueError("without 'train_data', 'glue_task' uses its own held-out data; remove 'eval_data'")
        if self.glue_task is not None and self.problem != "single-label":
            raise ValueError(f"glue_task {self.glue_task} sets the problem; remove 'problem'")
        if self.labels.problem != "single-label" and self.has_own_loss:
            raise ValueError("'class_weights' and 'label_smoothing_factor' need 'problem: single-label'; remove them")
        if self.labels.problem == "regression" and self.positive_class is not None:
            raise ValueError("'positive_class' is a class, but a regression has none; remove it")
        return self

    @property
    def labels(self) -> LabelFormat:
        """How labels are read."""
        return LabelFormat("regression" if self.glue_task == "stsb" else self.problem, self.label_delimiter)

    def inputs(self) -> Inputs:
        """Return the tables and columns to read.

        A GLUE task sets the columns that the arguments do not. If no tables are given, its data is read from the hub,
        and its public validation split is the held-out data.
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
        return Inputs(
            train=train, evaluation=evaluation, text=text, text_pair=text_pair, label=label, labels=self.labels
        )

    def evaluation_metrics(self) -> tuple[str, ...]:
        if self.labels.problem == "regression":
            combined = ("eval_combined_score",) if self.glue_task else ()
            return ("eval_loss", "eval_rmse", "eval_mae", "eval_pearson", "eval_spearman", *combined)
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

    def named_classes(self) -> Mapping[str, Collection[str]]:
        return {
            "positive_class": [self.positive_class] if self.positive_class else [],
            "class_weights": self.class_weights if isinstance(self.class_weights, dict) else [],
        }

    @property
    def has_own_loss(self) -> bool:
        """Return whether the loss differs from the model's."""
        return self.class_weights is not None or self.label_smoothing_factor > 0

    @property
    def longest_sequence(self) -> int | None:
        return self.max_length

    def columns(self, argument: str) -> Columns | None:
        if argument.partition(".")[0] not in ("train_data", "eval_data"):
            return None
        source = self.inputs()
        pair = (source.text_pair,) if source.text_pair else ()
        return Columns(
            texts=(source.text, *pair),
            label=source.label,
            missing_next=COLUMNS_NEXT,
            skip_at_most=self.max_bad_rows if self.on_bad_rows == "skip" else None,
            format=TextFormat.of(self),
            trains=argument.startswith("train_data") and len(source.train) == 1,
            labels=self.labels,
        )


def _listed(tables: str | list[str] | None) -> list[str]:
    return [tables] if isinstance(tables, str) else tables or []


KIND = JobKind(
    name="finetune-classification",
    summary="fine-tune an encoder on labelled texts or pairs of texts",
    entrypoint="jobs.container.kinds.finetune_classification",
    arguments=FinetuneClassification,
    accelerated=True,
    timeout_hours=12,
)
