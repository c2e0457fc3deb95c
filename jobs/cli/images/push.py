"""What `trainyard images push` and the demo do: build what is missing, push, record."""

import sys
from collections.abc import Sequence

from jobs.aws.connection import Aws
from jobs.cli.plain import print_text
from jobs.core.errors import UsageError
from jobs.core.git import image_tag, source_revision
from jobs.core.images import release
from jobs.images import engine
from jobs.images.bases import BASE_ARGUMENT
from jobs.images.build import Build, parse_build_arguments
from jobs.images.push import Push, Pushed, Registry, check_clean
from jobs.images.stage_images import StageImages


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
    chosen = there.chosen(names, emulated=aws.emulated)
    revision = source_revision()
    check_clean(revision, emulated=aws.emulated, allow_dirty=allow_dirty)
    client = engine.connect(engine.TRANSFER_SECONDS)
    job = Push(client=client, aws=aws, stage=there, registry=Registry.sign_in(aws), tag=image_tag(row.name, revision))
    _say(f"stage '{there.stage}', release {row.name}, revision {revision}: {', '.join(one.name for one in chosen)}")
    official_only = not (aws.emulated or allow_dirty)
    if official_only and BASE_ARGUMENT in arguments:
        raise UsageError(
            f"a custom base is in no tag, so stage '{there.stage}' would take it for its release's",
            next_step=f"leave {BASE_ARGUMENT} out, or push it all the same with --allow-dirty",
        )
    build = Build(client=client, release=row, revision=revision, build_arguments=arguments, network=network)
    if missing := job.missing(one for one in chosen if not build.is_there(one.name)):
        for parent in job.parents_there(missing):
            _say(f"{parent.name}: pull what was pushed already, to build on it")
            job.fetch(parent)
        engine.build_command()
        build.run(build.plan(missing), _say)
    if official_only:
        job.check_bases(chosen)
    pushed = job.run(chosen, _say)
    recorded = job.record(pushed)
    for one in pushed:
        if one.leaves_own:
            _say(f"note: {one.image.name}:{one.tag} was pushed before, and is taken; what was built here is not sent")
        if stand_ins := [name for name in there.stand_ins(one.image) if aws.emulated]:
            _say(f"the emulator has no accelerator: {one.image.name} is {', '.join(stand_ins)} there too")
    return pushed, recorded


def _say(line: str) -> None:
    print_text(line, to=sys.stderr)
