"""Templates for review: one file per stack, for the stage with every feature (ALL in variants.py).

python -m tests.support.infra.goldens     write the files; `git diff` then shows what a deployment would change
"""

import difflib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.support.infra.synthesis import ROOT, Templates, flatten, stacks_of
from tests.support.infra.variants import ALL

_LEFT_OUT = {
    "Metadata",
    # Scripts and the dashboard, which have separate tests.
    *("UserData", "Data", "ZipFile", "DashboardBody"),
    # Tags of every resource, which test_templates.py checks.
    *("trainyard:project", "trainyard:stage"),
}
_CHANGES = re.compile(r"[0-9a-f]{64}|(?<=\d\.)\d{6,9}$|^(?!\d{12}$)[0-9a-f]{12}(-dirty-[0-9a-f]{8})?$")
"""Hashes of assets, versions that contain hashes, and git revisions."""


def golden(stack: str) -> Path:
    return ROOT / "tests" / "infra" / {"jobs": "job"}.get(stack, stack.replace("-", "_")) / "golden.yaml"


def assert_as_reviewed(templates: Templates, stack: str) -> None:
    """Compare a stack of ALL with its reviewed file."""
    before, after = golden(stack).read_text().splitlines(), readable(templates[stack]).splitlines()
    difference = list(difflib.unified_diff(before, after, "reviewed", "now", n=2, lineterm=""))
    assert not difference, "\n".join([*difference, "Next: python -m tests.support.infra.goldens, and review git diff"])


def readable(template: dict[str, Any]) -> str:
    """Return a template as YAML: references in angle brackets, no metadata, and similar resources as differences."""
    text = json.dumps(template)
    for name, parameter in template.get("Parameters", {}).items():
        text = text.replace(json.dumps({"Ref": name}), json.dumps({"Ref": parameter["Default"]}))
    template = json.loads(text)
    parts = {
        "Exports": {flatten(item["Export"]["Name"]): item["Value"] for item in template.get("Outputs", {}).values()},
        "Resources": dict(_resources(template["Resources"])),
    }
    return yaml.dump(_plain(parts), sort_keys=False, default_flow_style=None, width=150, allow_unicode=True)


def _resources(resources: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield each resource, or its differences from the most similar earlier resource of its type."""
    by_type: dict[str, dict[str, dict[str, Any]]] = {}
    for name, resource in resources.items():
        plain = _plain(resource)
        leaves, others = dict(_leaves(plain)), by_type.setdefault(resource["Type"], {})
        differences = [
            {"Like": other}
            | {path: value for path, value in leaves.items() if other_leaves.get(path) != value}
            | {path: "none" for path in other_leaves if path not in leaves}
            for other, other_leaves in others.items()
        ]
        shortest = min(differences, key=len, default=leaves)
        yield name, shortest if len(shortest) < 0.7 * len(leaves) else plain
        others[name] = leaves


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{key}".lstrip("."))
    elif isinstance(value, list) and not all(isinstance(item, str) for item in value):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{path}.{index}")
    else:
        yield path, value


def _plain(value: Any) -> Any:
    match value:
        case dict() if len(value) == 1 and next(iter(value)).startswith(("Ref", "Fn::")):
            return _plain(_text(value))
        case dict():
            found = {key: _plain(item) for key, item in value.items() if key not in _LEFT_OUT}
            return {key: item for key, item in found.items() if item not in ([], {})}
        case list():
            return [_plain(item) for item in value if not (isinstance(item, dict) and item.get("Key") in _LEFT_OUT)]
        case str() if value.startswith(('{"', "{\n")):
            return _plain(json.loads(value))
        case str():
            return _CHANGES.sub("…", value)
    return value


def _text(value: Any) -> str:
    match value:
        case {"Fn::Join": [separator, parts]}:
            return str(separator).join(map(_text, parts))
        case {"Fn::Select": [index, inner]}:
            return f"{_text(inner)}[{index}]"
        case {"Fn::Split": [separator, inner]}:
            return f"{_text(inner)} split at {separator}"
        case {"Fn::GetAZs": _}:
            return "<zones>"
    return flatten(value)


def main() -> None:
    for stack, template in stacks_of(ALL).items():
        golden(stack).write_text(readable(template))


if __name__ == "__main__":
    main()
