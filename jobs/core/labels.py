"""Which values are valid class labels and texts; the command line and the container use the same rules."""

import json
import math
import re
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal

from jobs.core.errors import UsageError, did_you_mean

Problem = Literal["single-label", "multi-label", "regression"]
"""What a model predicts for a text: one class, any number of classes, or a number."""

_WHOLE = re.compile(r"(0|-?[1-9]\d{0,17})(\.0+)?", re.ASCII)
"""Text that a 64-bit integer round-trips, also with the `.0` that untyped tables add to a column with missing cells."""

_DIGITS = re.compile(r"[-+]?\d+", re.ASCII)

_FRACTION = re.compile(r"[-+]?((\d+[.,]\d*|[.,]\d+)(e[-+]?\d+)?|nan|inf(inity)?)", re.ASCII | re.IGNORECASE)
"""A score or a missing score in an untyped table (CSV), with a decimal point or comma. A column of scores is not a
column of labels: each score would become a class."""

_EXACT_FLOAT = 1 << 53
"""Above this value, different whole numbers may be the same float."""

_NAME_WIDTH = 40
"""Characters of a class name that a table shows."""

_INVALID = re.compile("[\x00\ud800-\udfff]")
"""NUL, which a wrong encoding leaves behind, and lone surrogates: JSON can contain them, but they cannot be encoded, so
tokenizers reject them."""

INVALID_CLASS_NEXT = "write each class as a name or as a whole number"
MIXED_NEXT = "write all labels as numbers, or all as names"
_SCORE_NEXT = "write it with a decimal point, or leave the row out"


@dataclass(frozen=True)
class LabelFormat:
    """How the values of a label column are read."""

    problem: Problem | None = "single-label"
    """None if unknown: before a model is read, labels cannot be checked."""
    delimiter: str = ","
    """Separates the classes in a text with several."""

    def classes(self, value: Any) -> list[str]:
        """Return the class names of a valid label; a regression's label has none."""
        if self.problem == "multi-label":
            return class_names_of(value, self.delimiter) or []
        return [class_name(value)] if self.problem == "single-label" else []


SINGLE_LABEL = LabelFormat()


def label_kind(value: Any) -> str | None:
    """Return `number`, `name` or `code`, or None if the value is not a class.

    A code is used as a name, because converting its digits to a number would change them: 0110, -0, +1, over 18 digits.
    """
    if isinstance(value, str):
        text = value.strip()
        if _WHOLE.fullmatch(text):
            return "number"
        if _DIGITS.fullmatch(text):
            return "code"
        return "name" if text and not _FRACTION.fullmatch(text) and not _INVALID.search(text) else None
    if isinstance(value, bool):
        return "name"
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer() and abs(value) <= _EXACT_FLOAT):
        return "number"
    return "number" if isinstance(value, Decimal) and value.is_finite() and value == value.to_integral() else None


def class_name(value: Any) -> str:
    """Return the class name of a label.

    All spellings of a class have the same name: 1, 1.0, "1" and "1.0"; True (from JSON) and "True" (from CSV).
    """
    if label_kind(value) == "number":
        return str(int(value.strip().partition(".")[0] if isinstance(value, str) else value))
    return str(value)


def class_names_of(value: Any, delimiter: str) -> list[str] | None:
    """Return the class names of a label with any number of classes, or None if it is not one.

    It is a list, or text with the delimiter between the classes. An empty list or text has no class.
    """
    if isinstance(value, str):
        parts = [part.strip() for part in value.split(delimiter)] if value.strip() else []
        value = None if value.strip().startswith("[") else parts  # a list that was written as text
    elif label_kind(value):
        value = [value]
    if not isinstance(value, list) or not all(map(label_kind, value)):
        return None
    return list(dict.fromkeys(map(class_name, value)))


def score(value: Any) -> float | None:
    """Return the number of a regression's label, or None if it is not a finite number."""
    try:
        number = math.nan if isinstance(value, bool) or "_" in str(value) else float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def sorted_classes(names: Iterable[str]) -> list[str]:
    """Return the distinct class names, sorted by value if all are numbers, else alphabetically."""
    distinct = set(names)
    return sorted(distinct, key=int if all(label_kind(name) == "number" for name in distinct) else None)


