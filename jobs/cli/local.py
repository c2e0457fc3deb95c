"""`trainyard local`: start, inspect and stop the emulator of the current folder."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from jobs.cli.options import RUNS_FOLDER, Group, Output, Run, Yes, is_fetched, user_path

if TYPE_CHECKING:
    from jobs.cli.emulator import Server

local = typer.Typer(
    cls=Group, help="Start and stop the emulator of the current folder. Needs no AWS account and no Docker."
)

STATE_FILE = Path(".trainyard/emulator.json")

_MAX_NAMED = 3
"""At most this many runs are named in a question."""

_OTHER_FOLDER = "change to the folder where you started it"


@local.command("up")
def local_up(
    ctx: typer.Context,
    *,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on localhost. 0 picks a free one.")] = 0,
    executor: Annotated[
        Literal["process", "docker"] | None,
        typer.Option(help="Run jobs as processes on this machine or in Docker containers. Default: process."),
    ] = None,
    keep: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            parser=user_path,
            help="Keep runs and data in DIR for the next start. Default: they are deleted when the emulator stops.",
        ),
    ] = None,
    deploy: Annotated[bool, typer.Option(help="Deploy the stacks of the stage with the CDK CLI.")] = True,
) -> None:
    """Start the emulator and deploy the stage to it.

    If the emulator is already running, deploys what has changed.
    """
    from jobs.cli import emulator, tables

    console, stage = tables.stderr(), ctx.obj.stage
    server = _running_or_started(port=port, executor=executor, keep=keep)
    if deploy:
        emulator.deploy(server, stage)
        console.print(f"stage '{stage}' is deployed")
    console.print('in this shell, run: eval "$(trainyard local env)", which sets')
    _print_exports(server)


def _running_or_started(*, port: int, executor: str | None, keep: Path | None) -> "Server":
    """Return the running server, or start one. Raises ConfigurationError if one runs with other options."""
    from jobs.cli import emulator, tables
    from jobs.core.errors import ConfigurationError

    console = tables.stderr()
    server = emulator.running(STATE_FILE)
    if server:
        console.print(f"the emulator is already running at {server.endpoint} (process {server.pid})")
        differs = (port and port != server.port) or executor not in (None, server.executor)
        if differs or (keep and str(keep.absolute()) != server.keep):
            kept = f" --keep {server.keep}" if server.keep else ""
            raise ConfigurationError(
                f"the emulator runs with other options: --port {server.port} --executor {server.executor}{kept}",
                next_step="trainyard local down, then start it again",
            )
        return server
    log_file = STATE_FILE.with_suffix(".log")
    server = emulator.start(STATE_FILE, log_file, port=port, executor=executor or "process", keep=keep)
    console.print(f"the emulator is running at {server.endpoint} (process {server.pid}, log {log_file})")
    if server.keep:
        console.print(f"runs and data are kept in {server.keep}; trainyard local down deletes jobs and logs")
    else:
        console.print("trainyard local down deletes everything in it; --keep DIR keeps runs and data")
    return server


@local.command("down")
def local_down(ctx: typer.Context, yes: Yes = False) -> None:
    """Stop the emulator and all its jobs.

    Deletes everything in it except what --keep preserves. Asks for confirmation if jobs are running or finished runs
    have not been fetched.
    """
    down(ctx.obj.stage, STATE_FILE, yes=yes)


def down(stage_name: str, state_file: Path, *, yes: bool) -> None:
    """Stop the emulator that a state file describes.

    Raises ConfigurationError if it does not answer, UsageError if something would be lost and there is no terminal.
    """
    from jobs.cli import emulator, tables
    from jobs.cli.terminal import ask
    from jobs.core.errors import UsageError

    server = emulator.running(state_file)
    if server is None:
        tables.stderr().print(_not_running(state_file), soft_wrap=True)
        tables.stderr().print(f"next: {_OTHER_FOLDER}", soft_wrap=True)
        return
    if not yes and (lost := _would_be_lost(server, stage_name)):
        unasked = UsageError(
            f"the emulator was not stopped, because this would be lost: {'; '.join(lost)}",
            next_step="trainyard fetch RUN, or add --yes",
        )
        ask("\n".join([*lost, "Stop the emulator and lose this?"]), unasked=unasked)
    emulator.stop(server)
    tables.stderr().print(f"stopped the emulator at {server.endpoint} and all its jobs")


def _would_be_lost(server: "Server", stage_name: str) -> list[str]:
    """Return sentences about unfinished jobs and runs that were not fetched; empty if no stage is deployed."""
    from datetime import datetime, timezone

    from jobs.aws.connection import Aws
    from jobs.cli import emulator
    from jobs.core.errors import TrainyardError
    from jobs.core.words import counted
    from jobs.runs import batch, storage
    from jobs.runs.sweeps import read_sweep

    emulator.connect(server)
    aws = Aws()
    try:
        stage = batch.read_stage(aws, stage_name)
    except TrainyardError:
        return []
    jobs = batch.list_jobs(aws, stage, since=datetime.fromtimestamp(0, timezone.utc))
    active = [job.run_id for job in jobs if not job.ended]
    succeeded = [job.run_id for job in jobs if job.state == "SUCCEEDED" and not job.points]
    for job in jobs:
        if job.state == "SUCCEEDED" and job.points:  # a sweep has no files of its own, but its points do
            sweep = read_sweep(aws, storage.find_run(aws, stage, job.run_id).location)
            succeeded += [point.run_id for point in sweep.points] if sweep else []
    unfetched = [run_id for run_id in succeeded if not server.keep and not is_fetched(run_id)]
    return [
        *([f"{counted(len(active), 'unfinished job')}: {_names(active)}"] if active else []),
        *([f"{counted(len(unfetched), 'run')} not in ./{RUNS_FOLDER}: {_names(unfetched)}"] if unfetched else []),
    ]


def _names(runs: Sequence[str]) -> str:
    more = len(runs) - _MAX_NAMED
    return ", ".join(runs[:_MAX_NAMED]) + (f" and {more} more" if more > 0 else "")


@local.command("status")
def local_status(output: Output = "table") -> None:
    """Show the emulator, its jobs, and what it does not prove."""
    from jobs.cli import emulator, tables

    server = _running_server()
    health = emulator.health(server) or {}
    if output == "json":
        tables.print_json({"endpoint": server.endpoint, "port": server.port, **health})
        return
    jobs = ", ".join(f"{count} {state}" for state, count in health.get("jobs", {}).items() if count)
    tables.show(
        tables.Pairs(
            [
                ("endpoint", server.endpoint),
                ("process", str(server.pid)),
                ("executor", server.executor),
                ("kept in", server.keep or "memory: runs and data are deleted when the emulator stops"),
                ("registry", server.registry or "none: images stay in the Docker engine"),
                ("started", str(health.get("started_at", ""))),
                ("jobs", jobs or "none"),
                ("server errors", "\n".join(map(str, health.get("server_errors", []))) or "none"),
                ("not proven", ", ".join(map(str, health.get("unproven", [])))),
            ]
        ),
        on=tables.stdout(),
    )


@local.command("reclaim")
def local_reclaim(
    ctx: typer.Context,
    run: Run,
    node: Annotated[int, typer.Option(min=0, help="Node, or worker of a sweep, to reclaim, counted from 0.")] = 0,
) -> None:
    """Reclaim the instance of a running job, as EC2 does with a Spot instance, but without its notice.

    The job gets SIGTERM, and SIGKILL 30 seconds later. Its next attempt continues from the newest checkpoint.
    """
    from jobs.aws.connection import Aws
    from jobs.cli import emulator, tables
    from jobs.cli.sweep_state import refuse_point
    from jobs.core.errors import TrainyardError
    from jobs.runs import batch, storage
    from jobs.runs.connect import task_of

    emulator.connect(_running_server())
    aws = Aws()
    stage = batch.read_stage(aws, ctx.obj.stage)
    found = storage.find_run(aws, stage, run)
    refuse_point(aws, found, "local reclaim")
    job = batch.job_of(aws, stage, found.run_id)
    aws, _ = batch.place_of(aws, stage, job)
    part = task_of(aws, job, node).job_id
    if aws.post_to_emulator(f"/trainyard/jobs/{part}/reclaim", {}) is None:
        raise TrainyardError(f"{job.run_id} has just ended", next_step=f"trainyard status {job.run_id}")
    what = "the instance" if part == job.id else f"node {node}"
    tables.stderr().print(f"reclaimed {what} of {job.run_id} in attempt {job.attempt} of {job.max_attempts}")
    tables.stderr().print(f"next: trainyard logs {job.run_id} --follow", soft_wrap=True)


@local.command("env")
def local_env() -> None:
    """Print shell lines that connect AWS tools to the emulator.

    Use them with: eval "$(trainyard local env)"
    """
    _print_exports(_running_server())


def _running_server() -> "Server":
    """Return the running server. Raises ConfigurationError if there is none."""
    from jobs.cli import emulator
    from jobs.core.errors import ConfigurationError

    server = emulator.running(STATE_FILE)
    if server is None:
        raise ConfigurationError(_not_running(STATE_FILE), next_step=f"trainyard local up, or {_OTHER_FOLDER}")
    return server


def _not_running(state_file: Path) -> str:
    return f"no emulator is running (looked for {state_file.absolute()})"


def _print_exports(server: "Server") -> None:
    import shlex

    from jobs.cli.emulator import OVERRIDING
    from jobs.cli.terminal import print_text

    for name, value in server.environment.items():
        print_text(f"export {name}={shlex.quote(value)}")
    if overriding := [name for name in OVERRIDING if name in os.environ]:
        print_text(f"unset {' '.join(overriding)}")
