"""What the commands of `trainyard data` do."""

import csv
import dataclasses
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.text import Text

from jobs.aws.connection import Aws
from jobs.cli import tables
from jobs.cli.options import ask
from jobs.cli.plain import print_text
from jobs.core.errors import StoppedError, UsageError
from jobs.core.locations import DATA, DELIMITERS, table_location, table_suffix
from jobs.core.words import counted, printable, printable_name
from jobs.data_checks import team_data
from jobs.data_checks.table_rows import delimiter_fault
from jobs.data_checks.table_summary import Model, summarize
from jobs.runs.batch import read_stage
from jobs.spec.arguments import Columns

_HEADER_CHARACTERS = 1 << 16


def show(
    connect: Callable[[], Aws],
    stage_name: str,
    training: Sequence[str],
    held_out: Sequence[str],
    *,
    texts: tuple[str, ...],
    label: str,
    model: str | None,
    max_length: int,
    output: str,
) -> None:
    """Run `trainyard data show`. The stage is asked only where a table lies in its data bucket."""
    columns = Columns(texts=texts, label=label, missing_next="name it with --text-column, --label-column")
    found = summarize(
        connect,
        [_resolved(connect, stage_name, location) for location in training],
        [_resolved(connect, stage_name, location) for location in held_out],
        columns,
        Model(_model_folder(connect, stage_name, model), max_length) if model else None,
    )
    if output == "json":
        tables.print_json(found.model_dump(mode="json"))
        return
    for line in found.lines():
        tables.print_line(Text(line, style="yellow" if line.startswith("warning: ") else ""), on=tables.stdout())


def _resolved(connect: Callable[[], Aws], stage_name: str, location: str) -> str:
    try:
        table_location(location)
    except ValueError as error:
        raise UsageError(str(error)) from None
    if location.startswith("hf://"):
        raise UsageError(f"{location}: tables of the hub are not looked into here", next_step="download it first")
    if not location.startswith(DATA):
        return os.path.expanduser(location)  # noqa: PTH111 - leaves what names nobody as it is
    return str(team_data.place_of(read_stage(connect(), stage_name), location))


def _model_folder(connect: Callable[[], Aws], stage_name: str, location: str) -> str:
    if location.startswith(DATA):
        return str(team_data.place_of(read_stage(connect(), stage_name), location))
    if location.startswith("hf://"):
        raise UsageError(f"{location}: models of the hub are not looked into here", next_step="download it first")
    return os.path.expanduser(location)  # noqa: PTH111 - leaves what names nobody as it is


def put(aws: Aws, stage_name: str, source: Path, location: str, *, output: str) -> None:
    """Run `trainyard data put`. Raises StoppedError on Ctrl-C, after which the same command sends the other files."""
    stage = read_stage(aws, stage_name)
    place = team_data.place_of(stage, location)
    if not place.key.partition("/")[2]:
        raise UsageError(f"{location} names all data of a team", next_step=f"name it {location.rstrip('/')}/NAME")
    files = team_data.files_of(source, place)
    console = tables.stderr()
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    new = 0
    _warn_of_delimiter(files, console)
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task(source.name, total=sum(path.stat().st_size for path in files))
        try:
            for path, target in files.items():
                new += team_data.put(aws, path, target, sent=lambda size: progress.advance(bar, size))
        except KeyboardInterrupt:
            raise StoppedError(
                f"stopped before all of {source} was sent",
                next_step=f"trainyard data put {source} {location} again",
            ) from None
    whole = place / source.name if source.is_file() and place.key.endswith("/") else place
    entry = team_data.entry(aws, stage, whole)
    if entry.files > len(files):
        console.print(f"{location} keeps {counted(entry.files - len(files), 'file')} that {source} does not have")
    if output == "json":
        tables.print_json({**dataclasses.asdict(entry), "sent": new})
        return
    there = f", {len(files) - new} of them there already" if new < len(files) else ""
    console.print(f"{counted(len(files), 'file')}{there}; fingerprint {entry.fingerprint}")
    print_text(printable_name(entry.location))


def _warn_of_delimiter(files: Iterable[Path], console: Console) -> None:
    """Warn of the first table whose columns are not parted as its name says: no job could read it."""
    for path in files:
        delimiter = DELIMITERS.get(table_suffix(path.name))
        if delimiter is None:
            continue
        with suppress(csv.Error), path.open(encoding="utf-8-sig", errors="replace", newline="") as table:
            header = next(csv.reader([table.readline(_HEADER_CHARACTERS)], delimiter=delimiter), [])
            if fault := delimiter_fault(str(path), header):
                console.print(Text(f"warning: {printable(str(fault.args[0]))}", style="yellow"), soft_wrap=True)
                console.print(Text(f"next: {fault.next_step}"), soft_wrap=True)
                return


def ls(aws: Aws, stage_name: str, location: str, *, output: str) -> None:
    """Run `trainyard data ls`."""
    stage = read_stage(aws, stage_name)
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


def rm(aws: Aws, stage_name: str, location: str, *, yes: bool) -> None:
    """Run `trainyard data rm`. Raises UsageError where nobody can be asked, typer.Abort on a no."""
    stage = read_stage(aws, stage_name)
    place = team_data.place_of(stage, location)
    entry = team_data.entry(aws, stage, place)
    what = f"{counted(entry.files, 'file')}, {entry.size:,} bytes, at {location}"
    if not yes:
        ask(f"Remove {what}?", unasked=UsageError(f"nothing was removed: {what}", next_step="add --yes"))
    team_data.remove(aws, place)
    tables.stderr().print(f"removed {what}")
