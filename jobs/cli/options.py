"""Options that commands of several files have."""

from typing import Annotated, Literal

import typer

Output = Annotated[Literal["table", "json"], typer.Option("--output", "-o", help="How to print: for eyes or scripts.")]
BuildArguments = Annotated[
    list[str] | None,
    typer.Option("--build-arg", metavar="NAME=VALUE", help="An ARG of the Dockerfile that no release decides."),
]
Network = Annotated[str | None, typer.Option(metavar="MODE", help="Docker's network mode for RUN: host, …")]

DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Check everything, print the exact SubmitJob request, submit nothing.")
]
Follow = Annotated[bool, typer.Option("--follow", help="Stream the log until the job ends (the default).")]
Wait = Annotated[bool, typer.Option("--wait", help="Wait until the job ends, without its log.")]
Detach = Annotated[bool, typer.Option("--detach", help="Return as soon as the job is submitted.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask before money is spent.")]
