"""One task: the containers of one node in one attempt, started in order, stopped together.

Source: Amazon ECS developer guide, "Container definition parameters": essential containers, dependencies between
containers, stop timeouts.
"""

import queue
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from infra.emulator.batch.overrides import Container, Node
from infra.emulator.batch.quotas import stop_timeout_seconds
from infra.emulator.containers.executor import CannotStartError, Exit, Handle
from infra.emulator.server_errors import record_exception

_MAX_REASON_CHARACTERS = 255


@dataclass(kw_only=True)
class ContainerRecord:
    """What DescribeJobs shows of a container."""

    name: str
    exit_code: int | None = None
    reason: str | None = None
    log_stream_name: str | None = None


@dataclass(kw_only=True)
class TaskRecord:
    """What DescribeJobs shows of a task; times are milliseconds since 1970."""

    task_arn: str
    container_instance_arn: str
    instance_id: str
    containers: list[ContainerRecord] = field(default_factory=list)
    started_at: int | None = None
    stopped_at: int | None = None
    status_reason: str | None = None


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a task ended by itself."""

    succeeded: bool
    decisive: ContainerRecord | None
    """The essential container whose end was the task's, or which failed first."""
    started: bool
    """False: no container ever ran."""


class _Signal(Enum):
    STOP = auto()
    TIME_IS_UP = auto()


StartContainer = Callable[[Container, ContainerRecord], Handle]
"""Starts a container through the executor and notes its log stream. Raises CannotStartError."""


