"""`trainyard images`: build, test and push the images that jobs run in, list them, and write their SBOMs."""

import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from jobs.cli.options import Output, user_path
from jobs.cli.terminal import print_text

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.table import Table

    from jobs.aws.connection import Aws
    from jobs.core.images import Image, Release
    from jobs.images.inventory import LocalImage, RemoteImage, StageImages
    from jobs.images.push import Pushed
    from jobs.images.upgrade import Upgrade

images = typer.Typer(help="Build, test and push the images that jobs run in.")

Images = Annotated[
    list[str],
    typer.Argument(metavar="IMAGE…", help="gaudi, cpu, cuda, or an image based on one of them: cpu-notebook, …"),
]
ReleaseName = Annotated[
    str | None,
    typer.Option(
        "--release",
        help="A row of images/releases.toml. Default: the stage's release if --stage is given, otherwise the file's "
        "default.",
    ),
]
BuildArguments = Annotated[
    list[str] | None,
    typer.Option(
        "--build-arg",
        metavar="NAME=VALUE",
        help="Set an ARG of the Dockerfile that the release does not set. Repeatable.",
    ),
]
Network = Annotated[
    str | None,
    typer.Option(metavar="MODE", help="Docker network mode of RUN steps: host, … Default: the engine's default."),
]

_MAX_TAGS = 5
"""The table shows at most this many tags of an image in a stage."""

_STATE_STYLES = {"current": "green", "outdated": "dark_orange3"}

ResultT = TypeVar("ResultT")


@images.command("build")
def images_build(
    ctx: typer.Context,
    *,
    names: Images,
    release: ReleaseName = None,
    all_descendants: Annotated[
        bool, typer.Option("--all-descendants", help="Also build all images based on each IMAGE.")
    ] = False,
    build_arguments: BuildArguments = None,
    network: Network = None,
    output: Output = "table",
) -> None:
    """Build images with the Docker engine.

    Parents are built first. The images are named trainyard/IMAGE:<release>-<revision>. The revision is a hash of
    images/, jobs/ and trainyard/ in the last commit; uncommitted changes become part of the tag. An image is tagged
    only after all its steps have passed.
    """
    from jobs.cli import tables
    from jobs.core.git import source_revision
    from jobs.images import engine
    from jobs.images.build import Build, parse_build_arguments

    rows = _releases(ctx, names, release)
    arguments = parse_build_arguments(build_arguments or ())
    job = Build(
        client=engine.connect(),
        releases=rows,
        revision=source_revision(),
        build_arguments=arguments,
        network=network,
    )
    engine.build_command()
    planned = job.plan(names, all_descendants=all_descendants)
    _print_progress(_heading(rows, planned, job.revision))
    built = job.run(planned, _print_progress)
    if output == "json":
        fields = ("release", "revision", "tag", "name", "id", "size_bytes")
        tables.print_json(
            [
                {
                    "image": each.image.name,
                    **{field: getattr(each, field) for field in fields},
                    "seconds": round(each.seconds, 1),
                }
                for each in built
            ]
        )
        return
    table = tables.columns("IMAGE", "TAG", "SIZE", "TOOK")
    for each in built:
        table.add_row(each.image.name, each.tag, tables.megabytes(each.size_bytes), f"{each.seconds:.1f} s")
    tables.show(table, on=tables.stdout())


