"""Forked ranks of a forked launcher, so that PyTorch and transformers are imported only once.

A real launcher starts each rank as a fresh process, in four seconds of CPU. Tests start hundreds of ranks. A launcher
that was forked from the warm process (warm_launcher.py) makes torchrun request ranks from a copy of the launcher. The
copy was made before the launcher had threads or connections. It forks one rank for each request and ends after the
last. The kernel then makes the ranks children of the launcher, with their exit codes and signals, as fresh processes
are.
"""

import atexit
import contextlib
import ctypes
import io
import json
import logging
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from jobs.container.launcher.sweep import Worker
from jobs.container.rank import die_with_parent

_PR_SET_CHILD_SUBREAPER = 36
"""prctl(2): a process whose parent ends becomes the child of the nearest ancestor with this setting."""

_SIGNALS = (signal.SIGTERM, signal.SIGINT)

_LOOK_SECONDS = 0.05
"""Interval at which a wait checks whether the process has ended."""

_ENVIRONMENT_START = 47
"""Index of env_start in /proc/PID/stat, counted from the state, followed by env_end (proc_pid_stat(5))."""


def fork_ranks() -> None:
    """Make torchrun fork this launcher's ranks. Called before the launcher has threads or connections."""
    from torch.distributed.elastic.multiprocessing import api

    here, there = Pipe()
    launcher = os.getpid()
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    sys.stdout.flush()
    server = os.fork()
    if server == 0:
        try:
            here.close()
            _serve(there, launcher)
        finally:
            os._exit(1)
    there.close()
    serving = True

    def start(**asked: Any) -> _Handler:
        nonlocal serving
        _, module, *argv = map(str, asked["args"])  # -m MODULE …
        environment = {**os.environ, **asked["env"]}
        here.send_bytes(json.dumps([module, argv, environment, asked["stdout"], asked["stderr"]]).encode())
        pid = json.loads(here.recv_bytes())
        if serving and int(asked["local_rank_id"]) == int(environment["LOCAL_WORLD_SIZE"]) - 1:
            serving = False
            here.close()
            os.waitpid(server, 0)
            # The launcher must not wait for other orphans.
            ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 0)
        return _Handler(ForkedProcess(pid), int(asked["local_rank_id"]))

    api.get_subprocess_handler = start  # type: ignore[assignment,attr-defined]


def fork_launchers() -> None:
    """Make a sweep's worker fork the launchers of its points."""

    def launcher(_: Worker, flags: list[str], environment: dict[str, str]) -> ForkedProcess:
        return _fork_launcher(flags, environment)

    vars(sys.modules[Worker.__module__])["Worker"]._launcher = launcher


class ForkedProcess:
    """A child process that `subprocess` did not start, with the methods of `Popen` that torchrun uses."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._was_missed = False

    def poll(self) -> int | None:
        """Return the exit code, below 0 for a signal, or None while it runs."""
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:
                # A signal handler may call this during a call that has received the exit code but not stored it yet.
                if self._was_missed:
                    raise
                self._was_missed = True
                return self.returncode
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end, and return the exit code. Raises subprocess.TimeoutExpired after `timeout` seconds."""
        since = time.monotonic()
        while (code := self.poll()) is None:
            if timeout is not None and time.monotonic() - since >= timeout:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            time.sleep(_LOOK_SECONDS)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM, unless the process has ended."""
        self.send_signal(signal.SIGTERM)


def _fork_launcher(flags: Sequence[str], environment: Mapping[str, str]) -> ForkedProcess:
    """Fork this process and run a launcher in the copy, with exactly this environment, in a separate session."""
    sys.stdout.flush()
    # Signals are blocked until the copy has its handlers, because those of this process would swallow them.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        pid = os.fork()
        if pid == 0:
            try:
                os.setsid()
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                _be_as_new(environment)
                sys.modules["boto3"].DEFAULT_SESSION = None  # type: ignore[attr-defined]  # the worker's connections
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
                fork_ranks()
                run_module("jobs.container.launch", flags)
            finally:
                os._exit(1)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return ForkedProcess(pid)


class _Handler:
    """Torchrun's SubprocessHandler for a forked rank."""

    def __init__(self, proc: ForkedProcess, local_rank_id: int) -> None:
        self.proc = proc
        self.local_rank_id = local_rank_id

    def close(self, death_sig: signal.Signals | None = None) -> None:
        """Send a signal to the rank and its children, which form a session."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.proc.pid, death_sig or signal.SIGTERM)


def _serve(requests: Connection, launcher: int) -> NoReturn:
    """Fork a rank for each request until the connection closes."""
    die_with_parent(launcher)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the launcher as well, which ends this process
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    while True:
        try:
            request = json.loads(requests.recv_bytes())
        except (EOFError, ConnectionResetError):
            os._exit(0)
        requests.send_bytes(json.dumps(_fork_rank(requests, *request)).encode())


def _fork_rank(
    requests: Connection, module: str, argv: list[str], environment: dict[str, str], *files: str | None
) -> int:
    """Return the process id of a rank, once it leads a session."""
    server = os.getpid()
    ready, leads = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            requests.close()
            os.close(ready)
            os.setsid()
            for number, path in enumerate(files, start=1):
                if path:
                    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
                    os.dup2(file, number)
                    os.close(file)
            _be_as_new(environment)
            os.close(leads)
            while os.getppid() == server:  # it must not become the launcher's child before all ranks are forked
                time.sleep(0.001)
            run_module(module, argv)
        finally:
            os._exit(1)
    os.close(leads)
    os.read(ready, 1)  # ends when the other side closes
    os.close(ready)
    return pid


def _be_as_new(environment: Mapping[str, str]) -> None:
    """Drop the state of the process that this one was forked from, and set this environment."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.stdout, sys.stderr = _unbuffered(1, "strict"), _unbuffered(2, "backslashreplace")
    logging.root.handlers.clear()  # the launcher's
    os.environ.clear()
    os.environ.update(environment)
    show_environment(environment)
    tempfile.tempdir = None  # read from TMPDIR at the next use


def _unbuffered(number: int, errors: str) -> io.TextIOWrapper:
    """Return a standard stream as Python creates it with PYTHONUNBUFFERED."""
    raw = io.FileIO(number, "w", closefd=False)
    return io.TextIOWrapper(raw, encoding=sys.stdout.encoding, errors=errors, write_through=True)


def run_module(module: str, argv: Sequence[str]) -> NoReturn:
    """Run a module like `python -m`, and exit like Python."""
    sys.modules.pop(module, None)  # the launcher's copy, about which runpy warns
    sys.argv = [module, *argv]
    run_to_its_end(lambda: runpy.run_module(module, run_name="__main__", alter_sys=True))


def run_to_its_end(program: Callable[[], object]) -> NoReturn:
    """Run a program in this process, and exit like Python."""
    code, interrupted = 0, False
    try:
        program()
    except SystemExit as end:
        if end.code is not None and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except KeyboardInterrupt:
        interrupted = True
    except BaseException:  # noqa: BLE001 - Python prints whatever a program raises
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    if interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code)


def show_environment(environment: Mapping[str, str]) -> None:
    """Write the environment over the initial one of this process, where /proc/PID/environ reads it."""
    fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    start, end = map(int, fields[_ENVIRONMENT_START : _ENVIRONMENT_START + 2])
    text = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in environment.items())
    ctypes.memmove(start, text.ljust(end - start, b"\0")[: end - start], end - start)
