"""Run containers as local processes, without images or limits, but with Batch's environment and full cleanup.

`container_init.py` is the init process of each. The server's Python is first in PATH, so `python -m
jobs.container.launch` runs the code installed here. Needs Linux.
"""

import ctypes
import errno
import hashlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, cast

import psutil

from infra.emulator.containers import KILLED_EXIT_CODE, CannotStartError, ContainerRun, Exit
from infra.emulator.errors import ConfigurationError

PASSED_VARIABLES = (
    "LANG",
    "LC_ALL",
    "TZ",
    # For networks with a proxy or a custom certificate.
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "NO_PROXY",
    "http_proxy",
    "https_proxy",
    "no_proxy",
    "AWS_CA_BUNDLE",
    "CURL_CA_BUNDLE",
    "REQUESTS_CA_BUNDLE",
    "SSL_CERT_DIR",
    "SSL_CERT_FILE",
    # Without access to the Hub, its client would retry for half a minute; a mirror may replace it.
    "HF_ENDPOINT",
    "HF_HUB_OFFLINE",
    # For networks with a private package index.
    "UV_DEFAULT_INDEX",
    "UV_INDEX",
    "UV_FIND_LINKS",
    # Jobs share the cores. Otherwise each would use all cores, and its threads would busy-wait for each other.
    "OMP_NUM_THREADS",
)
"""Variables that a job inherits from the server. It also inherits PATH, after the folder of the server's Python."""

_POSITIONS = ("AWS_BATCH_JOB_ARRAY_INDEX", "AWS_BATCH_JOB_NODE_INDEX")
"""Variables that differ between the containers of one job, and are the same in each attempt."""

PR_SET_CHILD_SUBREAPER = 36

_starting = threading.Lock()
_init_pids: set[int] = set()
"""Init processes that the server has started. All its other children are adopted orphans."""
_adopts = threading.Event()

_INIT = Path(__file__).with_name("container_init.py")
_CHUNK_BYTES = 1 << 16

_INIT_ENDS_WITHIN_SECONDS = 5.0
"""How long an init process may take to kill its container before it is killed too."""


def adopt_orphans() -> None:
    """Become the parent of processes that a killed init process leaves, so that they can be found and killed.

    Use it only in a program that starts no processes outside this module.
    """
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    _adopts.set()


def _kill_orphans() -> None:
    """Kill adopted orphans until none is left: killing one makes its children orphans."""
    while _adopts.is_set():
        with _starting:
            orphans = [child for child in psutil.Process().children() if child.pid not in _init_pids]
        if not orphans:
            return
        for orphan in orphans:
            with suppress(psutil.NoSuchProcess, ChildProcessError):
                orphan.kill()
                os.waitpid(orphan.pid, 0)


class ProcessExecutor:
    """Starts each container as a separate process tree in a fresh working directory."""

    def __init__(self) -> None:
        if sys.platform != "linux":
            raise ConfigurationError(
                "jobs run as local processes only on Linux, because other systems cannot clean up leftover processes",
                next_step="use a Docker engine: --executor docker",
            )

    def start(self, run: ContainerRun) -> "ProcessHandle":
        """Start a container. Raises CannotStartError with Docker's message if the command cannot run."""
        if not run.command:
            raise CannotStartError("CannotStartContainerError: Error response from daemon: no command specified")
        directory = _directory(run.environment)
        (directory / "tmp").mkdir()
        environment = {
            **passed_environment(os.environ),
            **run.environment,
            "HOME": str(directory),
            "TMPDIR": str(directory / "tmp"),
        }
        status_read, status_write = os.pipe()
        try:
            with _starting:
                process = self._start_init([str(status_write), str(directory), *run.command], environment)
                _init_pids.add(process.pid)
        except (OSError, ValueError) as error:  # too many processes, too long an argument list, a NUL in an argument
            os.close(status_read)
            shutil.rmtree(directory, ignore_errors=True)
            raise CannotStartError(f"CannotStartContainerError: {error}") from error
        finally:
            os.close(status_write)
        handle = ProcessHandle(process, status_read, directory, run)
        handle.await_start()
        return handle

    def _start_init(self, arguments: Sequence[str], environment: Mapping[str, str]) -> "subprocess.Popen[bytes]":
        """Start the init process of a container. `arguments` are those of container_init.py."""
        status_fd, directory, *_ = arguments
        return subprocess.Popen(
            [sys.executable, "-I", "-S", str(_INIT), *arguments],
            cwd=directory,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(int(status_fd),),
            start_new_session=True,  # Ctrl-C is for the server, not for its jobs
            bufsize=0,
        )


