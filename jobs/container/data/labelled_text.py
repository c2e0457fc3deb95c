"""Read labelled sentences and pairs from tables, and turn their labels into class numbers."""

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from jobs.container.data.tables import TableReader
from jobs.core.errors import UsageError, did_you_mean
from jobs.core.labels import (
    SINGLE_LABEL,
    LabelFormat,
    Problem,
    class_name,
    label_errors,
    label_kind,
    one_class_error,
    score,
    sorted_classes,
    text_error,
)
from jobs.core.words import counted
from jobs.data_checks.table_rows import BadRows
from jobs.spec.arguments import DEFAULT_FORMAT, TextFormat
from jobs.spec.kinds.evaluate import Evaluate
from jobs.spec.kinds.finetune_classification import COLUMNS_NEXT, FinetuneClassification, Inputs

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client
    from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True)
class Table:
    """The needed columns of a table of examples, in memory."""

    location: str
    columns: dict[str, list[Any]]
    lines: Sequence[int]
    """Each row's line in the file. For Parquet and hub data sets, its row number, from 1."""
    unit: str
    """What `lines` counts: `line` or `row`."""
    class_names: Sequence[str] | None = None
    """The data set's names for the numbers in the label column, if it has any."""
    parts: Sequence["Table"] = ()
    """The tables that were joined into this one."""
    bad: BadRows = field(default_factory=BadRows)
    """Records the rows that cannot be used."""
    unusable: set[int] = field(default_factory=set)
    """Numbers of the rows that turned out to be unusable after the table was read."""

    def __len__(self) -> int:
        return len(self.lines)

    def place(self, row: int) -> str:
        """Return a row's location, for an error message."""
        return f"{self._part(row)[0].location}, {self.place_in_part(row)}"

    def place_in_part(self, row: int) -> str:
        """Return a row's location without its table, for an error message that already names the table."""
        part, row = self._part(row)
        return f"{part.unit} {part.lines[row]}"

    def refuse(self, row: int, reason: str, *, next_step: str | None = None) -> None:
        """Record a row that cannot be used."""
        self.unusable.add(row)
        part, _ = self._part(row)
        self.bad.add(part.location, UsageError(f"{self.place(row)}: {reason}", next_step=next_step))

    def _part(self, row: int) -> "tuple[Table, int]":
        for part in self.parts:
            if row < len(part):
                return part, row
            row -= len(part)
        return self, row


def read_table(
    location: str,
    columns: Sequence[str],
    *,
    s3: Callable[[], "S3Client"],
    bad: BadRows | None = None,
    text_format: TextFormat = DEFAULT_FORMAT,
) -> Table:
    """Read the given columns of the table at `location`. The last column is the label.

    Raises NotFoundError if the table does not exist, and UsageError if it cannot be read or lacks a column. Unreadable
    rows are recorded in `bad`; without `bad`, one error reports them together.
    """
    noted = BadRows() if bad is None else bad
    reader = TableReader(
        location=location,
        columns=list(dict.fromkeys(columns)),
        missing_next=COLUMNS_NEXT,
        s3=s3,
        bad=noted,
        format=text_format,
    )
    lines = array("q")
    values: list[Any] = []
    try:
        for row, _, line in reader.rows():
            values += reader.cleaned(row)
            lines.append(line)
        width = len(reader.columns)
        if reader.joined and (swallowed := reader.refuse_joined(values[width - 1 :: width], lines)):
            rows = [row for row in range(len(lines)) if row not in swallowed]
            values = [value for row in rows for value in values[row * width : (row + 1) * width]]
            lines = array("q", (lines[row] for row in rows))
        kept = {column: values[number::width] for number, column in enumerate(reader.columns)}
    except MemoryError:
        raise UsageError(
            f"{location} does not fit into memory",
            next_step="remove data that is not needed for training, or use an instance type with more memory",
        ) from None
    if bad is None or not lines:
        noted.refuse()
    if not lines:
        raise UsageError(f"{location} has no examples", next_step="check the file, or the step that wrote it")
    return Table(
        location=location,
        columns=kept,
        lines=lines,
        unit=reader.unit,
        class_names=reader.class_names(columns[-1]),
        bad=noted,
    )


