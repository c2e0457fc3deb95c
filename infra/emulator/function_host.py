"""Run Lambda functions in a process that imports the AWS SDK once and forks for each invocation.

    python -I -u function_host.py FIFO

It reads invocations from FIFO and prints how each ended, as one line of JSON per invocation. A function can import only
what Lambda provides: the modules in its zip file, Python's standard library and the AWS SDK. Other installed packages
are hidden, so that a function with a missing dependency fails here too.
"""

import base64
import ctypes
import gc
import importlib
import importlib.machinery
import io
import json
import os
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
import zipfile
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import boto3

SDK = frozenset({"boto3", "botocore", "dateutil", "jmespath", "s3transfer", "six", "urllib3"})
"""Packages of Lambda's Python runtimes. Source: AWS Lambda developer guide, "Runtime-included SDK"."""
PRELOADED = ("batch", "ec2", "ecs", "iam", "s3", "sns", "ssm")
"""Services whose API models are loaded in advance, which is most of the run time of this project's functions."""
NICENESS = 5
"""Functions give way to jobs on the same machine: each change of a job's state may start several."""
INIT_SECONDS = 60
"""Time limit for importing the handler's module, which does not count against the timeout. Lambda allows 10 s; a laptop
that trains at the same time is slower."""
PR_SET_CHILD_SUBREAPER = 36
OUTPUT, RESULT = "output", "result"


class LambdaFinder:
    """Hides installed packages that Lambda does not have."""

    def __init__(self, task_root: str) -> None:
        self._task_root = task_root

    def find_spec(self, name: str, path: Sequence[str] | None = None, _target: ModuleType | None = None) -> None:
        """Leave the search to later finders. Raises ModuleNotFoundError for a package that Lambda does not have."""
        if path is not None or name in sys.stdlib_module_names or name in SDK:
            return
        if importlib.machinery.PathFinder.find_spec(name, [self._task_root]) is None:
            raise ModuleNotFoundError(f"No module named '{name}'", name=name)


class Context:
    """The second argument of a handler."""

    def __init__(self, work: dict[str, Any]) -> None:
        self.aws_request_id: str = work["request_id"]
        self.function_name: str = work["function_name"]
        self.invoked_function_arn: str = work["arn"]
        self.log_group_name: str = work["log_group"]
        self._deadline = time.monotonic() + work["timeout_seconds"]

    def get_remaining_time_in_millis(self) -> int:
        return max(0, int((self._deadline - time.monotonic()) * 1000))


def main(fifo: str) -> None:
    """Run invocations until the server closes the FIFO."""
    os.nice(NICENESS)
    boto3.setup_default_session()
    make: Any = boto3.client  # typed by service name
    for service in PRELOADED:  # explicit keys: the session must read each function's environment later
        make(service, region_name="us-east-1", aws_access_key_id="-", aws_secret_access_key="-")  # noqa: S106 - none
    gc.freeze()
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # adopt the orphans of functions
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    running: dict[int, tuple[str, Path]] = {}
    rest = b""
    requests = os.open(fifo, os.O_RDONLY)
    while True:
        ready, _, _ = select.select([requests, wake_read], [], [])
        if wake_read in ready:
            os.read(wake_read, 1024)
            _report_ended(running)
        if requests in ready:
            chunk = os.read(requests, 1 << 16)
            if not chunk:
                return
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                work = json.loads(line)
                folder = Path(tempfile.mkdtemp(dir="."))
                child = os.fork()
                if child == 0:
                    _run(work, folder)
                running[child] = (work["request_id"], folder)


def _report_ended(running: dict[int, tuple[str, Path]]) -> None:
    """Kill the processes that ended invocations left, which this process has adopted, and print the results."""
    ended = [(pid, status) for pid, status in (os.waitpid(child, os.WNOHANG) for child in running) if pid]
    known = running.keys() - {pid for pid, _ in ended}
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    while left := [pid for pid in map(int, children.read_text().split()) if pid not in known]:
        for pid in left:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    for pid, status in ended:
        request_id, folder = running.pop(pid)
        result = json.loads((folder / RESULT).read_text()) if (folder / RESULT).exists() else None
        output = (folder / OUTPUT).read_text(errors="replace") if (folder / OUTPUT).exists() else ""
        code = os.waitstatus_to_exitcode(status)
        print(json.dumps({"request_id": request_id, "code": code, "result": result, "output": output}))
        shutil.rmtree(folder, ignore_errors=True)


def _run(work: dict[str, Any], folder: Path) -> NoReturn:
    """Turn this process into one invocation. SIGALRM kills it when its time is up."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, INIT_SECONDS)
    folder, task_root = folder.absolute(), str((folder / "task").absolute())
    with (folder / OUTPUT).open("wb") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.environ.clear()
    os.environ.update(work["environment"], LAMBDA_TASK_ROOT=task_root)
    with zipfile.ZipFile(io.BytesIO(base64.b64decode(work["code"]))) as archive:
        archive.extractall(task_root)
    os.chdir(task_root)
    sys.path.insert(0, task_root)
    sys.meta_path.insert(0, LambdaFinder(task_root))
    whole = folder / f"{RESULT}.part"
    whole.write_text(json.dumps(_result(work)))
    whole.rename(folder / RESULT)
    os._exit(0)


def _result(work: dict[str, Any]) -> dict[str, Any]:
    try:
        handler = _load(work["handler"])
    except Exception as error:  # noqa: BLE001 - any error of the module is the result
        return _failure(error, kind=_kind_of_load_failure(error))
    signal.setitimer(signal.ITIMER_REAL, work["timeout_seconds"])
    try:
        return {"payload": json.dumps(handler(json.loads(work["event"]), Context(work)))}
    except Exception as error:  # noqa: BLE001 - the error is the result
        return _failure(error, kind=type(error).__name__)


def _load(handler: str) -> Any:
    module_name, _, function_name = handler.rpartition(".")
    module = importlib.import_module(module_name.replace("/", "."))
    if not hasattr(module, function_name):
        raise _HandlerNotFoundError(f"Handler '{function_name}' missing on module '{module_name}'")
    return getattr(module, function_name)


class _HandlerNotFoundError(Exception):
    """The module does not have the handler."""


def _kind_of_load_failure(error: Exception) -> str:
    if isinstance(error, _HandlerNotFoundError):
        return "Runtime.HandlerNotFound"
    if isinstance(error, ImportError):
        return "Runtime.ImportModuleError"
    if isinstance(error, SyntaxError):
        return "Runtime.UserCodeSyntaxError"
    return type(error).__name__


def _failure(error: Exception, *, kind: str) -> dict[str, Any]:
    """Return an error as Lambda does, and print its traceback to the log."""
    trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    print(f"[ERROR] {kind}: {error}\n{trace}", end="", flush=True)
    return {"payload": json.dumps({"errorMessage": str(error), "errorType": kind}), "error": True}


if __name__ == "__main__":
    main(sys.argv[1])
