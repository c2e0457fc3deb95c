"""The emulator, with jobs that are forked from one process that has imported their modules.

    python -m tests.support.container.warm_jobs serve …        as python -m infra.emulator

A job that trains on a CPU would import PyTorch and transformers: four seconds of CPU, some seventy times in all tests.
The fork is the first process of its container, so that the process tree, Batch's signals and the exit codes are the
same. All other commands are started normally, and so are the jobs of a server that the product starts (`trainyard
demo`).

The server is forked as well, unless its environment has variables that are read during imports (warm_launcher.py).
"""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import IO, TYPE_CHECKING, cast

# moto's jsonschema loads a grammar of IRIs if it is installed, in two seconds. The server prevents that, but later.
sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]  # imports of it fail

from infra.emulator import __main__, batch  # noqa: E402 - after that
from infra.emulator.containers import process_executor  # noqa: E402
from infra.emulator.containers.process_executor import ProcessExecutor  # noqa: E402
from tests.support.collector import collect_rarely  # noqa: E402

if TYPE_CHECKING:
    from tests.support.container.warm_launcher import WarmLauncher


class WarmExecutor(ProcessExecutor):
    """Starts jobs as local processes, and forks the launcher's jobs."""

    def _start_init(self, arguments: Sequence[str], environment: Mapping[str, str]) -> "subprocess.Popen[bytes]":
        status_fd, directory, *command = arguments
        if command[:3] != ["python", "-m", "jobs.container.launch"]:
            return super()._start_init(arguments, environment)
        from tests.support.container import warm_launcher

        # The output of a forked process is unbuffered as well.
        read = {name: value for name, value in environment.items() if name != "PYTHONUNBUFFERED"}
        if not warm_launcher.forks_jobs() or not warm_launcher.can_fork([sys.executable, *command[1:]], read):
            return super()._start_init(arguments, environment)
        stdin, lifeline = os.pipe()
        output, written = os.pipe()
        process = warm_launcher.start_container(
            command, environment, directory, output=written, stdin=stdin, status_fd=int(status_fd)
        )
        for descriptor in (stdin, written):
            os.close(descriptor)
        return cast("subprocess.Popen[bytes]", _Started(process, lifeline, output))


class _Started:
    """The methods of `Popen` that the executor uses."""

    def __init__(self, process: "WarmLauncher", stdin: int, stdout: int) -> None:
        self._process = process
        self.pid = process.pid
        self.wait = process.wait
        self.kill = process.kill
        self.send_signal = process.send_signal
        self.terminate = process.terminate
        self.stdin: IO[bytes] = os.fdopen(stdin, "wb", buffering=0)
        self.stdout: IO[bytes] = os.fdopen(stdout, "rb", buffering=0)

    @property
    def returncode(self) -> int | None:
        return self._process.returncode


if __name__ == "__main__":
    from tests.support.container import warm_launcher

    collect_rarely()
    vars(batch)["ProcessExecutor"] = WarmExecutor  # for jobs only; functions have a separate one
    if (forked := warm_launcher.fork_for_jobs()) is not None:
        process_executor._init_pids.add(forked)
    sys.exit(__main__.main())
