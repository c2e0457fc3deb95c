"""Pydantic models as command-line flags, and back: a container gets its arguments and its environment only."""

import argparse
import json
from collections.abc import Mapping, Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

ModelT = TypeVar("ModelT", bound=BaseModel)


class Switch:
    """Marks a field of truth whose flag has no value: `Annotated[bool, Switch()]`. Without the flag it is false."""


def to_flags(model: BaseModel, *, exclude_defaults: bool = False) -> list[str]:
    """Return `--key=value` for every field that is set."""
    values = model.model_dump(mode="json", exclude_none=True, exclude_defaults=exclude_defaults)
    flags = []
    for name, value in values.items():
        if not _is_switch(type(model).model_fields[name]):
            flags.append(f"{_flag(name)}={value if isinstance(value, str) else json.dumps(value)}")
        elif value:
            flags.append(_flag(name))
    return flags


def parse_flags(model: type[ModelT], flags: Sequence[str], *, program: str) -> ModelT:
    """Return the model that `flags` (from `to_flags`, or typed by hand) describe.

    Exits with status 2 and argparse's message on an unknown flag; raises pydantic.ValidationError on a bad value.
    """
    parser = argparse.ArgumentParser(prog=program, description=model.__doc__, allow_abbrev=False)
    add_flags(parser, model)
    return from_flags(model, vars(parser.parse_args(list(flags))))


def add_flags(parser: argparse.ArgumentParser, model: type[BaseModel]) -> None:
    """Let `parser` take a flag for every field of the model; a field's docstring is its help."""
    for name, field in model.model_fields.items():
        options: dict[str, Any] = {"action": "store_true"} if _is_switch(field) else {"required": field.is_required()}
        parser.add_argument(
            _flag(name),
            dest=name,
            default=argparse.SUPPRESS,
            help=(field.description or "").replace("%", "%%"),
            **options,
        )


def from_flags(model: type[ModelT], given: Mapping[str, Any]) -> ModelT:
    """Return the model whose fields are what a parser with `add_flags` found; what is not a field is left out."""
    fields = model.model_fields
    return model.model_validate({name: _from_text(fields[name], given[name]) for name in fields if name in given})


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _is_switch(field: FieldInfo) -> bool:
    return any(isinstance(mark, Switch) for mark in field.metadata)


def _from_text(field: FieldInfo, text: str | bool) -> Any:
    """Return a flag's text as what the field holds: strings as they are, the rest as JSON where it is JSON."""
    if isinstance(text, bool) or _is_text(field.annotation):
        return text
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _is_text(annotation: Any) -> bool:
    """Return whether only a string, or nothing, can be meant."""
    if get_origin(annotation) is Annotated:
        return _is_text(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return all(_is_text(part) or part is NoneType for part in get_args(annotation))
    return annotation is str
