"""One run of a function: its environment, its log, its timeout and how it ended."""

import json
import threading
import time
import uuid
from collections import deque
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from moto.logs.models import LogGroup, LogStream, logs_backends

from infra.emulator.containers.executor import CannotStartError
from infra.emulator.containers.logs import LogStreamWriter
from infra.emulator.errors import ConfigurationError
from infra.emulator.functions import environment as environments
from infra.emulator.functions.environment import Environment
from infra.emulator.functions.function import Function

MAX_CONCURRENT = 4
"""Invocations that run at once on this machine; the others wait. An AWS account starts with 1000."""
INIT_SECONDS = 60
"""For the start of the process and the import of the handler's module, which do not count against the timeout. Lambda
gives 10; a laptop that trains beside it is slower."""
_TAIL_BYTES = 4096

_slots = threading.BoundedSemaphore(MAX_CONCURRENT)
_creating_log = threading.Lock()


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How an invocation ended."""

    request_id: str
    payload: str
    """The handler's result, or the error, as JSON."""
    failed: bool
    log_tail: bytes


def run(function: Function, event: str, *, request_id: str | None = None) -> Outcome:
    """Invoke a function and wait for its end; `event` is JSON."""
    with _slots:
        return _Invocation(function, event, request_id or str(uuid.uuid4())).run()


class _Invocation:
    """One run of a function, as its environment serves it (environment.Served)."""

    def __init__(self, function: Function, event: str, request_id: str) -> None:
        self._function = function
        self._event = event
        self._request_id = request_id
        self._result: tuple[str, bool] | None = None
        self._log_stream, self._log = _open_log(function)
        self._tail: deque[bytes] = deque(maxlen=256)
        self._environment: Environment | None = None
        self._over = threading.Event()
        self._exit_code: int | None = None
        self._timed_out = False
        self._clock: threading.Timer | None = None
        self._started = time.monotonic()

    def run(self) -> Outcome:
        self._write(f"START RequestId: {self._request_id} Version: {self._function.shown_version}\n")
        try:
            payload, failed = self._run()
        finally:
            if self._clock is not None:
                self._clock.cancel()
        duration = (time.monotonic() - self._started) * 1000
        self._write(
            f"END RequestId: {self._request_id}\nREPORT RequestId: {self._request_id} Duration: {duration:.2f} ms "
            f"Memory Size: {self._function.memory_size} MB\n"
        )
        self._log.close()
        tail = b"".join(self._tail)[-_TAIL_BYTES:]
        return Outcome(request_id=self._request_id, payload=payload, failed=failed, log_tail=tail)

    def _run(self) -> tuple[str, bool]:
        problem = self._function.why_it_cannot_run
        if problem:
            return self._failure("Runtime.Unsupported", problem)
        try:
            self._environment = environments.take(self._function)
        except (CannotStartError, ConfigurationError) as error:
            return self._failure("Runtime.ExitError", str(error))
        self._set_clock(INIT_SECONDS)
        self._environment.serve(self)
        self._over.wait()
        if self._exit_code is None:
            environments.give_back(self._environment)
        if self._timed_out:
            seconds = float(self._function.timeout)
            return self._failure("Sandbox.Timedout", f"Task timed out after {seconds:.2f} seconds")
        if self._result is None:
            return self._failure("Runtime.ExitError", f"Runtime exited with error: exit status {self._exit_code}")
        return self._result

    def work(self) -> dict[str, Any]:
        """The handler's module is loaded, and the event is handed over: from here on the timeout counts."""
        self._started = time.monotonic()
        self._set_clock(float(self._function.timeout))
        function = self._function
        return {
            "request_id": self._request_id,
            "event": self._event,
            "function_name": function.function_name,
            "version": function.shown_version,
            "arn": function.function_arn,
            "memory_mib": str(function.memory_size),
            "timeout_seconds": float(function.timeout),
            "log_group": function.log_group,
            "log_stream": self._log_stream,
        }

    def on_output(self, output: bytes) -> None:
        self._tail.append(output)
        self._log.write(output)

    def on_result(self, payload: str, *, failed: bool) -> None:
        self._result = (payload, failed)

    def on_over(self, exit_code: int | None) -> None:
        self._exit_code = exit_code
        self._over.set()

    def _set_clock(self, seconds: float) -> None:
        if self._clock is not None:
            self._clock.cancel()
        self._clock = threading.Timer(seconds, self._time_is_up)
        self._clock.daemon = True
        self._clock.start()

    def _time_is_up(self) -> None:
        if self._result is None and self._environment is not None:
            self._timed_out = True
            self._environment.kill()

    def _write(self, text: str) -> None:
        self.on_output(text.encode())

    def _failure(self, kind: str, message: str) -> tuple[str, bool]:
        text = message if kind == "Sandbox.Timedout" else f"Error: {message}"
        self._write(f"{datetime.now(timezone.utc).isoformat()} {self._request_id} {text}\n")
        shown = f"RequestId: {self._request_id} {text}"
        return json.dumps({"errorType": kind, "errorMessage": shown}), True


def _open_log(function: Function) -> tuple[str, LogStreamWriter]:
    """A stream of its own for each run: its name, and what writes to it."""
    backend = logs_backends[function.account_id][function.region]
    name = function.log_group
    with _creating_log:
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
