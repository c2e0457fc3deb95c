"""The fork server: ranks are forked from one process that has imported what they need, once a node.

Importing PyTorch and transformers takes a rank some seconds of CPU. The launcher imports PyTorch for itself, forks this
server before it has threads or connections, and goes on; the server imports the rest meanwhile. Torchrun stays as it
is, but for how it makes the process of a rank: where it would start `python -m ENTRYPOINT` anew, it asks the server,
which forks one and lets it run that module as `__main__`. After the last one the server ends, so that the kernel gives
the ranks to the launcher: they are its children, as fresh processes are, with their exit codes and signals.

Forked are ranks on a CPU, of kinds whose entrypoint has a function `preload`. Others are fresh processes: an HPU's
bridge opens the driver while it is imported, which no two processes may share; with CUDA nobody here could try it; and
a script of one's own imports what it likes.

A worker of a sweep forks the launchers of its points in the same way (`fork_module`).
"""

import atexit
import contextlib
import ctypes
import importlib
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from jobs.train import accelerator as accelerators
from jobs.train.imports import imports_that_stay
from jobs.train.launcher import shutdown
from jobs.train.launcher.rank_environment import import_environment
from jobs.train.launcher.request import Launch
from jobs.train.rank import die_with_parent

_PR_SET_CHILD_SUBREAPER = 36
"""prctl(2): a process whose parent ends becomes the child of the nearest ancestor that has asked for it."""

_SIGNALS = (signal.SIGTERM, signal.SIGINT)

_LOOK_SECONDS = 0.05
"""The time between two looks whether a process has ended, while somebody waits for it."""

_ARG_START, _ARG_END = 45, 46
"""Fields of /proc/PID/stat, counted from the state, for where the command line lies in memory (proc_pid_stat(5), 48 and
49)."""


@contextlib.contextmanager
def fork_server(launch: Launch) -> "Iterator[ForkServer | None]":
    """Start the server of a launch, for the length of the block; None where its ranks are to be fresh processes.

    To be called before the launcher has threads or connections.
    """
    server = _started(launch)
    try:
        yield server
    finally:
        if server is not None:
            server.close()


def _started(launch: Launch) -> "ForkServer | None":
    entrypoint = importlib.import_module(launch.kind.entrypoint)
    if sys.platform != "linux" or not hasattr(entrypoint, "preload"):
        return None
    with shutdown.signals_held_back():
        os.environ.update(import_environment(launch.nproc_per_node))
        # The launcher needs PyTorch too: what is imported before the fork is imported once for all.
        if not accelerators.is_cpu(launch.accelerator_asked):
            return None
        with imports_that_stay():
            import torch.distributed.launcher.api  # noqa: F401
    if ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1) != 0:
        return None
    here, there = Pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    launcher = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            here.close()
            _serve(there, launch, launcher)
        except BaseException:  # noqa: BLE001 - nothing of the launcher's may run in its copy
            traceback.print_exc()
        finally:
            os._exit(1)
    there.close()
    return ForkServer(pid, here)


