"""Whether each value of a settings row is of the type that its field's annotation says. Python itself checks none."""

from collections.abc import Iterator
from dataclasses import is_dataclass
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

_NAMES = {str: "a string", int: "a whole number", float: "a number", bool: "True or False", NoneType: "None"}


def type_mistakes(row: Any) -> Iterator[str]:
    """Each field of the dataclass `row`, and of those in it, whose value is of another type: `field: must be …`."""
    for field, annotation in get_type_hints(type(row)).items():
        for place, mistake in _mistakes(getattr(row, field), annotation):
            yield f"{field}{place}: {mistake}"


def _mistakes(value: Any, annotation: Any) -> Iterator[tuple[str, str]]:
    """Where in the value, and what is wrong there."""
    choices = get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)
    if not any(_is_a(value, choice) for choice in choices):
        yield "", f"must be {' or '.join(_name(choice) for choice in choices)}{_remark(value, choices[0])}"
    elif isinstance(value, tuple):
        (of, _) = get_args(next(choice for choice in choices if get_origin(choice) is tuple))
        for index, item in enumerate(value):
            for place, mistake in _mistakes(item, of):
                yield f"[{index}]{place}", mistake
    elif is_dataclass(value):
        for mistake in type_mistakes(value):
            yield "", mistake


def _is_a(value: Any, wanted: Any) -> bool:
    """As a type checker sees it: a float may be written without its point, and True is no number."""
    if wanted is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if wanted is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, get_origin(wanted) or wanted)


def _name(wanted: Any) -> str:
    if get_origin(wanted) is tuple:
        of = get_args(wanted)[0]
        return "a tuple of " + ("strings" if of is str else of.__name__)
    return _NAMES.get(wanted) or f"{wanted.__name__}(…)"


def _remark(value: Any, wanted: Any) -> str:
    """What the value is instead; where it is one item of the tuple that is wanted, how to write that tuple."""
    if get_origin(wanted) is tuple and _is_a(value, get_args(wanted)[0]):
        item = repr(value) if isinstance(value, str) else f"{type(value).__name__}(…)"
        return f"; a tuple of one needs a comma: ({item},)"
    if get_origin(wanted) is tuple or is_dataclass(value) or isinstance(value, list | dict | set | tuple):
        return f", not {_NAMES.get(type(value), type(value).__name__)}"
    return f", not {value!r}"