@dataclass(frozen=True, kw_only=True)
class Examples:
    """Texts with their class numbers."""

    texts: list[str]
    pairs: list[str] | None
    labels: list[Any]
    """A class number, a list of class numbers, or a number for each text, depending on the problem."""

    def __len__(self) -> int:
        return len(self.labels)

    def together(self) -> Iterable[tuple[str, ...]]:
        """Return each text together with its pair, if there are pairs."""
        return zip(self.texts, self.pairs, strict=True) if self.pairs is not None else zip(self.texts, strict=True)

    def take(self, rows: Sequence[int]) -> "Examples":
        return Examples(
            texts=[self.texts[row] for row in rows],
            pairs=[self.pairs[row] for row in rows] if self.pairs is not None else None,
            labels=[self.labels[row] for row in rows],
        )


def load(
    arguments: FinetuneClassification, *, s3: Callable[[], "S3Client"], bad: BadRows | None = None
) -> tuple[list[str], Examples, Examples]:
    """Return the class names, the training examples and the held-out examples.

    Raises UsageError if a table's content is not as expected; the message names file and line. If the arguments allow
    skipping bad rows, `bad` records them.
    """
    source = arguments.inputs()
    bad = bad or bad_rows(arguments)
    read = partial(_read, columns=source.columns, s3=s3, bad=bad, text_format=TextFormat.of(arguments))
    train = read(source.train)
    held_out = read(source.evaluation) if source.evaluation else None
    names = class_names(train, source.label, source.labels)
    examples = _examples(train, source, names)
    evaluated = None if held_out is None else _examples(held_out, source, names)
    bad.refuse()
    if arguments.drop_duplicates:
        examples = _distinct(examples, bad)
    training, evaluated = (examples, evaluated) if evaluated is not None else _held_out(examples, arguments, train)
    if arguments.drop_duplicates:
        training = _distinct(training, bad, held_out=evaluated)
        if not training.labels:
            raise UsageError(
                f"{train.location}: every text is also held out, so drop_duplicates leaves no training examples",
                next_step="name another table in eval_data",
            )
    return names, training, evaluated


def _distinct(examples: Examples, bad: BadRows, held_out: Examples | None = None) -> Examples:
    """Return the examples without repeated ones and without held-out texts. `bad` counts those that are dropped."""
    texts = set() if held_out is None else set(held_out.together())
    first: dict[tuple[tuple[str, ...], str], int] = {}
    for row, example in enumerate(zip(examples.together(), map(str, examples.labels), strict=True)):
        first.setdefault(example, row)
    rows = [row for (text, _), row in first.items() if text not in texts]
    bad.duplicates += len(examples) - len(rows)
    return examples.take(rows)


def _held_out(examples: Examples, arguments: FinetuneClassification, train: Table) -> tuple[Examples, Examples]:
    """Split the examples into training and held-out ones. Raises UsageError if there are too few."""
    count = max(1, round(len(examples) * arguments.eval_fraction))
    if arguments.labels.problem == "single-label":
        chosen = stratified(examples.labels, min(count, len(examples)), seed=arguments.seed)
    else:
        chosen = np.random.default_rng(arguments.seed).choice(len(examples), min(count, len(examples)), replace=False)
    if count >= len(examples) or not len(chosen):
        raise UsageError(
            f"{train.location} has {counted(len(examples), 'example')}, too few to hold some out; set eval_data"
        )
    order = np.random.default_rng(arguments.seed).permutation(len(examples))
    is_held_out = np.isin(order, chosen)
    return examples.take(order[~is_held_out].tolist()), examples.take(order[is_held_out].tolist())


def bad_rows(arguments: FinetuneClassification | Evaluate) -> BadRows:
    return BadRows(skip=arguments.on_bad_rows == "skip", at_most=arguments.max_bad_rows)


