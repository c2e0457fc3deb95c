"""The processes that functions run in: one invocation at a time, then kept for the next, as Lambda keeps its own.

A process gets code and events over HTTP from the server, and answers the same way. It is started, watched and cleaned
up after as those of Batch jobs are.
"""

import base64
import sys
import threading
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from infra.emulator.containers.executor import ContainerRun
from infra.emulator.containers.process_executor import ProcessExecutor
from infra.emulator.functions.function import Function

MAX_WARM = 6
"""Environments that wait for an event; where there would be more, the one that waits longest ends."""
WARM_SECONDS = 60
"""How long one waits. Lambda promises nothing; here each holds some 50 MB of this machine's memory."""
END_OF_OUTPUT = b"\0end of an invocation's output\0"
"""Between two invocations' output; bootstrap.py writes it."""

_BOOTSTRAP = Path(__file__).with_name("bootstrap.py")
_STOP_SECONDS = 10

_changed = threading.Condition()
"""Guards what follows, and tells when there is something new in `_warm`."""
_all: dict[str, "Environment"] = {}
_warm: list["Environment"] = []
"""The one that waits longest comes first."""
_clocks: list[threading.Thread] = []
"""The one thread that ends what has waited too long, once there is something to end."""
_closed = threading.Event()


class NoSuchEnvironmentError(Exception):
    """Nothing of that id lives, or it has nothing to do."""


class Served(Protocol):
    """An invocation, as its environment knows it."""

    def work(self) -> dict[str, Any]:
        """Return what the process is to do: it takes it up now."""

    def on_output(self, output: bytes) -> None:
        """Take a piece of what the process wrote meanwhile."""

    def on_result(self, payload: str, *, failed: bool) -> None:
        """Take what the handler returned or raised, as JSON."""

    def on_over(self, exit_code: int | None) -> None:
        """Hear that all output was delivered. `exit_code` is the process's, where it has ended."""


def take(function: Function) -> "Environment":
    """An environment for one invocation: a warm one of the function as it is now, or else a new one.

    Raises CannotStartError, ConfigurationError.
    """
    identity = _identity(function)
    with _changed:
        for environment in reversed(_warm):
            if environment.is_alive and environment.identity == identity:
                _warm.remove(environment)
                return environment
    environment = Environment(function, identity)
    with _changed:
        _all[environment.id] = environment
    environment.start()
    if _closed.is_set():
        environment.kill()
    return environment


def give_back(environment: "Environment") -> None:
    """Keep an environment that has nothing to do for a while."""
    with _changed:
        environment.waits_since = time.monotonic()
        _warm.append(environment)
        surplus = _warm.pop(0) if len(_warm) > MAX_WARM or _closed.is_set() else None
        if not _clocks:
            _clocks.append(threading.Thread(target=_end_cold, name="warm-environments", daemon=True))
            _clocks[0].start()
        _changed.notify_all()
    if surplus is not None:
        surplus.kill()


def find(environment_id: str) -> "Environment":
    """Find a living environment by its id. Raises NoSuchEnvironmentError."""
    with _changed:
        environment = _all.get(environment_id)
    if environment is None:
        raise NoSuchEnvironmentError(f"no environment {environment_id} is alive")
    return environment


def close() -> None:
    """End all, and whatever is taken from now on; returns when they are gone."""
    _closed.set()
    with _changed:
        environments = list(_all.values())
        _warm.clear()
        _changed.notify_all()
    for environment in environments:
        environment.kill()
    for environment in environments:
        environment.join(_STOP_SECONDS)


def _end_cold() -> None:
    """End each environment that has waited long enough; one thread does so for all."""
    with _changed:
        while not _closed.is_set():
            left = _warm[0].waits_since + WARM_SECONDS - time.monotonic() if _warm else None
            if left is None or left > 0:
                _changed.wait(left)
            else:
                _warm.pop(0).kill()


def _identity(function: Function) -> Mapping[str, Any]:
    """Return what an environment is made from; made from anything else it may not serve the function any more."""
    return {"arn": function.function_arn, "code": function.code_sha_256, "variables": _variables(function)}


