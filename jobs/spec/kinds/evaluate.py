"""evaluate: predictions of a classifier or regression for a table, in Parquet, and their metrics."""

from typing import Literal

from pydantic import Field, model_validator
from typing_extensions import Self

from jobs.core.labels import LabelFormat
from jobs.spec.arguments import Arguments, ClassName, Columns, Delimiter, Encoding, JobKind, Model, Tables, TextFormat
from jobs.spec.recipe import MAX_BATCH_SIZE, HpuTrainer, LengthBuckets

COLUMNS_NEXT = "name the columns with text_column, text_pair_column and label_column, or set predict_only"

ADDED_COLUMNS = ("predicted", "confidence", "probabilities")
"""Columns that the predictions have in addition to the table's columns."""


class Evaluate(Arguments):
    """Predict the classes or numbers of a table with a fine-tuned model, and compare them with the table's labels."""

    model: Model
    """A classifier with its tokenizer: run://NAME/model, hf://…, data://…, s3://… or a folder."""
    data: Tables
    """Texts: a .csv, .tsv, .jsonl, .json or .parquet file, hf://org/name?config=…&split=…, or a list of them."""
    predict_only: bool = False
    """Only predict: the table needs no labels, and there are no metrics."""
    text_column: str = Field(default="text", min_length=1)
    """Column of the text, or of the first text of a pair."""
    text_pair_column: str | None = Field(default=None, min_length=1)
    """Column of the second text of a pair. Default: no pairs."""
    label_column: str = Field(default="label", min_length=1)
    """Column of the label: the model's name of the class, or its number if the model has no names; several classes; or
    a number, depending on the model."""
    label_delimiter: str = Field(default=",", min_length=1)
    """Separates the classes in a text with several, if the model predicts several."""
    positive_class: ClassName | None = None
    """The class whose F1 is eval_f1. Default: class 1 if there are two numeric classes, else the mean F1 of all
    classes."""
    max_length: int = Field(default=128, ge=8, le=8192)
    """Tokens at which sequences are truncated. Use the value that the model was trained with."""
    length_buckets: LengthBuckets = "auto"
    """Number of lengths that sequences are padded to; 1 pads all to the same length. auto is 4, or 2 on HPUs, which
    compile a graph for each length."""
    batch_size: int = Field(default=64, ge=1, le=MAX_BATCH_SIZE)
    """Sequences that a rank processes at once."""
    hpu_trainer: HpuTrainer = "optimum-habana"
    """Library of the Trainer on HPUs. transformers is untested on HPUs."""
    delimiter: Delimiter | None = None
    """Character between the columns of .csv and .tsv files, or tab. Default: a comma in .csv, a tab in .tsv."""
    encoding: Encoding = "utf-8"
    """Encoding of text files, such as cp1252 (Windows) or mac-roman. UTF-16 with a byte order mark needs no key."""
    quotes_are_text: bool = False
    """Read double quotes in .csv and .tsv files as text. By default they enclose texts with delimiters or newlines."""
    strip: bool = False
    """Remove spaces and invisible characters around texts, classes and column names, and compose accents (NFC)."""
    on_bad_rows: Literal["error", "skip"] = "error"
    """error ends the job at a row that cannot be read or has no text or label; skip leaves such rows out."""
    max_bad_rows: int = Field(default=100, ge=0)
    """Maximum number of rows, over all tables, that `on_bad_rows: skip` may leave out."""

    @model_validator(mode="after")
    def _check_columns(self) -> Self:
        for name in (self.text_column, self.text_pair_column, self.label_column):
            if name in ADDED_COLUMNS:
                raise ValueError(f"'{name}' is a column of the predictions; rename that column of the table")
        return self

    @property
    def longest_sequence(self) -> int | None:
        return self.max_length

    @property
    def classifies(self) -> bool:
        return True

    def columns(self, argument: str) -> Columns | None:
        if argument.partition(".")[0] != "data":
            return None
        pair = (self.text_pair_column,) if self.text_pair_column else ()
        return Columns(
            texts=(self.text_column, *pair),
            label=None if self.predict_only else self.label_column,
            missing_next=COLUMNS_NEXT,
            skip_at_most=self.max_bad_rows if self.on_bad_rows == "skip" else None,
            format=TextFormat.of(self),
            labels=LabelFormat(None, self.label_delimiter),  # the model decides
        )

    def tables(self) -> list[str]:
        """Return the tables in the order in which they are read."""
        return [self.data] if isinstance(self.data, str) else self.data


KIND = JobKind(
    name="evaluate",
    summary="predict the classes of a table with a fine-tuned classifier",
    entrypoint="jobs.container.kinds.evaluate",
    arguments=Evaluate,
    accelerated=True,
    timeout_hours=12,
)