def read_to_evaluate(
    arguments: Evaluate,
    names: Sequence[str],
    *,
    problem: Problem = "single-label",
    s3: Callable[[], "S3Client"],
    bad: BadRows,
) -> Examples:
    """Read the examples that a model should classify or score. `names` are the model's classes.

    Raises UsageError if a table's content is not as expected, or if its classes are not the model's. With
    `predict_only`, the class numbers mean nothing.
    """
    source = Inputs(
        train=[],
        evaluation=arguments.tables(),
        text=arguments.text_column,
        text_pair=arguments.text_pair_column,
        label="" if arguments.predict_only else arguments.label_column,
        labels=LabelFormat(problem, arguments.label_delimiter),
    )
    columns = [column for column in source.columns if column]
    table = _read(source.evaluation, columns, s3=s3, bad=bad, text_format=TextFormat.of(arguments))
    known = list(names)
    if all(name == f"LABEL_{number}" for number, name in enumerate(names)):
        known = [str(number) for number in range(len(names))]  # transformers calls unnamed classes LABEL_0, LABEL_1, …
    table_classes = table.class_names if source.label else None
    if table_classes is not None and not _are_numbers(known) and (unknown := sorted({*table_classes} - {*names})):
        raise UsageError(
            f"{table.location} has the class '{unknown[0]}', but the model's classes are {_shown(names)}",
            next_step="use a table with the classes that the model was trained on",
        )
    examples = _examples(table, source, known, whose="the model's")
    bad.refuse()
    return examples


def _read(
    locations: Sequence[str],
    columns: Sequence[str],
    *,
    s3: Callable[[], "S3Client"],
    bad: BadRows,
    text_format: TextFormat,
) -> Table:
    """Read the given columns of all tables and join them.

    Raises what `read_table` raises, and UsageError if the tables have different names for their label numbers.
    """
    first, *others = parts = [
        read_table(location, columns, s3=s3, bad=bad, text_format=text_format) for location in locations
    ]
    if not others:
        return first
    for other in others:
        if other.class_names != first.class_names:
            raise UsageError(
                f"the tables have different class names: {_shown(first.class_names)} in {first.location}, "
                f"{_shown(other.class_names)} in {other.location}",
                next_step="train on tables of one data set, or write the class names into the files",
            )
    return Table(
        location=f"{first.location} and {len(others)} more",
        columns={column: list(chain.from_iterable(part.columns[column] for part in parts)) for column in columns},
        lines=list(chain.from_iterable(part.lines for part in parts)),
        unit=first.unit,
        class_names=first.class_names,
        parts=parts,
        bad=bad,
    )


def _shown(names: Sequence[str] | None, *, at_most: int = 6) -> str:
    if names is None:
        return "none"
    return ", ".join(f"'{name}'" for name in names[:at_most]) + (", …" if len(names) > at_most else "")


def class_names(table: Table, column: str, labels: LabelFormat = SINGLE_LABEL) -> list[str]:
    """List the classes of a label column in a fixed order. A number is its own name unless the data set names it.

    A regression has none. Raises UsageError for missing labels, numbers mixed with names, fractions, and a column with
    only one class.
    """
    values = table.columns[column]
    for row, reason, next_step in label_errors(column, values, table.place_in_part, labels):
        table.refuse(row, reason, next_step=next_step)
    usable = [value for row, value in enumerate(values) if row not in table.unusable]
    if labels.problem == "regression":
        if len(set(map(score, usable))) == 1:
            raise UsageError(f"{table.location}: every '{column}' is {usable[0]!r}, so there is nothing to learn")
        return []
    if table.class_names is not None:
        return list(table.class_names)
    names = sorted_classes(chain.from_iterable(map(labels.classes, usable)))
    if labels.problem == "multi-label" and not names:
        table.bad.refuse()
        raise UsageError(f"{table.location}: no '{column}' names a class, but training needs at least one")
    if labels.problem == "single-label" and len(names) < 2:
        table.bad.refuse()
        raise one_class_error(table.location, column, usable)
    return names