@images.command("test")
def images_test(
    ctx: typer.Context,
    *,
    names: Images,
    release: ReleaseName = None,
    descendants: Annotated[
        bool,
        typer.Option("--descendants/--no-descendants", help="Also test all images based on each IMAGE."),
    ] = True,
    tag: Annotated[
        str | None,
        typer.Option(help="Test the images with this tag and build nothing. Default: the tag of the sources."),
    ] = None,
    build_arguments: BuildArguments = None,
    network: Network = None,
) -> None:
    """Test images in containers with pytest.

    The tests check versions, user, labels, files, signals, and a training on two ranks. Images that this machine lacks
    are built first. Tests that need an accelerator are skipped if there is none. Exit code 1 means that a test failed.
    """
    from jobs.core.errors import StoppedError, TrainyardError, UsageError
    from jobs.core.git import image_tag, source_revision
    from jobs.core.images import image, with_descendants
    from jobs.images import engine
    from jobs.images.build import Build, parse_build_arguments
    from jobs.images.check import check

    rows = _releases(ctx, names, release)
    arguments = parse_build_arguments(build_arguments or ())
    chosen = {each.name: each for name in names for each in (with_descendants(name) if descendants else (image(name),))}
    prefixes = {image_tag(rows[each.root].name, "") for each in chosen.values()}
    prefix = next((each for each in prefixes if tag and tag.startswith(each) and tag != each), "")
    if tag and (not prefix or len(prefixes) > 1):
        raise UsageError(
            f"tag '{tag}' does not belong to the release of {', '.join(chosen)}, whose tags are "
            f"{' or '.join(f'{each}<revision>' for each in sorted(prefixes))}",
            next_step="give images of one release, and the tag's release with --release; list the tags with: trainyard "
            "images list",
        )
    revision = tag.removeprefix(prefix) if tag else source_revision()
    client = engine.connect(engine.TRANSFER_SECONDS)  # a training may print nothing for minutes
    _print_progress(_heading(rows, chosen.values(), revision))
    if not tag:
        job = Build(client=client, releases=rows, revision=revision, build_arguments=arguments, network=network)
        if missing := [name for name in chosen if not job.exists(name)]:
            job.run(job.plan(missing), _print_progress)
    failed = []
    for each in chosen.values():
        print_text(f"{each.name}:")
        try:
            if not check(each, release=rows[each.root], revision=revision, client=client, report=print_text):
                failed.append(each.name)
        except KeyboardInterrupt:
            raise StoppedError(f"stopped while testing '{each.name}'; its container was removed") from None
    if failed:
        raise TrainyardError(f"tests of {', '.join(failed)} failed", next_step="fix the images, and test again")


@images.command("push")
def images_push(
    ctx: typer.Context,
    *,
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="IMAGE…", help="Same as for build. Default: the images that the stage's jobs run in."),
    ] = None,
    release_name: Annotated[
        str | None, typer.Option("--release", help="A row of images/releases.toml. Default: the stage's releases.")
    ] = None,
    allow_dirty: Annotated[
        bool,
        typer.Option(
            "--allow-dirty",
            help="Push even if images/ or jobs/ differ from the last commit, or the base image is custom.",
        ),
    ] = False,
    build_arguments: BuildArguments = None,
    network: Network = None,
    output: Output = "table",
) -> None:
    """Push images to the stage's repositories.

    The next deployment uses the pushed images. Images that neither this machine nor the stage has are built first. A
    tag that the stage already has is never replaced: its image is used.
    """
    from jobs.cli import tables
    from jobs.core.images import release
    from jobs.core.stage import deploy_command
    from jobs.images.inventory import StageImages

    if release_name:
        release(release_name)
    aws, stage = ctx.obj.aws(), ctx.obj.stage
    target = StageImages.read(aws, stage, release_name)
    pushed, recorded = push_images(
        aws, target, names or (), allow_dirty=allow_dirty, build_arguments=build_arguments or (), network=network
    )
    if output == "json":
        tables.print_json(
            [
                {
                    "image": each.image.name,
                    "release": target.releases[each.image.root].name,
                    "tag": each.tag,
                    "uri": each.uri,
                    "was_there": each.was_there,
                    "recorded": sorted(name for name, uri in recorded.items() if uri == each.uri),
                }
                for each in pushed
            ]
        )
    else:
        print_text("\n".join(each.uri for each in pushed))
    _print_progress(
        f"next: {deploy_command(stage, 'jobs', emulated=aws.emulated)}, so that jobs run in the pushed images"
    )


