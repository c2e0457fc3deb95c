"""Launchers, and embedded AWSs, that are forked from one process which has imported what they import.

Such a launcher forks its ranks in the same way (warm_ranks.py). Tests launch some hundreds of trainings of a second,
and would import PyTorch and transformers hundreds of times: four seconds of CPU each. Whatever a launch brings along
that is read during an import makes it a fresh process instead, and so do other packages and interpreters. Jobs of the
embedded AWS are forked in the same way (warm_jobs.py), with their containers.

Ranks of a script are fresh processes, as those of users are, unless the test names the modules that they are to find
imported: then they are forked as well, from a process that has imported nothing else than a launcher and these.

Servers are forked from a process of their own, since launchers would find imported what only servers import. Each forks
its jobs from a copy of itself that it makes before it has threads, so those do find it: that a job imports all it needs
is for the trainings that are launched without a server to show, and for those in a container.

    python -m tests.support.train.warm_launcher SOCKET_FD [MODULE …]
"""

import atexit
import ctypes
import functools
import importlib
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
from typing import IO, Any, NamedTuple, NoReturn

from infra.emulator import REGION
from infra.emulator.containers import container_init
from jobs.train.accelerator import CPU
from jobs.train.imports import imports_that_stay
from tests.support.collector import seldom_collect
from tests.support.train import warm_ranks
from tests.support.train.warm_ranks import name_process, run_module, run_to_its_end

_REPOSITORY = Path(__file__).parents[3]
_LAUNCHER = "jobs.train.launch"
_IMPORTED = (_LAUNCHER, "torch.distributed.launcher.api")
_IMPORTED_BY_RANKS = (
    "jobs.train.trainer.training",
    "jobs.train.models.masked_bert",
    "transformers.models.bert.modeling_bert",
    "transformers.models.bert.tokenization_bert_fast",
    "torch.utils.tensorboard",
    "numpy.ma",
)
_KINDS = ["finetune-classification", "pretrain-mlm", "evaluate", "fabric-check"]
"""Those whose ranks are forked; with a script's modules imported, its ranks too."""
_SERVICES = ("batch", "cloudformation", "ec2", "events", "iam", "logs", "s3", "ssm", "sts")
"""Those of moto that most servers come to use."""
SERVERS = (
    "tests.support.train.warm_jobs",
    "infra.emulator.server",
    *(
        f"infra.emulator.{name}"
        for name in (
            "access",
            "application",
            "cloudformation",
            "ecr",
            "events",
            "functions",
            "kept_objects",
            "shortcuts",
        )
    ),
    "moto.server",
    *(f"moto.{name}.urls" for name in _SERVICES),
)
"""What servers import: given to `start` in place of a script's modules."""
_READ_DURING_IMPORTS = ("HF_", "LD_", "MOTO_", "OMP_", "PYTHON", "S3_", "TORCH_", "TRANSFORMERS_")
"""Beginnings of the names of variables."""
_SEARCH_PATH = "PYTHONPATH"
_OF_A_SCRIPT = ("--requirements=",)
"""Beginnings of flags of a script that its ranks can have as fresh processes only: packages on their search path."""
_KEPT = ("PATH", "HOME", "LANG", "LD_LIBRARY_PATH")
"""What a container of the tests has of this machine's environment (launching.py)."""
_IMPORT_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "USE_TF": "0",
    "USE_FLAX": "0",
    "HF_DATASETS_TRUST_REMOTE_CODE": "0",
    "HF_HUB_OFFLINE": "1",
}
_ENVIRONMENT_ROOM = "TRAINYARD_TESTS_ROOM"
"""Variable as long as an environment may get: /proc/PID/environ of a forked launcher is to be its own, and that is
where the environment lies that the process was started with."""
_ROOM_BYTES = 65_536
_REQUEST_BYTES = 1 << 20
_ENVIRONMENT_START = 47
"""Fields of /proc/PID/stat counted from the state: env_start and, behind it, env_end (proc_pid_stat(5))."""


