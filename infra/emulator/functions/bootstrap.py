"""The program in a function's process: fetches code and event from the server, calls the handler, sends the result.

    python -I -u bootstrap.py http://localhost:PORT/trainyard/invocations/ID

Modules are found as in Lambda: those in the function's zip file, those of Python itself, and the AWS SDK. Whatever else
is installed on this machine stays hidden, so that a function which forgot to pack something fails here, too.
"""

import base64
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
    """What a handler gets as its second argument."""

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
    """Run one invocation; the process's exit code."""
    os.nice(NICENESS)
    work = json.loads(_request(url))
    task_root = str(Path("task").absolute())
    with zipfile.ZipFile(io.BytesIO(base64.b64decode(work["code"]))) as archive:
        archive.extractall(task_root)
    os.chdir(task_root)
    os.environ["LAMBDA_TASK_ROOT"] = task_root
    sys.path.insert(0, task_root)
    sys.meta_path.insert(0, OnlyWhatLambdaHas(task_root))
    try:
        handler = _load(work["handler"])
    except Exception as error:  # noqa: BLE001 - whatever the module does, the caller is told
        return _fail(url, work, error, kind=_kind_of_load_failure(error))
    _request(f"{url}/started", {})
    context = Context(work)
    try:
        result = handler(json.loads(work["event"]), context)
        payload = json.dumps(result)
    except Exception as error:  # noqa: BLE001 - likewise
        return _fail(url, work, error, kind=type(error).__name__)
    _request(f"{url}/result", {"payload": payload})
    return 0


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


def _fail(url: str, work: dict[str, Any], error: Exception, *, kind: str) -> int:
    trace = traceback.format_exception(type(error), error, error.__traceback__)
    message = f"Unable to import module '{work['handler']}': {error}" if "Import" in kind else str(error)
    print(f"[ERROR] {kind}: {message}\n{''.join(trace)}", end="")
    failure = {
        "errorMessage": message,
        "errorType": kind,
        "requestId": work["request_id"],
        "stackTrace": traceback.format_tb(error.__traceback__),
    }
    _request(f"{url}/result", {"payload": json.dumps(failure), "error": True})
    return 1


def _request(url: str, body: dict[str, Any] | None = None) -> bytes:
    data = None if body is None else json.dumps(body).encode()
    with _opener.open(urllib.request.Request(url, data, {"Content-Type": "application/json"}), timeout=60) as answer:  # noqa: S310 - the server's own address
        content: bytes = answer.read()
        return content


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