class ForkServer:
    """The launcher's side of it."""

    def __init__(self, pid: int, connection: Connection) -> None:
        self._server: ForkedProcess | None = ForkedProcess(pid)
        self._connection = connection
        self._ranks: list[ForkedProcess] = []

    def begin(self, scratch: Path) -> None:
        """Let the server import what the ranks need, and leave what that writes in `scratch`."""
        with contextlib.suppress(OSError):  # it is gone: the ranks will be fresh processes
            self._connection.send_bytes(os.fsencode(scratch))

    def replace_start_of(self, nproc_per_node: int) -> None:
        """Make torchrun start this node's ranks by this server; fresh where it cannot fork them."""
        from torch.distributed.elastic.multiprocessing import api

        starts_fresh = getattr(api, "get_subprocess_handler", None)
        if starts_fresh is None:  # another release of PyTorch
            return

        def start(**asked: Any) -> Any:
            number = int(asked["local_rank_id"])
            rank = self._forked(asked)
            if number == nproc_per_node - 1:
                self._end_server()
            return starts_fresh(**asked) if rank is None else _Handler(rank, number)

        api.get_subprocess_handler = start  # type: ignore[assignment,attr-defined]  # no release names it as its own

    def close(self) -> None:
        """End the server, and whatever it has forked that torchrun was interrupted before it knew of."""
        if self._server is not None:
            self._server.send_signal(signal.SIGKILL)
            self._end_server()
        for rank in self._ranks:
            rank.send_signal(signal.SIGKILL)

    def _forked(self, asked: Mapping[str, Any]) -> "ForkedProcess | None":
        """Have a rank forked. None: it is to be a fresh process, for forking is not safe or the server is gone."""
        if self._server is None:
            return None
        _, module, *argv = map(str, asked["args"])  # -m MODULE …
        request = _Request(
            module=module,
            argv=argv,
            environment={**os.environ, **asked["env"]},
            stdout=asked["stdout"] or None,
            stderr=asked["stderr"] or None,
        )
        try:
            self._connection.send_bytes(json.dumps(asdict(request)).encode())
            pid = json.loads(self._connection.recv_bytes())
        except (EOFError, OSError):
            self._end_server()
            return None
        if pid is None:
            return None
        self._ranks.append(ForkedProcess(pid))
        return self._ranks[-1]

    def _end_server(self) -> None:
        """Wait until the server has ended, by itself once nobody can ask it any more: its children are ours then."""
        if self._server is None:
            return
        self._connection.close()
        self._server.wait()
        self._server = None  # not before: a signal's handler may raise in the midst of that
        # Whatever else loses its parent is not ours to wait for.
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 0)


class ForkedProcess:
    """A child process that was not started by `subprocess`, with what torchrun uses of a `Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._was_missed = False

    def poll(self) -> int | None:
        """Return the exit code, below 0 for the signal that ended it; None: it still runs."""
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:
                # A signal's handler may ask in the midst of a call that has been told, and not noted it yet.
                if self._was_missed:
                    raise
                self._was_missed = True
                return self.returncode
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code, once it has ended. Raises subprocess.TimeoutExpired after `timeout` seconds."""
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


def fork_module(module: str, argv: Sequence[str], environment: Mapping[str, str]) -> ForkedProcess | None:
    """Fork this process and run a module in the copy, as `python -m` does, with just this environment.

    The copy leads a session of its own and takes signals as a fresh process does. None: a fork is not safe, since this
    is no Linux, or since this process has threads, of which a fork takes none along.
    """
    if sys.platform != "linux" or threading.active_count() > 1:
        return None
    sys.stdout.flush()
    sys.stderr.flush()
    # One that comes before the copy has its own handlers waits for them: those of this process would swallow it.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        pid = os.fork()
        if pid == 0:
            try:
                os.setsid()
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                _be_as_new(environment)
                if (boto3 := sys.modules.get("boto3")) is not None:
                    boto3.DEFAULT_SESSION = None  # type: ignore[attr-defined]  # its connections are the worker's
                name_process(" ".join(["python", "-m", module, *argv]))
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
                run_module(module, argv)
            except BaseException:  # noqa: BLE001 - as above
                traceback.print_exc()
            finally:
                os._exit(1)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return ForkedProcess(pid)


class _Handler:
    """What torchrun keeps of a rank: its SubprocessHandler, for a process that was forked."""

    def __init__(self, proc: ForkedProcess, local_rank_id: int) -> None:
        self.proc = proc
        self.local_rank_id = local_rank_id

    def close(self, death_sig: signal.Signals | None = None) -> None:
        """Send a signal to the rank and to what it has started: it leads a session of its own."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.proc.pid, death_sig or signal.SIGTERM)


@dataclass(frozen=True, kw_only=True)
class _Request:
    """One rank, as torchrun would start it."""

    module: str
    argv: list[str]
    environment: dict[str, str]
    stdout: str | None
    """The file that its output goes to; None: the launcher's own."""
    stderr: str | None


