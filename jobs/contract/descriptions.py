"""What the fields of a model are for: the texts under them, read from the source only when somebody asks.

pydantic reads them whenever a class is made (`use_attribute_docstrings`), which is a tenth of what a command takes, and
few commands show any.
"""

import ast
import inspect
import sys
from collections.abc import Mapping
from functools import cache
from itertools import pairwise
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core.core_schema import ModelSchema


def descriptions(model: type[BaseModel]) -> Mapping[str, str]:
    """Return the text under each field of a model, of its bases too; nothing of a field that has none."""
    found: dict[str, str] = {}
    for base in reversed(model.__mro__):
        if issubclass(base, BaseModel) and base is not BaseModel:
            found |= _texts_in(base.__module__).get(base.__qualname__.rpartition(".")[2], {})
    return {name: found[name] for name in model.model_fields if name in found}


@cache
def _texts_in(module: str) -> Mapping[str, dict[str, str]]:
    """Return the texts under the attributes of each class of a module."""
    classes = [
        node for node in ast.walk(ast.parse(inspect.getsource(sys.modules[module]))) if isinstance(node, ast.ClassDef)
    ]
    return {
        node.name: {
            field.target.id: inspect.cleandoc(text.value.value)
            for field, text in pairwise(node.body)
            if isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(text, ast.Expr)
            and isinstance(text.value, ast.Constant)
            and isinstance(text.value.value, str)
        }
        for node in classes
    }


class Described(GenerateJsonSchema):
    """A JSON Schema whose properties have the texts under the fields as their descriptions."""

    def model_schema(self, schema: ModelSchema) -> dict[str, Any]:
        described = super().model_schema(schema)
        for name, text in descriptions(schema["cls"]).items():
            described["properties"][name].setdefault("description", text)
        return described
