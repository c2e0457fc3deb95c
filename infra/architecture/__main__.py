"""python -m infra.architecture [--stage NAME]"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

import aws_cdk as cdk

from infra import settings_file

if __name__ == "__main__":
    settings_file.load_or_exit()  # before the imports below, which all need the settings

from infra.app import build
from infra.architecture.drawing import draw
from infra.architecture.reading import read
from infra.settings import Alerts, GitHub, Stage, Team
from infra.settings_checks import selected_stages
from infra.stdout import end_with_reader
from jobs.contract.errors import TrainyardError

SVG = Path(__file__).parents[1] / "architecture.svg"

_ROOT = Path(__file__).parents[2]

EVERYTHING = Stage(
    name="stage",
    teams=(
        Team(
            name="team",
            monthly_budget_usd=1_000,
            huggingface_token=True,
            member_principals=("arn:aws:iam::123456789012:role/researcher",),
        ),
    ),
    machine_image=None,
    max_on_demand_nodes=1,
    max_multinode_nodes=2,
    interface_endpoints=True,
    own_kms_key=True,
    fsx_gib=1_200,
    monthly_budget_usd=1_000,
    alerts=Alerts(emails=("operations@example.com",), webhook_secret="chat"),  # noqa: S106 - a secret's name
    deploy_from=GitHub(repository="owner/name"),
)
"""What the tracked picture shows: all that a stage can have, for one team."""


def picture_of(row: Stage, *, title: str) -> str:
    """The stage's architecture as an SVG document; synthesises it."""
    context = json.loads((_ROOT / "cdk.json").read_text())["context"]
    with tempfile.TemporaryDirectory() as directory:
        app = cdk.App(context=context, outdir=directory)
        build(app, [row])
        assembly = app.synth().get_nested_assembly(f"assembly-{row.name}")
        templates = {stack.hierarchical_id: stack.template for stack in assembly.stacks}
        # In the order of the app, in which each stack builds on those before it.
        paths = [child.node.path for child in app.node.find_child(row.name).node.children if cdk.Stack.is_stack(child)]
    return draw(read({path: templates[path] for path in paths}), title=title)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m infra.architecture", description=__doc__)
    parser.add_argument("--stage", help="a stage of infra/settings.py; its picture goes to stdout")
    chosen: str | None = parser.parse_args().stage
    if chosen is None:
        SVG.write_text(picture_of(EVERYTHING, title="trainyard: everything that a stage can have"))
        print(SVG, file=sys.stderr)
    else:
        (row,) = selected_stages(chosen)
        picture = picture_of(row, title=f"trainyard: stage {row.name}")
        end_with_reader()
        sys.stdout.write(picture)


if __name__ == "__main__":
    try:
        main()
    except TrainyardError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
