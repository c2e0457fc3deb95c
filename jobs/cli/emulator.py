"""Starts, queries and stops the emulator, which is a separate program: `python -m infra.emulator`."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, TypeAlias, get_type_hints
from urllib.error import URLError

from jobs.core.errors import ConfigurationError, TrainyardError, UsageError

START_TIMEOUT_SECONDS = 60.0
ANSWER_TIMEOUT_SECONDS = 10.0
STOP_TIMEOUT_SECONDS = 60.0
"""Longer than the grace period of the jobs, which the server stops first."""

INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Ctrl-C, `kill`, and a closed terminal."""

OVERRIDING = ("AWS_PROFILE", "AWS_REGION", "AWS_SESSION_TOKEN")
"""Variables that would override the emulator's credentials, or be sent with them."""

Process: TypeAlias = "subprocess.Popen[bytes]"

_POLL_SECONDS = 0.05

_HOSTS = ("localhost", "127.0.0.1")
"""Host names of an emulator. It writes the first one into its state file."""


@dataclass(frozen=True)
class Server:
    """A running emulator as described by its state file."""

    endpoint: str
    port: int
    pid: int
    executor: str
    access_key_id: str
    secret_access_key: str = field(repr=False)
    registry: str | None = None
    """Host and port of the container registry that replaces ECR's."""
    keep: str | None = None
    """Folder that keeps runs and data after the emulator ends."""

    @property
    def environment(self) -> dict[str, str]:
        """Return the variables that connect boto3, the AWS CLI and the CDK CLI. Each emulator has a new secret key."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": self.access_key_id,
            "AWS_SECRET_ACCESS_KEY": self.secret_access_key,
            "AWS_DEFAULT_REGION": "us-east-1",
        }


def connect(server: Server) -> None:
    """Connect this process to the emulator instead of AWS."""
    for name in OVERRIDING:
        os.environ.pop(name, None)
    os.environ.update(server.environment)


def running(state_file: Path) -> Server | None:
    """Return the server that `state_file` describes; None if there is no file, or if its server was killed.

    Raises ConfigurationError for any other file, and for a server that runs but does not answer, because it may still
    run jobs. Only addresses on localhost are accepted, because the file may have come with someone else's folder.
    """
    try:
        is_device = state_file.exists() and not state_file.is_file()  # reading /dev/zero would never end
        server = _parse_state("" if is_device else state_file.read_text())
    except FileNotFoundError:
        return None
    except PermissionError:
        raise ConfigurationError(
            f"{state_file} belongs to another user's emulator",
            next_step="use another folder",
        ) from None
    except (OSError, ValueError, TypeError):
        raise ConfigurationError(
            f"{state_file} is not the state file of an emulator", next_step="delete the file, or use another folder"
        ) from None
    if server.endpoint not in [f"http://{host}:{server.port}" for host in _HOSTS]:
        raise ConfigurationError(
            f"{state_file} has the address {server.endpoint}, but emulators only run at http://localhost:PORT",
            next_step="delete the file if no emulator was started here",
        )
    try:
        answer = health(server)
    except TimeoutError:
        if not _is_running(server.pid):
            return None
        raise ConfigurationError(
            f"the emulator (process {server.pid}) did not answer within {ANSWER_TIMEOUT_SECONDS:.0f} s",
            next_step=f"kill {server.pid}, or kill -9 {server.pid} if it keeps running",
        ) from None
    return server if answer and answer.get("pid") == server.pid else None


def _parse_state(text: str) -> Server:
    """Parse the content of a state file. Raises ValueError or TypeError if it is invalid."""
    server = Server(**json.loads(text))
    for name, kind in get_type_hints(Server).items():
        if not isinstance(getattr(server, name), kind):
            raise TypeError(name)
    # `stop` would kill the init process with pid 1, and a whole process group with 0 or less.
    if server.pid <= 1 or not 0 < server.port < 2**16:
        raise ValueError(server.pid)
    return server


def health(server: Server) -> dict[str, Any] | None:
    """Return the server's own report; None if it is not running. Raises TimeoutError if it does not answer."""
    url = f"{server.endpoint}/trainyard/health"
    try:
        # Bypass any proxy, because its localhost is another machine.
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(
            url, timeout=ANSWER_TIMEOUT_SECONDS
        ) as answer:
            found: dict[str, Any] = json.load(answer)
            return found
    except TimeoutError:
        raise
    except URLError as error:
        if isinstance(error.reason, TimeoutError):
            raise error.reason from None
        return None
    except (OSError, ValueError):
        return None