class Task(threading.Thread):
    """Runs the containers of a node in a thread of its own; `ended` holds the result once `finished` is set."""

    def __init__(
        self,
        node: Node,
        record: TaskRecord,
        *,
        start_container: StartContainer,
        on_running: Callable[[], None],
        on_ended: Callable[["Task"], None],
    ) -> None:
        """From the task's thread: `on_running` is called when the first container runs, `on_ended` at the end."""
        super().__init__(name=f"task-{record.task_arn.rsplit('/', 1)[-1]}", daemon=True)
        self.record = record
        self.settled = threading.Event()
        """Set once it runs, or never will."""
        self.finished = threading.Event()
        self.ended = Ended(succeeded=False, decisive=None, started=False)
        self._node = node
        self._start_container = start_container
        self._on_running = on_running
        self._on_ended = on_ended
        self._events: queue.SimpleQueue[tuple[str, Exit] | _Signal] = queue.SimpleQueue()
        self._handles: dict[str, Handle] = {}
        self._records = {container.name: ContainerRecord(name=container.name) for container in node.containers}
        record.containers = list(self._records.values())
        self._running: set[str] = set()
        self._exited: dict[str, int] = {}
        self._decisive: ContainerRecord | None = None
        self._stop_asked = threading.Event()
        self._stop_began: float | None = None
        self._grace_seconds: float | None = None

    @property
    def ended_unstarted(self) -> bool:
        """Say whether it is over and no container ever ran."""
        return self.finished.is_set() and not self.ended.started

    def stop(self, *, grace_seconds: float | None = None) -> None:
        """Ask it to stop: SIGTERM, then SIGKILL after the containers' stop timeouts, or after `grace_seconds`.

        Returns at once. A task that has not been started yet then starts no container.
        """
        if grace_seconds is not None:
            self._grace_seconds = grace_seconds
        self._stop_asked.set()
        self._events.put(_Signal.STOP)

    def entrance(self) -> Mapping[str, Any] | None:
        """Return what its first container is entered by; None where that does not run, or where nobody may enter it."""
        first = self._node.containers[0].name
        definition = self._node.task or self._node.properties.get("containerProperties", {})
        may_enter = definition.get("enableExecuteCommand") and first in self._running
        return self._handles[first].entrance() if may_enter else None

    def run(self) -> None:
        try:
            self._run()
        except Exception as error:  # noqa: BLE001 - a job may end in any way, the server goes on
            record_exception("Batch", f"running {self.name}", error)
            for handle in self._handles.values():
                handle.kill()
            self.record.status_reason = f"{type(error).__name__}: {error} (an error of the embedded AWS, see its log)"
        finally:
            try:
                self._on_ended(self)
            finally:
                self.finished.set()
                self.settled.set()

    def _run(self) -> None:
        waiting = list(self._node.containers)
        killed = False
        while True:
            waiting = self._start_ready(waiting)
            if not self._running:
                break  # what still waits then waits for what cannot come
            self.settled.set()
            event = self._next_event(killed=killed)
            if event is _Signal.TIME_IS_UP:
                for name in self._running:
                    self._handles[name].kill()
                killed = True
            elif event is _Signal.STOP:
                if self._stop_began is None or self._grace_seconds is not None:
                    self._begin_stop()
                    killed = False
            else:
                self._note_exit(*event)
        failed = [
            record
            for container in self._node.containers
            if container.essential and (record := self._records[container.name]).exit_code not in (0, None)
        ]
        decisive = self._decisive or next(iter(failed), None)
        self.ended = Ended(
            succeeded=decisive is not None and decisive.exit_code == 0 and decisive.reason is None,
            decisive=decisive,
            started=bool(self._handles),
        )

    def _start_ready(self, waiting: list[Container]) -> list[Container]:
        """Start what waits for nothing any more; the containers that still wait."""
        progress = True
        while progress and self._stop_began is None and not self._stop_asked.is_set():
            progress = False
            for container in waiting:
                ready = self._is_ready(container)
                if ready is None:
                    continue
                waiting = [other for other in waiting if other is not container]
                progress = True
                record = self._records[container.name]
                if ready:
                    self._start(container, record)
                else:
                    record.reason = "A container that this one depends on did not succeed"
                    self._decide(container, record)
                break
        return waiting

    def _is_ready(self, container: Container) -> bool | None:
        """Say whether to start a container now; False: it can never start, None: not yet."""
        for dependency in container.properties.get("dependsOn") or ():
            name, condition = dependency["containerName"], dependency["condition"]
            if name not in self._records:
                return False
            if condition == "START":
                if name not in self._handles:
                    return False if name in self._exited else None
            elif name not in self._exited:
                return None
            elif condition == "SUCCESS" and self._exited[name] != 0:
                return False
        return True

    def _start(self, container: Container, record: ContainerRecord) -> None:
        try:
            handle = self._start_container(container, record)
        except CannotStartError as error:
            record.reason = str(error)[:_MAX_REASON_CHARACTERS]
            record.exit_code = error.exit_code
            self._exited[container.name] = error.exit_code if error.exit_code is not None else 1
            self._decide(container, record)
            return
        first = not self._handles
        self._handles[container.name] = handle
        self._running.add(container.name)
        threading.Thread(
            target=self._wait_for, args=(container.name, handle), name=f"{self.name}-{container.name}", daemon=True
        ).start()
        if first:
            self._on_running()

    def _wait_for(self, name: str, handle: Handle) -> None:
        try:
            result = handle.wait()
        except Exception as error:  # noqa: BLE001 - whatever the executor trips over, the attempt must end
            record_exception("Batch", f"waiting for {self.name} {name}", error)
            handle.kill()
            result = Exit(code=1, reason=f"ContainerRuntimeError: {error}")
        self._events.put((name, result))

    def _next_event(self, *, killed: bool) -> tuple[str, Exit] | _Signal:
        if self._stop_began is None or killed:
            return self._events.get()
        left = self._stop_began + self._stop_timeout() - time.monotonic()
        try:
            return self._events.get(timeout=max(0, left))
        except queue.Empty:
            return _Signal.TIME_IS_UP

    def _note_exit(self, name: str, result: Exit) -> None:
        self._running.discard(name)
        self._exited[name] = result.code
        record = self._records[name]
        record.exit_code = result.code
        record.reason = result.reason[:_MAX_REASON_CHARACTERS] if result.reason else None
        container = next(item for item in self._node.containers if item.name == name)
        if self._stop_began is None:
            self._decide(container, record)

    def _decide(self, container: Container, record: ContainerRecord) -> None:
        """The end of an essential container is the end of the task."""
        if container.essential and self._stop_began is None:
            self._decisive = record
            self._begin_stop()

    def _begin_stop(self) -> None:
        self._stop_began = self._stop_began or time.monotonic()
        for name in self._running:
            self._handles[name].terminate()

    def _stop_timeout(self) -> float:
        if self._grace_seconds is not None:
            return self._grace_seconds
        own = [container.properties.get("stopTimeout") for container in self._node.containers]
        return max((float(seconds) for seconds in own if seconds is not None), default=stop_timeout_seconds())


def new_task_record(*, account_id: str, region: str, cluster: str) -> TaskRecord:
    """A task on an instance of its own."""
    prefix = f"arn:aws:ecs:{region}:{account_id}"
    return TaskRecord(
        task_arn=f"{prefix}:task/{cluster}/{uuid.uuid4().hex}",
        container_instance_arn=f"{prefix}:container-instance/{cluster}/{uuid.uuid4().hex}",
        instance_id=f"i-0{uuid.uuid4().hex[:16]}",
    )
