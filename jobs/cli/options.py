"""Options that commands of several files have."""

import os
import re
import sys
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Annotated, Literal

import typer

from jobs.cli.completion import complete_run
from jobs.core.errors import UsageError
from jobs.core.run import LATEST, is_latest

_AGO = re.compile(r"(\d+)\s*([smhd])")
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}


def user_path(text: str) -> Path:
    """Return the path in which `~` means the user's folder, also where no shell has seen it, as in `--to=~/runs`."""
    return Path(os.path.expanduser(text))  # noqa: PTH111 - leaves what names nobody as it is


def folder_of(text: str) -> Path | None:
    """Return the folder that a fetched run is named by, `runs/RUN`; None if the text is a run's id or a name."""
    return user_path(text) if os.sep in text and not is_latest(text) else None


def ask(question: str, *, unasked: UsageError) -> None:
    """Ask before something is spent or lost. Raises `unasked` if there is no terminal, typer.Abort on a no."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise unasked
    typer.confirm(question, abort=True, err=True)


def parse_since(text: str) -> datetime:
    """Return the moment that `30m`, `12h`, `7d` or an ISO 8601 time names; it is in UTC where it names no offset.

    Raises UsageError for all else.
    """
    match = _AGO.fullmatch(text.strip())
    try:
        if match:
            return datetime.now(timezone.utc) - timedelta(**{_UNITS[match[2]]: int(match[1])})
        time = datetime.fromisoformat(text.strip())
    except OverflowError:
        raise UsageError(f"--since {text}: that is before the first year there is") from None
    except ValueError:
        raise UsageError(f"--since {text}: it should look like 30m, 12h, 7d or 2026-01-31T12:00:00") from None
    return time if time.tzinfo else time.replace(tzinfo=timezone.utc)


RUNS_FOLDER = Path("runs")
"""Where `trainyard fetch` puts runs by default."""

Output = Annotated[Literal["table", "json"], typer.Option("--output", "-o", help="How to print: for eyes or scripts.")]
BuildArguments = Annotated[
    list[str] | None,
    typer.Option("--build-arg", metavar="NAME=VALUE", help="An ARG of the Dockerfile that no release decides."),
]
Network = Annotated[str | None, typer.Option(metavar="MODE", help="Docker's network mode for RUN: host, …")]

Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Replace a value of the spec: --set arguments.epochs=2; of one of several specs: --set NAME.KEY=VALUE",
    ),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Check everything, print the exact SubmitJob request, submit nothing.")
]
Wait = Annotated[bool, typer.Option("--wait", help="Wait until the job ends, without its log.")]
Detach = Annotated[bool, typer.Option("--detach", help="Return as soon as the job is submitted.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask first.")]
NoCheck = Annotated[
    bool,
    typer.Option("--no-check", help="Do not look into the inputs: whether they are there is looked at all the same."),
]


def latest_of_team(ctx: typer.Context, run: str) -> str:
    """Return `TEAM/latest` where --team says whose newest run is meant."""
    team = ctx.obj.team if ctx.obj else None
    return f"{team}/{run}" if team and run == LATEST else run


Run = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="A run id, the beginning of one, a spec's name (its newest run), or 'latest': the newest of your team's.",
        autocompletion=complete_run,
        callback=latest_of_team,
    ),
]

RunOrFolder = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="A run id, the beginning of one, a spec's name (its newest run), 'latest', or a fetched run's folder, "
        "runs/RUN, which is read without AWS.",
        autocompletion=complete_run,
        callback=latest_of_team,
    ),
]