def push_images(
    aws: "Aws",
    target: "StageImages",
    names: Sequence[str],
    *,
    allow_dirty: bool = False,
    build_arguments: Sequence[str] = (),
    network: str | None = None,
) -> "tuple[list[Pushed], dict[str, str]]":
    """Build the missing images, push them and record their digests.

    Returns the pushed images, and the URI of each image whose parameter in the stage changed. Raises UsageError for
    sources and bases that may not be pushed, and the errors of `Build` and `Push`.
    """
    from jobs.core.errors import UsageError
    from jobs.core.git import source_revision
    from jobs.images import engine
    from jobs.images.bases import BASE_ARGUMENT
    from jobs.images.build import Build, parse_build_arguments
    from jobs.images.push import Push, Registry, check_clean

    arguments = parse_build_arguments(build_arguments)
    chosen = target.chosen(names, emulated=aws.emulated)
    revision = source_revision()
    check_clean(revision, emulated=aws.emulated, allow_dirty=allow_dirty)
    client = engine.connect(engine.TRANSFER_SECONDS)
    job = Push(client=client, aws=aws, stage=target, registry=Registry.sign_in(aws), revision=revision)
    _print_progress(f"stage '{target.stage}', {_heading(target.releases, chosen, revision)}")
    official_only = not (aws.emulated or allow_dirty)
    if official_only and BASE_ARGUMENT in arguments:
        raise UsageError(
            f"{BASE_ARGUMENT} sets a custom base that the tag does not show: in stage '{target.stage}' the image would "
            "look like an official one",
            next_step=f"omit {BASE_ARGUMENT}, or push anyway with --allow-dirty",
        )
    build = Build(
        client=client, releases=target.releases, revision=revision, build_arguments=arguments, network=network
    )
    if missing := job.missing(each for each in chosen if not build.exists(each.name)):
        for parent in job.pullable_parents(missing):
            _print_progress(f"{parent.name}: pulling the pushed image, to build on it")
            job.fetch(parent)
        engine.build_command()
        build.run(build.plan(missing), _print_progress)
    if official_only:
        job.check_bases(chosen)
    pushed = job.run(chosen, _print_progress)
    recorded = job.record(pushed)
    for each in pushed:
        if each.leaves_own:
            _print_progress(
                f"note: {each.image.name}:{each.tag} was pushed before and is used instead of the image built here"
            )
        if stand_ins := [name for name in target.stand_ins(each.image) if aws.emulated]:
            _print_progress(f"the emulator has no accelerator: {each.image.name} also serves as {', '.join(stand_ins)}")
    return pushed, recorded


@images.command("list")
def images_list(ctx: typer.Context, release: ReleaseName = None, output: Output = "table") -> None:
    """List the images of each release, here and in the stage.

    The next deployment of the stage uses the images marked `recorded`.
    """
    from jobs.cli import tables
    from jobs.core import images as core_images
    from jobs.core.git import source_revision
    from jobs.images import engine
    from jobs.images.inventory import StageImages, local_images, recorded_images, remote_images

    aws, stage = ctx.obj.aws(), ctx.obj.stage
    chosen: Mapping[str, Release] = core_images.chosen_releases(release)
    unknown: dict[str, str] = {}
    revision = _try("sources", source_revision, unknown)
    target = _try("stage", lambda: StageImages.read(aws, stage, release), unknown)
    recorded: Mapping[str, str | None] = recorded_images(target) if target else {}
    pushed = (target and _try("stage", lambda: remote_images(aws, target), unknown)) or {}
    chosen = target.releases if target else chosen
    local = _try("engine", lambda: local_images(engine.connect(), chosen, revision=revision), unknown) or {}
    rows = [
        {"image": name, "release": chosen[each.root].name}
        | _row(name, local.get(name), recorded, pushed.get(name, ()), revision=revision, unknown=unknown)
        for name, each in core_images.images().items()
    ]
    if output == "json":
        tables.print_json({"revision": revision, "stage": stage, "unknown": unknown, "images": rows})
        return
    console = tables.stderr()
    console.print(f"revision of the sources: {revision or 'unknown'}")
    for about, reason in unknown.items():
        console.print(f"{about} unknown: {reason}")
    tables.show(_table(rows, unknown), on=tables.stdout())


def _try(about: str, query: Callable[[], ResultT], unknown: dict[str, str]) -> ResultT | None:
    """Return the query's result. If it fails, return None and record the reason in `unknown`."""
    from jobs.aws.errors import explain
    from jobs.core.errors import TrainyardError

    try:
        return query()
    except TrainyardError as error:
        unknown[about] = str(error.args[0])
    except Exception as error:
        explained = explain(error)
        if explained is None:
            raise
        unknown[about] = str(explained.args[0])
    return None