def _examples(table: Table, source: Inputs, names: list[str], *, whose: str = "the training data's") -> Examples:
    """Return the usable rows and record the unusable ones. `whose` names the owner of the classes in errors."""
    numbers = {name: number for number, name in enumerate(names)}
    own = table.class_names
    if own is not None and _are_numbers(names):
        own = names  # the model's labels are numbers, so compare numbers with numbers
    several = source.labels.problem == "multi-label"
    labels: list[Any] = [] if source.label else [[] if several else 0] * len(table)
    values = table.columns[source.label] if source.label else []
    if source.labels.problem != "single-label":
        for row, error, next_step in label_errors(source.label, values, table.place_in_part, source.labels):
            if row not in table.unusable:
                table.refuse(row, error, next_step=next_step)
    for row, value in enumerate(values):
        if source.labels.problem == "regression":
            labels.append(score(value))
            continue
        found: list[int] = []
        for each in _parts(value, own, source.labels) if several else [value]:
            class_of_part = _class_of(each, own)
            if class_of_part is not None and class_of_part in numbers:
                found.append(numbers[class_of_part])
            elif row not in table.unusable:
                shown = each if own is None or class_of_part is None else class_of_part
                table.refuse(
                    row,
                    f"label {shown!r} is not one of {whose} classes{did_you_mean(str(shown), names)}",
                    next_step="correct the label, or remove the examples of that class",
                )
        labels.append(found if several else (found or [-1])[0])
    columns = [source.text, *([source.text_pair] if source.text_pair else [])]
    for column in columns:
        for row, text in enumerate(table.columns[column]):
            if (reason := text_error(text)) and row not in table.unusable:
                table.refuse(row, f"'{column}' {reason}")
        if not table.unusable and not any(text.strip() for text in table.columns[column]):
            raise UsageError(
                f"{table.location}: every '{column}' is empty; there is nothing to classify",
                next_step="check the file and the columns named by text_column and text_pair_column",
            )
    pairs = table.columns[source.text_pair] if source.text_pair else None
    examples = Examples(texts=table.columns[source.text], pairs=pairs, labels=labels)
    if not table.unusable:
        return examples
    if len(table.unusable) == len(table):
        table.bad.refuse()
        raise UsageError(f"{table.location} has only bad rows, for instance {table.place(0)}")
    return examples.take([row for row in range(len(table)) if row not in table.unusable])


def _are_numbers(names: Sequence[str]) -> bool:
    """Return whether the classes are named only by their numbers."""
    return list(names) == [str(number) for number in range(len(names))]


def _parts(value: Any, names: Sequence[str] | None, labels: LabelFormat) -> Sequence[Any]:
    """Return the classes of a label with several, as names, or as numbers if the data set has `names` for them."""
    return value if names is not None and isinstance(value, list) else labels.classes(value)


def _class_of(value: Any, names: Sequence[str] | None) -> str | None:
    """Return a label's class name, or None if it has none. `names` are the data set's names for its numbers."""
    if names is None:
        return class_name(value) if label_kind(value) else None
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return names[value] if is_number and 0 <= value < len(names) else None


def stratified(labels: Sequence[int], count: int, *, seed: int) -> "NDArray[np.int64]":
    """Draw `count` rows so that each class keeps its share and, if possible, is present in both splits.

    A class with a single example is never drawn. If there are more classes than rows to draw, the smallest classes are
    left out. If the classes together have too few examples to spare, fewer rows are drawn.
    """
    numbers = np.asarray(labels)
    sizes = np.bincount(numbers)
    share = sizes * (count / len(numbers))
    most = np.maximum(sizes - 1, 0)
    drawn = np.minimum(np.maximum(np.floor(share).astype(np.int64), 1), most)
    while (excess := int(drawn.sum()) - count) > 0:
        rare = np.flatnonzero(drawn)
        drawn[rare[np.argsort(share[rare] - drawn[rare], kind="stable")[:excess]]] -= 1
    while (lack := count - int(drawn.sum())) > 0 and (free := np.flatnonzero(drawn < most)).size:
        drawn[free[np.argsort(drawn[free] - share[free], kind="stable")[:lack]]] += 1
    order = np.random.default_rng(seed).permutation(len(numbers))
    # Group the rows by class, in shuffled order within each class.
    by_class = order[np.argsort(numbers[order], kind="stable")]
    place_in_class = np.arange(len(numbers)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return by_class[place_in_class < np.repeat(drawn, sizes)]
