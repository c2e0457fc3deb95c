"""Prints all keys of a spec as Markdown lists, with defaults, limits and help, for jobs/docs/spec.md.

The texts are the first sentences of the fields' docstrings; the JSON Schema has the whole docstrings.

python -m jobs.spec.spec_reference
"""

import json
from collections.abc import Collection, Iterator
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from jobs.core.output import run_program
from jobs.spec.catalog import CATALOG
from jobs.spec.launcher_options import Health
from jobs.spec.recipe import HubPush, Recipe, TrainerArguments
from jobs.spec.spec import JobSpec, Resources
from jobs.spec.sweep import Halving, Sweep

_BOUNDS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}


def main() -> None:
    print("\n\n".join(_sections()))


def _sections() -> Iterator[str]:
    yield _table("Every spec", JobSpec, leave_out={"arguments"})
    yield _table("`resources`", Resources)
    yield _table("`health`", Health)
    yield _table("`sweep`", Sweep)
    yield _table("`sweep.halving`", Halving)
    yield _table(
        "`arguments` of every kind that trains (keys with other defaults are listed again under their kind)", Recipe
    )
    yield _table("`arguments.training_arguments`", TrainerArguments)
    yield _table("`arguments.push_to_hub` of a kind that trains", HubPush)
    for kind in CATALOG.values():
        inherited = Recipe.model_fields if issubclass(kind.arguments, Recipe) else {}
        same = {
            name for name, field in inherited.items() if _default(kind.arguments.model_fields[name]) == _default(field)
        }
        yield _table(f"`arguments` of `{kind.name}`: {kind.summary}", kind.arguments, leave_out=same)


def _table(title: str, model: type[BaseModel], *, leave_out: Collection[str] = ()) -> str:
    rows = [
        f"- `{name}`{_given(field)}: {_text(field.description or '')}"
        for name, field in model.model_fields.items()
        if name not in leave_out
    ]
    return "\n".join([f"**{title}**", "", *rows])


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "*required*"
    value: Any = field.get_default(call_default_factory=True)
    if isinstance(value, BaseModel) or value in (None, {}, []):
        return ""
    return f"`{value if isinstance(value, str) else json.dumps(value)}`"


def _given(field: FieldInfo) -> str:
    """Return the default, the choices and the bounds of a key: ` (3; >= 1, <= 10)`."""
    bounds = ", ".join(
        f"{sign} {_number(getattr(item, name))}"
        for item in field.metadata
        for name, sign in _BOUNDS.items()
        if isinstance(getattr(item, name, None), (int, float))
    )
    given = "; ".join(filter(None, (_default(field), _choices(field), bounds)))
    return f" ({given})" if given else ""


def _choices(field: FieldInfo) -> str:
    """Return the allowed values of a key with fixed choices: `spot or on-demand`."""
    for annotation in (field.annotation, *get_args(field.annotation)):
        if get_origin(annotation) is Literal:
            *others, last = (f"{choice}" for choice in get_args(annotation))
            return f"{', '.join(others)} or {last}" if others else ""
    return ""


def _text(description: str) -> str:
    """Return the first sentence and the one that starts with `Default`."""
    first, *rest = " ".join(description.split()).removesuffix(".").split(". ")
    return ". ".join([first, *(each for each in rest if each.startswith("Default"))])


def _number(bound: int | float) -> str:
    return str(bound) if isinstance(bound, int) else f"{bound:g}"


if __name__ == "__main__":
    run_program(main)
