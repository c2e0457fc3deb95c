"""`trainyard local up | down | status | env`: the emulator as a service on this machine."""

import os
import shlex
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path

from jobs.aws.connection import Aws
from jobs.cli import emulator, tables
from jobs.cli.options import RUNS_FOLDER, ask
from jobs.cli.plain import print_text
from jobs.core.errors import ConfigurationError, TrainyardError, UsageError
from jobs.core.words import counted
from jobs.runs import batch

_NAMED = 3
"""So many runs are named; of the others only the number is said."""

_STALE = ("AWS_PROFILE", "AWS_REGION", "AWS_SESSION_TOKEN")
"""Either would take precedence over, or be sent along with, the emulator's credentials."""

_ELSEWHERE = "go to the folder where you started it"


def up(
    stage: str,
    state_file: Path,
    *,
    port: int,
    executor: str | None,
    keep: Path | None,
    deploy: bool,
) -> None:
    """Do `trainyard local up`. A server that is there already is deployed to again, which changes what has changed."""
    console = tables.stderr()
    server = _running_as_asked(state_file, port=port, executor=executor, keep=keep)
    if deploy:
        emulator.deploy(server, stage)
        console.print(f"stage '{stage}' is deployed")
    console.print('in this shell: eval "$(trainyard local env)", which sets')
    _print_exports(server)


def _running_as_asked(state_file: Path, *, port: int, executor: str | None, keep: Path | None) -> emulator.Server:
    """Return the server that runs, or start one. Raises ConfigurationError if one runs with other options."""
    console = tables.stderr()
    server = emulator.running(state_file)
    if server:
        console.print(f"the emulator runs already at {server.endpoint} (process {server.pid})")
        differs = (port and port != server.port) or executor not in (None, server.executor)
        if differs or (keep and str(keep.absolute()) != server.keep):
            kept = f" --keep {server.keep}" if server.keep else ""
            raise ConfigurationError(
                f"it runs with --port {server.port} --executor {server.executor}{kept}, not as asked",
                next_step="trainyard local down, then again",
            )
    else:
        log_file = state_file.with_suffix(".log")
        server = emulator.start(state_file, log_file, port=port, executor=executor or "process", keep=keep)
        console.print(f"the emulator answers at {server.endpoint} (process {server.pid}, log {log_file})")
        if server.keep:
            console.print(f"runs and data are kept in {server.keep}; jobs and logs are gone after trainyard local down")
        else:
            console.print("its state is in memory, and gone after trainyard local down; --keep DIR keeps runs and data")
    return server


def down(stage_name: str, state_file: Path, *, yes: bool) -> None:
    """Do `trainyard local down`.

    Raises ConfigurationError where one is there and does not answer, UsageError where something would be lost and there
    is nobody to ask.
    """
    server = emulator.running(state_file)
    if server is None:
        console = tables.stderr()
        console.print(_none_runs(state_file), soft_wrap=True)
        console.print(f"next: {_ELSEWHERE}", soft_wrap=True)
        return
    if not yes and (lost := _would_be_lost(server, stage_name)):
        _confirm_loss(lost)
    emulator.stop(server)
    tables.stderr().print(f"stopped the emulator at {server.endpoint} and all its jobs")


def _would_be_lost(server: emulator.Server, stage_name: str) -> list[str]:
    """Return sentences on the jobs that run and the runs that were not fetched; none where nothing is deployed."""
    for name in _STALE:
        os.environ.pop(name, None)
    os.environ.update(server.environment)
    aws = Aws()
    try:
        stage = batch.read_stage(aws, stage_name)
    except TrainyardError:
        return []
    jobs = batch.list_jobs(aws, stage, since=datetime.fromtimestamp(0, timezone.utc))
    active = [job.run_id for job in jobs if not job.ended]
    succeeded = [job.run_id for job in jobs if job.state == "SUCCEEDED"]
    unfetched = [run_id for run_id in succeeded if not server.keep and not (RUNS_FOLDER / run_id).exists()]
    return [
        *([f"{counted(len(active), 'job')} not ended yet: {_names(active)}"] if active else []),
        *([f"{counted(len(unfetched), 'run')} not in ./{RUNS_FOLDER}: {_names(unfetched)}"] if unfetched else []),
    ]


def _names(runs: Sequence[str]) -> str:
    more = len(runs) - _NAMED
    return ", ".join(runs[:_NAMED]) + (f" and {more} more" if more > 0 else "")


def _confirm_loss(lost: Sequence[str]) -> None:
    unasked = UsageError(
        f"the emulator was not stopped, since all that is in it would be lost: {'; '.join(lost)}",
        next_step="trainyard fetch RUN, or add --yes",
    )
    ask("\n".join([*lost, "Stop the emulator and lose that?"]), unasked=unasked)


def status(state_file: Path, *, output: str) -> None:
    """Do `trainyard local status`. Raises ConfigurationError where none runs."""
    server = _expect(state_file)
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
                ("kept in", server.keep or "memory: runs and data end with it"),
                ("registry", server.registry or "none: images stay in the Docker engine"),
                ("started", str(health.get("started_at", ""))),
                ("jobs", jobs or "none"),
                ("server errors", "\n".join(map(str, health.get("server_errors", []))) or "none"),
                ("not proven", ", ".join(map(str, health.get("unproven", [])))),
            ]
        ),
        on=tables.stdout(),
    )


def env(state_file: Path) -> None:
    """Do `trainyard local env`. Raises ConfigurationError where none runs."""
    _print_exports(_expect(state_file))


def _expect(state_file: Path) -> emulator.Server:
    server = emulator.running(state_file)
    if server is None:
        raise ConfigurationError(_none_runs(state_file), next_step=f"trainyard local up, or {_ELSEWHERE}")
    return server


def _none_runs(state_file: Path) -> str:
    return f"no emulator runs (looked for {state_file.absolute()})"


def _print_exports(server: emulator.Server) -> None:
    for name, value in server.environment.items():
        print_text(f"export {name}={shlex.quote(value)}")
    stale = [name for name in _STALE if name in os.environ]
    if stale:
        print_text(f"unset {' '.join(stale)}")
