"""Summarize training data in a few lines: examples, classes, lengths, and likely mistakes."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

from pydantic import BaseModel

from jobs.core.labels import Problem, quoted_name, shown_name, similar_names, stripped
from jobs.core.words import counted

SHARES = (0.5, 0.9, 0.99, 1.0)
"""Shares of the examples, the shortest first, for which the longest length is reported."""

MAX_CLASSES = 20
"""Maximum number of classes to list, by number of examples. All classes are counted."""

_MAX_NAMED = 5

_FEW = {1: "one example", 2: "two examples"}
"""Numbers of examples, training and held-out together, that are too few to learn a class reliably."""


class ClassCount(BaseModel):
    """One class and its number of examples."""

    name: str
    training: int
    held_out: int = 0


class Lengths(BaseModel):
    """Lengths of a table's examples at the `SHARES`: half are no longer than `at[0]`, and so on."""

    unit: str
    at: list[int]


class Cut(BaseModel):
    """What truncation at `max_length` removes."""

    max_length: int
    texts: int
    of_texts: int
    tokens: int
    of_tokens: int
    estimated: bool = False
    """Whether the tokens were estimated from a sample of the truncated texts."""


class DataSummary(BaseModel):
    """What is known about the training and held-out data."""

    training: int
    held_out: int = 0
    problem: Problem | None = "single-label"
    classes: list[ClassCount]
    """Empty for a regression. An example with several classes counts in each."""
    lengths: list[Lengths] = []
    cut: Cut | None = None
    length_buckets: int | None = None
    """Number of padding widths, which later attempts reuse. None if no buckets were made."""
    repeated: int = 0
    """Training examples that repeat the text of an earlier one."""
    shared: int = 0
    """Held-out examples whose text is also in the training data."""
    dropped: int = 0
    """Training examples that `drop_duplicates` removed."""
    empty: int = 0
    """Training and held-out examples whose text, or one text of a pair, is empty or only whitespace."""
    bad_rows: dict[str, int] = {}
    """Number of skipped rows by table."""
    trained: bool = True
    """Whether a job has used the data, which therefore did not refuse it."""
    named_bad_rows: list[str] = []
    """Messages about the first bad rows."""
    table_warnings: list[str] = []
    """Warnings of likely mistakes in a table's rows."""
    fingerprints: dict[str, str] = {}
    """Fingerprint of each table's content, by its location."""

    def lines(self) -> Iterator[str]:
        """Yield the summary for a terminal or a log, in lines of at most 80 characters, except for long names."""
        examples = counted(self.training, "training example")
        if self.held_out:
            examples = f"{_number(self.training)} training and {_number(self.held_out)} held-out examples"
        yield f"{examples}, {counted(len(self.classes), 'class', 'classes')}" if self.classes else examples
        yield from self._class_lines()
        if self.dropped:
            yield f"drop_duplicates left out {counted(self.dropped, 'training example')}"
        for lengths in self.lengths:
            half, most, nearly, longest = map(_number, lengths.at)
            yield f"{lengths.unit}: half have at most {half}, 90 % {most}, 99 % {nearly}, the longest {longest}"
        if self.cut is not None:
            yield _cut_line(self.cut)
        for table, fingerprint in self.fingerprints.items():
            yield f"read: {table} (fingerprint {fingerprint})"
        for warning in self.warnings():
            yield f"warning: {warning}"
        for line in self.named_bad_rows:
            yield f"  {line}"

    def _class_lines(self) -> Iterator[str]:
        if not self.classes:
            return
        shown = sorted(self.classes, key=lambda item: -item.training)[:MAX_CLASSES]
        width = max([len("class"), *(len(shown_name(item.name)) for item in shown)])
        yield f"  {'class':<{width}}  {'training':>10}" + (f"{'held out':>10}" if self.held_out else "")
        for item in shown:
            held_out_cell = f"{item.held_out:>10,}" if self.held_out else ""
            yield f"  {shown_name(item.name):<{width}}  {item.training:>10,}{held_out_cell}"
        if more := self.classes[len(shown) :]:
            yield f"  and {len(more)} more"

    def warnings(self) -> Iterator[str]:
        """Yield warnings of likely mistakes."""
        yield from self.table_warnings
        for group in similar_names(item.name for item in self.classes):
            shown = " and ".join(name if name[0] in "'\"" else f"'{name}'" for name in map(quoted_name, group))
            merge = "; strip: true makes them one" if len({*map(stripped, group)}) == 1 else ""
            yield f"{shown} look alike, but are {len(group)} classes{merge}"
        for count, words in _FEW.items():
            if few := [item.name for item in self.classes if item.training + item.held_out == count]:
                yield f"{_classes(few)} only {words}"
        unheld = [item.name for item in self.classes if self.held_out and item.training > 1 and not item.held_out]
        if unheld:
            yield f"{_classes(unheld)} no held-out example"
        if untrained := [item.name for item in self.classes if item.held_out and not item.training]:
            yield f"{_classes(untrained)} no training example"
        if self.shared:
            yield f"{_number(self.shared)} of {counted(self.held_out, 'held-out example')} also in the training data"
        if self.empty == self.training + self.held_out:
            yield "every text is empty: training refuses this data"
        elif self.empty:
            yield f"{counted(self.empty, 'example')} with an empty text, used like any other"
        if self.repeated:
            repeating = f"{counted(self.repeated, 'training example')} repeating an earlier text"
            yield f"{repeating}; drop_duplicates: true drops those of the same class"
        if self.problem == "single-label" and len(self.classes) == 1:
            yield "there is only one class: training refuses this data"
        if self.problem == "multi-label" and not self.classes:
            yield "no example has a class: training refuses this data"
        for table, count in self.bad_rows.items():
            end = (
                "skipped"
                if self.trained
                else "not counted: training refuses the table, or skips them with on_bad_rows: skip"
            )
            yield f"{counted(count, 'bad row')} of {table} {end}"


