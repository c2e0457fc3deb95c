"""The commands of `trainyard local`: their names, options and help. What they do lies in the module beside it."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from jobs.cli.options import Output, Yes, user_path

local = typer.Typer(help="The emulator of the current folder: no account, no Docker needed.")

STATE_FILE = Path(".trainyard/emulator.json")


@local.command("up")
def local_up(
    ctx: typer.Context,
    *,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Loopback port; 0 takes a free one.")] = 0,
    executor: Annotated[
        Literal["process", "docker"] | None,
        typer.Option(help="What runs a job: this machine's processes (the default), or containers."),
    ] = None,
    keep: Annotated[
        Path | None,
        typer.Option(metavar="DIR", parser=user_path, help="Keep runs and data there, for later starts."),
    ] = None,
    deploy: Annotated[bool, typer.Option(help="Deploy the stage's stacks with the CDK CLI.")] = True,
) -> None:
    """Start the emulator and deploy the stage to it."""
    from jobs.cli.local import commands

    commands.up(ctx.obj.stage, STATE_FILE, port=port, executor=executor, keep=keep, deploy=deploy)


@local.command("down")
def local_down(ctx: typer.Context, yes: Yes = False) -> None:
    """Stop the emulator and every job in it; what was in memory is gone.

    Asks first where jobs run, or where runs have not been fetched.
    """
    from jobs.cli.local import commands

    commands.down(ctx.obj.stage, STATE_FILE, yes=yes)


@local.command("status")
def local_status(output: Output = "table") -> None:
    """Show whether the emulator runs, its jobs, and what it does not prove."""
    from jobs.cli.local import commands

    commands.status(STATE_FILE, output=output)


@local.command("env")
def local_env() -> None:
    """Print the shell lines that point AWS tools at the emulator: eval "$(trainyard local env)"."""
    from jobs.cli.local import commands

    commands.env(STATE_FILE)
