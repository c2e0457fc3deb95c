"""What may be a class, and what may be text to put into one: the same for the command line and the container."""

import re
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

_NUMBER = re.compile(r"-?\d{1,4000}", re.ASCII)
"""Python converts no text of more than 4,300 digits."""

_FRACTION = re.compile(r"[-+]?((\d+[.,]\d*|[.,]\d+)(e[-+]?\d+)?|nan|inf(inity)?)", re.ASCII | re.IGNORECASE)
"""How a table without types, as CSV is, spells a score, with a comma too, or the lack of one.
A column of scores would become as many classes."""

_NAME_WIDTH = 40
"""A table shows so many characters of a class's name."""

_SURROGATE = re.compile("[\ud800-\udfff]")
"""JSON can spell one; it cannot be encoded, so no tokenizer takes it."""

NO_CLASS_NEXT = "write each class as a name or as a whole number"
MIXED_NEXT = "write all labels as numbers, or all as names"


def label_kind(value: Any) -> str | None:
    """Return `number` or `name`; None for what is no class."""
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


def canonical(value: Any) -> int | str:
    """Return what is the same for all ways to write a class: 1, 1.0 and "1"; True (of JSON) and "True" (of CSV)."""
    if isinstance(value, str):
        return int(value) if _is_number(value) else value
    return str(value) if isinstance(value, bool) else int(value)


def text_fault(value: Any) -> str | None:
    """Return why a value is no text that can be classified, as the end of a sentence about its column; None: it is."""
    if not isinstance(value, str):
        return f"is not text but {value!r}"
    return "has half of a surrogate pair, which is no character" if _SURROGATE.search(value) else None


def shown_name(name: str) -> str:
    """Return a class's name for a table, quoted where blanks at its ends could not be seen."""
    text = repr(name) if name != name.strip() else name
    return text if len(text) <= _NAME_WIDTH else text[: _NAME_WIDTH - 1] + "…"


def alike(names: Iterable[str]) -> list[list[str]]:
    """Return the groups of names that differ by blanks or case only: `games`, `games ` and `Games`."""
    groups = defaultdict(list)
    for name in names:
        groups[" ".join(name.split()).casefold()].append(name)
    return [group for group in groups.values() if len(group) > 1]