def summary(
    names: Sequence[str],
    training: tuple[Iterable[tuple[str, ...]], Sequence[Any]],
    held_out: tuple[Iterable[tuple[str, ...]], Sequence[Any]] = ((), ()),
) -> DataSummary:
    """Count the texts, or pairs of texts, and the class numbers of the training and the held-out data.

    A label is a class number, a list of them, or a regression's number.
    """
    (texts, labels), (held_out_texts, held_out_labels) = training, held_out
    training_counts, held_out_counts = (
        Counter(chain.from_iterable(label if isinstance(label, list) else (label,) for label in part))
        for part in (labels, held_out_labels)
    )
    empty = 0

    def hashes(part: Iterable[tuple[str, ...]]) -> Iterator[int]:
        """Yield hashes instead of texts, to save memory: the texts of millions of examples are already loaded once."""
        nonlocal empty
        for text in part:
            empty += not all(map(str.strip, text))
            yield hash(text)

    seen = set(hashes(texts))
    shared = sum(one in seen for one in hashes(held_out_texts))
    return DataSummary(
        training=len(labels),
        held_out=len(held_out_labels),
        classes=[
            ClassCount(name=name, training=training_counts[number], held_out=held_out_counts[number])
            for number, name in enumerate(names)
        ],
        repeated=len(labels) - len(seen),
        shared=shared,
        empty=empty,
    )


def lengths_at_shares(unit: str, lengths: Iterable[int]) -> Lengths:
    ordered = sorted(lengths)
    places = (max(0, -(-len(ordered) * round(share * 100) // 100) - 1) for share in SHARES)
    return Lengths(unit=unit, at=[int(ordered[place]) for place in places])


def _cut_line(cut: Cut) -> str:
    if not cut.texts:
        return f"no text is cut at max_length {cut.max_length}"
    about = "about " if cut.estimated else ""
    return (
        f"cut at max_length {cut.max_length}: {counted(cut.texts, 'text')} ({100 * cut.texts / cut.of_texts:.0f} %), "
        f"{about}{counted(cut.tokens, 'token')} ({100 * cut.tokens / cut.of_tokens:.0f} %)"
    )


def _classes(names: Sequence[str]) -> str:
    shown = ", ".join(map(repr, names[:_MAX_NAMED])) + (", …" if len(names) > _MAX_NAMED else "")
    return f"{len(names)} classes ({shown}) have" if len(names) > 1 else f"class {shown} has"


def _number(value: int) -> str:
    return f"{value:,}"