def start(
    state_file: Path,
    log_file: Path,
    *,
    port: int = 0,
    executor: str = "process",
    keep: Path | None = None,
    exit_with_pid: int | None = None,
) -> Server:
    """Start a server that outlives this process. With `exit_with_pid`, it exits when that process does.

    Raises ConfigurationError with the server's own error if it does not start, e.g. because the port is taken.
    """
    state_file.parent.mkdir(parents=True, exist_ok=True)
    # Existing files with these names may be links to other files.
    state_file.unlink(missing_ok=True)
    log_file.unlink(missing_ok=True)
    command = [sys.executable, "-P", "-m", "infra.emulator", "serve", "--port", str(port), "--executor", executor]
    command += ["--state-file", str(state_file.absolute())]
    command += ["--keep", str(keep.absolute())] if keep else []
    command += ["--exit-with-pid", str(exit_with_pid)] if exit_with_pid else []
    with log_file.open("xb") as log, started(command, stdout=log, stderr=subprocess.STDOUT) as process:
        return _wait_until_up(process, state_file, log_file)


def _wait_until_up(process: Process, state_file: Path, log_file: Path) -> Server:
    give_up_at = time.monotonic() + START_TIMEOUT_SECONDS
    while time.monotonic() < give_up_at:
        if server := running(state_file):
            return server
        if process.poll() is not None:
            error, next_step = _logged_error(log_file)
            raise ConfigurationError(
                error or f"the emulator ended with exit code {process.returncode}",
                next_step=next_step or f"read {log_file}",
            )
        time.sleep(_POLL_SECONDS)
    raise ConfigurationError(
        f"the emulator did not start within {START_TIMEOUT_SECONDS:.0f} s", next_step=f"read {log_file}"
    )


def deploy(server: Server, stage: str) -> None:
    """Deploy a stage's stacks to `server` with the CDK CLI, whose output goes to stderr.

    Raises UsageError if infra/settings.py has no such stage, ConfigurationError if the deployment fails.
    """
    command = [sys.executable, "-P", "-m", "infra.emulator", "deploy", "--endpoint", server.endpoint, "--stage", stage]
    environment = {**os.environ, **server.environment}
    with started(command, stdout=sys.stderr.fileno(), environment=environment) as process:
        code = process.wait()
    if code == UsageError.exit_code:
        raise UsageError(
            f"infra/settings.py has no stage '{stage}' (see above); the emulator is running without a stage",
            next_step="trainyard --stage NAME local up",
        )
    if code:
        raise ConfigurationError(
            f"stage '{stage}' could not be deployed to the emulator (exit code {code}, see above)",
            next_step='eval "$(trainyard local env)" && '
            f"python -m infra.emulator deploy --endpoint {server.endpoint} --stage {stage}",
        )


def stop(server: Server) -> None:
    """Stop the server, which first stops all jobs. Raises TrainyardError if it does not end in time."""
    try:
        os.kill(server.pid, signal.SIGTERM)
    except ProcessLookupError:
        return
    give_up_at = time.monotonic() + STOP_TIMEOUT_SECONDS
    while _is_running(server.pid):
        if time.monotonic() > give_up_at:
            raise TrainyardError(
                f"the emulator (process {server.pid}) did not stop within {STOP_TIMEOUT_SECONDS:.0f} s",
                next_step=f"kill -9 {server.pid}",
            )
        time.sleep(_POLL_SECONDS)


@contextmanager
def started(
    command: Sequence[str],
    *,
    stdout: IO[bytes] | int,
    stderr: int | None = None,
    environment: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> Iterator[Process]:
    """Start a process that continues after the block. If the block raises, end it and everything that it started.

    The process leads its own process group, so that Ctrl-C reaches only this process, which then ends the group.
    """
    arrived: list[int] = []
    handlers = {number: signal.signal(number, lambda number, _: arrived.append(number)) for number in INTERRUPTS}
    process = None
    try:
        # An interrupt inside Popen would leave an unknown process behind, so the handlers above delay it.
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                env=environment,
                cwd=cwd,
                start_new_session=True,
            )
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        if arrived:
            raise KeyboardInterrupt  # noqa: TRY301 - ends the process, below
        yield process
    except BaseException:
        if process is not None:
            end_group(process)
        raise


def end_group(process: Process, *, grace_seconds: float = 15.0) -> None:
    """End the process group that `process` leads, with SIGINT, SIGTERM and SIGKILL, `grace_seconds` apart.

    On SIGINT the process also ends the other process groups that it has started.
    """
    for signal_number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            os.killpg(process.pid, signal_number)
            with suppress(subprocess.TimeoutExpired):
                process.wait(grace_seconds)


def _is_running(pid: int) -> bool:
    try:
        ended, _ = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        pass
    else:
        return ended == 0
    try:
        os.kill(pid, 0)
        # A zombie stays until its parent reaps it, which pid 1 of many containers never does.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except ProcessLookupError:
        return False
    except FileNotFoundError:
        return not Path("/proc/self").exists()


def _logged_error(log_file: Path) -> tuple[str, str]:
    """Return the error and the next step from an ended server's log. Each is empty if the log has none."""
    found = {"error": "", "next": ""}
    for line in log_file.read_text(errors="replace").splitlines():
        label, _, text = line.partition(": ")
        if label.lower() in found:
            found[label.lower()] = text
    return found["error"], found["next"]
