"""Synthesis for tests, and functions to read templates."""

import atexit
import json
import re
import shutil
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any
from unittest.mock import patch

import aws_cdk as cdk

from infra.access.stack import AccessStack
from infra.app import build
from infra.compute.stack import ComputeStack
from infra.image.stack import ImageStack
from infra.job.stack import JobStack
from infra.machine_image.stack import MachineImageStack
from infra.network.stack import NetworkStack
from infra.settings import STAGES
from infra.stages import Stage
from infra.storage.stack import StorageStack
from tests.support.infra.variants import HOME, WEST

ROOT = Path(__file__).parents[3]

Templates = dict[str, dict[str, Any]]
"""`<stage>/<stack>` to template."""


def new_app(directory: Path, **more_context: object) -> cdk.App:
    """Return an app with the feature flags of cdk.json, which synthesises into `directory`."""
    flags = json.loads((ROOT / "cdk.json").read_text())["context"]
    return cdk.App(context={**flags, **more_context}, outdir=str(directory))


def _build(app: cdk.App, rows: Iterable[Stage]) -> None:
    """Build stages beside those that jobs of HOME and WEST move between, as if the settings had them."""
    selected = tuple(rows)  # perhaps a view of the settings
    with patch.dict(STAGES, {row.name: row for row in (HOME, WEST)}):
        build(app, selected)


def synthesise_for_cli(row: Stage, directory: Path, *more: Stage) -> str:
    """Synthesise stages, and return the assembly's folder for `cdk --app`, which accepts it instead of a command.

    Running the app in a process of the CLI takes four times as long.
    """
    # The CLI's defaults: without them, every resource would differ from a deployment by the CLI.
    app = new_app(directory, **{"aws:cdk:enable-path-metadata": True, "aws:cdk:enable-asset-metadata": True})
    _build(app, [row, *more])
    app.synth()
    return str(directory)


def synthesise(rows: Iterable[Stage], directory: Path) -> Templates:
    """Return the templates of `rows`, synthesised into `directory` like `cdk synth` does."""
    app = new_app(directory)
    _build(app, rows)
    app.synth()
    return read_assembly(directory)


@cache
def templates_of(row: Stage) -> Templates:
    """Return a stage's templates, cached for all tests with the same settings. Do not modify them."""
    return synthesise([row], _folder(row.name))


@cache
def _folder(_stage: str) -> Path:
    """Return a folder that every synthesis of a stage with this name overwrites.

    The sources, an asset of every stage, are then hashed and copied only once, which takes half as long as the rest.
    """
    folder = Path(mkdtemp())
    atexit.register(shutil.rmtree, folder)
    return folder


@cache
def up_to(stack: str, row: Stage, tag: tuple[str, str] | None = None) -> Templates:
    """Return a stack and the stacks it builds on, in a quarter of the time of all stacks. Rules are not checked.

    `tag`: an organisation's tag of the whole stage.
    """
    directory = _folder(row.name)
    app = new_app(directory)
    scope = cdk.Stage(app, row.name, env=cdk.Environment(account=row.account, region=row.region))
    if tag:
        cdk.Tags.of(scope).add(*tag)
    network = NetworkStack(scope, stage=row)
    storage = StorageStack(scope, stage=row, network=network)
    if stack == "access":
        AccessStack(scope, stage=row)
    elif stack == "compute":
        ComputeStack(scope, stage=row, network=network, storage=storage)
    elif stack != "network":
        image = ImageStack(scope, stage=row, storage=storage)
        if stack == "machine-image":
            MachineImageStack(scope, stage=row, network=network, image=image)
        elif stack == "jobs":
            JobStack(scope, stage=row, storage=storage, image=image)
    app.synth()
    return {path.split("/")[1]: template for path, template in read_assembly(directory).items()}


def stacks_of(row: Stage) -> Templates:
    """Return a stage's templates by stack name."""
    return {path.split("/")[1]: template for path, template in templates_of(row).items()}


def read_assembly(directory: Path) -> Templates:
    return {
        artifact["displayName"].split(" ")[0]: json.loads((nested / artifact["properties"]["templateFile"]).read_text())
        for nested in directory.glob("assembly-*")
        for artifact in json.loads((nested / "manifest.json").read_text())["artifacts"].values()
        if artifact["type"] == "aws:cloudformation:stack"
    }


def resources(template: dict[str, Any], resource_type: str) -> dict[str, dict[str, Any]]:
    """Return the properties of all resources of a type, by logical id."""
    return {
        name: resource.get("Properties", {})
        for name, resource in template["Resources"].items()
        if resource["Type"] == resource_type
    }


def imports(value: Any) -> set[str]:
    """Return the names of the exports that a template imports."""
    if isinstance(value, dict):
        direct = {str(value["Fn::ImportValue"])} if "Fn::ImportValue" in value else set()
        return direct.union(*map(imports, value.values()))
    return set().union(*map(imports, value)) if isinstance(value, list) else set()


def only(template: dict[str, Any], resource_type: str) -> dict[str, Any]:
    """Return the properties of the only resource of a type."""
    found = list(resources(template, resource_type).values())
    assert len(found) == 1, f"{len(found)} resources of type {resource_type}"
    return found[0]


def flatten(value: Any) -> str:
    """Return a template's string with unresolved references in angle brackets, as cdk-nag writes it."""
    match value:
        case str():
            return value
        case {"Fn::Join": [separator, parts]}:
            return str(separator).join(flatten(part) for part in parts)
        case {"Ref": name}:
            return f"<{name}>"
        case {"Fn::GetAtt": [name, attribute]}:
            return f"<{name}.{attribute}>"
        case {"Fn::ImportValue": name}:
            return str(name)
        case {"Fn::Sub": text}:
            return re.sub(r"\$\{([\w:]+)\}", r"<\1>", str(text))
        case {"Fn::Select": [_, inner]} | {"Fn::Split": [_, inner]}:
            return flatten(inner)
    raise AssertionError(f"cannot flatten {value}")
