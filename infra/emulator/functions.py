"""Lambda: moto's API with Python functions that really run, in function_host.py, and write logs.

Source: AWS Lambda developer guide, "How Lambda handles errors and retries with asynchronous invocation": two retries,
after one minute and then two; then the dead-letter queue.
"""

import base64
import json
import logging
import os
import select
import sys
import tempfile
import threading
import time
import uuid
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import moto.awslambda.models
from moto.awslambda.exceptions import InvalidParameterValueException
from moto.awslambda.models import EventInvokeConfig, LambdaBackend, LambdaFunction, lambda_backends
from moto.logs.models import logs_backends
from moto.sqs.models import sqs_backends
from moto.utilities.arns import parse_arn

from infra.emulator.containers import KILLED_EXIT_CODE, ContainerRun
from infra.emulator.containers.logs import LogStreamWriter, add_stream
from infra.emulator.containers.process_executor import ProcessExecutor
from infra.emulator.credentials import Credentials
from infra.emulator.errors import record_exception
from infra.emulator.settings import function_retry_seconds

logger = logging.getLogger(__name__)

MAX_CONCURRENT = 4
"""Maximum number of concurrent invocations; others wait. The default of an AWS account is 1000."""
_TAIL_BYTES = 4096
_POLL_SECONDS = 0.2
_TIMED_OUT = -14
"""Exit code of a process that SIGALRM killed."""
_slots = threading.BoundedSemaphore(MAX_CONCURRENT)
_workers = ThreadPoolExecutor(MAX_CONCURRENT, thread_name_prefix="functions")
_stopping = threading.Event()


def install(endpoint: str, credentials: Credentials) -> None:
    """Make moto create functions that run. Call it before the server starts; `endpoint` is its address."""
    Function.endpoint = endpoint
    Function.credentials = credentials
    moto.awslambda.models.LambdaFunction = Function
    LambdaBackend.put_function_event_invoke_config = _put_event_invoke_config


def shutdown() -> None:
    """Kill running invocations and drop waiting ones."""
    _stopping.set()
    _workers.shutdown(wait=False, cancel_futures=True)
    _host.close()


class Function(LambdaFunction):
    """Adds to moto's function the settings that moto drops, and an Invoke that runs the code."""

    endpoint: str
    """Address of the server; set by `install`."""
    credentials: Credentials
    """Credentials of the server; set by `install`."""

    def __init__(self, account_id: str, spec: dict[str, Any], region: str, version: str | int = 1) -> None:
        super().__init__(account_id=account_id, spec=spec, region=region, version=version)
        self.dead_letter_config: dict[str, Any] | None = spec.get("DeadLetterConfig")
        self.logging_config: dict[str, Any] = spec.get("LoggingConfig") or {}

    @property
    def log_group(self) -> str:
        return str(self.logging_config.get("LogGroup") or f"/aws/lambda/{self.function_name}")

    @property
    def retries(self) -> int:
        """Return the maximum number of retries of a failed asynchronous invocation."""
        config = self.event_invoke_config[0].config if self.event_invoke_config else {}
        return int(config.get("MaximumRetryAttempts", 2))

    @property
    def unsupported_reason(self) -> str | None:
        """Return why the emulator cannot run the function, or None if it can."""
        if self.package_type != "Zip":
            return "the emulator runs functions from zip files, not from container images"
        if not str(self.run_time).startswith("python"):
            return f"the emulator runs only Python functions, not {self.run_time}"
        if self.layers:
            return "the emulator does not support layers"
        return None

    @property
    def environment(self) -> dict[str, str]:
        """Return all environment variables of the function."""
        return {
            **self.credentials.environment,
            "AWS_REGION": self.region,
            "AWS_DEFAULT_REGION": self.region,
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_LAMBDA_FUNCTION_NAME": self.function_name,
            "AWS_LAMBDA_LOG_GROUP_NAME": self.log_group,
            "TZ": "UTC",
            **{name: str(value) for name, value in (self.environment_vars or {}).items()},
        }

    def invoke(self, body: Any, request_headers: Any, response_headers: Any) -> bytes:
        """Run the Invoke operation. Raises InvalidParameterValueException if the payload is not JSON."""
        text = body.decode() if isinstance(body, bytes) else body or "{}"
        try:
            json.loads(text)
        except ValueError as error:
            raise InvalidParameterValueException(f"Could not parse request body into json: {error}") from None
        headers = {str(name).lower(): value for name, value in dict(request_headers).items()}
        if headers.get("x-amz-invocation-type", "RequestResponse") == "Event":
            invoke_later(self, text)
            return b""
        outcome = run(self, text)
        if outcome.failed:
            response_headers["x-amz-function-error"] = "Unhandled"
        response_headers["x-amz-log-result"] = base64.b64encode(outcome.log_tail).decode()
        return outcome.payload.encode()

    def get_configuration(self, on_create: bool = False) -> dict[str, Any]:
        configuration: dict[str, Any] = super().get_configuration(on_create)
        configuration["LoggingConfig"] = {"LogFormat": "Text", "LogGroup": self.log_group}
        if self.dead_letter_config:
            configuration["DeadLetterConfig"] = self.dead_letter_config
        return configuration

    def update_configuration(self, config_updates: dict[str, Any]) -> dict[str, Any]:
        if "DeadLetterConfig" in config_updates:
            self.dead_letter_config = config_updates["DeadLetterConfig"]
        if "LoggingConfig" in config_updates:
            self.logging_config = config_updates["LoggingConfig"] or {}
        super().update_configuration(config_updates)
        return self.get_configuration()

    def _set_function_code(self, updated_spec: dict[str, Any]) -> None:
        try:
            super()._set_function_code(updated_spec)
        except ValueError as error:  # how moto reports a missing bucket or object
            raise InvalidParameterValueException(str(error.args[-1])) from None


