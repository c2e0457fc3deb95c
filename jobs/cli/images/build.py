"""`trainyard images build`: build images, and say what came of it."""

from collections.abc import Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from jobs.cli import tables
from jobs.contract import image_hierarchy as hierarchy
from jobs.contract.instance_types import instance_type
from jobs.contract.releases import Release, check_image, release, release_for
from jobs.contract.revision import source_revision
from jobs.images import engine
from jobs.images.build import Build, BuiltImage, parse_build_arguments


def build(
    names: Sequence[str],
    *,
    release_name: str | None,
    instance_type_name: str | None,
    all_descendants: bool,
    build_arguments: Sequence[str],
    network: str | None,
    output: str,
) -> None:
    """Run `trainyard images build`."""
    row = chosen_release(names, release_name, instance_type_name)
    arguments = parse_build_arguments(build_arguments)
    client = engine.connect()
    engine.build_command()
    console = tables.stderr()
    if note := engine.emulation_note(client):
        console.print(f"note: {note}")
    job = Build(client=client, release=row, revision=source_revision(), build_arguments=arguments, network=network)
    planned = job.plan(names, all_descendants=all_descendants)
    console.print(f"release {row.name}, revision {job.revision}: {', '.join(image.name for image in planned)}")
    built = job.run(planned, progress)
    if output == "json":
        tables.print_json([_built_json(image) for image in built])
    else:
        tables.show(_built_table(built), on=tables.stdout())


def progress(line: str) -> None:
    """Print a line about a build or a push that is under way."""
    tables.stderr().print(Text(line), soft_wrap=True)


def chosen_release(images: Sequence[str], name: str | None, instance_type_name: str | None = None) -> Release:
    """The release called `name`, or the default one; it must fit an instance type that runs the images, and the one
    that is given.

    Raises UsageError for an image that there is not, UsageError and ConfigurationError as `jobs.contract.releases`
    does.
    """
    chosen = [hierarchy.image(one) for one in images]
    row = release_for(instance_type(instance_type_name), name) if instance_type_name else release(name)
    for one in chosen:
        check_image(one.root, row)
    return row


def _built_json(built: BuiltImage) -> dict[str, Any]:
    return {
        "image": built.image.name,
        "release": built.release,
        "revision": built.revision,
        "tag": built.tag,
        "name": built.name,
        "id": built.id,
        "size_bytes": built.size_bytes,
        "added_bytes": built.added_bytes,
        "seconds": round(built.seconds, 1),
        "layers": built.layers,
        "rebuilt_layers": built.rebuilt_layers,
    }


def _built_table(built: Sequence[BuiltImage]) -> Table:
    table = tables.columns("IMAGE", "TAG", "SIZE", "OVER BASE", "TOOK", "LAYERS")
    for one in built:
        table.add_row(
            one.image.name,
            one.tag,
            tables.megabytes(one.size_bytes),
            tables.megabytes(one.added_bytes),
            f"{one.seconds:.1f} s",
            f"{one.rebuilt_layers} of {one.layers} rebuilt" if one.rebuilt_layers else f"{one.layers} cached",
        )
    return table