def _variables(function: Function) -> dict[str, str]:
    return {
        **function.credentials.environment,
        "AWS_REGION": function.region,
        "AWS_DEFAULT_REGION": function.region,
        "AWS_ENDPOINT_URL": function.endpoint,
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_EXECUTION_ENV": f"AWS_Lambda_{function.run_time}",
        "AWS_LAMBDA_FUNCTION_NAME": function.function_name,
        "AWS_LAMBDA_FUNCTION_VERSION": function.shown_version,
        "AWS_LAMBDA_FUNCTION_MEMORY_SIZE": str(function.memory_size),
        "AWS_LAMBDA_LOG_GROUP_NAME": function.log_group,
        "_HANDLER": str(function.handler),
        "TZ": "UTC",
        **{name: str(value) for name, value in (function.environment_vars or {}).items()},
    }


class Environment:
    """A process that serves one function, from its start to its end."""

    def __init__(self, function: Function, identity: Mapping[str, Any]) -> None:
        self.id = str(uuid.uuid4())
        self.identity = identity
        self.waits_since = 0.0
        self._function = function
        self._code = function.code_bytes
        self._served: Served | None = None
        self._is_waiting = False
        self._exit_code: int | None = None
        self._changed = threading.Condition()
        self._held_back = b""
        self._thread = threading.Thread(target=self._watch, name=f"environment-{self.id}", daemon=True)

    @property
    def is_alive(self) -> bool:
        return self._exit_code is None

    def start(self) -> None:
        """Start the process. Raises CannotStartError, ConfigurationError."""
        url = f"{self._function.endpoint}/trainyard/environments/{self.id}"
        run = ContainerRun(
            name=f"trainyard-function-{self.id}",
            command=(sys.executable, "-I", "-u", str(_BOOTSTRAP), url),
            environment=self.identity["variables"],
            properties={},
            task={},
            job_id=self.id,
            on_output=self._on_output,
        )
        try:
            self._handle = ProcessExecutor().start(run)
        except Exception:
            with _changed:
                del _all[self.id]
            raise
        self._thread.start()

    def serve(self, served: Served) -> None:
        """Hand over an invocation, whose `on_over` tells of the end."""
        with self._changed:
            self._served = served
            self._is_waiting = True
            self._changed.notify_all()
        if not self.is_alive:
            self._over(self._exit_code)

    def code(self) -> dict[str, str]:
        """Return what the process asks for first, once an invocation is there to hear what modules print."""
        with self._changed:
            self._changed.wait_for(lambda: self._served is not None or not self.is_alive)
        return {"code": base64.b64encode(self._code).decode(), "handler": str(self._function.handler)}

    def next_work(self) -> dict[str, Any] | None:
        """Wait for an invocation; the process asks for it then and after each result. None: there will be no more."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_waiting or not self.is_alive)
            served = self._served
            self._is_waiting = False
        return None if served is None else served.work()

    def result(self, payload: str, *, failed: bool) -> None:
        """Take what the process says of the invocation. Raises NoSuchEnvironmentError where it has none."""
        served = self._served
        if served is None:
            raise NoSuchEnvironmentError(f"environment {self.id} serves no invocation")
        served.on_result(payload, failed=failed)

    def kill(self) -> None:
        """Harmless once it has ended."""
        self._handle.kill()

    def join(self, timeout_seconds: float) -> None:
        """Wait for its end."""
        self._thread.join(timeout_seconds)

    def _watch(self) -> None:
        code = self._handle.wait().code
        self._deliver(self._held_back)
        with _changed:
            del _all[self.id]
            if self in _warm:
                _warm.remove(self)
        with self._changed:
            self._exit_code = code
            self._changed.notify_all()
        self._over(code)

    def _on_output(self, output: bytes) -> None:
        *ended, rest = (self._held_back + output).split(END_OF_OUTPUT)
        for piece in ended:
            self._deliver(piece)
            self._over(None)
        cut = rest.rfind(END_OF_OUTPUT[:1])
        whole = len(rest) if cut < 0 or not END_OF_OUTPUT.startswith(rest[cut:]) else cut
        self._deliver(rest[:whole])
        self._held_back = rest[whole:]

    def _deliver(self, output: bytes) -> None:
        """Hand on what was written during an invocation; between two, it is nobody's."""
        if output and self._served is not None:
            self._served.on_output(output)

    def _over(self, exit_code: int | None) -> None:
        with self._changed:
            served, self._served = self._served, None
        if served is not None:
            served.on_over(exit_code)
