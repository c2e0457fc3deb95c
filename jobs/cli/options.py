"""Options, arguments and completion that several commands share."""

import os
import re
import shlex
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from jobs.core.errors import UsageError
from jobs.core.run import LATEST, RECEIPT, is_latest

RUNS_FOLDER = Path("runs")
"""Default folder of `trainyard fetch`."""

_OTHER_NAMES = {
    "cancel RUN": ("kill", "stop"),
    "cancel RUN, which keeps its files; trainyard data rm LOCATION deletes data": ("delete", "remove", "rm"),
    "dashboard": ("ui", "web"),
    "data ls": ("data list",),
    "data put SOURCE LOCATION": ("data cp", "data upload", "upload"),
    "data rm LOCATION": ("data delete", "data remove"),
    "exec RUN": ("attach", "shell", "ssh"),
    "fetch RUN": ("download", "get", "pull"),
    "list": ("history", "jobs", "ls", "ps", "runs"),
    "local down": ("local stop",),
    "local up": ("local start",),
    "logs RUN --follow": ("follow", "tail", "watch"),
    "resume RUN": ("continue", "restart", "retry"),
    "status RUN": ("describe", "info", "show", "top"),
    "submit SPEC": ("launch", "run", "start", "train"),
    "submit SPEC; jobs/specs/ has specs to copy": ("create", "init", "new"),
    "--help": ("help",),
    "--version": ("version",),
}
"""Commands, with the names that other tools have for them."""


class Group(TyperGroup):
    """Names the command to use in place of another tool's."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = " ".join([*ctx.command_path.split()[1:], args[0]])
        meant = next((command for command, names in _OTHER_NAMES.items() if name in names), None)
        if meant is not None and args[0] not in self.commands:
            given = next((word for word in args[1:] if not word.startswith("-")), None)
            if given is not None:
                meant = re.sub("RUN|SPEC", lambda _: shlex.quote(given), meant, count=1)
            raise UsageError(f"No such command '{name}'.", next_step=f"trainyard {meant}")
        return super().resolve_command(ctx, args)


_AGO = re.compile(r"(\d+)\s*([smhd])")
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}


def user_path(text: str) -> Path:
    """Return a path with `~` expanded, because shells do not expand it in `--to=~/runs`."""
    return Path(os.path.expanduser(text))  # noqa: PTH111 - Path.expanduser raises for an unknown user


def is_fetched(run_id: str) -> bool:
    """Return whether a run's results are below the current folder. `fetch --code` and `report` download none."""
    return (RUNS_FOLDER / run_id / RECEIPT).is_file()


def folder_of(text: str) -> Path | None:
    """Return the folder of a fetched run, such as `runs/RUN`; None if the text is a run id or a name."""
    return user_path(text) if os.sep in text and not is_latest(text) else None


def parse_since(text: str) -> datetime:
    """Parse `30m`, `12h`, `7d` or an ISO 8601 time, which is UTC unless it has an offset. Raises UsageError."""
    match = _AGO.fullmatch(text.strip())
    try:
        if match:
            return datetime.now(timezone.utc) - timedelta(**{_UNITS[match[2]]: int(match[1])})
        time = datetime.fromisoformat(text.strip())
    except OverflowError:
        raise UsageError(f"--since {text} is before the year 1", next_step="--since 7d") from None
    except ValueError:
        raise UsageError(f"--since {text}: expected 30m, 12h, 7d or a time such as 2026-01-31T12:00:00") from None
    return time if time.tzinfo else time.replace(tzinfo=timezone.utc)


class Mode(Enum):
    """What `submit` and `resume` do after planning."""

    DRY_RUN = "dry-run"
    FOLLOW = "follow"
    WAIT = "wait"
    DETACH = "detach"


def chosen_mode(*, dry_run: bool, wait: bool, detach: bool) -> Mode:
    """Return the selected mode. Raises typer.BadParameter if several are selected."""
    given = {Mode.DRY_RUN: dry_run, Mode.WAIT: wait, Mode.DETACH: detach}
    chosen = [mode for mode, is_given in given.items() if is_given] or [Mode.FOLLOW]
    if len(chosen) > 1:
        raise typer.BadParameter(f"--{chosen[0].value} and --{chosen[1].value} cannot be combined")
    return chosen[0]


def latest_of_team(ctx: typer.Context, run: str) -> str:
    """Return `TEAM/latest` for 'latest' with --team; any other run unchanged."""
    team = ctx.obj.team if ctx.obj else None
    return f"{team}/{run}" if team and run == LATEST else run


def complete_run(ctx: typer.Context, incomplete: str) -> Iterator[tuple[str, str]]:
    """Yield the stage's run ids for shell completion, newest first. Yields nothing if AWS cannot be reached."""
    from jobs.aws.connection import Aws
    from jobs.runs.batch import read_stage
    from jobs.runs.storage import stored_runs

    options = ctx.find_root().params
    try:
        aws = Aws(options.get("profile"), options.get("region"))
        runs = stored_runs(aws, read_stage(aws, options["stage"]), prefix=incomplete)
    except Exception:  # noqa: BLE001 - an error would be printed in the middle of the user's command line
        return
    if LATEST.startswith(incomplete):
        yield LATEST, "the newest run"
    for run in reversed(runs):
        yield run.run_id, run.team


Output = Annotated[
    Literal["table", "json"], typer.Option("--output", "-o", help="Print a table for people or JSON for scripts.")
]
Run = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="A run id, the beginning of one, a spec's name (its newest run), or 'latest' (your team's newest run).",
        autocompletion=complete_run,
        callback=latest_of_team,
    ),
]
RunOrFolder = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="A run id, the beginning of one, a spec's name (its newest run), 'latest', or the folder of a fetched "
        "run (runs/RUN), which needs no AWS.",
        autocompletion=complete_run,
        callback=latest_of_team,
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override a key of the spec, e.g. --set arguments.epochs=2, or --set epochs=2 if only one key ends like "
        "this. Repeatable. If the file has several specs, --set NAME.KEY=VALUE changes only the spec NAME.",
    ),
]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="Check everything and print the plan, but submit nothing. -o json prints the SubmitJob request.",
    ),
]
Wait = Annotated[bool, typer.Option("--wait", help="Wait until the job ends, without printing its log.")]
Detach = Annotated[bool, typer.Option("--detach", help="Return as soon as the job is submitted.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]
NoCheck = Annotated[
    bool, typer.Option("--no-check", help="Check only that the inputs exist; do not read their contents.")
]
HtmlPage = Annotated[
    Path | None,
    typer.Option("--html", metavar="FILE", parser=user_path, help="Also write an HTML page with charts to FILE."),
]
