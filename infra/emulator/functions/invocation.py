"""One run of a function: a process that gets its code and event over HTTP from the server, and answers the same way.

The process is started, watched and cleaned up after as those of Batch jobs are. Every invocation is a cold start.
"""

import base64
import json
import logging
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moto.logs.models import LogGroup, LogStream, logs_backends

from infra.emulator.batch.environment import CREDENTIALS
from infra.emulator.batch.executor import CannotStartError, ContainerRun, Handle
from infra.emulator.batch.logs import LogStreamWriter
from infra.emulator.batch.process_executor import ProcessExecutor
from jobs.errors import ConfigurationError

if TYPE_CHECKING:
    from infra.emulator.functions.function import Function

logger = logging.getLogger(__name__)

MAX_CONCURRENT = 4
"""Invocations that run at once on this machine; the others wait. An AWS account starts with 1000."""
INIT_SECONDS = 60
"""For the start of the process and the import of the handler's module, which do not count against the timeout. Lambda
gives 10; a laptop that trains beside it is slower."""
_TAIL_BYTES = 4096
_BOOTSTRAP = Path(__file__).with_name("bootstrap.py")

_slots = threading.BoundedSemaphore(MAX_CONCURRENT)
_running: dict[str, "_Invocation"] = {}
_lock = threading.Lock()
_closed = threading.Event()


class InvocationError(Exception):
    """Nothing of that id is running."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How an invocation ended."""

    request_id: str
    payload: str
    """The handler's result, or the error, as JSON."""
    failed: bool
    log_tail: bytes


def run(function: "Function", event: str, *, request_id: str | None = None) -> Outcome:
    """Invoke a function and wait for its end; `event` is JSON."""
    with _slots:
        return _Invocation(function, event, request_id or str(uuid.uuid4())).run()


def kill_all() -> None:
    """End what runs, and start nothing any more."""
    _closed.set()
    with _lock:
        invocations = list(_running.values())
    for invocation in invocations:
        invocation.kill()


def work_of(request_id: str) -> dict[str, Any]:
    """What the function's process asks for first. Raises InvocationError."""
    return _find(request_id).work()


def note_started(request_id: str) -> None:
    """The handler's module is loaded: from here on the timeout counts. Raises InvocationError."""
    _find(request_id).start_clock()


def note_result(request_id: str, result: Mapping[str, Any]) -> None:
    """What the handler returned or raised. Raises InvocationError."""
    _find(request_id).result = (str(result["payload"]), bool(result.get("error")))


def _find(request_id: str) -> "_Invocation":
    with _lock:
        invocation = _running.get(request_id)
    if invocation is None:
        raise InvocationError(f"no invocation {request_id} is running")
    return invocation


