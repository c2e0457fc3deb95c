"""Launchers, and emulators with their jobs, forked from one process that has imported their modules.

Tests start hundreds of trainings that take a second, and would import PyTorch and transformers hundreds of times, in
four seconds of CPU each. A forked launcher forks its ranks in the same way (warm_ranks.py), and a forked emulator its
jobs (warm_jobs.py). A launch with variables that are read during imports, or with other packages or interpreters, is a
fresh process. Ranks of a script are fresh processes, as in production, unless a test requests forked ones.

    python -m tests.support.container.warm_launcher SOCKET_FD
"""

import atexit
import ctypes
import functools
import importlib
import importlib.util
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

from infra.emulator import REGION
from infra.emulator.containers import container_init
from jobs.container.accelerator import CPU, imports_without_gc
from tests.support.collector import collect_rarely
from tests.support.container import warm_ranks
from tests.support.container.warm_ranks import run_module, run_to_its_end, show_environment

_REPOSITORY = Path(__file__).parents[3]
_LAUNCHER = "jobs.container.launch"
_SERVER = "tests.support.container.warm_jobs"
_KINDS = (
    *("finetune-classification", "pretrain-mlm", "evaluate", "fabric-check"),
    *("prepare-corpus", "train-tokenizer", "tokenize"),
)
"""The kinds whose ranks are forked."""
_SERVICES = ("batch", "cloudformation", "ec2", "events", "iam", "logs", "s3", "ssm", "sts")
"""The services of moto that most servers use."""
_EMULATOR = (
    "access",
    "application",
    "cloudformation",
    "ecr",
    "events",
    "functions",
    "s3",
    "server",
)
_IMPORTED = (
    _SERVER,  # first, because it prevents imports of moto
    _LAUNCHER,
    "torch.distributed.launcher.api",
    "jobs.container.trainer.training",
    "jobs.container.models.masked_bert",
    "transformers.models.bert.modeling_bert",
    "transformers.models.bert.tokenization_bert",
    "torch.utils.tensorboard",
    "numpy.ma",
    "trainyard.run",
    "trainyard.callback",
    "infra.emulator.server",
    *(f"infra.emulator.{name}" for name in _EMULATOR),
    "moto.server",
    *(f"moto.{name}.urls" for name in _SERVICES),
)
_READ_DURING_IMPORTS = ("HF_", "LD_", "MOTO_", "OMP_", "PYTHON", "S3_", "TORCH_", "TRANSFORMERS_")
"""Prefixes of the variables."""
_KEPT = ("PATH", "HOME", "LANG", "LD_LIBRARY_PATH")
"""The variables of this machine that a container of the tests gets (launching.py)."""
_IMPORT_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "USE_TF": "0",
    "USE_FLAX": "0",
    "HF_DATASETS_TRUST_REMOTE_CODE": "0",
    "HF_HUB_OFFLINE": "1",
}
_ROOM_BYTES = 65_536
"""Maximum size of an environment. /proc/PID/environ of a forked process must show its own environment, and it reads the
memory of the first process's initial environment."""
_REQUEST_BYTES = 1 << 20


