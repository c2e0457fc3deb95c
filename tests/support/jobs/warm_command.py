"""`trainyard` in processes that are forked from one which has imported what its commands import.

Tests run it some hundreds of times, and most of what it then does is to import: half a second and more. Whatever the
environment has of what Python and the libraries read during imports makes it a fresh process instead; so do tests of a
terminal or of signals, which start the program themselves.

    python -m tests.support.jobs.warm_command SOCKET_FD
"""

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import pkgutil
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jobs.cli
import jobs.client
from tests.support import service_models
from tests.support.collector import seldom_collect
from tests.support.jobs.terminal import TRAINYARD

_REPOSITORY = Path(__file__).parents[3]
_READ_WHEN_USED = ("AWS_", "DOCKER_", "GIT_", "HF_", "HOME", "PATH", "PYTEST_", "TMPDIR", "TRAINYARD_", "XDG_")
"""Beginnings of the names of variables that nothing reads during an import. All others have to be as they were then."""
_REQUEST_BYTES = 1 << 18


def run(
    arguments: Sequence[str], *, folder: Path, environment: Mapping[str, str], stdin: str, timeout_seconds: float
) -> subprocess.CompletedProcess[str]:
    """Run `trainyard ARGUMENTS…` to its end in a folder, with just this environment.

    Raises subprocess.TimeoutExpired.
    """
    command = [str(TRAINYARD), *arguments]
    requests, imported_with = _server()
    if _read_during_imports(environment) != imported_with:
        return subprocess.run(
            command,
            cwd=folder,
            env=dict(environment),
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout_seconds,
            check=False,
        )
    ended, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    outputs = os.pipe(), os.pipe()
    with tempfile.TemporaryFile("w+") as given, ended, ThreadPoolExecutor(2) as readers:
        given.write(stdin)
        given.seek(0)
        written = [write for _, write in outputs]
        request = json.dumps([command, str(folder), dict(environment)]).encode()
        with there:
            socket.send_fds(requests, [request], [given.fileno(), *written, there.fileno()])
        for descriptor in written:
            os.close(descriptor)
        texts = [readers.submit(_read, read) for read, _ in outputs]
        pid = int(ended.recv(16))
        if not select.select([ended], [], [], timeout_seconds)[0]:
            os.kill(pid, signal.SIGKILL)
            raise subprocess.TimeoutExpired(command, timeout_seconds)
        code = int(ended.recv(16))
    stdout, stderr = (text.result() for text in texts)
    return subprocess.CompletedProcess(command, code, stdout, stderr)


def _read(descriptor: int) -> str:
    with open(descriptor) as output:
        return output.read()


def _read_during_imports(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if not name.startswith(_READ_WHEN_USED)}


@functools.cache
def _server() -> tuple[socket.socket, Mapping[str, str]]:
    """Start what is forked from; return where it takes requests, and the environment that it imported with."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for place in (here, there):
        place.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _REQUEST_BYTES)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "TRAINYARD_"))}
    process = subprocess.Popen(
        [sys.executable, "-m", __name__, str(there.fileno())],
        env=kept,
        cwd=_REPOSITORY,
        pass_fds=(there.fileno(),),
        stdin=subprocess.DEVNULL,
    )
    there.close()

    def end() -> None:
        here.close()
        process.wait()

    atexit.register(end)
    return here, _read_during_imports(kept)


def _serve(requests: socket.socket) -> None:
    """Fork for each request, until nobody makes any more; return in the fork, which is to be the program."""
    import boto3

    for package in (jobs.cli, jobs.client):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            importlib.import_module(module.name)
    # What is imported and read only where a client is made.
    service_models.share()
    for service in ("batch", "logs", "s3", "ssm"):
        boto3.Session("none", "none", region_name="us-east-1").client(service)
    gc.collect()
    gc.freeze()
    seldom_collect()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the tests as well, which end this by their socket
    while True:
        request, descriptors, _, _ = socket.recv_fds(requests, _REQUEST_BYTES, 4)
        if not request:
            sys.exit()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if os.fork() == 0:
            requests.close()
            *streams, ended = descriptors
            _watch(streams, socket.socket(fileno=ended))
            command, folder, environment = json.loads(request)
            _become(command, folder, environment, streams)
            return
        for descriptor in descriptors:
            os.close(descriptor)


def _watch(streams: Sequence[int], ended: socket.socket) -> None:
    """Fork once more: return in the fork, and tell of it and of its end in this process."""
    with ended:
        if (pid := os.fork()) == 0:
            return
        for descriptor in streams:  # whose end is the program's
            os.close(descriptor)
        ended.send(str(pid).encode())
        ended.send(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())
    os._exit(0)


def _become(command: Sequence[str], folder: str, environment: Mapping[str, str], streams: Sequence[int]) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, descriptor in enumerate(streams):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # read from TMPDIR when it is asked for next
    sys.argv = [*command]
    sys.path[0] = str(Path(command[0]).parent)


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
    runpy.run_path(sys.argv[0], run_name="__main__")