def _row(
    name: str,
    local: "LocalImage | None",
    recorded: Mapping[str, str | None],
    pushed: "Sequence[RemoteImage]",
    *,
    revision: str | None,
    unknown: Mapping[str, str],
) -> dict[str, Any]:
    """Return an image as JSON. None means that a value is missing or unknown."""
    uri = recorded.get(name)
    return {
        "tag": local and local.tag,
        "revision": local and local.revision,
        "id": local and local.id,
        "size_bytes": local and local.size_bytes,
        "created_at": local and local.created_at.isoformat(),
        "is_built": None if "engine" in unknown else local is not None,
        "is_current": local.revision == revision if local and revision else None,
        "in_stage": None if "stage" in unknown else name in recorded,
        "recorded": uri,
        "pushed": [
            {
                "tag": each.tag,
                "digest": each.digest,
                "pushed_at": each.pushed_at.isoformat(),
                "is_recorded": bool(uri) and str(uri).endswith(f"@{each.digest}"),
            }
            for each in pushed
        ],
    }


def _table(rows: Sequence[Mapping[str, Any]], unknown: Mapping[str, str]) -> "Table":
    from datetime import datetime, timezone

    from rich.text import Text

    from jobs.cli import tables
    from jobs.core.words import duration

    table = tables.columns("IMAGE", "RELEASE", "BUILT HERE", "TAG", "SIZE", "AGE", "PUSHED")
    now = datetime.now(timezone.utc)
    for row in rows:
        state = {True: "current", False: "outdated", None: "yes"}[row["is_current"]] if row["is_built"] else "no"
        state = "?" if "engine" in unknown else state
        age = row["created_at"] and duration((now - datetime.fromisoformat(row["created_at"])).total_seconds())
        table.add_row(
            row["image"],
            row["release"],
            Text(state, style=_STATE_STYLES.get(state, "")),
            row["tag"] or "",
            tables.megabytes(row["size_bytes"]) if row["size_bytes"] else "",
            age or "",
            _pushed_text(row, unknown),
        )
    return table


def _pushed_text(row: Mapping[str, Any], unknown: Mapping[str, str]) -> str:
    """Return a line per tag in the stage, newest first. Old tags are left out unless they are recorded."""
    from datetime import datetime

    from jobs.cli import tables

    if "stage" in unknown:
        return "?"
    if not row["in_stage"]:
        return "not in this stage"
    lines = []
    if row["recorded"] and not any(each["is_recorded"] for each in row["pushed"]):
        # On an emulator, ECR does not list the images in the registry next to it.
        repository, _, digest = str(row["recorded"]).partition("@")
        lines = [f"{digest[:19] or repository.rpartition(':')[2]}, recorded"]
    shown = [each for place, each in enumerate(row["pushed"]) if place < _MAX_TAGS or each["is_recorded"]]
    for each in shown:
        recorded = ", recorded" if each["is_recorded"] else ""
        lines.append(f"{each['tag']}, {tables.moment(datetime.fromisoformat(each['pushed_at']))}{recorded}")
    if hidden := len(row["pushed"]) - len(shown):
        lines.append(f"and {hidden} older (-o json)")
    return "\n".join(lines) or "no"


@images.command("lock")
def images_lock(
    image: Annotated[str, typer.Argument(metavar="[IMAGE]", help="An image, or all of them.")] = "all",
    release: Annotated[
        list[str] | None, typer.Argument(metavar="[RELEASE…]", help="Rows of images/releases.toml. Default: all rows.")
    ] = None,
    upgrade: Annotated[
        bool,
        typer.Option(
            "--upgrade",
            help="Add releases with today's packages for every image but gaudi, and make them the defaults.",
        ),
    ] = False,
    torch_index: Annotated[
        str, typer.Option(metavar="URL", help="Package index of PyTorch's CPU build.")
    ] = "https://download.pytorch.org/whl/cpu",
) -> None:
    """Pin and hash the Python packages of images in images/locks/. Needs a package index.

    With --upgrade, the laptop's pins change too. Afterwards, run make test, make contract and make cuda-image.
    """
    from jobs.images.lock import ROOT, lock_all

    if not upgrade:
        for path in lock_all(image, release or [], torch_index=torch_index):
            print_text(str(path.relative_to(ROOT)), to=sys.stderr)
        return
    from jobs.cli import tables
    from jobs.images.upgrade import newest, run_steps, write

    upgrades = newest(today=datetime.now(timezone.utc).date(), torch_index=torch_index)
    tables.show(_upgrade_table(upgrades), on=tables.stdout())
    if any(each.changes for each in upgrades):
        write(upgrades, ROOT)
        run_steps(ROOT, upgrades, torch_index=torch_index)
        print_text("next: make test, make contract, make cuda-image", to=sys.stderr)


