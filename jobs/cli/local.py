"""`trainyard local up | down | status | env`: the embedded AWS as a service on this machine."""

import os
import shlex
from pathlib import Path

from jobs.cli import embedded, tables
from jobs.contract.errors import ConfigurationError


def up(
    stage: str,
    state_file: Path,
    *,
    port: int,
    executor: str | None,
    registry: str | None = None,
    deploy: bool,
) -> None:
    """Do `trainyard local up`. A server that is there already is deployed to again, which changes what has changed."""
    console = tables.stderr()
    server = embedded.running(state_file)
    if server:
        console.print(f"the embedded AWS runs already at {server.endpoint} (process {server.pid})")
        differs = (port and port != server.port) or executor not in (None, server.executor)
        if differs or registry not in (None, server.registry):
            with_registry = f" --registry {server.registry}" if server.registry else ""
            raise ConfigurationError(
                f"it runs with --port {server.port} --executor {server.executor}{with_registry}, not as asked",
                next_step="trainyard local down, then again",
            )
    else:
        log_file = state_file.with_suffix(".log")
        server = embedded.start(state_file, log_file, port=port, executor=executor or "process", registry=registry)
        console.print(f"the embedded AWS answers at {server.endpoint} (process {server.pid}, log {log_file})")
        console.print("its state is in memory: it is gone after trainyard local down")
    if deploy:
        embedded.deploy(server, stage)
        console.print(f"stage '{stage}' is deployed")
    console.print('in this shell: eval "$(trainyard local env)", which sets')
    _print_exports(server)


def down(state_file: Path) -> None:
    """Do `trainyard local down`. Raises ConfigurationError where one is there and does not answer."""
    server = embedded.running(state_file)
    if server is None:
        tables.stderr().print(f"no embedded AWS runs ({state_file})")
        return
    embedded.stop(server)
    tables.stderr().print(f"stopped the embedded AWS at {server.endpoint} and all its jobs")


def status(state_file: Path, *, output: str) -> None:
    """Do `trainyard local status`. Raises ConfigurationError where none runs."""
    server = _expect(state_file)
    health = embedded.health(server) or {}
    if output == "json":
        tables.print_json({"endpoint": server.endpoint, "port": server.port, **health})
        return
    jobs = ", ".join(f"{count} {state}" for state, count in health.get("jobs", {}).items() if count)
    tables.show(
        tables.pairs(
            [
                ("endpoint", server.endpoint),
                ("process", str(server.pid)),
                ("executor", server.executor),
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


def _expect(state_file: Path) -> embedded.Server:
    server = embedded.running(state_file)
    if server is None:
        raise ConfigurationError(f"no embedded AWS runs ({state_file})", next_step="trainyard local up")
    return server


def _print_exports(server: embedded.Server) -> None:
    for name, value in server.environment.items():
        print(f"export {name}={shlex.quote(value)}")
    # Either would take precedence over, or be sent along with, the credentials above.
    stale = [name for name in ("AWS_PROFILE", "AWS_REGION", "AWS_SESSION_TOKEN") if name in os.environ]
    if stale:
        print(f"unset {' '.join(stale)}")