class WarmLauncher:
    """A launcher that runs, with what the tests use of a `Popen`."""

    def __init__(self, pid: int, stdout: IO[str] | None, ended: socket.socket) -> None:
        self.pid = pid
        self.stdout = stdout
        self.returncode: int | None = None
        self._ended = ended
        self._reading = threading.Lock()
        weakref.finalize(self, ended.close)  # of one that nobody waited for

    def poll(self) -> int | None:
        """Return the exit code, below 0 for the signal that ended it; None: it still runs."""
        return self._code(0)

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code, once it has ended. Raises subprocess.TimeoutExpired after `timeout` seconds."""
        code = self._code(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(f"launcher {self.pid}", timeout or 0)
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


def can_fork(command: Sequence[str], environment: Mapping[str, str], imports: Sequence[str] | None) -> bool:
    """Return whether a launch needs nothing but what a warm process has.

    That is one of `python -m jobs.train.launch …`, and of `python -c` with a program that sets something of it first.
    `imports`: the modules that ranks of a script find imported; None: they are fresh; SERVERS: it is a server.
    """
    imported_with = _environment()
    if imports is not None and _SEARCH_PATH in environment:
        imported_with[_SEARCH_PATH] = environment[_SEARCH_PATH]
    is_launcher = list(command[1:3]) == ["-m", _LAUNCHER] or (command[1] == "-c" and "jobs.train" in command[2])
    return (
        (is_launcher or imports == SERVERS)
        and command[0] == sys.executable
        and len(_as_bytes(environment)) < _ROOM_BYTES
        and not (imports is not None and any(word.startswith(_OF_A_SCRIPT) for word in command))
        and all(
            value == imported_with.get(name)
            for name, value in environment.items()
            if name.startswith(_READ_DURING_IMPORTS)
        )
    )


def start(
    command: Sequence[str],
    environment: Mapping[str, str],
    imports: Sequence[str] | None,
    stdin: IO[str] | None = None,
    output: int | None = None,
) -> WarmLauncher:
    """Start what `can_fork` allows, with just this environment.

    `output`: the open file for what it prints; None: a pipe, which is then its `stdout`.
    """
    requests = _server(*([] if imports is None else [environment.get(_SEARCH_PATH, ""), *imports])).requests
    read, write = os.pipe() if output is None else (None, os.dup(output))
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with there:
        request = json.dumps([list(command[1:]), dict(environment), None]).encode()
        inherited = [] if stdin is None else [stdin.fileno()]
        socket.send_fds(requests, [request], [write, there.fileno(), *inherited])
        os.close(write)
        pid = json.loads(here.recv(64))
    return WarmLauncher(pid, None if read is None else os.fdopen(read, encoding="utf-8"), here)


def start_container(
    command: Sequence[str], environment: Mapping[str, str], folder: str, *, output: int, stdin: int, status_fd: int
) -> WarmLauncher:
    """Start the first process of a container whose command `can_fork` allows, with these open files."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with there:
        request = json.dumps([list(command[1:]), dict(environment), folder]).encode()
        socket.send_fds(_server().requests, [request], [output, there.fileno(), stdin, status_fd])
        pid = json.loads(here.recv(64))
    return WarmLauncher(pid, None, here)


def _environment() -> dict[str, str]:
    return {**{name: os.environ[name] for name in _KEPT if name in os.environ}, **_IMPORT_ENVIRONMENT}


class _Server(NamedTuple):
    """A warm process: where it takes requests."""

    requests: socket.socket
    pid: int


def pid_for_jobs() -> int:
    """Return the process id of what `start_container` forks."""
    return _server().pid


_of_forked_server: list[_Server] = []
"""In a server that was forked: what it forks its jobs from."""


def fork_for_jobs() -> int | None:
    """In a server that was forked, before it has threads: fork what its jobs are to be forked from.

    Returns its process id; None: this server is a fresh process, whose first job starts one.
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
    _of_forked_server.append(_Server(here, pid))

    def end() -> None:
        here.close()
        os.waitpid(pid, 0)

    atexit.register(end)
    return pid


def _sockets() -> tuple[socket.socket, socket.socket]:
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for place in (here, there):
        place.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _REQUEST_BYTES)
    return here, there


def _server(search_path: str = "", *imports: str) -> _Server:
    """Return the process for ranks of ours; where modules are named, the one for a script's, or for servers."""
    if _of_forked_server and not imports:
        return _of_forked_server[0]
    return _started_server(search_path, *imports)


@functools.cache
def _started_server(search_path: str, *imports: str) -> _Server:
    here, there = _sockets()
    process = subprocess.Popen(
        # The name that `ps` shows is written over the arguments: there is to be room for a launcher's.
        [sys.executable, "-m", "tests.support.train.warm_launcher", str(there.fileno()), *imports, " " * 4096],
        env={
            **_environment(),
            **({_SEARCH_PATH: search_path} if search_path else {}),
            _ENVIRONMENT_ROOM: "x" * _ROOM_BYTES,
        },
        cwd=_REPOSITORY,
        pass_fds=(there.fileno(),),
    )
    there.close()

    def end() -> None:
        here.close()
        process.wait()

    atexit.register(end)
    return _Server(here, process.pid)


_is_warm = False
"""Whether this process has imported what servers and their jobs import, or was forked from one that has."""


