"""Labelled sentences and pairs: from tables to texts with the numbers of their classes."""

import re
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from jobs.contract.errors import UsageError, did_you_mean
from jobs.kinds.finetune_classification import FinetuneClassification, GlueTask
from jobs.train.data.tables import TableReader

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

GLUE = "hf://nyu-mll/glue"

_NUMBER = re.compile(r"-?\d{1,4000}", re.ASCII)
"""Python converts no text of more than 4,300 digits."""

_FRACTION = re.compile(r"[-+]?\d*\.\d+(e[-+]?\d+)?", re.ASCII | re.IGNORECASE)
"""How a table without types, as CSV is, spells a score. A column of scores would become as many classes."""

_SURROGATE = re.compile("[\ud800-\udfff]")
"""JSON can spell one; it cannot be encoded, so no tokenizer takes it."""


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


def inputs(arguments: FinetuneClassification) -> Inputs:
    """Return the tables and columns that the arguments name.

    A GLUE task has its own columns, but for those that the arguments name too. Without other tables it is read
    from the hub, and its public validation split is the held-out data.
    """
    task = arguments.glue_task
    text, text_pair, label = arguments.text_column, arguments.text_pair_column, arguments.label_column
    if task is not None:
        glue_text, glue_pair = _GLUE_COLUMNS[task]
        defaults = FinetuneClassification.model_fields
        text = glue_text if text == defaults["text_column"].default else text
        text_pair = text_pair or glue_pair
        label = "label" if label == defaults["label_column"].default else label
    if task is None or arguments.train_data is not None:
        return Inputs(
            train=_listed(arguments.train_data),
            evaluation=_listed(arguments.eval_data),
            text=text,
            text_pair=text_pair,
            label=label,
        )
    validation = "validation_matched" if task == "mnli" else "validation"
    return Inputs(
        train=[f"{GLUE}?config={task}&split=train"],
        evaluation=[f"{GLUE}?config={task}&split={validation}"],
        text=text,
        text_pair=text_pair,
        label=label,
    )


def _listed(tables: str | list[str] | None) -> list[str]:
    return [tables] if isinstance(tables, str) else tables or []


@dataclass(frozen=True, kw_only=True)
class Table:
    """Some columns of a table of examples, all in memory."""

    location: str
    columns: dict[str, list[Any]]
    lines: Sequence[int]
    """For each row, its line in the file (of a Parquet file or a hub data set: its row number, from 1)."""
    unit: str
    """What `lines` counts: `line` or `row`."""
    class_names: Sequence[str] | None = None
    """Names of the label column's numbers, where the data set brings them."""
    parts: Sequence["Table"] = ()
    """The tables that it was put together from."""

    def __len__(self) -> int:
        return len(self.lines)

    def place(self, row: int) -> str:
        """Name the place of a row, for an error."""
        for part in self.parts:
            if row < len(part):
                return part.place(row)
            row -= len(part)
        return f"{self.location}, {self.unit} {self.lines[row]}"


def read_table(location: str, columns: Sequence[str], *, s3: Callable[[], "S3Client"]) -> Table:
    """Read the named columns of the table at `location`, the last of which is the label.

    Raises NotFoundError where nothing is there, UsageError where it cannot be read as such a table.
    """
    reader = TableReader(
        location=location,
        columns=list(dict.fromkeys(columns)),
        columns_are_named_by="name the columns with text_column, text_pair_column and label_column",
        s3=s3,
    )
    lines = array("q")
    values: list[Any] = []
    try:
        for row, _, line in reader.rows():
            values += row
            lines.append(line)
        kept = {column: values[number :: len(reader.columns)] for number, column in enumerate(reader.columns)}
    except MemoryError:
        raise UsageError(
            f"{location} does not fit into memory",
            next_step="leave out what is not trained on, or take an instance type with more memory",
        ) from None
    if not lines:
        raise UsageError(f"{location} holds no examples", next_step="check the file, or the step that wrote it")
    return Table(
        location=location,
        columns=kept,
        lines=lines,
        unit=reader.unit,
        class_names=reader.class_names(columns[-1]),
    )


@dataclass(frozen=True, kw_only=True)
class Examples:
    """Texts with the numbers of their classes."""

    texts: list[str]
    pairs: list[str] | None
    labels: list[int]

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, rows: Sequence[int]) -> "Examples":
        return Examples(
            texts=[self.texts[row] for row in rows],
            pairs=[self.pairs[row] for row in rows] if self.pairs is not None else None,
            labels=[self.labels[row] for row in rows],
        )