class _Invocation:
    """One run, from the start of the process to its end."""

    def __init__(self, function: "Function", event: str, request_id: str) -> None:
        self.function = function
        self.event = event
        self.request_id = request_id
        self.result: tuple[str, bool] | None = None
        self.log_stream, self._log = _open_log(function)
        self._tail: deque[bytes] = deque(maxlen=256)
        self._handle: Handle | None = None
        self._timed_out = False
        self._clock: threading.Timer | None = None
        self._started = time.monotonic()

    def run(self) -> Outcome:
        self._write(f"START RequestId: {self.request_id} Version: {self.function.shown_version}\n")
        with _lock:
            _running[self.request_id] = self
        try:
            payload, failed = self._run()
        finally:
            with _lock:
                del _running[self.request_id]
            if self._clock is not None:
                self._clock.cancel()
        duration = (time.monotonic() - self._started) * 1000
        self._write(
            f"END RequestId: {self.request_id}\nREPORT RequestId: {self.request_id} Duration: {duration:.2f} ms "
            f"Memory Size: {self.function.memory_size} MB\n"
        )
        self._log.close()
        tail = b"".join(self._tail)[-_TAIL_BYTES:]
        return Outcome(request_id=self.request_id, payload=payload, failed=failed, log_tail=tail)

    def _run(self) -> tuple[str, bool]:
        problem = self.function.why_it_cannot_run
        if problem:
            return self._failure("Runtime.Unsupported", problem)
        try:
            handle = ProcessExecutor().start(self._container())
        except (CannotStartError, ConfigurationError) as error:
            return self._failure("Runtime.ExitError", str(error))
        self._handle = handle
        self._set_clock(INIT_SECONDS)
        if _closed.is_set():
            self.kill()
        exit_code = handle.wait().code
        if self._timed_out:
            seconds = float(self.function.timeout)
            return self._failure("Sandbox.Timedout", f"Task timed out after {seconds:.2f} seconds")
        if self.result is None:
            return self._failure("Runtime.ExitError", f"Runtime exited with error: exit status {exit_code}")
        return self.result

    def kill(self) -> None:
        if self._handle is not None:
            self._handle.kill()

    def start_clock(self) -> None:
        self._started = time.monotonic()
        self._set_clock(float(self.function.timeout))

    def _set_clock(self, seconds: float) -> None:
        if self._clock is not None:
            self._clock.cancel()
        self._clock = threading.Timer(seconds, self._time_is_up)
        self._clock.daemon = True
        self._clock.start()

    def _time_is_up(self) -> None:
        if self.result is None:
            self._timed_out = True
            self.kill()

    def work(self) -> dict[str, Any]:
        function = self.function
        return {
            "request_id": self.request_id,
            "event": self.event,
            "code": base64.b64encode(function.code_bytes).decode(),
            "handler": function.handler,
            "function_name": function.function_name,
            "version": function.shown_version,
            "arn": function.function_arn,
            "memory_mib": str(function.memory_size),
            "timeout_seconds": float(function.timeout),
            "log_group": function.log_group,
            "log_stream": self.log_stream,
        }

    def _container(self) -> ContainerRun:
        function = self.function
        environment = {
            "AWS_REGION": function.region,
            "AWS_DEFAULT_REGION": function.region,
            "AWS_ENDPOINT_URL": function.endpoint,
            "AWS_EC2_METADATA_DISABLED": "true",
            **CREDENTIALS,
            "AWS_EXECUTION_ENV": f"AWS_Lambda_{function.run_time}",
            "AWS_LAMBDA_FUNCTION_NAME": function.function_name,
            "AWS_LAMBDA_FUNCTION_VERSION": function.shown_version,
            "AWS_LAMBDA_FUNCTION_MEMORY_SIZE": str(function.memory_size),
            "AWS_LAMBDA_LOG_GROUP_NAME": function.log_group,
            "AWS_LAMBDA_LOG_STREAM_NAME": self.log_stream,
            "_HANDLER": str(function.handler),
            "TZ": "UTC",
            **{name: str(value) for name, value in (function.environment_vars or {}).items()},
        }
        url = f"{function.endpoint}/trainyard/invocations/{self.request_id}"
        return ContainerRun(
            name=f"trainyard-function-{self.request_id}",
            command=(sys.executable, "-I", "-u", str(_BOOTSTRAP), url),
            environment=environment,
            properties={},
            task={},
            job_id=self.request_id,
            on_output=self._on_output,
        )

    def _on_output(self, output: bytes) -> None:
        self._tail.append(output)
        self._log.write(output)

    def _write(self, text: str) -> None:
        self._on_output(text.encode())

    def _failure(self, kind: str, message: str) -> tuple[str, bool]:
        text = message if kind == "Sandbox.Timedout" else f"Error: {message}"
        self._write(f"{datetime.now(timezone.utc).isoformat()} {self.request_id} {text}\n")
        shown = f"RequestId: {self.request_id} {text}"
        return json.dumps({"errorType": kind, "errorMessage": shown}), True


def _open_log(function: "Function") -> tuple[str, LogStreamWriter]:
    """A stream of its own for each run: its name, and what writes to it."""
    backend = logs_backends[function.account_id][function.region]
    name = function.log_group
    with _lock:
        if name not in backend.groups:
            backend.groups = {**backend.groups, name: LogGroup(backend.account_id, backend.region_name, name)}
        group = backend.groups[name]
        day = f"{datetime.now(timezone.utc):%Y/%m/%d}"
        # In a group that functions share, streams carry the function's name.
        owner = "" if name == function.default_log_group else f"{function.function_name}"
        stream_name = f"{day}/{owner}[{function.shown_version}]{uuid.uuid4().hex}"
        stream = LogStream(group, stream_name)
        group.streams = {**group.streams, stream_name: stream}
    return stream_name, LogStreamWriter(stream)