def serve(requests: socket.socket, imports: Sequence[str]) -> NoReturn:
    """Import what launches need, then fork one for each request, until nobody can ask any more."""
    global _is_warm  # noqa: PLW0603 - it holds for this process and all that it forks
    _is_warm = tuple(imports) == SERVERS
    with imports_that_stay():
        if not imports or _is_warm:
            CPU.trainer_class()  # first: it keeps out what a rank would not load either
            from transformers import AutoModelForSequenceClassification

            AutoModelForSequenceClassification._model_mapping.keys()  # imports the configurations of all models
        for name in (*_IMPORTED, *imports, *(_IMPORTED_BY_RANKS if not imports or _is_warm else ())):
            importlib.import_module(name)
        if _is_warm:
            _prepare_moto()
    if imports and not _is_warm:
        _KINDS.append("script")
    seldom_collect()
    assert threading.active_count() == 1  # a fork takes no other thread along
    _fork_for_requests(requests)


def _prepare_moto() -> None:
    """Have what servers read at the first request to a service read."""
    from moto.backends import get_backend
    from moto.core.utils import get_service_model
    from moto.moto_api._internal import mock_random

    for name in _SERVICES:
        get_service_model(name)
    networks = get_backend("ec2")
    _ = networks["000000000000"][REGION]
    networks.clear()
    # Else the names and numbers that moto makes up would be the same in all servers.
    os.register_at_fork(after_in_child=mock_random.seed)


def _fork_for_requests(requests: socket.socket) -> NoReturn:
    """Fork a process for each request, until nobody can ask any more."""
    woken, wake = os.pipe()
    for descriptor in (woken, wake):
        os.set_blocking(descriptor, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the tests as well, which end this by their socket
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
            output, place_number, *more = descriptors
            place = socket.socket(fileno=place_number)
            pid = os.fork()
            if pid == 0:
                try:
                    for other in (requests, place, *running.values()):
                        other.close()
                    for descriptor in (woken, wake):
                        os.close(descriptor)
                    command, environment, folder = json.loads(request)
                    _take_over(environment, output, *more[:1])
                    if folder is None:
                        _run(command)
                    else:
                        _run_in_container(command, folder, status_fd=more[1])
                finally:
                    os._exit(1)
            for descriptor in (output, *more):
                os.close(descriptor)
            place.send(json.dumps(pid).encode())
            running[pid] = place


def _take_over(environment: Mapping[str, str], output: int, stdin: int = 0) -> None:
    """Give this process what a fresh one would have been started with."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for given, number in ((output, 1), (output, 2), (stdin, 0)):
        os.dup2(given, number)
    for descriptor in {output, stdin} - {0}:
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # read from TMPDIR when it is asked for next
    _show_environment(environment)


def _run(command: Sequence[str]) -> NoReturn:
    """Be what Python is with these arguments."""
    name_process(" ".join(["python", *command]))
    warm_ranks.fork_launchers()
    option, program, *argv = command
    if option == "-m":
        if _forks_ranks(command):
            warm_ranks.fork_ranks()
        run_module(program, argv)
    if _forks_ranks(command):
        # Not before the program has changed what it wants changed: its ranks find that too.
        launcher = importlib.import_module(_LAUNCHER)
        begin = launcher.main

        def main(*given: Any, **named: Any) -> int:
            warm_ranks.fork_ranks()
            return int(begin(*given, **named))

        vars(launcher)["main"] = main
    sys.argv = [option, *argv]
    run_to_its_end(functools.partial(exec, program, vars(types.ModuleType("__main__"))))


def _forks_ranks(command: Sequence[str]) -> bool:
    """Return whether a launcher's ranks find imported what they need, and it starts ranks itself."""
    is_worker = any(word.startswith("--sweep-attempts=") for word in command)
    return not is_worker and any(kind in command for kind in _KINDS)


def _run_in_container(command: Sequence[str], folder: str, status_fd: int) -> NoReturn:
    """Be the first process of a container whose command is Python with these arguments."""

    def execute(_: list[str], error_fd: int, libc: ctypes.CDLL) -> None:
        container_init.leave_init(libc)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_IGN)  # as Python has it once it has started
        os.closerange(3, 256)  # an exec would; with `error_fd` the init process learns that it is done
        sys.path[0] = folder
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]  # TextIO does not declare it
        _run(command)

    os.setsid()
    os.chdir(folder)
    name_process(f"python {container_init.__file__} {' '.join(command)}")
    os._exit(container_init.main([str(status_fd), folder, "python", *command], execute))


def _as_bytes(environment: Mapping[str, str]) -> bytes:
    return b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in environment.items())


def _show_environment(environment: Mapping[str, str]) -> None:
    """Write the environment where /proc/PID/environ reads it: over the one that this process was started with."""
    fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    start, end = map(int, fields[_ENVIRONMENT_START : _ENVIRONMENT_START + 2])
    text = _as_bytes(environment)
    assert len(text) <= end - start
    ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


if __name__ == "__main__":
    from tests.support.train import warm_launcher  # what a server that is forked here finds, in place of a second one

    warm_launcher.serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:-1])