def find(arn: str) -> Function:
    """Return the function with an ARN. Raises moto's UnknownFunctionException."""
    place = parse_arn(arn)
    function: Function = lambda_backends[place.account][place.region].get_function(arn)
    return function


def _put_event_invoke_config(backend: Any, function_name: str, config: dict[str, Any]) -> Any:
    """Replace the configuration. moto would append the new one and keep using the first."""
    if config.get("DestinationConfig"):
        raise InvalidParameterValueException("the emulator does not send results to destinations")
    function = backend.get_function(function_name)
    settings = {name: config[name] for name in ("MaximumRetryAttempts", "MaximumEventAgeInSeconds") if name in config}
    function.event_invoke_config[:] = [EventInvokeConfig(function.function_arn, function.last_modified, settings)]
    return function.event_invoke_config[0].response()


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How an invocation ended."""

    payload: str
    """The handler's result, or the error, as JSON."""
    failed: bool
    log_tail: bytes


def invoke_later(function: Function, event: str, *, number: int = 1) -> None:
    """Run a function in the background. `event` is JSON; `number` counts the tries from 1."""
    with suppress(RuntimeError):  # the server is shutting down
        _workers.submit(_run_with_retries, function, event, number)


def _run_with_retries(function: Function, event: str, number: int) -> None:
    try:
        outcome = run(function, event)
        if not outcome.failed or _stopping.is_set():
            return
        if number <= function.retries:
            timer = threading.Timer(
                function_retry_seconds() * number, invoke_later, (function, event), {"number": number + 1}
            )
            timer.daemon = True
            timer.start()
        elif target := (function.dead_letter_config or {}).get("TargetArn"):
            arn = parse_arn(target)
            sqs_backends[arn.account][arn.region].send_message(arn.resource_id, event)
    except Exception as error:  # noqa: BLE001 - nothing else would report it
        record_exception("Lambda", f"invoking {function.function_name}", error)


def run(function: Function, event: str) -> Outcome:
    """Invoke a function and wait until it ends. `event` is JSON."""
    request_id = str(uuid.uuid4())
    with _slots:
        started = time.monotonic()
        if problem := function.unsupported_reason:
            output, payload, failed = _failure("Runtime.Unsupported", f"Error: {problem}")
        else:
            output, payload, failed = _outcome(_host.call(_work(function, event, request_id)), function)
    end = f"END RequestId: {request_id}\nREPORT RequestId: {request_id} Duration: {time.monotonic() - started:.2f} s\n"
    log = f"START RequestId: {request_id}\n{output}{end}".encode()
    _write(function, log)
    return Outcome(payload=payload, failed=failed, log_tail=log[-_TAIL_BYTES:])


def _work(function: Function, event: str, request_id: str) -> dict[str, Any]:
    return {
        "request_id": request_id,
        "event": event,
        "code": base64.b64encode(function.code_bytes).decode(),
        "handler": str(function.handler),
        "environment": function.environment,
        "function_name": function.function_name,
        "arn": function.function_arn,
        "timeout_seconds": float(function.timeout),
        "log_group": function.log_group,
    }


