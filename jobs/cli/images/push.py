"""`trainyard images push`: build what is missing, push, record, and say what rolls it out."""

from collections.abc import Mapping, Sequence
from typing import Any

from jobs.aws.connection import Aws
from jobs.cli import tables
from jobs.cli.images.build import progress
from jobs.cli.plain import print_text
from jobs.contract.errors import UsageError
from jobs.contract.releases import release
from jobs.contract.revision import image_tag, source_revision
from jobs.contract.stage import deploying
from jobs.images import engine
from jobs.images.bases import BASE_ARGUMENT
from jobs.images.build import Build, parse_build_arguments
from jobs.images.push import Push, Pushed, Registry, check_clean
from jobs.images.stage_images import StageImages


def push(
    aws: Aws,
    stage: str,
    names: Sequence[str],
    *,
    release_name: str | None,
    allow_dirty: bool,
    build_arguments: Sequence[str],
    network: str | None,
    output: str,
) -> None:
    """Run `trainyard images push`. On stdout stand the URIs as they were recorded."""
    if release_name:
        release(release_name)
    there = StageImages.read(aws, stage, release_name)
    pushed, recorded = push_images(
        aws, there, names, allow_dirty=allow_dirty, build_arguments=build_arguments, network=network
    )
    if output == "json":
        tables.print_json([_pushed_json(one, there.release, recorded) for one in pushed])
    else:
        print_text("\n".join(one.uri for one in pushed))
    rolls_out = deploying(stage, "jobs", embedded=aws.embedded)
    tables.stderr().print(f"next: {rolls_out}, which has jobs run in what was pushed")


def push_images(
    aws: Aws,
    there: StageImages,
    names: Sequence[str],
    *,
    allow_dirty: bool = False,
    build_arguments: Sequence[str] = (),
    network: str | None = None,
) -> tuple[list[Pushed], dict[str, str]]:
    """Build what is missing, push, and record it.

    Returns what was pushed, and image to URI of what changed in the stage's parameters.

    Raises UsageError for sources and bases that may not be pushed, and as `Build` and `Push` do.
    """
    arguments = parse_build_arguments(build_arguments)
    row = release(there.release)
    chosen = there.chosen(names, embedded=aws.embedded)
    revision = source_revision()
    check_clean(revision, embedded=aws.embedded, allow_dirty=allow_dirty)
    client = engine.connect(engine.TRANSFER_SECONDS)
    job = Push(client=client, aws=aws, stage=there, registry=Registry.sign_in(aws), tag=image_tag(row.name, revision))
    console = tables.stderr()
    chosen_names = ", ".join(one.name for one in chosen)
    console.print(f"stage '{there.stage}', release {row.name}, revision {revision}: {chosen_names}")
    official_only = not (aws.embedded or allow_dirty)
    if official_only and BASE_ARGUMENT in arguments:
        raise UsageError(
            f"a base of one's own is in no tag, so stage '{there.stage}' would take it for its release's",
            next_step=f"leave {BASE_ARGUMENT} out, or push it all the same with --allow-dirty",
        )
    missing = job.missing(chosen)
    build = Build(client=client, release=row, revision=revision, build_arguments=arguments, network=network)
    build.check_bases(one for one in chosen if one.name not in missing)
    if missing:
        for parent in job.parents_there(missing):
            console.print(f"{parent.name}: pull what was pushed already, to build on it")
            job.fetch(parent)
        engine.build_command()
        build.run(build.plan(missing, all_descendants=False), progress)
    elif arguments:
        console.print(f"note: nothing was to be built, so --build-arg {', '.join(arguments)} changed nothing")
    if official_only:
        job.check_bases(chosen)
    pushed = job.run(chosen, progress)
    recorded = job.record(pushed)
    for one in pushed:
        if one.leaves_own:
            console.print(
                f"note: {one.image.name}:{one.tag} was pushed before, and is taken; what was built here is not sent",
                soft_wrap=True,
            )
        if stand_ins := [name for name in there.stand_ins(one.image) if aws.embedded]:
            console.print(f"the embedded AWS has no accelerator: {one.image.name} is {', '.join(stand_ins)} there too")
    return pushed, recorded


def _pushed_json(one: Pushed, release_name: str, recorded: Mapping[str, str]) -> dict[str, Any]:
    return {
        "image": one.image.name,
        "release": release_name,
        "tag": one.tag,
        "uri": one.uri,
        "was_there": one.was_there,
        "recorded": sorted(name for name, uri in recorded.items() if uri == one.uri),
    }
