"""One attempt of a job: its task, or those of all its nodes, from the start of the main node to the end of the last.

Source for several nodes: AWS Batch user guide, "Job lifecycle for MNP jobs": the main node starts first and the others
once it runs; its exit ends the job, the exit of another does nothing; the timeout is the job's.
"""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from moto.logs.models import LogsBackend

from infra.emulator.batch.compute import ComputeEnvironment
from infra.emulator.batch.environment import SecretError, container_environment, resolve_secrets
from infra.emulator.batch.job import Job, now_milliseconds
from infra.emulator.batch.job_definition import resource
from infra.emulator.batch.retry import Outcome
from infra.emulator.batch.task import Task, TaskRecord, new_task_record
from infra.emulator.containers.executor import CannotStartError, ContainerRun, Executor, Exit, Handle
from infra.emulator.containers.logs import LogDestinationError, LogStreamWriter, open_log_stream
from infra.emulator.credentials import Credentials
from infra.emulator.server_errors import record_exception

EXITED = "Essential container in task exited"
FAILED_TO_START = "Task failed to start"
TIMED_OUT = "Job attempt duration exceeded timeout"


class Cause(Enum):
    """Why an attempt was stopped from outside."""

    TERMINATED = auto()
    TIMED_OUT = auto()
    SHUTDOWN = auto()


