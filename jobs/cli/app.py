"""Assembles the commands and global options of `trainyard`, and the hints that plain `trainyard` prints.

Each command is declared in the file that implements it.
"""

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from jobs.cli import exec as exec_command
from jobs.cli.acceptance.command import acceptance
from jobs.cli.canary import canary
from jobs.cli.cancel import cancel
from jobs.cli.compare import compare
from jobs.cli.connect import connect
from jobs.cli.costs import show_costs
from jobs.cli.dashboard import dashboard
from jobs.cli.data import data
from jobs.cli.demo import demo
from jobs.cli.estimate import estimate
from jobs.cli.fetch import fetch
from jobs.cli.images import images
from jobs.cli.leftovers import leftovers
from jobs.cli.list import list_runs
from jobs.cli.local import STATE_FILE, local
from jobs.cli.logs import logs
from jobs.cli.options import RUNS_FOLDER, Group, is_fetched, parse_since
from jobs.cli.receipt import receipt
from jobs.cli.report import report
from jobs.cli.resume import resume
from jobs.cli.schema import schema
from jobs.cli.status import status
from jobs.cli.submit import submit
from jobs.cli.sweep import sweep
from jobs.cli.terminal import print_commands, print_text
from jobs.cli.why import why
from jobs.core.errors import TrainyardError
from jobs.core.stage import DEFAULT_STAGE, DEFAULT_TEAM

if TYPE_CHECKING:
    from jobs.aws.connection import Aws

GLOBAL_OPTIONS = ("--profile", "--region", "--stage", "--team")

_AWS_SETTINGS = ("AWS_ENDPOINT_URL", "AWS_PROFILE", "AWS_ACCESS_KEY_ID", "AWS_ROLE_ARN", "AWS_WEB_IDENTITY_TOKEN_FILE")
"""If any of these is set, the shell was set up for an AWS account or an emulator."""


