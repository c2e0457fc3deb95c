"""The commands of `trainyard data`: their names, options and help. What they do lies in the module beside it."""

from pathlib import Path
from typing import Annotated

import typer

from jobs.cli.options import Output, Yes, user_path

data = typer.Typer(help="Look into tables of examples, and keep a team's files in the stage's data bucket.")

Place = Annotated[str, typer.Argument(metavar="LOCATION", help="data://TEAM/NAME, a file or a folder.")]


@data.command("show")
def data_show(
    ctx: typer.Context,
    *,
    tables: Annotated[
        list[str], typer.Argument(metavar="FILE…", help=".csv, .tsv, .jsonl or .parquet; here, data://… or s3://….")
    ],
    held_out: Annotated[
        list[str] | None, typer.Option("--eval", metavar="FILE", help="Held-out examples, to compare with.")
    ] = None,
    text_column: Annotated[str, typer.Option(help="Column of the sentence.")] = "text",
    text_pair_column: Annotated[str | None, typer.Option(help="Column of the second sentence of a pair.")] = None,
    label_column: Annotated[str, typer.Option(help="Column of the class.")] = "label",
    model: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help="Count tokens with its tokenizer.json; here, data://… or s3://…."),
    ] = None,
    max_length: Annotated[int, typer.Option(min=1, help="With --model: what is cut beyond so many tokens.")] = 128,
    output: Output = "table",
) -> None:
    """Show what a table has: examples, classes, lengths, bad rows, and what looks like a mistake.

    Lengths are in characters and words, with --model in tokens too.
    """
    from jobs.cli.data import commands

    texts = (text_column, *([text_pair_column] if text_pair_column else []))
    commands.show(
        ctx.obj.aws,
        ctx.obj.stage,
        tables,
        held_out or [],
        texts=texts,
        label=label_column,
        model=model,
        max_length=max_length,
        output=output,
    )


@data.command("put")
def data_put(
    ctx: typer.Context,
    source: Annotated[
        Path, typer.Argument(metavar="SOURCE", parser=user_path, help="A file or a folder of this machine.")
    ],
    location: Place,
    output: Output = "table",
) -> None:
    """Upload a file or a folder to data://TEAM/NAME, where the team's jobs read it.

    What is there already is not sent again, and an upload that was interrupted goes on where it was. The fingerprint
    that it prints is the one that a fine-tuning writes down as what it has read.
    """
    from jobs.cli.data import commands

    commands.put(ctx.obj.aws(), ctx.obj.stage, source, location, output=output)


@data.command("ls")
def data_ls(ctx: typer.Context, location: Place, output: Output = "table") -> None:
    """List what a folder of the data bucket holds, with sizes and fingerprints."""
    from jobs.cli.data import commands

    commands.ls(ctx.obj.aws(), ctx.obj.stage, location, output=output)


@data.command("rm")
def data_rm(ctx: typer.Context, location: Place, yes: Yes = False) -> None:
    """Remove a file, or a folder with all that it holds; asks first."""
    from jobs.cli.data import commands

    commands.rm(ctx.obj.aws(), ctx.obj.stage, location, yes=yes)
