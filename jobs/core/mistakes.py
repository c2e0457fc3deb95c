"""What pydantic found wrong with what a user wrote, in plain words."""

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BaseModel
from pydantic_core import ErrorDetails

_WHOLE_NUMBER, _NUMBER, _TRUTH = "must be a whole number", "must be a number", "must be true or false"
_TEXT, _LIST, _MAPPING = "must be text", "must be a list", "must hold keys and their values"


def _number(limit: float) -> str:
    return str(limit) if isinstance(limit, int) else f"{limit:.3g}"


_IN_WORDS: Mapping[str, str | Callable[[Mapping[str, Any]], str]] = {
    "int_type": _WHOLE_NUMBER,
    "int_parsing": _WHOLE_NUMBER,
    "int_parsing_size": _WHOLE_NUMBER,
    "int_from_float": _WHOLE_NUMBER,
    "float_type": _NUMBER,
    "float_parsing": _NUMBER,
    "finite_number": "must be a finite number",
    "bool_type": _TRUTH,
    "bool_parsing": _TRUTH,
    "string_type": _TEXT,
    "list_type": _LIST,
    "tuple_type": _LIST,
    "dict_type": _MAPPING,
    "model_type": _MAPPING,
    "model_attributes_type": _MAPPING,
    "greater_than": lambda context: f"must be more than {_number(context['gt'])}",
    "greater_than_equal": lambda context: f"must be at least {_number(context['ge'])}",
    "less_than": lambda context: f"must be less than {_number(context['lt'])}",
    "less_than_equal": lambda context: f"must be at most {_number(context['le'])}",
    "too_short": lambda context: f"must have at least {context['min_length']}",
    "too_long": lambda context: f"must have at most {context['max_length']}",
    "string_too_short": lambda context: (
        "must not be empty" if context["min_length"] == 1 else f"must have at least {context['min_length']} characters"
    ),
    "string_too_long": lambda context: f"must have at most {context['max_length']} characters",
    "literal_error": lambda context: f"must be {context['expected']}",
}
"""By pydantic's type of error (https://docs.pydantic.dev/latest/errors/validation_errors/): what must be."""


def in_words(item: ErrorDetails, model: type[BaseModel] | None = None) -> str:
    """Return what is wrong with one value, without its place.

    `model`: what the value belongs to, whose docstrings say what a text may look like.
    """
    if item["type"] == "value_error":
        return item["msg"].removeprefix("Value error, ")
    words = _IN_WORDS.get(item["type"], item["msg"])
    if callable(words):
        words = words(item["ctx"])
    if item["type"] == "string_pattern_mismatch":
        described = _first_sentence(_description(model, item["loc"])) if model is not None else ""
        return f"{item['input']!r} does not fit{f': {described}' if described else ''}"
    if item["type"] == "float_parsing" and str(item["loc"][-1]).endswith("hours") and ":" in item["input"]:
        return f"{words}, not {item['input']!r}; write hours as a number: 1.5"
    return words if item["input"] == "" else f"{words}, not {item['input']!r}"


def _description(model: type[BaseModel], path: tuple[int | str, ...]) -> str | None:
    """Return the description of the field at the end of a path; None where there is none on it."""
    for number, part in enumerate(path, start=1):
        field = model.model_fields.get(str(part))
        if field is None:
            return None
        if number == len(path):
            return field.description
        if not (isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)):
            return None
        model = field.annotation
    return None


def _first_sentence(description: str | None) -> str:
    sentence = " ".join((description or "").split()).partition(". ")[0].partition("; ")[0].rstrip(".")
    return sentence[:1].lower() + sentence[1:]
