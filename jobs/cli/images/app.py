"""The commands of `trainyard images`: their names, options and help. What they do lies in the modules they import."""

from pathlib import Path
from typing import Annotated

import typer

from jobs.cli.options import BuildArguments, Network, Output, user_path

images = typer.Typer(help="The images that jobs run in: build them here, test them, push them to a stage.")

Images = Annotated[
    list[str], typer.Argument(metavar="IMAGE…", help="gaudi, cpu, cuda, or one that is built on it: cpu-notebook, …")
]
ReleaseName = Annotated[
    str | None,
    typer.Option(
        "--release",
        help="A row of images/releases.toml; default: that of --stage where one is given, else its default.",
    ),
]


def _release_name(ctx: typer.Context, given: str | None) -> str | None:
    """The release of the stage, where a stage is named and no release is; None: the default one."""
    source = ctx.find_root().get_parameter_source("stage")
    if given or source is None or source.name not in ("COMMANDLINE", "ENVIRONMENT"):
        return given
    from jobs.contract.errors import TrainyardError
    from jobs.images.stage_images import StageImages

    try:
        return StageImages.release_of(ctx.obj.aws(), ctx.obj.stage)
    except TrainyardError as error:
        own = "say --release, which asks no stage"
        error.next_step = f"{error.next_step}; or {own}" if error.next_step else own
        raise


@images.command("build")
def images_build(
    ctx: typer.Context,
    *,
    names: Images,
    release: ReleaseName = None,
    instance_type: Annotated[
        str | None, typer.Option(help="Refuse a release whose software does not run on it: dl1.24xlarge, …")
    ] = None,
    all_descendants: Annotated[
        bool, typer.Option("--all-descendants", help="Also what is built on each IMAGE: the notebook.")
    ] = False,
    build_arguments: BuildArguments = None,
    network: Network = None,
    output: Output = "table",
) -> None:
    """Build images with the Docker engine, each after the one it is built on, as trainyard/IMAGE:<release>-<revision>.

    The revision is a hash of what the last commit has in images/ and jobs/; what differs from it is part of the tag. An
    image gets its name when all its steps have passed.
    """
    from jobs.cli.images import build as command

    command.build(
        names,
        release_name=_release_name(ctx, release),
        instance_type_name=instance_type,
        all_descendants=all_descendants,
        build_arguments=build_arguments or [],
        network=network,
        output=output,
    )


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
        str | None, typer.Option(help="Test the images of this tag, and build nothing; default: the sources' own.")
    ] = None,
    build_arguments: BuildArguments = None,
    network: Network = None,
    output: Output = "table",
) -> None:
    """Test images in containers: versions, user, labels, files, signals, a training on two ranks.

    Builds what this machine does not have at the sources' revision. A check that needs an accelerator is left out where
    there is none, and says so. Exit code 1: a check failed.
    """
    from jobs.cli.images import check as command

    command.test(
        names,
        release_name=_release_name(ctx, release),
        descendants=descendants,
        tag=tag,
        build_arguments=build_arguments or [],
        network=network,
        output=output,
    )


@images.command("push")
def images_push(
    ctx: typer.Context,
    *,
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="IMAGE…", help="As for build; default: those that the stage's jobs run in."),
    ] = None,
    release: Annotated[
        str | None, typer.Option("--release", help="A row of images/releases.toml; default: the stage's own.")
    ] = None,
    allow_dirty: Annotated[
        bool,
        typer.Option(
            "--allow-dirty", help="Also where images/ or jobs/ differ from the last commit, or on a base of one's own."
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
    from jobs.cli.images import push as command

    command.push(
        ctx.obj.aws(),
        ctx.obj.stage,
        names or [],
        release_name=release,
        allow_dirty=allow_dirty,
        build_arguments=build_arguments or [],
        network=network,
        output=output,
    )


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
    from jobs.cli.images import sbom as command

    command.sbom(names, release_name=_release_name(ctx, release), folder=folder)
