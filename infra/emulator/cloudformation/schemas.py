"""Whether a changed property takes another resource: from CloudFormation's own schemas, as cfn-lint ships them.

Source: CloudFormation CLI user guide, "Resource type schema": `createOnlyProperties` and
`conditionalCreateOnlyProperties`.
"""

import importlib.util
import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from infra.emulator import REGION
from infra.emulator.errors import ConfigurationError

_CONDITIONAL = "conditionalCreateOnlyProperties"
_IN_PLACE_ANYWAY = "ReplaceComputeEnvironment"
"""What a compute environment says of its conditional properties; those of other types replace."""


def replacing(resource_type: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return the names of the changed properties that AWS changes only by making another resource."""
    schema = _schema(resource_type)
    paths = list(schema.get("createOnlyProperties", []))
    if str(new.get(_IN_PLACE_ANYWAY, True)).lower() != "false":
        paths += schema.get(_CONDITIONAL, [])
    steps = [path.removeprefix("/properties/").split("/") for path in paths]
    return sorted({step[0] for step in steps if _at(old, step) != _at(new, step)})


def _at(value: Any, steps: Sequence[str]) -> Any:
    for step in steps:
        if not isinstance(value, Mapping):
            return value  # a list: all of it counts
        value = value.get(step)
    return value


@cache
def _schema(resource_type: str) -> Mapping[str, Any]:
    digest = _digests().get(resource_type)
    if digest is None:
        return {}
    schema: Mapping[str, Any] = json.loads((_folder() / "resources" / f"{digest}.json").read_text())
    return schema


@cache
def _digests() -> Mapping[str, str]:
    digests: Mapping[str, str] = json.loads((_folder() / "providers" / f"{REGION}.json").read_text())
    return digests


@cache
def _folder() -> Path:
    """Find the schemas without importing cfn-lint, which takes a second."""
    spec = importlib.util.find_spec("cfnlint")
    if spec is None or spec.origin is None:
        raise ConfigurationError("cfn-lint is not installed", next_step="pip install -e '.[infra]'")
    return Path(spec.origin).parent / "data" / "schemas"