@dataclass(frozen=True, kw_only=True)
class Result:
    """How an attempt ended."""

    succeeded: bool
    outcome: Outcome
    may_retry: bool
    """False where it was terminated or timed out: Batch never starts such a job again."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """What an attempt needs besides its job."""

    environment: ComputeEnvironment
    executor: Executor
    credentials: Credentials
    logs: LogsBackend
    account_id: str
    region: str
    cluster: str


class Attempt(threading.Thread):
    """Supervises one attempt in a separate thread."""

    def __init__(
        self,
        job: Job,
        number: int,
        place: Place,
        *,
        on_running: Callable[[Job], None],
        on_node_ended: Callable[[Job, bool], None],
        on_ended: Callable[["Attempt", Result], None],
    ) -> None:
        """The callbacks come from the attempt's threads; `on_running` for each that runs: the job, or its nodes."""
        super().__init__(name=f"attempt-{job.id}-{number}", daemon=True)
        self.job = job
        self.number = number
        self.place = place
        self._on_running = on_running
        self._on_node_ended = on_node_ended
        self._on_ended = on_ended
        self._lock = threading.Lock()
        self._cause: tuple[Cause, str] | None = None
        self._reclaimed: set[str] = set()
        self._units = job.nodes or [job]
        self._main_unit = self._units[0]
        self._tasks: dict[str, Task] = {unit.id: self._new_task(unit) for unit in self._units}
        self._main = self._tasks[self._main_unit.id]
        for unit in self._units:
            unit.current = self._tasks[unit.id].record
        job.current = self._main.record

    def stop(self, cause: Cause, reason: str, *, grace_seconds: float | None = None) -> None:
        """End the attempt: SIGTERM to all nodes, SIGKILL later. Returns at once; the first cause is the one shown."""
        with self._lock:
            self._cause = self._cause or (cause, reason)
        for task in self._tasks.values():
            task.stop(grace_seconds=grace_seconds)

    def reclaim(self, unit: Job) -> bool:
        """Take the instance away that `unit` (the job, or one of its nodes) runs on; False where it has ended there."""
        if unit is self.job:
            unit = self._main_unit
        task = self._tasks[unit.id]
        if task.finished.is_set():
            return False
        self._reclaimed.add(unit.id)
        task.stop()
        return True

    def entrance(self, unit: Job) -> Mapping[str, Any] | None:
        """Return what the container of `unit` (the job, or one of its nodes) is entered by; None where it cannot be."""
        if not self.job.submission.task.get("enableExecuteCommand"):
            return None
        return self._tasks[(self._main_unit if unit is self.job else unit).id].entrance()

    def run(self) -> None:
        try:
            result = self._run()
        except Exception as error:  # noqa: BLE001 - whatever happens, the job must end and the server go on
            record_exception("Batch", f"running {self.name}", error)
            for task in self._tasks.values():
                task.stop(grace_seconds=0)
            reason = f"{type(error).__name__}: {error} (an error of the embedded AWS, see its log)"
            self._main.record.status_reason = reason
            outcome = Outcome(exit_code=None, reason=None, status_reason=reason)
            result = Result(succeeded=False, outcome=outcome, may_retry=False)
        self._on_ended(self, result)

    def _run(self) -> Result:
        self._main.start()
        self._main.settled.wait()
        others = [unit for unit in self._units if unit is not self._main_unit]
        if self._main.finished.is_set() and not self._main.started:
            others = []
        for unit in others:
            self._tasks[unit.id].start()
        if not self._main.finished.wait(self.job.submission.timeout_seconds):
            self.stop(Cause.TIMED_OUT, TIMED_OUT)
            self._main.finished.wait()
        for unit in others:
            self._tasks[unit.id].stop()
        for unit in others:
            self._tasks[unit.id].finished.wait()
        return self._conclude()

    def _conclude(self) -> Result:
        record = self._main.record
        record.status_reason = reason = self._status_reason(self._main_unit)
        outcome = Outcome(exit_code=record.exit_code, reason=record.reason, status_reason=reason)
        return Result(
            succeeded=self._main.succeeded and self._cause is None and self._main_unit.id not in self._reclaimed,
            outcome=outcome,
            may_retry=self._cause is None,
        )

    def _status_reason(self, unit: Job) -> str:
        task = self._tasks[unit.id]
        if self._cause is not None:
            return self._cause[1]
        if unit.id in self._reclaimed:
            return f"Host EC2 (instance {task.record.instance_id}) terminated."
        if task.record.status_reason is not None:
            return task.record.status_reason
        return EXITED if task.started else FAILED_TO_START

    def _new_task(self, unit: Job) -> Task:
        record = new_task_record(account_id=self.place.account_id, region=self.place.region, cluster=self.place.cluster)

        def running() -> None:
            record.started_at = now_milliseconds()
            self._on_running(unit)

        def ended(task: Task) -> None:
            record.stopped_at = now_milliseconds()
            if unit.id in self._reclaimed:  # with its instance gone, nothing reports how the container ended
                record.exit_code = None
            record.status_reason = self._status_reason(unit)
            if unit is not self.job:
                self._on_node_ended(unit, task.succeeded)

        return Task(
            record,
            start_container=lambda: self._start_container(unit, record),
            on_running=running,
            on_ended=ended,
        )

    def _start_container(self, unit: Job, record: TaskRecord) -> Handle:
        """Start the container of a job or node. Raises CannotStartError."""
        submission, place = self.job.submission, self.place
        container = submission.container
        if submission.overrides_too_long:
            raise CannotStartError("Container Overrides length must be at most 8192")
        try:
            secrets = resolve_secrets(container.get("secrets") or (), account_id=place.account_id, region=place.region)
        except SecretError as error:
            record.status_reason = str(error)
            raise CannotStartError(str(error)) from error
        task_id = record.task_arn.rsplit("/", 1)[-1]
        try:
            log = open_log_stream(
                place.logs,
                container.get("logConfiguration"),
                definition=submission.definition.name,
                container=container["name"],
                task_id=task_id,
            )
        except LogDestinationError as error:
            raise CannotStartError(f"CannotStartContainerError: Error response from daemon: {error}") from error
        own = {item["name"]: item.get("value", "") for item in container.get("environment") or ()}
        memory = resource(container, "MEMORY")
        run = ContainerRun(
            name=f"trainyard-{task_id}-{container['name']}",
            command=tuple(container.get("command") or ()),
            environment=container_environment(
                own={**own, **secrets},
                endpoint=submission.endpoint,
                credentials=place.credentials,
                region=place.region,
                job_id=unit.id,
                attempt=self.number,
                queue=submission.queue.name,
                compute_environment=place.environment.name,
                array=unit.array,
                node=unit.node_position,
            ),
            properties=container,
            task=submission.task,
            memory_mib=None if memory is None else int(memory),
            job_id=unit.id,
            on_output=log.write,
        )
        handle = place.executor.start(run)
        record.log_stream_name = log.name
        return _LoggedHandle(handle, log)


class _LoggedHandle:
    """A handle whose log stream is complete when it has ended."""

    def __init__(self, handle: Handle, log: LogStreamWriter) -> None:
        self._handle = handle
        self._log = log

    def wait(self) -> Exit:
        try:
            return self._handle.wait()
        finally:
            self._log.close()

    def terminate(self) -> None:
        self._handle.terminate()

    def kill(self) -> None:
        self._handle.kill()

    def entrance(self) -> Mapping[str, Any]:
        return self._handle.entrance()
