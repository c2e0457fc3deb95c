"""`trainyard data`: look at tables of examples, and manage a team's files in the data bucket of the stage."""

import os
import re
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from jobs.cli.options import Group, Output, Yes, user_path
from jobs.core.labels import Problem

if TYPE_CHECKING:
    from rich.console import Console

    from jobs.aws.connection import Aws

data = typer.Typer(cls=Group, help="Look at tables, and manage a team's files in the data bucket.")

Location = Annotated[str, typer.Argument(metavar="LOCATION", help="data://TEAM/NAME, a file or a folder.")]

_CHECKED_ROWS = 10_000
"""First rows of a table that `data put` checks."""


@data.command("show")
def data_show(
    ctx: typer.Context,
    *,
    tables: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE…", help=".csv, .tsv, .jsonl, .json or .parquet tables: local paths, data://… or s3://…."
        ),
    ],
    held_out: Annotated[
        list[str] | None, typer.Option("--eval", metavar="FILE", help="Compare with these held-out examples.")
    ] = None,
    text_column: Annotated[str, typer.Option(help="Column of the text.")] = "text",
    text_pair_column: Annotated[
        str | None, typer.Option(help="Column of the second text of a pair. Default: single texts.")
    ] = None,
    label_column: Annotated[str, typer.Option(help="Column of the label: a class, several, or a number.")] = "label",
    problem: Annotated[
        Problem, typer.Option(help="What a label is: one class, any number of classes, or a number.")
    ] = "single-label",
    label_delimiter: Annotated[
        str, typer.Option(help="With --problem multi-label: separates the classes in a text.")
    ] = ",",
    delimiter: Annotated[
        str | None, typer.Option(help="Character between columns, or tab. Default: comma in .csv, tab in .tsv.")
    ] = None,
    encoding: Annotated[str, typer.Option(help="Encoding of text files, such as cp1252.")] = "utf-8",
    quotes_are_text: Annotated[bool, typer.Option("--quotes-are-text", help="Read double quotes as text.")] = False,
    strip: Annotated[
        bool, typer.Option("--strip", help="Remove spaces and invisible characters around texts and classes.")
    ] = False,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER",
            help="Also count tokens, with the tokenizer.json of this model: a local path, data://… or s3://….",
        ),
    ] = None,
    max_length: Annotated[
        int, typer.Option(min=1, help="With --model: report how many texts are longer than this many tokens.")
    ] = 128,
    output: Output = "table",
) -> None:
    """Show what a table contains, and likely mistakes in it.

    Shows examples, classes, lengths and bad rows. Lengths are in characters and words, and with --model also in tokens.
    The options for the table's format and --problem are keys of a spec, too.
    """
    from rich.text import Text

    from jobs.cli import tables as printed
    from jobs.core.errors import UsageError
    from jobs.core.labels import LabelFormat
    from jobs.data_checks.table_summary import Model, summarize
    from jobs.spec.arguments import Columns, TextFormat, delimiter_named, encoding_named

    texts = (text_column, *([text_pair_column] if text_pair_column else []))
    try:
        text_format = TextFormat(
            delimiter=delimiter_named(delimiter) if delimiter else None,
            encoding=encoding_named(encoding),
            quotes_are_text=quotes_are_text,
            strip=strip,
        )
    except ValueError as error:
        raise UsageError(str(error)) from None
    columns = Columns(
        texts=texts,
        label=label_column,
        missing_next="name the columns with --text-column and --label-column",
        format=text_format,
        labels=LabelFormat(problem, label_delimiter),
    )
    connect, stage = ctx.obj.aws, ctx.obj.stage
    try:
        found = summarize(
            connect,
            [_table(connect, stage, location) for location in tables],
            [_table(connect, stage, location) for location in held_out or []],
            columns,
            Model(_resolved(connect, stage, model, kind="models"), max_length) if model else None,
        )
    except UsageError as error:
        # The advice is written for specs, whose keys are options here.
        error.next_step = error.next_step and re.sub(r"\bset (delimiter|encoding): ", r"add --\1 ", error.next_step)
        raise
    if output == "json":
        printed.print_json(found.model_dump(mode="json"))
        return
    for line in found.lines():
        printed.print_line(
            Text(line, style=printed.ORANGE if line.startswith("warning: ") else ""), on=printed.stdout()
        )


def _table(connect: "Callable[[], Aws]", stage_name: str, location: str) -> str:
    from jobs.core.errors import UsageError
    from jobs.core.locations import table_location

    try:
        table_location(location)
    except ValueError as error:
        raise UsageError(str(error)) from None
    return _resolved(connect, stage_name, location, kind="tables")


def _resolved(connect: "Callable[[], Aws]", stage_name: str, location: str, *, kind: str) -> str:
    """Return a local path or an S3 URI. Connects to the stage only for data:// locations."""
    from jobs.core.errors import UsageError
    from jobs.core.locations import DATA
    from jobs.data_checks import team_data
    from jobs.runs.batch import read_stage

    if location.startswith("hf://"):
        raise UsageError(f"{location}: this command cannot read {kind} from the hub", next_step="download it first")
    if not location.startswith(DATA):
        return os.path.expanduser(location)  # noqa: PTH111 - Path.expanduser raises for an unknown user
    return str(team_data.place_of(read_stage(connect(), stage_name), location))


