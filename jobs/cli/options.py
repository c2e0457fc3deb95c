"""Options that commands of several files have."""

from typing import Annotated, Literal

import typer

Output = Annotated[Literal["table", "json"], typer.Option("--output", "-o", help="How to print: for eyes or scripts.")]
BuildArguments = Annotated[
    list[str] | None,
    typer.Option("--build-arg", metavar="NAME=VALUE", help="An ARG of the Dockerfile that no release decides."),
]
Network = Annotated[str | None, typer.Option(metavar="MODE", help="Docker's network mode for RUN: host, …")]
