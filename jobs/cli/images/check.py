"""`trainyard images test`: build what is missing, run the checks of each image, say how they ended."""

from collections.abc import Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from jobs.cli import tables
from jobs.cli.images.build import chosen_release, progress
from jobs.contract.errors import StoppedError, TrainyardError, UsageError
from jobs.contract.image_hierarchy import Image, image, with_descendants
from jobs.contract.revision import image_tag, local_name, source_revision
from jobs.images import engine
from jobs.images.build import Build, parse_build_arguments
from jobs.images.checks.check import Check, Subject
from jobs.images.checks.table import Result, run_checks

_STYLES = {"ok": "green", "failed": "red", "left out": "yellow"}


def test(
    names: Sequence[str],
    *,
    release_name: str | None,
    descendants: bool,
    tag: str | None,
    build_arguments: Sequence[str],
    network: str | None,
    output: str,
) -> None:
    """Run `trainyard images test`. Raises TrainyardError where a check failed."""
    row = chosen_release(names, release_name)
    arguments = parse_build_arguments(build_arguments)
    chosen: dict[str, Image] = {}
    for name in names:
        for one in with_descendants(name) if descendants else (image(name),):
            chosen[one.name] = one
    revision = _revision_of(tag, row.name) if tag else source_revision()
    client = engine.connect()
    console = tables.stderr()
    console.print(f"release {row.name}, revision {revision}: {', '.join(chosen)}")
    if not tag:
        current = image_tag(row.name, revision)
        missing = [name for name in chosen if not client.images.list(name=local_name(name, current))]
        build = Build(client=client, release=row, revision=revision, build_arguments=arguments, network=network)
        build.check_bases(one for one in chosen.values() if one.name not in missing)
        if missing:
            build.run(build.plan(missing, all_descendants=False), progress)
        elif arguments:
            console.print(f"note: nothing was to be built, so --build-arg {', '.join(arguments)} changed nothing")
    elif arguments:
        raise UsageError("--tag builds nothing, so --build-arg would change nothing", next_step="leave one of them out")
    subjects = [Subject.find(one, release=row, revision=revision, client=client) for one in chosen.values()]
    results = _run(subjects)
    if output == "json":
        tables.print_json([_json(result, revision) for result in results])
    else:
        tables.show(_table(results), on=tables.stdout())
    if failed := [result for result in results if result.outcome == "failed"]:
        raise TrainyardError(
            f"{len(failed)} of {len(results)} checks failed: "
            + ", ".join(f"{result.image.name} ({result.check.name})" for result in failed),
            next_step="what each found stands in its row; correct it, and test again",
        )


def _run(subjects: Sequence[Subject]) -> list[Result]:
    console = tables.stderr()
    results: list[Result] = []
    with console.status("") as status:
        for subject in subjects:

            def begins(check: Check, name: str = subject.image.name) -> None:
                status.update(Text(f"{name}: {check.shows}"))

            try:
                results += run_checks(subject, begins=begins, ends=lambda result: console.print(_line(result)))
            except KeyboardInterrupt:
                raise StoppedError(f"stopped while '{subject.image.name}' was tested; its container is gone") from None
    return results


def _revision_of(tag: str, release_name: str) -> str:
    prefix = image_tag(release_name, "")
    if not tag.startswith(prefix) or tag == prefix:
        raise UsageError(
            f"tag '{tag}' is not one of release {release_name}, whose tags are {prefix}<revision>",
            next_step="give the tag's release as --release; 'trainyard images list' shows the tags there are",
        )
    return tag.removeprefix(prefix)


def _line(result: Result) -> Text:
    line = Text(f"{result.image.name}: ")
    line.append(result.outcome, style=_STYLES[result.outcome])
    line.append(f" {result.check.name}, {result.seconds:.1f} s")
    if result.output:
        line.append(f"\n{result.output}", style="dim")
    return line


def _json(result: Result, revision: str) -> dict[str, Any]:
    return {
        "image": result.image.name,
        "revision": revision,
        "check": result.check.name,
        "shows": result.check.shows,
        "outcome": result.outcome,
        "found": result.found,
        "output": result.output,
        "seconds": round(result.seconds, 1),
    }


def _table(results: Sequence[Result]) -> Table:
    table = tables.columns("IMAGE", "CHECK", "", "TOOK")
    table.add_column("FOUND", overflow="fold")
    for result in results:
        outcome = Text(result.outcome, style=_STYLES[result.outcome])
        table.add_row(result.image.name, result.check.name, outcome, f"{result.seconds:.1f} s", result.found)
    return table