def load(arguments: FinetuneClassification, *, s3: Callable[[], "S3Client"]) -> tuple[list[str], Examples, Examples]:
    """Read the class names, the training and the held-out examples.

    Raises UsageError where a table does not hold what it should; the message names file and line.
    """
    source = inputs(arguments)
    train = _read(source.train, source.columns, s3=s3)
    held_out = _read(source.evaluation, source.columns, s3=s3) if source.evaluation else None
    names = class_names(train, source.label)
    examples = _examples(train, source, names)
    if held_out is not None:
        return names, examples, _examples(held_out, source, names)
    order = np.random.default_rng(arguments.seed).permutation(len(examples)).tolist()
    count = max(1, round(len(examples) * arguments.eval_fraction))
    if count >= len(examples):
        raise UsageError(f"{train.location} has {len(examples)} examples: too few to hold some out; give eval_data")
    return names, examples.take(order[count:]), examples.take(order[:count])


def _read(locations: Sequence[str], columns: Sequence[str], *, s3: Callable[[], "S3Client"]) -> Table:
    """Read the named columns of all these tables, one after the other.

    Raises what `read_table` does, and UsageError where their labels are numbers with different names.
    """
    first, *others = parts = [read_table(location, columns, s3=s3) for location in locations]
    if not others:
        return first
    for other in others:
        if other.class_names != first.class_names:
            raise UsageError(
                f"{other.location} names its classes {_shown(other.class_names)}, but {first.location} names them "
                f"{_shown(first.class_names)}",
                next_step="train on tables of one data set, or write the names of the classes into a file",
            )
    return Table(
        location=f"{first.location} and {len(others)} more",
        columns={column: list(chain.from_iterable(part.columns[column] for part in parts)) for column in columns},
        lines=list(chain.from_iterable(part.lines for part in parts)),
        unit=first.unit,
        class_names=first.class_names,
        parts=parts,
    )


def _shown(names: Sequence[str] | None, *, at_most: int = 6) -> str:
    if names is None:
        return "nowhere"
    return ", ".join(f"'{name}'" for name in names[:at_most]) + (", …" if len(names) > at_most else "")


def class_names(table: Table, column: str) -> list[str]:
    """List the classes of a label column in a fixed order; a number's name is the number, unless the data set names it.

    Raises UsageError on a missing label, on numbers mixed with names, on fractions, and where all are of one class.
    """
    values = table.columns[column]
    kinds = [_kind(value) for value in values]
    for row, kind in enumerate(kinds):
        if kind is None:
            raise UsageError(
                f"{table.place(row)}: '{column}' is {values[row]!r}, which is no class",
                next_step="write each class as a name or as a whole number",
            )
        if kind != kinds[0]:
            raise UsageError(
                f"{table.place(row)}: '{column}' is the {kind} {values[row]!r}, but the {kinds[0]} {values[0]!r} in "
                f"{table.unit} {table.lines[0]}",
                next_step="write all labels as numbers, or all as names",
            )
    if table.class_names is not None:
        return list(table.class_names)
    distinct = {_canonical(value) for value in values}
    if len(distinct) < 2:
        raise UsageError(f"{table.location}: every '{column}' is {values[0]!r}; there is nothing to tell apart")
    return [str(value) for value in sorted(distinct)]


def _kind(value: Any) -> str | None:
    if isinstance(value, str):
        if _is_number(value):
            return "number"
        text = value.strip()
        return "name" if text and not _FRACTION.fullmatch(text) and not _SURROGATE.search(text) else None
    if isinstance(value, bool):
        return "name"
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return "number"
    return None


def _is_number(text: str) -> bool:
    return _NUMBER.fullmatch(text.strip()) is not None


def _canonical(value: Any) -> int | str:
    """Return what is the same for all ways to write a class: 1, 1.0 and "1"; True (of JSON) and "True" (of CSV)."""
    if isinstance(value, str):
        return int(value) if _is_number(value) else value
    return str(value) if isinstance(value, bool) else int(value)


def _examples(table: Table, source: Inputs, names: list[str]) -> Examples:
    numbers = {name: number for number, name in enumerate(names)}
    labels = []
    for row, value in enumerate(table.columns[source.label]):
        if table.class_names is not None:
            label = value if isinstance(value, int) and 0 <= value < len(names) else None
        else:
            label = numbers.get(str(_canonical(value))) if _kind(value) else None
        if label is None:
            raise UsageError(
                f"{table.place(row)}: label {value!r} is none of the training data's" + did_you_mean(str(value), names),
                next_step="correct the label, or leave out the examples of that class",
            )
        labels.append(label)
    columns = [source.text, *([source.text_pair] if source.text_pair else [])]
    for column in columns:
        for row, text in enumerate(table.columns[column]):
            if not isinstance(text, str):
                raise UsageError(f"{table.place(row)}: '{column}' is not text but {text!r}")
            if _SURROGATE.search(text):
                raise UsageError(f"{table.place(row)}: '{column}' has half of a surrogate pair, which is no character")
        if not any(text.strip() for text in table.columns[column]):
            raise UsageError(
                f"{table.location}: every '{column}' is empty; there is nothing to classify",
                next_step="check the file, and which columns text_column and text_pair_column name",
            )
    pairs = table.columns[source.text_pair] if source.text_pair else None
    return Examples(texts=table.columns[source.text], pairs=pairs, labels=labels)