class GlobalOptionsAnywhere(Group):
    """Accepts the global options after the command too, where most people type them."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        hoisted: list[str] = []
        rest: list[str] = []
        waiting = iter(args)
        for argument in waiting:
            if argument == "--":
                rest.append(argument)
                break
            if argument in GLOBAL_OPTIONS:
                hoisted += [argument, *([value] if (value := next(waiting, None)) is not None else [])]
            elif argument.startswith(tuple(f"{option}=" for option in GLOBAL_OPTIONS)):
                hoisted.append(argument)
            else:
                rest.append(argument)
        return super().parse_args(ctx, [*hoisted, *rest, *waiting])


app = typer.Typer(
    cls=GlobalOptionsAnywhere,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help: wraps paragraphs, and does not load rich
    help="Train Hugging Face models on Habana Gaudi or NVIDIA instances in AWS. Everything also runs on a laptop.",
)
app.add_typer(local, name="local")
app.add_typer(images, name="images")
app.add_typer(data, name="data")
# In the order of --help: run a job, look at it, compare and add up, prepare.
app.command()(submit)
app.command()(resume)
app.command()(status)
app.command()(why)
app.command()(logs)
app.command()(connect)
app.command("exec", context_settings=exec_command.SETTINGS)(exec_command.run_in_job)
app.command()(cancel)
app.command("list")(list_runs)
app.command()(dashboard)
app.command()(fetch)
app.command()(receipt)
app.command()(report)
app.command()(sweep)
app.command()(compare)
app.command("costs")(show_costs)
app.command()(estimate)
app.command()(schema)
app.command()(demo)
app.command()(canary)
app.command()(acceptance)
app.command()(leftovers)


@dataclass(frozen=True)
class Target:
    """The stage and team that a command works on, and how it connects to AWS."""

    profile: str | None
    region: str | None
    stage: str
    team: str | None

    def aws(self) -> "Aws":
        from jobs.aws.connection import Aws

        return Aws(self.profile, self.region)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print_text(version("trainyard"))
        raise typer.Exit


@app.callback(invoke_without_command=True)
def main(
    ctx: typer.Context,
    profile: Annotated[str | None, typer.Option(help="AWS profile. Default: AWS_PROFILE, like the AWS CLI.")] = None,
    region: Annotated[str | None, typer.Option(help="AWS region. Default: the profile's region.")] = None,
    stage: Annotated[str, typer.Option(envvar="TRAINYARD_STAGE", help="Name of the deployed stage.")] = DEFAULT_STAGE,
    team: Annotated[
        str | None,
        typer.Option(
            help="Show only this team's runs in lists and totals; 'latest' is its newest run. Default: all teams, but "
            f"'latest' is the newest run of {DEFAULT_TEAM}."
        ),
    ] = None,
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    ctx.obj = Target(profile, region, stage, team)
    if ctx.invoked_subcommand is None:
        _show_next_steps(ctx.obj)


def _show_next_steps(target: Target) -> None:
    """Print the state of this folder and shell, and the commands to run next."""
    from jobs.cli import emulator

    print_text("trainyard trains Hugging Face models in AWS and on this machine.\n")
    try:
        server = emulator.running(STATE_FILE)
    except TrainyardError as error:
        print_text(str(error))
        return
    endpoint = os.environ.get("AWS_ENDPOINT_URL")
    if server is not None and endpoint != server.endpoint:
        print_text("An emulator is running, but this shell is not connected to it.")
        print_commands([('eval "$(trainyard local env)"', "connect this shell to it")])
    elif server is not None or target.profile or any(name in os.environ for name in _AWS_SETTINGS):
        _show_newest_run(target)
    else:
        print_text("This shell is not connected to AWS or an emulator.")
        print_commands(
            [
                ("trainyard demo", "train a model on this machine, in a few minutes"),
                ("trainyard local up", "start an emulator for your own jobs"),
                ("export AWS_PROFILE=…", "or connect to an AWS account with a deployed stage"),
            ]
        )
    print_text("\nAll commands: trainyard --help")


def _show_newest_run(target: Target) -> None:
    from jobs.aws.errors import explain
    from jobs.runs import batch
    from jobs.runs.spec_file import READY_SPECS

    aws, stage_name = target.aws(), target.stage
    try:
        jobs = batch.list_jobs(aws, batch.read_stage(aws, stage_name), since=parse_since("7d"))
    except Exception as error:
        explained = error if isinstance(error, TrainyardError) else explain(error)
        if explained is None:
            raise
        print_text(f"The runs cannot be listed: {explained.args[0]}")
        print_commands([(explained.next_step, "")] if explained.next_step else [])
        return
    if not jobs:
        print_text(f"Stage '{stage_name}' has had no runs in the last seven days.")
        print_commands(
            [
                ("trainyard submit SPEC --dry-run", f"check a spec; examples: {os.path.relpath(READY_SPECS)}/"),
                ("trainyard submit SPEC", "submit it"),
            ]
        )
        return
    newest = jobs[0]
    print_text(f"The newest run of stage '{stage_name}' is {newest.run_id}: {newest.state}.")
    if not newest.ended:
        steps = [("logs {} --follow", "follow its log"), ("status {}", "its progress")]
        steps += [("why {}", "why it is waiting")] if newest.state != "RUNNING" else []
    elif newest.state == "SUCCEEDED":
        steps = [("receipt {}", "its result and cost"), ("report {}", "an HTML page with curves, mistakes and costs")]
        if not is_fetched(newest.run_id):
            steps.append(("fetch {}", f"download its model and curves into {RUNS_FOLDER}/"))
    else:
        steps = [
            ("status {}", "how it ended"),
            ("logs {}", "its log"),
            ("resume {}", "continue it from its newest checkpoint"),
        ]
    steps.append(("list", "all runs"))
    print_commands((f"trainyard {command.format(newest.run_id)}", effect) for command, effect in steps)