def _upgrade_table(upgrades: "Sequence[Upgrade]") -> "Table":
    from rich.table import Table

    table = Table("IMAGE", "RELEASE", "PACKAGE", "NOW", "NEWEST", box=None)
    for each in upgrades:
        name = each.after.name if each.changes else each.before.name
        for package, (before, after) in each.versions.items():
            table.add_row(each.before.image, name, package, before, after if after != before else "")
    return table


@images.command("sbom")
def images_sbom(
    ctx: typer.Context,
    *,
    names: Images,
    release: ReleaseName = None,
    folder: Annotated[
        Path, typer.Option(metavar="FOLDER", parser=user_path, help="Write the documents into FOLDER.")
    ] = Path(".trainyard/sbom"),
) -> None:
    """Write an SPDX document (SBOM) per image.

    A document lists every package with its version and licence. Prints the documents' paths. The images must be built
    from the current sources. `laptop` stands for this machine's Python environment.
    """
    from importlib.metadata import version

    from jobs.core.errors import NotFoundError
    from jobs.core.git import image_tag, local_name, source_revision
    from jobs.core.images import image
    from jobs.images import engine
    from jobs.images.sbom import LAPTOP, syft, write

    chosen = [image(name) for name in dict.fromkeys(names) if name != LAPTOP]
    rows = _releases(ctx, [each.name for each in chosen], release)
    syft()
    if LAPTOP in names:
        print_text(str(write(f"dir:{sys.prefix}", name=LAPTOP, tag=version("trainyard"), folder=folder)))
    if not chosen:
        return
    client = engine.connect()
    tags = {each.name: image_tag(rows[each.root].name, source_revision()) for each in chosen}
    for each in chosen:
        if not client.images.list(name=local_name(each.name, tags[each.name])):
            raise NotFoundError(
                f"the Docker engine has no image {local_name(each.name, tags[each.name])}",
                next_step=f"trainyard images build {each.name} --release {rows[each.root].name}",
            )
    for name, tag in tags.items():
        print_text(str(write(f"docker:{local_name(name, tag)}", name=name, tag=tag, folder=folder)))


def _releases(ctx: typer.Context, names: Sequence[str], given: str | None) -> "dict[str, Release]":
    """Return the release of each root image: the given one, the stage's if --stage is given, or the default.

    Raises UsageError for an unknown image or release, ConfigurationError if the given release is for other images.
    """
    from jobs.core.images import check_image, chosen_releases, image, release

    wanted = [image(name) for name in names]
    chosen = chosen_releases(given, {} if given else _stage_releases(ctx))
    for each in wanted:
        check_image(each.root, release(given) if given else chosen[each.root])
    return chosen


def _stage_releases(ctx: typer.Context) -> dict[str, str]:
    """Return the stage's releases by root image if --stage is given."""
    source = ctx.find_root().get_parameter_source("stage")
    if source is None or source.name not in ("COMMANDLINE", "ENVIRONMENT"):
        return {}
    from jobs.core.errors import TrainyardError
    from jobs.images.inventory import StageImages

    try:
        return StageImages.releases_of(ctx.obj.aws(), ctx.obj.stage)
    except TrainyardError as error:
        own = "omit --stage and give --release"
        error.next_step = f"{error.next_step}; or {own}" if error.next_step else own
        raise


def _heading(rows: "Mapping[str, Release]", chosen: "Iterable[Image]", revision: str) -> str:
    """Return a line with the revision and the images with their releases."""
    return f"revision {revision}: {', '.join(f'{each.name} ({rows[each.root].name})' for each in chosen)}"


def _print_progress(line: str) -> None:
    """Print a progress line on stderr."""
    print_text(line, to=sys.stderr)