@data.command("put")
def data_put(
    ctx: typer.Context,
    source: Annotated[
        Path, typer.Argument(metavar="SOURCE", parser=user_path, help="A file or a folder on this machine.")
    ],
    location: Location,
    output: Output = "table",
) -> None:
    """Upload a file or a folder to data://TEAM/NAME.

    The team's jobs can then read it. Files that are already there are skipped, so the same command continues an
    interrupted upload. Prints the fingerprint that fine-tuning runs record for their data.
    """
    import dataclasses

    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    from jobs.cli import tables
    from jobs.cli.terminal import print_text
    from jobs.core.errors import StoppedError, UsageError
    from jobs.core.words import counted, printable_name
    from jobs.data_checks import team_data
    from jobs.runs.batch import read_stage

    aws = ctx.obj.aws()
    stage = read_stage(aws, ctx.obj.stage)
    place = team_data.place_of(stage, location)
    if not place.key.partition("/")[2]:
        raise UsageError(
            f"{location} is the folder of all of the team's data", next_step=f"name a file: {location.rstrip('/')}/NAME"
        )
    files = team_data.files_of(source, place)
    console = tables.stderr()
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    new = 0
    _warn_of_format(files, console)
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task(source.name, total=sum(path.stat().st_size for path in files))
        try:
            for path, target in files.items():
                new += team_data.put(aws, path, target, sent=lambda size: progress.advance(bar, size))
        except KeyboardInterrupt:
            raise StoppedError(
                f"stopped before all of {source} was uploaded",
                next_step=f"continue with: trainyard data put {source} {location}",
            ) from None
    whole = place / source.name if source.is_file() and place.key.endswith("/") else place
    entry = team_data.entry(aws, stage, whole)
    if entry.files > len(files):
        console.print(f"{location} also has {counted(entry.files - len(files), 'file')} that {source} does not have")
    if output == "json":
        tables.print_json({**dataclasses.asdict(entry), "sent": new})
        return
    skipped = f", {len(files) - new} already uploaded" if new < len(files) else ""
    console.print(f"{counted(len(files), 'file')}{skipped}; fingerprint {entry.fingerprint}")
    print_text(printable_name(entry.location))


def _warn_of_format(files: Iterable[Path], console: "Console") -> None:
    """Warn about the first table that a job cannot read, or only with keys such as `delimiter` and `encoding`."""
    from rich.text import Text

    from jobs.cli import tables
    from jobs.core.errors import UsageError
    from jobs.core.locations import DELIMITERS, JSON_LINES, table_suffix
    from jobs.core.words import printable
    from jobs.data_checks.table_rows import TableRows

    for path in files:
        if table_suffix(path.name) not in (*DELIMITERS, *JSON_LINES):
            continue
        table = TableRows(location=str(path), columns=[], missing_next="")
        try:
            with path.open("rb") as stream:
                for _ in islice(table.rows_of_text(stream), _CHECKED_ROWS):
                    pass
        except UsageError as error:
            console.print(Text(f"warning: {printable(str(error.args[0]))}", style=tables.ORANGE), soft_wrap=True)
            if error.next_step:
                console.print(Text(f"next: {error.next_step}"), soft_wrap=True)
            return


@data.command("ls")
def data_ls(
    ctx: typer.Context,
    location: Annotated[
        str | None,
        typer.Argument(metavar="[LOCATION]", help="data://TEAM/NAME, a file or a folder. Default: your team's folder."),
    ] = None,
    output: Output = "table",
) -> None:
    """List a folder of the data bucket."""
    import dataclasses

    from jobs.cli import tables
    from jobs.core.locations import DATA
    from jobs.data_checks import team_data
    from jobs.runs.batch import read_stage

    aws = ctx.obj.aws()
    stage = read_stage(aws, ctx.obj.stage)
    location = location or f"{DATA}{ctx.obj.team or stage.default_team}/"
    entries = [*team_data.entries(aws, stage, team_data.place_of(stage, location))]
    if output == "json":
        tables.print_json([dataclasses.asdict(entry) for entry in entries])
        return
    table = tables.columns("FILES", "BYTES", "FINGERPRINT", "LOCATION")
    table.columns[0].justify = table.columns[1].justify = "right"
    table.columns[-1].no_wrap, table.columns[-1].overflow = False, "fold"
    for entry in entries:
        table.add_row(f"{entry.files:,}", f"{entry.size:,}", entry.fingerprint, entry.location)
    tables.show(table, on=tables.stdout())


@data.command("rm")
def data_rm(ctx: typer.Context, location: Location, yes: Yes = False) -> None:
    """Delete a file, or a folder with everything in it."""
    from jobs.cli import tables
    from jobs.cli.terminal import ask
    from jobs.core.errors import UsageError
    from jobs.core.words import counted
    from jobs.data_checks import team_data
    from jobs.runs.batch import read_stage

    aws = ctx.obj.aws()
    stage = read_stage(aws, ctx.obj.stage)
    place = team_data.place_of(stage, location)
    entry = team_data.entry(aws, stage, place)
    what = f"{counted(entry.files, 'file')}, {entry.size:,} bytes, at {location}"
    if not yes:
        ask(f"Delete {what}?", unasked=UsageError(f"nothing was deleted: {what}", next_step="add --yes"))
    team_data.remove(aws, place)
    tables.stderr().print(f"deleted {what}")