def _outcome(end: dict[str, Any], function: Function) -> tuple[str, str, bool]:
    """Return output, payload and whether the invocation failed."""
    if result := end["result"]:
        return end["output"], result["payload"], bool(result.get("error"))
    if end["code"] == _TIMED_OUT:
        message = f"Task timed out after {float(function.timeout):.2f} seconds"
        output, *rest = _failure("Sandbox.Timedout", message)
    else:
        message = f"Error: Runtime exited with error: exit status {end['code']}"
        output, *rest = _failure("Runtime.ExitError", message)
    return end["output"] + output, *rest


def _failure(kind: str, message: str) -> tuple[str, str, bool]:
    return f"{message}\n", json.dumps({"errorType": kind, "errorMessage": message}), True


def _write(function: Function, output: bytes) -> None:
    """Write the output of one run to a new log stream."""
    backend = logs_backends[function.account_id][function.region]
    stream_name = f"{datetime.now(timezone.utc):%Y/%m/%d}/{function.function_name}[$LATEST]{uuid.uuid4().hex}"
    writer = LogStreamWriter(add_stream(backend, function.log_group, stream_name))
    writer.write(output)
    writer.close()


class _Host:
    """The process that runs functions (function_host.py), started for the first invocation."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._waiting: dict[str, Future[dict[str, Any]]] = {}
        self._requests: int | None = None
        self._handle: Any = None
        self._ended = threading.Event()
        """Set when the process has ended, so nothing reads requests."""
        self._rest = b""

    def call(self, work: dict[str, Any]) -> dict[str, Any]:
        """Run one invocation and return how it ended."""
        future: Future[dict[str, Any]] = Future()
        with self._lock:
            if _stopping.is_set():
                return {"code": KILLED_EXIT_CODE, "result": None, "output": ""}
            if self._requests is None:
                self._requests = self._start()
            self._waiting[work["request_id"]] = future
            requests, ended = self._requests, self._ended
        with self._writing:
            _write_all(requests, json.dumps(work).encode() + b"\n", ended)
        return future.result()

    def close(self) -> None:
        with self._lock:
            if self._handle is not None:
                self._handle.kill()

    def _start(self) -> int:
        """Start the process; return the descriptor that requests are written to."""
        folder = tempfile.TemporaryDirectory(prefix="trainyard-functions-")
        fifo = str(Path(folder.name, "requests"))
        os.mkfifo(fifo, 0o600)
        run = ContainerRun(
            name="trainyard-functions",
            command=(sys.executable, "-I", "-u", str(Path(__file__).with_name("function_host.py")), fifo),
            environment={},
            properties={},
            task={},
            job_id="functions",
            on_output=self._on_output,
        )
        self._handle = ProcessExecutor().start(run)
        self._ended = threading.Event()
        threading.Thread(
            target=self._watch, args=(self._handle, folder, self._ended), name="functions-host", daemon=True
        ).start()
        # Opening the FIFO only for writing would wait for the process to open it, but the process may have failed.
        return os.open(fifo, os.O_RDWR | os.O_NONBLOCK)

    def _watch(self, handle: Any, folder: "tempfile.TemporaryDirectory[str]", ended: threading.Event) -> None:
        code = handle.wait().code
        ended.set()
        folder.cleanup()
        with self._writing, self._lock:
            if self._requests is not None:
                os.close(self._requests)
            self._requests, self._handle, self._rest = None, None, b""
            waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            future.set_result({"code": code, "result": None, "output": ""})

    def _on_output(self, output: bytes) -> None:
        *lines, self._rest = (self._rest + output).split(b"\n")
        for line in lines:
            if not line.startswith(b"{"):
                logger.warning("functions: %s", line.decode(errors="replace"))  # an error of function_host.py itself
                continue
            end = json.loads(line)
            with self._lock:
                future = self._waiting.pop(end["request_id"], None)
            if future is not None:
                future.set_result(end)


def _write_all(descriptor: int, text: bytes, ended: threading.Event) -> None:
    """Write a request, which is longer than the pipe's buffer, to a process that may end before reading all of it."""
    while text and not ended.is_set():
        if select.select([], [descriptor], [], _POLL_SECONDS)[1]:
            with suppress(BlockingIOError):
                text = text[os.write(descriptor, text) :]


_host = _Host()