def _directory(environment: Mapping[str, str]) -> Path:
    """Create the folder that replaces a container's file system.

    In a container, every attempt of a job sees the same paths. So the folder is named after a hash of the job's
    variables, unless another container with the same variables is running.
    """
    variables = sorted(item for item in environment.items() if not item[0].startswith("AWS_") or item[0] in _POSITIONS)
    name = f"trainyard-job-{hashlib.sha256(json.dumps(variables).encode()).hexdigest()[:8]}"
    directory = Path(tempfile.gettempdir(), name)
    try:
        directory.mkdir(mode=0o700)
    except FileExistsError:
        return Path(tempfile.mkdtemp(prefix="trainyard-job-"))
    return directory


def passed_environment(server_environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment that an image would set."""
    passed = {name: server_environment[name] for name in PASSED_VARIABLES if name in server_environment}
    search_path = server_environment.get("PATH", os.defpath)
    passed["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{search_path}"
    # Jobs share this machine's uv cache; on AWS, they share the instance's.
    cache = Path(server_environment.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    passed["UV_CACHE_DIR"] = server_environment.get("UV_CACHE_DIR") or str(cache / "uv")
    # Common in Python images: log lines appear when they are written.
    passed["PYTHONUNBUFFERED"] = "1"
    return passed


class ProcessHandle:
    """The process tree of one container."""

    def __init__(self, process: "subprocess.Popen[bytes]", status_fd: int, directory: Path, run: ContainerRun) -> None:
        self._process = process
        self._lifeline = cast("IO[bytes]", process.stdin)
        self._output = cast("IO[bytes]", process.stdout)
        self._status_fd = status_fd
        self._directory = directory
        self._run = run
        self._session: int | None = None
        self._killer = threading.Timer(_INIT_ENDS_WITHIN_SECONDS, process.kill)
        self._killer.daemon = True

    def await_start(self) -> None:
        """Wait until the command runs. Raises CannotStartError if it cannot."""
        word, _, number = os.read(self._status_fd, 64).decode().strip().partition(" ")
        if word == "started":
            self._session = int(number)
            return
        self.kill()
        if self._process.wait() < 0:
            return  # the command ran, and killed the init process before it could report that
        self._close()
        program = self._run.command[0]
        error = int(number or errno.EIO)
        problem, code = {
            errno.ENOENT: (
                "executable file not found in $PATH" if "/" not in program else "no such file or directory",
                127,
            ),
            errno.EACCES: ("permission denied", 126),
        }.get(error, (os.strerror(error).lower(), 127))
        raise CannotStartError(
            "CannotStartContainerError: Error response from daemon: failed to create task for container: failed to "
            f'create shim task: OCI runtime create failed: exec: "{program}": {problem}: unknown',
            exit_code=code,
        )

    def wait(self) -> Exit:
        """Deliver the output until the process tree is gone."""
        output = self._output.fileno()
        poll = select.poll()  # select() accepts no descriptor above 1023; a server with many jobs has more
        for descriptor in (output, self._status_fd):
            poll.register(descriptor, select.POLLIN)
        while True:
            ready = {descriptor for descriptor, _ in poll.poll()}
            if self._status_fd in ready:
                poll.unregister(self._status_fd)
                self._wait_for_init()
            elif output in ready:
                chunk = os.read(output, _CHUNK_BYTES)
                if not chunk:
                    break
                self._run.on_output(chunk)
        self._wait_for_init()
        code = self._process.returncode
        self._close()
        return Exit(code=code if code >= 0 else KILLED_EXIT_CODE)

    def terminate(self) -> None:
        """Send SIGTERM to the init process, which forwards it to the command."""
        self._process.terminate()
        self._resume()

    def kill(self) -> None:
        """Close the init process's standard input, which makes it kill the tree. If it does not, kill it too."""
        self._lifeline.close()
        self._resume()
        with suppress(RuntimeError):  # already started by an earlier call
            self._killer.start()

    def _resume(self) -> None:
        """Resume an init process that the job stopped.

        In a container, no process can stop the init process of its PID namespace (pid_namespaces(7)). Here a job
        can, and repeatedly.
        """
        self._process.send_signal(signal.SIGCONT)

    def exec_target(self) -> Mapping[str, Any]:
        """Return the pid of the command, which has the container's environment and working directory."""
        return {"pid": self._session}

    def _wait_for_init(self) -> None:
        """Wait for the init process to end, and clean up after it if it was killed."""
        if self._process.wait() >= 0:
            return
        if self._session is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._session, signal.SIGKILL)
        _kill_orphans()

    def _close(self) -> None:
        self._killer.cancel()
        with _starting:
            _init_pids.discard(self._process.pid)
        os.close(self._status_fd)
        self._lifeline.close()
        self._output.close()
        # If the init process was killed, the folder still exists. Otherwise the next attempt may already use its name.
        if self._process.returncode < 0:
            shutil.rmtree(self._directory, ignore_errors=True)
