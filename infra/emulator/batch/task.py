"""One task: the container of one node in one attempt, started, and stopped by SIGTERM and then SIGKILL."""

import threading
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from infra.emulator.batch.quotas import stop_timeout_seconds
from infra.emulator.containers.executor import CannotStartError, Handle
from infra.emulator.server_errors import record_exception

_MAX_REASON_CHARACTERS = 255


@dataclass(kw_only=True)
class TaskRecord:
    """What DescribeJobs shows of a task; times are milliseconds since 1970."""

    task_arn: str
    container_instance_arn: str
    instance_id: str
    exit_code: int | None = None
    reason: str | None = None
    """The container's: an error of the container runtime, mostly absent."""
    log_stream_name: str | None = None
    started_at: int | None = None
    stopped_at: int | None = None
    status_reason: str | None = None


class Task(threading.Thread):
    """Runs the container of a node in a separate thread."""

    def __init__(
        self,
        record: TaskRecord,
        *,
        start_container: Callable[[], Handle],
        on_running: Callable[[], None],
        on_ended: Callable[["Task"], None],
    ) -> None:
        """From the task's thread: `on_running` is called when the container runs, `on_ended` at the end.

        `start_container` raises CannotStartError.
        """
        super().__init__(name=f"task-{record.task_arn.rsplit('/', 1)[-1]}", daemon=True)
        self.record = record
        self.settled = threading.Event()
        """Set once it runs, or never will."""
        self.finished = threading.Event()
        self.succeeded = False
        self.started = False
        """Whether the container ever ran."""
        self._start_container = start_container
        self._on_running = on_running
        self._on_ended = on_ended
        self._lock = threading.Lock()
        self._handle: Handle | None = None
        self._stop_asked = False
        self._timers: list[threading.Timer] = []

    def stop(self, *, grace_seconds: float | None = None) -> None:
        """Ask it to stop: SIGTERM, then SIGKILL after the stop timeout, or after `grace_seconds`.

        Returns at once. A task that has not been started yet then starts no container.
        """
        with self._lock:
            again, self._stop_asked = self._stop_asked, True
            if self._handle is not None and (not again or grace_seconds is not None):
                self._end(self._handle, grace_seconds)

    def entrance(self) -> Mapping[str, Any] | None:
        """Return what its container is entered by; None if it does not run."""
        with self._lock:
            return self._handle.entrance() if self._handle is not None else None

    def run(self) -> None:
        try:
            self._run()
        except Exception as error:  # noqa: BLE001 - a job may end in any way, the server continues
            record_exception("Batch", f"running {self.name}", error)
            if self._handle is not None:
                self._handle.kill()
            self.record.status_reason = f"{type(error).__name__}: {error} (an error of the embedded AWS, see its log)"
        finally:
            with self._lock:
                self._handle = None
                for timer in self._timers:
                    timer.cancel()
            try:
                self._on_ended(self)
            finally:
                self.finished.set()
                self.settled.set()

    def _run(self) -> None:
        if self._stop_asked:
            return
        try:
            handle = self._start_container()
        except CannotStartError as error:
            self.record.reason, self.record.exit_code = str(error)[:_MAX_REASON_CHARACTERS], error.exit_code
            return
        self.started = True
        self._take(handle)
        self._on_running()
        self.settled.set()
        result = handle.wait()
        self.record.exit_code = result.code
        self.record.reason = result.reason[:_MAX_REASON_CHARACTERS] if result.reason else None
        self.succeeded = result.code == 0 and not self._stop_asked

    def _take(self, handle: Handle) -> None:
        with self._lock:
            self._handle = handle
            if self._stop_asked:  # while it was being started
                self._end(handle, None)

    def _end(self, handle: Handle, grace_seconds: float | None) -> None:
        handle.terminate()
        timer = threading.Timer(stop_timeout_seconds() if grace_seconds is None else grace_seconds, handle.kill)
        timer.daemon = True
        self._timers.append(timer)
        timer.start()


def new_task_record(*, account_id: str, region: str, cluster: str) -> TaskRecord:
    """Return a task on a new instance."""
    prefix = f"arn:aws:ecs:{region}:{account_id}"
    return TaskRecord(
        task_arn=f"{prefix}:task/{cluster}/{uuid.uuid4().hex}",
        container_instance_arn=f"{prefix}:container-instance/{cluster}/{uuid.uuid4().hex}",
        instance_id=f"i-0{uuid.uuid4().hex[:16]}",
    )
