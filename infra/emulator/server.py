"""Run the emulator as a process: bind a port, write the state file, serve, and clean up at the end."""

import errno
import gc
import json
import logging
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from types import FrameType
from typing import Any

import psutil

from infra.emulator import HOST
from infra.emulator.credentials import Credentials
from infra.emulator.errors import ConfigurationError

logger = logging.getLogger(__name__)

PARENT_POLL_SECONDS = 0.5
"""Interval for checking the process of --exit-with-pid."""
SHUTDOWN_POLL_SECONDS = 0.1
"""How long a shutdown may wait for the thread that accepts connections. socketserver's default is 0.5."""


def serve(
    *,
    port: int,
    state_file: Path,
    executor: str,
    exit_with_pid: int | None,
    registry: str | None = None,
    keep: Path | None = None,
) -> None:
    """Serve until SIGTERM, SIGINT or the exit of process `exit_with_pid`, then stop all jobs.

    `registry` is host and port of the container registry to use for ECR. `keep` is a folder in which S3 objects outlive
    the server; everything else is in memory.

    Raises ConfigurationError if the port is taken, the state file cannot be written, or `keep` is in use.
    """
    stop = Event()

    def on_signal(number: int, _frame: FrameType | None) -> None:
        logger.info("%s: stopping", signal.Signals(number).name)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    parent = _process(exit_with_pid)

    # Import moto only now, because it takes a second. Check the port and handle signals first.
    with _listening(port) as listener:
        # moto imports jsonschema, which would double the start time by loading an optional grammar of IRIs.
        sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]  # imports of it fail
        # Loaded modules are never freed. Collecting garbage while they load would take almost half the start time.
        gc.disable()

        from moto.moto_server.werkzeug_app import MotoRequestHandler
        from werkzeug.serving import make_server

        from infra.emulator import access, batch, cloudformation, ecr, events, functions, placement_scores, s3, settings
        from infra.emulator.application import Application
        from infra.emulator.containers import process_executor

        endpoint = f"http://{HOST}:{listener.getsockname()[1]}"
        settings.check_all()
        credentials = Credentials.random()
        access.install()
        functions.install(endpoint, credentials)
        events.install()
        cloudformation.install(endpoint, credentials)
        s3.install()
        placement_scores.install()
        if keep is not None:
            s3.keep_objects(keep.absolute())
        ecr.install(registry)
        process_executor.adopt_orphans()
        batch.install(executor, credentials=credentials, registry=registry)
        gc.freeze()
        gc.enable()
        server = make_server(
            "127.0.0.1",
            0,
            Application(executor, credentials),
            threaded=True,
            request_handler=MotoRequestHandler,
            fd=listener.fileno(),
        )
        thread = Thread(target=server.serve_forever, args=(SHUTDOWN_POLL_SECONDS,), name="server", daemon=True)
        thread.start()
    state = {
        "endpoint": endpoint,
        "port": server.port,
        "pid": os.getpid(),
        "executor": executor,
        "registry": registry,
        "keep": None if keep is None else str(keep.absolute()),
        "access_key_id": credentials.access_key_id,
        "secret_access_key": credentials.secret_access_key,
    }
    try:
        _write_state(state_file, state)
        logger.info(
            "emulator at %s (executor: %s; state is in memory%s)",
            endpoint,
            executor,
            "" if keep is None else f", except S3 objects, which are kept in {keep}",
        )
        while not stop.wait(PARENT_POLL_SECONDS if parent else None):
            if parent is not None and not _alive(parent):
                logger.info("process %s has exited: stopping", parent.pid)
                break
    finally:
        _remove_state(state_file)
        events.shutdown()
        functions.shutdown()
        batch.shutdown()
        server.shutdown()
        thread.join()
        # Otherwise the interpreter would collect garbage in all of moto for half a second before it exits.
        gc.freeze()


@contextmanager
def _listening(port: int) -> Iterator[Any]:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
        except OSError as error:
            reasons = {errno.EADDRINUSE: "is in use by another process", errno.EACCES: "needs more privileges"}
            reason = reasons.get(error.errno or 0, f"cannot be opened: {error.strerror}")
            raise ConfigurationError(
                f"port {port} {reason}", next_step="choose another port with --port, or --port 0 for any free one"
            ) from None
        listener.listen(128)
        yield listener


def _write_state(path: Path, state: dict[str, Any]) -> None:
    """Write the state file atomically, because clients read it as soon as it exists.

    It contains the credentials, so only its owner may read it.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as scratch:
            whole = Path(scratch, path.name)
            whole.touch(mode=0o600)
            whole.write_text(json.dumps(state))
            whole.replace(path)
    except OSError as error:
        raise ConfigurationError(
            f"the state file {path} cannot be written: {error.filename2 or error.filename}: {error.strerror}",
            next_step="choose another with --state-file",
        ) from None


def _remove_state(path: Path) -> None:
    try:
        if json.loads(path.read_text())["pid"] != os.getpid():
            return  # it belongs to another server now
    except (OSError, ValueError, KeyError):
        return
    path.unlink(missing_ok=True)


def _process(pid: int | None) -> psutil.Process | None:
    """Return the process to exit with. Raises ConfigurationError if it does not exist."""
    if pid is None:
        return None
    try:
        return psutil.Process(pid)
    except (psutil.NoSuchProcess, ValueError):  # ValueError: negative
        raise ConfigurationError(f"--exit-with-pid: process {pid} does not exist") from None


def _alive(process: psutil.Process) -> bool:
    # A zombie has exited; its parent has just not waited for it.
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
