"""The commands of `trainyard`: their names, options and help. What they do lies in the modules they import.

Those of `trainyard images`, `data`, `local` and `acceptance` are in the app.py of the folder of that name, and those
that look back at runs are in past.py.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from typer.core import TyperGroup

from jobs.cli.acceptance.app import acceptance
from jobs.cli.data.app import data
from jobs.cli.images.app import images
from jobs.cli.local.app import STATE_FILE, local
from jobs.cli.options import (
    RUNS_FOLDER,
    Detach,
    DryRun,
    NoCheck,
    Output,
    Overrides,
    Run,
    Wait,
    Yes,
    user_path,
)
from jobs.cli.past import past
from jobs.cli.plain import print_text
from jobs.core.stage import DEFAULT_STAGE, DEFAULT_TEAM

if TYPE_CHECKING:
    from jobs.aws.connection import Aws
    from jobs.cli.submit import How

GLOBAL_OPTIONS = ("--profile", "--region", "--stage", "--team")


class GlobalOptionsAnywhere(TyperGroup):
    """Takes the global options after the command too, where most people type them."""

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
    help="Train Hugging Face models on Habana Gaudi in AWS, and try it all on a laptop first.",
)
app.add_typer(local, name="local")
app.add_typer(images, name="images")
app.add_typer(data, name="data")
app.add_typer(past)
app.add_typer(acceptance)


@dataclass(frozen=True)
class Target:
    """The stage a command talks to, and with whose credentials."""

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
    profile: Annotated[str | None, typer.Option(help="AWS profile; default: AWS_PROFILE, as for the AWS CLI.")] = None,
    region: Annotated[str | None, typer.Option(help="AWS region; default: the profile's.")] = None,
    stage: Annotated[str, typer.Option(envvar="TRAINYARD_STAGE", help="The deployed stage.")] = DEFAULT_STAGE,
    team: Annotated[
        str | None,
        typer.Option(
            help=f"Whose runs are listed or added up; default: all teams'. Whose 'latest' is meant: {DEFAULT_TEAM}'s."
        ),
    ] = None,
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    ctx.obj = Target(profile, region, stage, team)
    if ctx.invoked_subcommand is None:
        from jobs.cli import next_steps

        next_steps.show(stage, profile=profile, region=region, state_file=STATE_FILE, runs_folder=RUNS_FOLDER)


@app.command()
def submit(
    ctx: typer.Context,
    *,
    spec: Annotated[
        Path,
        typer.Argument(
            metavar="SPEC",
            parser=user_path,
            help="A job spec, or - for standard input; ready ones lie in jobs/specs/.",
        ),
    ],
    no_check: NoCheck = False,
    dry_run: DryRun = False,
    wait: Wait = False,
    detach: Detach = False,
    yes: Yes = False,
    overrides: Overrides = None,
    output: Output = "table",
) -> None:
    """Submit a spec as one job, and follow it to its end.

    A file may hold several specs, parted by ---: all are checked first, then submitted and followed in their order,
    each after those whose results it reads (run://NAME/…).
    Ctrl-C stops the following, never the job. The run id is printed on stdout. Exit code 1: the job failed.
    """
    from jobs.cli import submit as command

    if ctx.obj.team is not None:
        raise typer.BadParameter("a spec says who pays: --set team=TEAM", param_hint="--team")
    how = _how(dry_run=dry_run, wait=wait, detach=detach)
    command.submit(
        ctx.obj.aws(),
        ctx.obj.stage,
        spec,
        overrides or [],
        how=how,
        yes=yes,
        output=output,
        look_inside=not no_check,
    )


@app.command()
def resume(
    ctx: typer.Context,
    *,
    run: Run,
    overrides: Overrides = None,
    allow_changes: Annotated[
        bool,
        typer.Option(
            "--allow-changes", help="Go on from the checkpoint though arguments that decide the result changed."
        ),
    ] = False,
    no_check: NoCheck = False,
    dry_run: DryRun = False,
    wait: Wait = False,
    detach: Detach = False,
    yes: Yes = False,
    output: Output = "table",
) -> None:
    """Go on with a run that failed, was interrupted once too often, was cancelled or timed out.

    It stays the same run, and goes on from its newest checkpoint: one id, one folder, one curve, one receipt.
    """
    from jobs.cli.resume import resume as command

    command(
        ctx.obj.aws(),
        ctx.obj.stage,
        run,
        overrides or [],
        allow_changes=allow_changes,
        how=_how(dry_run=dry_run, wait=wait, detach=detach),
        yes=yes,
        output=output,
        look_inside=not no_check,
    )


def _how(**given: bool) -> "How":
    """Return what is done once the plan stands, from the options of the same names."""
    from jobs.cli.submit import How

    chosen = [name.replace("_", "-") for name, is_given in given.items() if is_given] or ["follow"]
    if len(chosen) > 1:
        raise typer.BadParameter(f"--{chosen[0]} and --{chosen[1]} exclude each other")
    return How(chosen[0])


@app.command()
def status(ctx: typer.Context, run: Run, output: Output = "table") -> None:
    """Show a run: its state, its attempts and why they ended, how far it is."""
    from jobs.cli import status as command

    command.status(ctx.obj.aws(), ctx.obj.stage, run, output=output)


@app.command()
def why(ctx: typer.Context, run: Run, output: Output = "table") -> None:
    """Say why a run waits: asks Batch and EC2 for all that can keep it from starting."""
    from jobs.cli import why as command

    command.why(ctx.obj.aws(), ctx.obj.stage, run, output=output)


@app.command()
def logs(
    ctx: typer.Context,
    run: Run,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job ends.")] = False,
    since: Annotated[str | None, typer.Option(help="Lines since: 30m, 12h, 7d, or an ISO 8601 time.")] = None,
    output: Output = "table",
) -> None:
    """Print a run's log: all its attempts, all its nodes."""
    from jobs.cli import logs as command

    command.logs(ctx.obj.aws(), ctx.obj.stage, run, follow=follow, since=since, output=output)


@app.command()
def connect(
    ctx: typer.Context,
    run: Run,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Of this machine; 0 takes a free one.")] = 0,
    output: Output = "table",
) -> None:
    """Open a notebook's JupyterLab and TensorBoard on this machine, through Session Manager.

    Prints the address for a browser on stdout, and forwards it until Ctrl-C, which never ends the notebook.
    """
    from jobs.cli import connect as command

    command.connect(ctx.obj.aws(), ctx.obj.stage, run, port=port, output=output)


@app.command("exec", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def run_in_job(
    ctx: typer.Context,
    run: Run,
    command: Annotated[
        list[str] | None, typer.Argument(metavar="[COMMAND]...", help="What to run; default: a shell.")
    ] = None,
    node: Annotated[int, typer.Option(min=0, help="Which node of several, from 0.")] = 0,
) -> None:
    """Run a shell or a command in the container of a job that runs: hl-smi, py-spy dump --pid 7, …

    It is its team's people who may, unless the stage has it switched off, and AWS CloudTrail records who ran what.
    Exit code 0 says that the command ended, and not how: ECS Exec does not tell.
    """
    from jobs.cli import exec as command_module

    # Between RUN and COMMAND, `--` ends what trainyard's own options are looked for in.
    words = command[1:] if command and command[0] == "--" else command or []
    command_module.run_in_job(ctx.obj.aws(), ctx.obj.stage, run, words, node=node)


@app.command()
def cancel(
    ctx: typer.Context,
    run: Run,
    reason: Annotated[str, typer.Option(help="Kept with the job, beside your name.")] = "",
    yes: Yes = False,
) -> None:
    """Stop a run, whatever its state; what runs gets SIGTERM, and its newest complete checkpoint stays.

    'latest' is asked about first: somebody may have submitted another run meanwhile.
    """
    from jobs.cli import cancel as command

    command.cancel(ctx.obj.aws(), ctx.obj.stage, run, reason=reason, yes=yes)


@app.command()
def schema() -> None:
    """Print the JSON Schema of a spec, for editors."""
    import json

    from jobs.spec.spec import spec_json_schema

    print_text(json.dumps(spec_json_schema(), indent=2))


@app.command()
def demo(
    executor: Annotated[
        Literal["process", "docker"],
        typer.Option(help="What the job runs as: this machine's processes, or a container of the cpu image."),
    ] = "process",
) -> None:
    """Deploy to an emulator, fine-tune a real model there, show the result (what `make demo` runs).

    With a Docker engine, --executor docker builds the cpu image first, unless `trainyard images build` has.
    """
    from jobs.cli import demo as command

    command.demo(executor=executor)