class WarmLauncher:
    """A forked process, with the methods of `Popen` that the tests use."""

    def __init__(self, pid: int, stdout: IO[str] | None, ended: socket.socket) -> None:
        self.pid = pid
        self.stdout = stdout
        self.returncode: int | None = None
        self._ended = ended
        self._reading = threading.Lock()
        weakref.finalize(self, ended.close)  # for a process that nobody waits for

    def poll(self) -> int | None:
        """Return the exit code, below 0 for a signal, or None while it runs."""
        return self._code(0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end, and return the exit code. Raises subprocess.TimeoutExpired after `timeout` seconds."""
        code = self._code(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def _code(self, timeout: float | None) -> int | None:
        with self._reading:
            if self.returncode is None and select.select([self._ended], [], [], timeout)[0]:
                self.returncode = json.loads(self._ended.recv(64))
                self._ended.close()
        return self.returncode


def can_fork(command: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Return whether a command can be forked from a warm process.

    It must be a launcher, a program (`python -c`) that changes something in the launcher first, or an emulator. Without
    PyTorch, a warm process saves no time.
    """
    imported_with = _environment()
    is_known = list(command[1:3]) in (["-m", _LAUNCHER], ["-m", _SERVER]) or (
        command[1] == "-c" and "jobs.container" in command[2]
    )
    return (
        is_known
        and importlib.util.find_spec("torch") is not None
        and command[0] == sys.executable
        and len(_as_bytes(environment)) < _ROOM_BYTES
        and all(
            value == imported_with.get(name)
            for name, value in environment.items()
            if name.startswith(_READ_DURING_IMPORTS)
        )
    )


def start(
    command: Sequence[str], environment: Mapping[str, str], output: int | None = None, *, forks_script: bool = False
) -> WarmLauncher:
    """Start Python with these arguments and exactly this environment.

    `output` is the open file for its output, or None for a pipe, which becomes its `stdout`. With `forks_script`, a
    launcher also forks the ranks of a script.
    """
    read, write = os.pipe() if output is None else (None, os.dup(output))
    pid, ended = _ask(command, environment, None, write, forks_script=forks_script)
    os.close(write)
    return WarmLauncher(pid, None if read is None else os.fdopen(read, encoding="utf-8"), ended)


def start_container(
    command: Sequence[str], environment: Mapping[str, str], folder: str, *, output: int, stdin: int, status_fd: int
) -> WarmLauncher:
    """Start the first process of a container whose command `can_fork` allows, with these open files."""
    pid, ended = _ask(command, environment, folder, output, stdin, status_fd)
    return WarmLauncher(pid, None, ended)


def _ask(
    command: Sequence[str],
    environment: Mapping[str, str],
    folder: str | None,
    *files: int,
    forks_script: bool = False,
) -> tuple[int, socket.socket]:
    """Return the process id of the fork, and the socket that will receive its exit code."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with there:
        request = json.dumps([list(command[1:]), dict(environment), folder, forks_script]).encode()
        requests = _of_forked_server[0] if _of_forked_server else _of_tests()
        socket.send_fds(requests, [request], [there.fileno(), *files])
        return json.loads(here.recv(64)), here


def _environment() -> dict[str, str]:
    return {**{name: os.environ[name] for name in _KEPT if name in os.environ}, **_IMPORT_ENVIRONMENT}


_of_forked_server: list[socket.socket] = []
"""The socket of the process from which a forked emulator forks its jobs."""

_is_warm = False
"""Whether this process, or the one it was forked from, has imported everything."""


def fork_for_jobs() -> int | None:
    """Fork the process from which a forked emulator forks its jobs. Call it before the emulator has threads.

    Jobs are descendants of their server, which adopts the children of a killed job. Returns the process id, or None if
    this server is a fresh process, as its jobs are then.
    """
    if not _is_warm:
        return None
    here, there = _sockets()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        here.close()
        _fork_for_requests(there)
    there.close()
    _of_forked_server.append(here)

    def end() -> None:
        here.close()
        os.waitpid(pid, 0)

    atexit.register(end)
    return pid


def forks_jobs() -> bool:
    return bool(_of_forked_server)


def _sockets() -> tuple[socket.socket, socket.socket]:
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for place in (here, there):
        place.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _REQUEST_BYTES)
    return here, there


@functools.cache
def _of_tests() -> socket.socket:
    """Start the process from which launchers and servers are forked. Returns the socket for its requests."""
    here, there = _sockets()
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.container.warm_launcher", str(there.fileno())],
        env={**_environment(), "TRAINYARD_TESTS_ROOM": "x" * _ROOM_BYTES},
        cwd=_REPOSITORY,
        stdin=subprocess.DEVNULL,
        pass_fds=(there.fileno(),),
    )
    there.close()

    def end() -> None:
        here.close()
        process.wait()

    atexit.register(end)
    return here


def serve(requests: socket.socket) -> NoReturn:
    """Import the modules of launchers, ranks and servers, then fork one for each request until the socket closes."""
    global _is_warm  # noqa: PLW0603 - it holds for this process and all that it forks
    _is_warm = True
    with imports_without_gc():
        CPU.trainer_class()  # first, because it prevents imports that a rank would not make either
        from transformers import AutoModelForSequenceClassification

        AutoModelForSequenceClassification._model_mapping.keys()  # this imports the configurations of all models
        for name in _IMPORTED:
            importlib.import_module(name)
        _prepare_moto()
    collect_rarely()
    assert threading.active_count() == 1  # a fork has no other threads
    _fork_for_requests(requests)


def _prepare_moto() -> None:
    """Load the files that servers read at the first request to a service."""
    from moto.backends import get_backend
    from moto.core.utils import get_service_model
    from moto.moto_api._internal import mock_random

    for name in _SERVICES:
        get_service_model(name)
    networks = get_backend("ec2")
    _ = networks["000000000000"][REGION]
    networks.clear()
    # Otherwise moto's random names and numbers would be the same in all servers.
    os.register_at_fork(after_in_child=mock_random.seed)


def _fork_for_requests(requests: socket.socket) -> NoReturn:
    """Fork a process for each request until the socket closes."""
    woken, wake = os.pipe()
    for descriptor in (woken, wake):
        os.set_blocking(descriptor, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the tests as well, which close the socket
    running: dict[int, socket.socket] = {}
    while True:
        ready, _, _ = select.select([requests.fileno(), woken], [], [])
        if woken in ready:
            os.read(woken, 4096)
            while running and (ended := os.waitpid(-1, os.WNOHANG))[0]:
                with running.pop(ended[0]) as place:
                    place.send(json.dumps(os.waitstatus_to_exitcode(ended[1])).encode())
        if requests.fileno() in ready:
            request, descriptors, _, _ = socket.recv_fds(requests, _REQUEST_BYTES, 4)
            if not request:
                os._exit(0)
            place_number, *files = descriptors
            place = socket.socket(fileno=place_number)
            pid = os.fork()
            if pid == 0:
                try:
                    for other in (requests, place, *running.values()):
                        other.close()
                    for descriptor in (woken, wake):
                        os.close(descriptor)
                    command, environment, folder, forks_script = json.loads(request)
                    _take_over(environment, *files[:2])
                    if folder is None:
                        _run(command, forks_script=forks_script)
                    else:
                        _run_in_container(command, folder, status_fd=files[2])
                finally:
                    os._exit(1)
            for descriptor in files:
                os.close(descriptor)
            place.send(json.dumps(pid).encode())
            running[pid] = place


def _take_over(environment: Mapping[str, str], output: int, stdin: int = 0) -> None:
    """Give this process the files, folder and environment of a freshly started one."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for given, number in ((output, 1), (output, 2), (stdin, 0)):
        os.dup2(given, number)
    for descriptor in {output, stdin} - {0}:
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # read from TMPDIR at the next use
    show_environment(environment)


def _run(command: Sequence[str], *, forks_script: bool = False) -> NoReturn:
    """Run Python with these arguments in this process."""
    warm_ranks.fork_launchers()
    kinds = (*_KINDS, "script") if forks_script else _KINDS
    is_worker = any(word.startswith("--sweep-attempts=") for word in command)
    forks_ranks = not is_worker and any(kind in command for kind in kinds)
    option, program, *argv = command
    if option == "-m":
        if forks_ranks:
            warm_ranks.fork_ranks()
        run_module(program, argv)
    if forks_ranks:
        # After the program has made its changes, because its ranks need them, too.
        launcher = importlib.import_module(_LAUNCHER)
        begin = launcher.main

        def main(*given: Any, **named: Any) -> int:
            warm_ranks.fork_ranks()
            return int(begin(*given, **named))

        vars(launcher)["main"] = main
    sys.argv = [option, *argv]
    run_to_its_end(functools.partial(exec, program, vars(types.ModuleType("__main__"))))


def _run_in_container(command: Sequence[str], folder: str, status_fd: int) -> NoReturn:
    """Become the first process of a container with Python and these arguments as its command."""

    def execute(_: list[str], error_fd: int, libc: ctypes.CDLL) -> None:
        container_init.leave_init(libc)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_IGN)  # as after the start of Python
        os.closerange(3, 256)  # as an exec would; closing `error_fd` tells the init process that it is done
        sys.path[0] = folder
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]  # TextIO does not declare it
        _run(command)

    os.setsid()
    os.chdir(folder)
    os._exit(container_init.main([str(status_fd), folder, "python", *command], execute))


def _as_bytes(environment: Mapping[str, str]) -> bytes:
    return b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in environment.items())


if __name__ == "__main__":
    from tests.support.container import (
        warm_launcher,  # a server that is forked here finds this module instead of a second copy
    )

    warm_launcher.serve(socket.socket(fileno=int(sys.argv[1])))
