"""`trainyard leftovers`: list what a destroyed stage left, and delete it."""

from typing import TYPE_CHECKING, Annotated

import typer

from jobs.cli.options import Output, Yes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from jobs.aws.connection import Aws
    from jobs.money.leftovers import Leftover, Leftovers

_NEEDED_BY = {"key": (("bucket", "secret", "repository"), "read"), "machine-image": (("snapshot",), "found again")}
"""Kinds without which other kinds cannot be read or, because only their AMI has the stage's tags, not be found."""


def leftovers(
    ctx: typer.Context,
    *,
    kind: Annotated[
        list[str] | None,
        typer.Option(metavar="KIND", help="Only this kind, as the table names it. Repeatable. Default: all."),
    ] = None,
    delete: Annotated[bool, typer.Option("--delete", help="Delete what is listed. Asks for confirmation.")] = False,
    yes: Yes = False,
    output: Output = "table",
) -> None:
    """List what `cdk destroy` left of the stage, and what it costs.

    Lists only resources with the stage's tag or names that belong to none of its stacks. Keys and secrets that
    --delete deletes can be restored for 30 days. Everything else is lost, including the files in buckets.
    """
    import dataclasses

    from jobs.cli import tables
    from jobs.core.errors import UsageError, did_you_mean
    from jobs.money.leftovers import KINDS, find

    for name in kind or ():
        if name not in KINDS:
            raise UsageError(f"unknown kind '{name}'{did_you_mean(name, KINDS)}")
    aws, stage = ctx.obj.aws(), ctx.obj.stage
    left = find(aws, stage)
    chosen = [item for item in left.found if item.kind in (kind or KINDS)]
    if output == "json":
        tables.print_json({**dataclasses.asdict(left), "found": [dataclasses.asdict(item) for item in chosen]})
    elif chosen:
        _show(chosen)
    for note in _notes(aws, stage, left, chosen):
        tables.stderr().print(note)
    if delete and chosen:
        _delete(aws, stage, left, chosen, yes=yes)


def _show(chosen: "Sequence[Leftover]") -> None:
    """Print a table with a row per leftover, but one row for all job definitions, which are free."""
    from jobs.cli import tables
    from jobs.core.words import counted, size

    rows = [
        (
            item.name,
            item.kind,
            "" if item.size_bytes is None else size(item.size_bytes),
            "unknown" if item.usd_a_month is None else f"{item.usd_a_month:.2f}",
        )
        for item in chosen
        if item.kind != "job-definition"
    ]
    if revisions := len(chosen) - len(rows):
        rows.append((counted(revisions, "revision"), "job-definition", "", "0.00"))
    rows.append(("total", "", "", f"{sum(item.usd_a_month or 0 for item in chosen):.2f}"))
    cells = dict(zip(("NAME", "KIND", "SIZE", "USD/MONTH"), zip(*rows, strict=True), strict=True))
    on = tables.stdout()
    tables.show(tables.fitted(cells, width=on.width, leave_out=(), right=("SIZE", "USD/MONTH")), on=on)


def _notes(aws: "Aws", stage: str, left: "Leftovers", chosen: "Sequence[Leftover]") -> "Iterator[str]":
    """Yield where was searched, what the table leaves out, and what AWS did not answer."""
    result = "recorded prices of us-east-1" if chosen else "nothing is left"
    yield f"stage '{stage}' in account {aws.account}, {aws.region_name}: {result}"
    yield "not searched: other regions, and what has no tags, such as logs of the CDK's own functions"
    if left.stacks:
        yield f"only buckets, secrets and log groups outside the stage's stacks: {', '.join(left.stacks)}"
    if any(item.kind == "bucket" and item.size_bytes is None for item in chosen):
        yield "S3 reports the size of a bucket once a day; it has not reported all of these"
    for name, refusal in sorted(left.refusals.items()):
        yield f"could not ask about each {name}: {refusal}"


def _delete(aws: "Aws", stage: str, left: "Leftovers", chosen: "Sequence[Leftover]", *, yes: bool) -> None:
    """Ask, and delete what was chosen. Raises UsageError if what stays needs it, TrainyardError if AWS refuses some."""
    from jobs.cli import tables
    from jobs.cli.terminal import ask
    from jobs.core.errors import TrainyardError, UsageError
    from jobs.core.words import counted

    for kind, (others, use) in _NEEDED_BY.items():
        stays = [item for item in left.found if item.kind in others and item not in chosen]
        if stays and any(item.kind == kind for item in chosen):
            raise UsageError(
                f"nothing was deleted: without its {kind}, {stays[0].kind} {stays[0].name} could not be {use}",
                next_step=f"choose other kinds, or add --kind {' --kind '.join(others)}",
            )
    buckets = sum(item.kind == "bucket" for item in chosen)
    what = f"{counted(len(chosen), 'leftover')} of stage '{stage}'"
    what += f", with all files in {counted(buckets, 'bucket')}" if buckets else ""
    if not yes:
        ask(f"Delete {what}?", unasked=UsageError(f"nothing was deleted: {what}", next_step="add --yes"))
    refused: list[str] = []
    for item in chosen:
        if item.kind == "other" or (item.kind == "key" and refused):
            reason = "delete it by hand" if item.kind == "other" else "what stays may need it"
        else:
            reason = _refusal(aws, item)
        if reason:
            refused.append(f"{item.kind} {item.name} was not deleted: {reason}")
        else:
            tables.stderr().print(f"deleted {item.kind} {item.name}")
    if refused:
        raise TrainyardError("\n".join(refused), next_step=f"trainyard --stage {stage} leftovers")


def _refusal(aws: "Aws", item: "Leftover") -> str:
    """Delete a leftover. Return AWS's reason if it refuses, else an empty string."""
    from jobs.aws.errors import explain
    from jobs.money.leftovers import delete

    try:
        delete(aws, item)
    except Exception as error:
        explained = explain(error)
        if explained is None:
            raise
        return str(explained)
    return ""
