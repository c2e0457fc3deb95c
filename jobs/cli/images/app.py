"""The commands of `trainyard images`."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from jobs.cli.options import BuildArguments, Network, Output, user_path

if TYPE_CHECKING:
    from jobs.core.images import Release

images = typer.Typer(help="The images that jobs run in: build them here, test them, push them to a stage.")

Images = Annotated[
    list[str], typer.Argument(metavar="IMAGE…", help="gaudi, cpu, cuda, or one that is built on it: cpu-notebook, …")
]
ReleaseName = Annotated[
    str | None,
    typer.Option(
        "--release",
        help="A row of images/releases.toml. Default: the release of --stage if it is given, else the file's default.",
    ),
]


@images.command("build")
def images_build(
    ctx: typer.Context,
    *,
    names: Images,
    release: ReleaseName = None,
    all_descendants: Annotated[
        bool, typer.Option("--all-descendants", help="Also what is built on each IMAGE: the notebook.")
    ] = False,
    build_arguments: BuildArguments = None,
    network: Network = None,
    output: Output = "table",
) -> None:
    """Build images with the Docker engine, each after its parent, as trainyard/IMAGE:<release>-<revision>.

    The revision is a hash of what the last commit has in images/, jobs/ and trainyard/; what differs from it is part of
    the tag. An image gets its name when all its steps have passed.
    """
    from jobs.cli import tables
    from jobs.core.git import source_revision
    from jobs.images import engine
    from jobs.images.build import Build, parse_build_arguments

    row = _release(ctx, names, release)
    arguments = parse_build_arguments(build_arguments or ())
    job = Build(
        client=engine.connect(),
        release=row,
        revision=source_revision(),
        build_arguments=arguments,
        network=network,
    )
    engine.build_command()
    planned = job.plan(names, all_descendants=all_descendants)
    _say(f"release {row.name}, revision {job.revision}: {', '.join(one.name for one in planned)}")
    built = job.run(planned, _say)
    if output == "json":
        fields = ("release", "revision", "tag", "name", "id", "size_bytes")
        tables.print_json(
            [
                {
                    "image": one.image.name,
                    **{field: getattr(one, field) for field in fields},
                    "seconds": round(one.seconds, 1),
                }
                for one in built
            ]
        )
        return
    table = tables.columns("IMAGE", "TAG", "SIZE", "TOOK")
    for one in built:
        table.add_row(one.image.name, one.tag, tables.megabytes(one.size_bytes), f"{one.seconds:.1f} s")
    tables.show(table, on=tables.stdout())


@images.command("test")
def images_test(
    ctx: typer.Context,
    *,
    names: Images,
    release: ReleaseName = None,
    descendants: Annotated[
        bool, typer.Option("--descendants/--no-descendants", help="Also what is built on each IMAGE: the notebook.")
    ] = True,
    tag: Annotated[
        str | None, typer.Option(help="Test the images of this tag, and build nothing. Default: the sources' own tag.")
    ] = None,
    build_arguments: BuildArguments = None,
    network: Network = None,
) -> None:
    """Test images in containers with pytest: versions, user, labels, files, signals, a training on two ranks.

    Builds what this machine does not have at the sources' revision. A test that needs an accelerator is skipped if
    there is none. Exit code 1: a test failed.
    """
    from jobs.cli.plain import print_text
    from jobs.core.errors import StoppedError, TrainyardError, UsageError
    from jobs.core.git import image_tag, source_revision
    from jobs.core.images import image, with_descendants
    from jobs.images import engine
    from jobs.images.build import Build, parse_build_arguments
    from jobs.images.check import check

    row = _release(ctx, names, release)
    arguments = parse_build_arguments(build_arguments or ())
    chosen = {one.name: one for name in names for one in (with_descendants(name) if descendants else (image(name),))}
    prefix = image_tag(row.name, "")
    if tag and (not tag.startswith(prefix) or tag == prefix):
        raise UsageError(
            f"tag '{tag}' is not one of release {row.name}, whose tags are {prefix}<revision>",
            next_step="give the tag's release as --release; 'trainyard images list' shows the tags there are",
        )
    revision = tag.removeprefix(prefix) if tag else source_revision()
    client = engine.connect(engine.TRANSFER_SECONDS)  # a training may print nothing for minutes
    _say(f"release {row.name}, revision {revision}: {', '.join(chosen)}")
    if not tag:
        job = Build(client=client, release=row, revision=revision, build_arguments=arguments, network=network)
        if missing := [name for name in chosen if not job.is_there(name)]:
            job.run(job.plan(missing), _say)
    failed = []
    for one in chosen.values():
        print_text(f"{one.name}:")
        try:
            if not check(one, release=row, revision=revision, client=client, say=print_text):
                failed.append(one.name)
        except KeyboardInterrupt:
            raise StoppedError(f"stopped while '{one.name}' was tested; its container is gone") from None
    if failed:
        raise TrainyardError(
            f"tests of {', '.join(failed)} failed", next_step="correct what each found, and test again"
        )


@images.command("push")
def images_push(
    ctx: typer.Context,
    *,
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="IMAGE…", help="As for build; default: those that the stage's jobs run in."),
    ] = None,
    release_name: Annotated[
        str | None, typer.Option("--release", help="A row of images/releases.toml; default: the stage's own.")
    ] = None,
    allow_dirty: Annotated[
        bool,
        typer.Option(
            "--allow-dirty", help="Also if images/ or jobs/ differ from the last commit, or on a custom base."
        ),
    ] = False,
    build_arguments: BuildArguments = None,
    network: Network = None,
    output: Output = "table",
) -> None:
    """Push images to the stage's repositories, and record their digests for its next deployment.

    Builds what neither this machine nor the stage has at the sources' revision. A tag that is there already is never
    replaced: what is there is taken.
    """
    from jobs.cli import tables
    from jobs.cli.images.push import push_images
    from jobs.cli.plain import print_text
    from jobs.core.images import release
    from jobs.core.stage import deploy_command
    from jobs.images.stage_images import StageImages

    if release_name:
        release(release_name)
    aws, stage = ctx.obj.aws(), ctx.obj.stage
    there = StageImages.read(aws, stage, release_name)
    pushed, recorded = push_images(
        aws, there, names or (), allow_dirty=allow_dirty, build_arguments=build_arguments or (), network=network
    )
    if output == "json":
        tables.print_json(
            [
                {
                    "image": one.image.name,
                    "release": there.release,
                    "tag": one.tag,
                    "uri": one.uri,
                    "was_there": one.was_there,
                    "recorded": sorted(name for name, uri in recorded.items() if uri == one.uri),
                }
                for one in pushed
            ]
        )
    else:
        print_text("\n".join(one.uri for one in pushed))
    _say(f"next: {deploy_command(stage, 'jobs', emulated=aws.emulated)}, which has jobs run in what was pushed")


@images.command("list")
def images_list(ctx: typer.Context, release: ReleaseName = None, output: Output = "table") -> None:
    """List the images of a release: what this machine's Docker engine has, and every tag that the stage has of it.

    `recorded` is what the stage's next deployment has jobs run in.
    """
    from jobs.cli.images import list as command

    command.list_images(ctx.obj.aws(), ctx.obj.stage, release_name=release, output=output)


@images.command("sbom")
def images_sbom(
    ctx: typer.Context,
    *,
    names: Images,
    release: ReleaseName = None,
    folder: Annotated[Path, typer.Option(metavar="FOLDER", parser=user_path, help="Where the documents go.")] = Path(
        ".trainyard/sbom"
    ),
) -> None:
    """Write what images hold, every package with version and licence, as SPDX documents; prints their paths.

    They must have been built at the sources' revision. `laptop` stands for this machine's own Python environment.
    """
    from importlib.metadata import version

    from jobs.cli.plain import print_text
    from jobs.core import images as releases
    from jobs.core.errors import NotFoundError
    from jobs.core.git import image_tag, local_name, source_revision
    from jobs.core.images import image
    from jobs.images import engine
    from jobs.images.sbom import LAPTOP, syft, write

    row = releases.release(_release_name(ctx, release))
    chosen = [image(name).name for name in dict.fromkeys(names) if name != LAPTOP]
    syft()
    if LAPTOP in names:
        print_text(str(write(f"dir:{sys.prefix}", name=LAPTOP, tag=version("trainyard"), folder=folder)))
    if not chosen:
        return
    client = engine.connect()
    tag = image_tag(row.name, source_revision())
    for name in chosen:
        if not client.images.list(name=local_name(name, tag)):
            raise NotFoundError(
                f"the Docker engine has no {local_name(name, tag)}",
                next_step=f"trainyard images build {name} --release {row.name}",
            )
    for name in chosen:
        print_text(str(write(f"docker:{local_name(name, tag)}", name=name, tag=tag, folder=folder)))


def _release(ctx: typer.Context, names: Sequence[str], given: str | None) -> "Release":
    """Return the row of the release for these images, which must fit the instance types that run them.

    Raises UsageError for an unknown image or release, ConfigurationError for a release that does not fit.
    """
    from jobs.core.images import check_image, image, release

    chosen = [image(name) for name in names]
    row = release(_release_name(ctx, given))
    for one in chosen:
        check_image(one.root, row)
    return row


def _release_name(ctx: typer.Context, given: str | None) -> str | None:
    """Return the release of the stage if a stage is named and no release is, or None for the default release."""
    source = ctx.find_root().get_parameter_source("stage")
    if given or source is None or source.name not in ("COMMANDLINE", "ENVIRONMENT"):
        return given
    from jobs.core.errors import TrainyardError
    from jobs.images.stage_images import StageImages

    try:
        return StageImages.release_of(ctx.obj.aws(), ctx.obj.stage)
    except TrainyardError as error:
        own = "say --release, which asks no stage"
        error.next_step = f"{error.next_step}; or {own}" if error.next_step else own
        raise


def _say(line: str) -> None:
    """Print a line about what is under way."""
    from jobs.cli.plain import print_text

    print_text(line, to=sys.stderr)
