"""What may be a class, and what may be text to put into one: the same for the command line and the container."""

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

_WHOLE = re.compile(r"(0|-?[1-9]\d{0,17})(\.0+)?", re.ASCII)
"""Text that an integer of 64 bits returns unchanged, and as a table without types writes it once a cell is missing."""

_DIGITS = re.compile(r"[-+]?\d+", re.ASCII)

_FRACTION = re.compile(r"[-+]?((\d+[.,]\d*|[.,]\d+)(e[-+]?\d+)?|nan|inf(inity)?)", re.ASCII | re.IGNORECASE)
"""A score, or a missing one, as a table without types (CSV) spells it; some write a comma.
A column of scores would become as many classes."""

_EXACT_FLOAT = 1 << 53
"""Above it not every whole number is a float: two numbers may have become one."""

_NAME_WIDTH = 40
"""A table shows so many characters of a class's name."""

_SURROGATE = re.compile("[\ud800-\udfff]")
"""JSON can spell one; it cannot be encoded, so no tokenizer takes it."""

INVALID_CLASS_NEXT = "write each class as a name or as a whole number"
MIXED_NEXT = "write all labels as numbers, or all as names"


def label_kind(value: Any) -> str | None:
    """Return `number`, `name` or `code`, or None if the value is no class.

    A code is text of digits that a number would not keep: 0110, -0, +1, or more than 18 digits. It is a name.
    """
    if isinstance(value, str):
        text = value.strip()
        if _WHOLE.fullmatch(text):
            return "number"
        if _DIGITS.fullmatch(text):
            return "code"
        return "name" if text and not _FRACTION.fullmatch(text) and not _SURROGATE.search(text) else None
    if isinstance(value, bool):
        return "name"
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer() and abs(value) <= _EXACT_FLOAT):
        return "number"
    return None


def class_name(value: Any) -> str:
    """Return the name of the class that a label stands for.

    All ways to write a class have one name: 1, 1.0, "1" and "1.0"; True (of JSON) and "True" (of CSV).
    """
    if label_kind(value) == "number":
        return str(int(value.strip().partition(".")[0] if isinstance(value, str) else value))
    return str(value)


def sorted_classes(names: Iterable[str]) -> list[str]:
    """Return the distinct names of classes in a fixed order: by value if all are numbers, otherwise by name."""
    distinct = set(names)
    return sorted(distinct, key=int if all(label_kind(name) == "number" for name in distinct) else None)


def label_errors(column: str, values: Sequence[Any], place: Callable[[int], str]) -> Iterator[tuple[int, str, str]]:
    """Yield the labels of a column that cannot be used: the row, what is wrong with it, and what to do next.

    Numbers and names are not mixed, unless there is a code: it makes the column one of names. `place` names a row.
    """
    kinds = [label_kind(value) for value in values]
    first = next((row for row, kind in enumerate(kinds) if kind), 0)
    may_mix = "code" in kinds
    for row, kind in enumerate(kinds):
        if kind is None:
            yield row, f"'{column}' is {values[row]!r}, which is no class", INVALID_CLASS_NEXT
        elif not may_mix and kind != kinds[first]:
            other = f"the {kinds[first]} {values[first]!r} in {place(first)}"
            yield row, f"'{column}' is the {kind} {values[row]!r}, but {other}", MIXED_NEXT


def names_in_parquet(schema: Any, column: str) -> list[str] | None:
    """Return the names of a column's numbers that `datasets` wrote into an Arrow schema, or None if it has none.

    Source: datasets' arrow_writer.py, `ArrowWriter._build_metadata`. Metadata that does not fit the column is ignored:
    other writers keep it when they change the column.
    """
    try:
        feature = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"][column]
        names = feature["names"] if feature["_type"] == "ClassLabel" else None
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    if not isinstance(names, list) or not all(label_kind(name) and isinstance(name, str) for name in names):
        return None
    is_whole = str(schema.field(column).type).startswith(("int", "uint"))
    return names if names and is_whole and len({*names}) == len(names) else None


def text_error(value: Any) -> str | None:
    """Return why a value is no text that can be classified, as the end of a sentence about its column; None: it is."""
    if not isinstance(value, str):
        return f"is not text but {value!r}"
    return "has half of a surrogate pair, which is no character" if _SURROGATE.search(value) else None


def quoted_name(name: str) -> str:
    """Return a class's name, quoted if it has blanks or characters that cannot be seen: ' Rechnung' and 'a  b'."""
    return name if name == " ".join(name.split()) and name.isprintable() else repr(name)


def shown_name(name: str) -> str:
    """Return a class's name for a table, as `quoted_name` has it, without its end if it is long."""
    text = quoted_name(name)
    return text if len(text) <= _NAME_WIDTH else text[: _NAME_WIDTH - 1] + "…"


def similar_names(names: Iterable[str]) -> list[list[str]]:
    """Return the groups of names that differ by blanks or case only: `games`, `games ` and `Games`."""
    groups = defaultdict(list)
    for name in names:
        groups[" ".join(name.split()).casefold()].append(name)
    return [group for group in groups.values() if len(group) > 1]