def label_errors(
    column: str, values: Sequence[Any], place: Callable[[int], str], labels: LabelFormat = SINGLE_LABEL
) -> Iterator[tuple[int, str, str]]:
    """Yield the unusable labels of a column: the row, the error, and the next step.

    If each label is one class, numbers and names must not be mixed, unless the column has a code, which makes all
    labels names. `place` describes a row.
    """
    if labels.problem is None:
        return
    if labels.problem == "regression":
        for row in (row for row, value in enumerate(values) if score(value) is None):
            yield row, f"'{column}' is {values[row]!r}, which is not a number", _SCORE_NEXT
        return
    if labels.problem == "multi-label":
        for row in (row for row, value in enumerate(values) if class_names_of(value, labels.delimiter) is None):
            next_step = f"write a list in JSON lines or Parquet, or the classes with '{labels.delimiter}' between them"
            yield row, f"'{column}' is {values[row]!r}, which is not a list of classes", next_step
        return
    kinds = [label_kind(value) for value in values]
    first = next((row for row, kind in enumerate(kinds) if kind), 0)
    may_mix = "code" in kinds
    for row, kind in enumerate(kinds):
        if kind is None:
            yield row, f"'{column}' is {values[row]!r}, which is not a class", _class_next(values[row])
        elif not may_mix and kind != kinds[first]:
            other = f"the {kinds[first]} {values[first]!r} in {place(first)}"
            yield row, f"'{column}' is the {kind} {values[row]!r}, but {other}", MIXED_NEXT


def _class_next(value: Any) -> str:
    """Return what to do about a label that is not a class."""
    if isinstance(value, list):
        return "for examples with several classes, train with problem: multi-label"
    is_score = score(value) is not None
    return f"{INVALID_CLASS_NEXT}, or train with problem: regression" if is_score else INVALID_CLASS_NEXT


def names_in_parquet(schema: Any, column: str) -> list[str] | None:
    """Return the class names that `datasets` stored in an Arrow schema for a numeric column, or None if there are none.

    Source: datasets' arrow_writer.py, `ArrowWriter._build_metadata`. Metadata that does not match the column is
    ignored, because other writers keep it when they change the column.
    """
    try:
        feature = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"][column]
        feature = feature.get("feature", feature)  # of a list
        names = feature["names"] if feature["_type"] == "ClassLabel" else None
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    if not isinstance(names, list) or not all(label_kind(name) and isinstance(name, str) for name in names):
        return None
    kind = schema.field(column).type
    is_whole = str(getattr(kind, "value_type", kind)).startswith(("int", "uint"))
    return names if names and is_whole and len({*names}) == len(names) else None


def one_class_error(location: str, column: str, values: Sequence[Any]) -> UsageError:
    """Return the error for a label column whose usable values are all of one class, or are none."""
    shown = f"is {values[0]!r}" if values else "is unusable"
    return UsageError(f"{location}: every '{column}' {shown}, but training needs at least two classes")


def text_error(value: Any) -> str | None:
    """Return why a value is not a text to classify, to follow the column's name in a message; None if it is valid."""
    if not isinstance(value, str):
        return f"is not text but {value!r}"
    if not (found := _INVALID.search(value)):
        return None
    return "contains a NUL byte" if found[0] == "\0" else "contains a lone surrogate, which is not a character"


_BLANK = r"\s\ufeff\u00ad\u061c\u180e\u200b-\u200f\u202a-\u202e\u2060-\u2069"
"""White space and invisible characters (Unicode's category Cf), without the tags and joiners of emoji."""

_BLANK_ENDS = re.compile(f"^[{_BLANK}]+|[{_BLANK}]+$")


def stripped(text: str) -> str:
    """Return a text without blanks and invisible characters at both ends, with composed accents (NFC)."""
    return unicodedata.normalize("NFC", _BLANK_ENDS.sub("", text))


def unknown_classes(named: Mapping[str, Collection[str]], classes: Sequence[str]) -> Iterator[UsageError]:
    """Yield an error for each argument that names a class which is not among the data's. `named` has its names."""
    for argument, names in named.items():
        for name in (each for each in names if each not in classes):
            yield UsageError(
                f"{argument}: '{name}' is none of the classes{did_you_mean(name, classes)}",
                next_step="correct the name, or look at the classes: trainyard data show TABLE",
            )


def quoted_name(name: str) -> str:
    """Return a class name, quoted if it has extra spaces, invisible characters or separate accents: ' a', 'a  b'."""
    if unicodedata.normalize("NFC", name) != name:
        return ascii(name)
    return name if name == " ".join(name.split()) and name.isprintable() else repr(name)


def shown_name(name: str) -> str:
    """Return a class name for a table: like `quoted_name`, truncated if it is long."""
    text = quoted_name(name)
    return text if len(text) <= _NAME_WIDTH else text[: _NAME_WIDTH - 1] + "…"


def similar_names(names: Iterable[str]) -> list[list[str]]:
    """Return groups of names that look alike: `games`, `games ` and `Games`; or with an invisible character in one."""
    groups = defaultdict(list)
    for name in names:
        visible = "".join(letter for letter in name if unicodedata.category(letter) != "Cf")
        groups[" ".join(unicodedata.normalize("NFC", visible).split()).casefold()].append(name)
    return [group for group in groups.values() if len(group) > 1]
