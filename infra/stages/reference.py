"""Every key of infra/settings.py as Markdown tables, from the rows' own fields; infra/docs/settings.md holds them.

python -m infra.stages.reference
"""

import ast
import dataclasses
import inspect
from collections.abc import Iterator

from infra.stages.model import Alerts, CapacityReservation, ExistingVpc, GitHub, Pool, Stage, Team
from jobs.contract.output import run_program


def main() -> None:
    print("\n\n".join(map(_table, (Stage, Team, Pool, CapacityReservation, Alerts, GitHub, ExistingVpc))))


def _table(model: type) -> str:
    said = dict(_documented(model))
    rows = [f"| `{field.name}` | {_default(field)} | {said[field.name]} |" for field in dataclasses.fields(model)]
    heading = f"## {model.__name__}\n\n{inspect.getdoc(model)}"
    return "\n".join([heading, "", "| Key | Default | |", "| --- | --- | --- |", *rows])


def _documented(model: type) -> Iterator[tuple[str, str]]:
    """Yield the fields of a dataclass with what is written under each, which only its source knows."""
    [found] = ast.parse(inspect.getsource(model)).body
    assert isinstance(found, ast.ClassDef)  # noqa: S101 - that is what was asked for
    for field, below in zip(found.body, found.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(below, ast.Expr):
            yield field.target.id, " ".join(ast.literal_eval(below.value).split())


def _default(field: "dataclasses.Field[object]") -> str:
    if field.default is dataclasses.MISSING:
        return "*needed*"
    if field.default in (None, ()) or dataclasses.is_dataclass(field.default):
        return ""
    return f"`{field.default}`"


if __name__ == "__main__":
    run_program(main)
