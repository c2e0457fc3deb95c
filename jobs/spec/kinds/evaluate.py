"""evaluate: what a classifier makes of a table, as predictions in Parquet, and how often it is right."""

from typing import Literal

from pydantic import Field, model_validator
from typing_extensions import Self

from jobs.spec.arguments import Arguments, ClassName, Columns, JobKind, Model, Tables
from jobs.spec.recipe import MAX_BATCH_SIZE, HpuTrainer, LengthBuckets

COLUMNS_NEXT = "name the columns with text_column, text_pair_column and label_column, or set predict_only"

ADDED_COLUMNS = ("predicted", "confidence", "probabilities")
"""What the predictions have beside the table's own columns."""


class Evaluate(Arguments):
    """Have a fine-tuned classifier predict the classes of a table, and hold them against the table's own."""

    model: Model
    """A classifier with its tokenizer: run://NAME/model, hf://…, data://…, s3://… or a folder."""
    data: Tables
    """Texts: a .jsonl, .csv, .tsv or .parquet file, hf://org/name?config=…&split=…, or a list of them."""
    predict_only: bool = False
    """The table needs no classes, and there are no metrics."""
    text_column: str = Field(default="text", min_length=1)
    """Column of the sentence (of a pair: the first)."""
    text_pair_column: str | None = Field(default=None, min_length=1)
    """Column of the second sentence of a pair."""
    label_column: str = Field(default="label", min_length=1)
    """Column of the class: the model's name of it, or its number if the model has no names."""
    positive_class: ClassName | None = None
    """The class whose F1 is eval_f1. Default: class 1 of two that are numbers, else the mean over the classes."""
    max_length: int = Field(default=128, ge=8, le=8192)
    """Tokens a sequence is cut at. Take what the model was trained with."""
    length_buckets: LengthBuckets = "auto"
    """Lengths that sequences are padded to. 1: all alike. auto: 4, or 2 on HPUs, which compile a graph for each."""
    batch_size: int = Field(default=64, ge=1, le=MAX_BATCH_SIZE)
    """Sequences a rank takes at once."""
    hpu_trainer: HpuTrainer = "optimum-habana"
    """The Trainer on an HPU: optimum-habana or transformers. The second was never tried on an HPU."""
    on_bad_rows: Literal["error", "skip"] = "error"
    """error: a row that cannot be read, or has no text or no class, ends the job; skip: it is left out."""
    max_bad_rows: int = Field(default=100, ge=0)
    """Most bad rows that `on_bad_rows: skip` leaves out, of all tables together."""

    @model_validator(mode="after")
    def _columns_are_free(self) -> Self:
        for name in (self.text_column, self.text_pair_column, self.label_column):
            if name in ADDED_COLUMNS:
                raise ValueError(f"the predictions have a column '{name}' of their own; rename the table's")
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
            skips=self.on_bad_rows == "skip",
        )

    def tables(self) -> list[str]:
        """Return the tables, in the order in which they are read."""
        return [self.data] if isinstance(self.data, str) else self.data


KIND = JobKind(
    name="evaluate",
    summary="predict the classes of a table with a fine-tuned classifier",
    entrypoint="jobs.container.kinds.evaluate",
    arguments=Evaluate,
    accelerated=True,
    timeout_hours=12,
)
