"""The program in a function's process: fetches the code from the server, then event after event for the handler.

    python -I -u bootstrap.py http://localhost:PORT/trainyard/environments/ID

Modules are found as in Lambda: those in the function's zip file, those of Python itself, and the AWS SDK. Whatever else
is installed on this machine stays hidden, so that a function which forgot to pack something fails here, too.
"""

import base64
import gc
import importlib
import importlib.machinery
import io
import json
import os
import sys
import time
import traceback
import urllib.request
import zipfile
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

SDK = frozenset({"boto3", "botocore", "dateutil", "jmespath", "s3transfer", "six", "urllib3"})
"""What Lambda's Python runtimes carry besides Python. Source: AWS Lambda developer guide, "Runtime-included SDK"."""

NICENESS = 5
"""Functions make way for the jobs on the same machine: each change of a job's state may start several."""

END_OF_OUTPUT = b"\0end of an invocation's output\0"
"""Tells the server (environment.py) that what was written belongs to the invocation whose result it has."""

_token = os.environ["AWS_SECRET_ACCESS_KEY"]
"""What the server knows its own functions by; their code may change the variable."""

# No proxy: the server is on this machine.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class OnlyWhatLambdaHas:
    """A finder that hides what the machine has and Lambda has not."""

    def __init__(self, task_root: str) -> None:
        self._task_root = task_root

    def find_spec(self, name: str, path: Sequence[str] | None = None, _target: ModuleType | None = None) -> None:
        """Nothing: the finders after it look. Raises ModuleNotFoundError where there is nothing to be found."""
        if path is not None or name in sys.stdlib_module_names or name in SDK:
            return
        if importlib.machinery.PathFinder.find_spec(name, [self._task_root]) is None:
            raise ModuleNotFoundError(f"No module named '{name}'", name=name)


class Context:
    """The second argument of a handler."""

    def __init__(self, work: dict[str, Any]) -> None:
        self.aws_request_id: str = work["request_id"]
        self.function_name: str = work["function_name"]
        self.function_version: str = work["version"]
        self.invoked_function_arn: str = work["arn"]
        self.memory_limit_in_mb: str = work["memory_mib"]
        self.log_group_name: str = work["log_group"]
        self.log_stream_name: str = work["log_stream"]
        self.identity = None
        self.client_context = None
        self._deadline = time.monotonic() + work["timeout_seconds"]

    def get_remaining_time_in_millis(self) -> int:
        return max(0, int((self._deadline - time.monotonic()) * 1000))


def main(url: str) -> int:
    """Run invocations as long as there are some; the process's exit code."""
    os.nice(NICENESS)
    package = json.loads(_request(f"{url}/code", timeout_seconds=60))
    task_root = str(Path("task").absolute())
    with zipfile.ZipFile(io.BytesIO(base64.b64decode(package["code"]))) as archive:
        archive.extractall(task_root)
    os.chdir(task_root)
    os.environ["LAMBDA_TASK_ROOT"] = task_root
    sys.path.insert(0, task_root)
    sys.meta_path.insert(0, OnlyWhatLambdaHas(task_root))
    try:
        handler = _load(package["handler"])
    except Exception as error:  # noqa: BLE001 - whatever the module does, the caller is told
        _send(url, _failure(error, kind=_kind_of_load_failure(error), handler=package["handler"]))
        return 1
    # What the module has loaded stays, the SDK above all. To search it for what can be freed, mostly at the end, takes
    # a quarter of the CPU time of a function that is called once.
    gc.freeze()
    while True:
        # For as long as it takes: nobody may call the function for a while.
        work = json.loads(_request(f"{url}/next"))["work"]
        if work is None:
            return 0
        os.environ["AWS_LAMBDA_LOG_STREAM_NAME"] = work["log_stream"]
        _send(url, _answer(handler, work))
        if _has_children():
            return 0  # what it forgot goes with this process
        os.write(sys.stdout.fileno(), END_OF_OUTPUT)


def _answer(handler: Any, work: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"payload": json.dumps(handler(json.loads(work["event"]), Context(work)))}
    except Exception as error:  # noqa: BLE001 - the caller is told
        return _failure(error, kind=type(error).__name__, request_id=work["request_id"])


def _has_children() -> bool:
    return any(path.read_text().strip() for path in Path("/proc/self/task").glob("*/children"))


def _load(handler: str) -> Any:
    module_name, _, function_name = handler.rpartition(".")
    module = importlib.import_module(module_name.replace("/", "."))
    if not hasattr(module, function_name):
        raise _HandlerNotFoundError(f"Handler '{function_name}' missing on module '{module_name}'")
    return getattr(module, function_name)


class _HandlerNotFoundError(Exception):
    """The module has no such function."""


def _kind_of_load_failure(error: Exception) -> str:
    if isinstance(error, _HandlerNotFoundError):
        return "Runtime.HandlerNotFound"
    if isinstance(error, ImportError):
        return "Runtime.ImportModuleError"
    if isinstance(error, SyntaxError):
        return "Runtime.UserCodeSyntaxError"
    return type(error).__name__


def _failure(error: Exception, *, kind: str, handler: str = "", request_id: str = "") -> dict[str, Any]:
    """The answer, as Lambda words it; the whole of it goes to the log."""
    trace = traceback.format_exception(type(error), error, error.__traceback__)
    message = f"Unable to import module '{handler}': {error}" if handler and "Import" in kind else str(error)
    print(f"[ERROR] {kind}: {message}\n{''.join(trace)}", end="")
    content = {
        "errorMessage": message,
        "errorType": kind,
        "requestId": request_id,
        "stackTrace": traceback.format_tb(error.__traceback__),
    }
    return {"payload": json.dumps(content), "error": True}


def _send(url: str, result: dict[str, Any]) -> None:
    _request(f"{url}/result", result, timeout_seconds=60)


def _request(url: str, body: dict[str, Any] | None = None, *, timeout_seconds: float | None = None) -> bytes:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {_token}"}
    request = urllib.request.Request(url, data, headers)  # noqa: S310 - the server's own
    with _opener.open(request, timeout=timeout_seconds) as answer:
        content: bytes = answer.read()
        return content


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