def _serve(requests: Connection, launch: Launch, launcher: int) -> NoReturn:
    """Import what the ranks need, then fork one for each request, until nobody can ask any more."""
    die_with_parent(launcher)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the launcher as well, which ends this process
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    name_process(f"python -m {launch.kind.entrypoint} [imports for the ranks]")
    try:
        os.environ["TMPDIR"] = os.fsdecode(requests.recv_bytes())
    except EOFError:
        os._exit(0)
    tempfile.tempdir = None  # read from TMPDIR when it is asked for next
    with imports_that_stay(), contextlib.suppress(Exception):  # a rank meets the same, where there is a log for it
        importlib.import_module(launch.kind.entrypoint).preload(launch.arguments)
    while True:
        try:
            request = _Request(**json.loads(requests.recv_bytes()))
        except EOFError:
            os._exit(0)
        has_threads = threading.active_count() > 1  # a fork takes none of them along
        requests.send_bytes(json.dumps(None if has_threads else _fork_rank(request, requests)).encode())


def _fork_rank(request: _Request, requests: Connection) -> int:
    """Return the process id of a rank, once it leads a session."""
    server = os.getpid()
    ready, leads = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            requests.close()
            os.close(ready)
            os.setsid()
            _take_over(request)
            os.close(leads)
            while os.getppid() == server:  # it may not become the launcher's child before all have been forked
                time.sleep(0.001)
            run_module(request.module, request.argv)
        except BaseException:  # noqa: BLE001 - as above
            traceback.print_exc()
        finally:
            os._exit(1)
    os.close(leads)
    os.read(ready, 1)  # ends when the other side is closed
    os.close(ready)
    return pid


def _take_over(request: _Request) -> None:
    """Give this process what torchrun would have started a fresh one with."""
    for number, path in ((1, request.stdout), (2, request.stderr)):
        if path is not None:
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
            os.dup2(file, number)
            os.close(file)
    _be_as_new(request.environment)
    rank = request.environment["RANK"]
    name_process(f"python -m {request.module} [rank {rank}] {' '.join(request.argv)}")


def _be_as_new(environment: Mapping[str, str]) -> None:
    """Put away what this process has of the one that it was forked from, and take this environment."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.stdout, sys.stderr = _unbuffered(1, "strict"), _unbuffered(2, "backslashreplace")
    logging.root.handlers.clear()  # the launcher's
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # as above


def _unbuffered(number: int, errors: str) -> io.TextIOWrapper:
    """Return the stream that Python makes of a standard stream where PYTHONUNBUFFERED is set."""
    raw = io.FileIO(number, "w", closefd=False)
    return io.TextIOWrapper(raw, encoding=sys.stdout.encoding, errors=errors, write_through=True)


def run_module(module: str, argv: Sequence[str]) -> NoReturn:
    """Run a module as `python -m` does, and end as Python does after it."""
    sys.modules.pop(module, None)  # the launcher's copy; runpy warns of it
    sys.argv = [module, *argv]
    run_to_its_end(lambda: runpy.run_module(module, run_name="__main__", alter_sys=True))


def run_to_its_end(program: Callable[[], object]) -> NoReturn:
    """Run a program in this process, and end as Python does after it."""
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
    threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001 - it waits for threads, as Python's own end does
    atexit._run_exitfuncs()  # noqa: SLF001
    sys.stdout.flush()
    if interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code)


def name_process(name: str) -> None:
    """Set what `ps` shows as the command line of this process, whose copy it has from the launcher.

    It is written over that one, in place, as far as it goes. Linux takes a last byte that is not 0 as the sign that it
    has been (`get_mm_cmdline` in fs/proc/base.c), and then shows the text up to its end.
    """
    try:
        fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
        start, end = int(fields[_ARG_START]), int(fields[_ARG_END])
    except (OSError, IndexError, ValueError):
        return
    size = end - start
    if start and size > 1:
        text = name.encode()[: size - 2]
        ctypes.memmove(start, text.ljust(size - 1, b"\0") + b" ", size)
