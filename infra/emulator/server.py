"""The emulator as a process: binds a port, says where in a state file, and leaves nothing behind at its end."""

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
"""How often the process given with --exit-with-pid is looked for."""
SHUTDOWN_POLL_SECONDS = 0.1
"""How long the end may have to wait for the thread that takes connections; socketserver's own is half a second."""


def serve(
    *,
    port: int,
    state_file: Path,
    executor: str,
    exit_with_pid: int | None,
    registry: str | None = None,
    keep: Path | None = None,
) -> None:
    """Serve until SIGTERM, SIGINT or the end of `exit_with_pid`; then stop every job.

    `registry`: host and port of the one that stands in for ECR's. `keep`: folder in which the objects of S3 outlive the
    server; all else is in memory.

    Raises ConfigurationError where the port is taken, the state cannot be written, or `keep` is in use.
    """
    stop = Event()

    def on_signal(number: int, _frame: FrameType | None) -> None:
        logger.info("%s: stopping", signal.Signals(number).name)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    parent = _process(exit_with_pid)

    # Here rather than above: the port is checked and the signals are set before moto takes its second to load.
    with _listening(port) as listener:
        # moto loads jsonschema, which loads a grammar of IRIs where it finds one: as much again as all the rest takes.
        sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]  # None: not to be found
        # What is loaded stays for as long as the server runs: to search it for what can be freed, again and again while
        # it is loaded, takes almost half of the start.
        gc.disable()

        from moto.moto_server.werkzeug_app import MotoRequestHandler
        from werkzeug.serving import make_server

        from infra.emulator import access, batch, cloudformation, ecr, events, functions, s3, settings
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
        if keep is not None:
            s3.keep_objects(keep.absolute())
        if registry:
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
            "emulator at %s (jobs run as: %s; state is in memory and ends with this process%s)",
            endpoint,
            executor,
            "" if keep is None else f", but for the objects of S3, which {keep} keeps",
        )
        while not stop.wait(PARENT_POLL_SECONDS if parent else None):
            if parent is not None and not _alive(parent):
                logger.info("process %s is gone: stopping", parent.pid)
                break
    finally:
        _remove_state(state_file)
        events.shutdown()
        functions.shutdown()
        batch.shutdown()
        server.shutdown()
        thread.join()
        # The interpreter would search all of moto for what can be freed, for half a second, and then end anyway.
        gc.freeze()


@contextmanager
def _listening(port: int) -> Iterator[Any]:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
        except OSError as error:
            reasons = {errno.EADDRINUSE: "is taken by another process", errno.EACCES: "needs more rights"}
            reason = reasons.get(error.errno or 0, f"cannot be opened: {error.strerror}")
            raise ConfigurationError(
                f"port {port} {reason}", next_step="choose another with --port, or --port 0 for any that is free"
            ) from None
        listener.listen(128)
        yield listener


def _write_state(path: Path, state: dict[str, Any]) -> None:
    """Write all of the file or nothing: whoever waits for it reads it as soon as it is there.

    It holds the credentials, so nobody but its owner may read it.
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
            next_step="name another with --state-file",
        ) from None


def _remove_state(path: Path) -> None:
    try:
        if json.loads(path.read_text())["pid"] != os.getpid():
            return  # another server's by now
    except (OSError, ValueError, KeyError):
        return
    path.unlink(missing_ok=True)


def _process(pid: int | None) -> psutil.Process | None:
    """The process to end with. Raises ConfigurationError where there is none of that id."""
    if pid is None:
        return None
    try:
        return psutil.Process(pid)
    except (psutil.NoSuchProcess, ValueError):  # ValueError: less than nothing
        raise ConfigurationError(f"--exit-with-pid: there is no process {pid}") from None


def _alive(process: psutil.Process) -> bool:
    # A zombie has ended; only its parent has not looked yet.
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
