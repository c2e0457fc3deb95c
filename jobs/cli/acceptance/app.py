"""`trainyard acceptance`: its options and help. What it does lies in command.py."""

from typing import Annotated

import typer

from jobs.cli.options import Yes

acceptance = typer.Typer()


@acceptance.command("acceptance")
def run_acceptance(
    ctx: typer.Context,
    *,
    max_usd: Annotated[
        float, typer.Option(min=0, help="US dollars that all of it may cost; at the limit it ends and takes all away.")
    ] = 40.0,
    keep: Annotated[bool, typer.Option(help="Leave the stage standing; needed where it is there already.")] = False,
    yes: Yes = False,
) -> None:
    """Prove a stage on its account, once: deploy it, run jobs, have one reclaimed, destroy it, and write a report.

    It says first what that may cost, and goes on where it broke off.
    """
    from jobs.cli.acceptance import command

    command.acceptance(ctx.obj.aws(), ctx.obj.stage, max_usd=max_usd, keep=keep, yes=yes)
