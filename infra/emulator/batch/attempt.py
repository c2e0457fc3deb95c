"""Run one attempt of a job: one task, or a task for each node.

Sources:
- AWS Batch user guide, "Job lifecycle for MNP jobs": the main node starts first, and the others when it is running. The
  exit of the main node ends the job; the exit of another node does nothing. The timeout applies to the job.
- AWS Batch user guide, "Job environment variables", "Array jobs" and "Environment variables" of multi-node parallel
  jobs. Many public job scripts show that AWS_BATCH_JOB_ID ends with the child or node (`:1`, `#1`).
- Amazon ECS developer guide, "Pass Secrets Manager secrets through environment variables": the ARN of a secret, with an
  optional `:json-key:version-stage:version-id`. A secret is read when its container starts, and only the
  container's environment has its value. Systems Manager parameters are refused, because no stack uses them as secrets.
"""

import json
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from moto.core.exceptions import ServiceException
from moto.ec2.models import ec2_backends
from moto.logs.models import LogsBackend
from moto.secretsmanager.models import secretsmanager_backends
from werkzeug.exceptions import HTTPException

from infra.emulator.batch.compute import ComputeEnvironment
from infra.emulator.batch.job import Job, TaskRecord, now_milliseconds
from infra.emulator.batch.job_definition import resource
from infra.emulator.containers import CannotStartError, ContainerRun, Executor, Handle
from infra.emulator.containers.logs import LogDestinationError, LogStreamWriter, open_log_stream
from infra.emulator.credentials import Credentials
from infra.emulator.errors import record_exception
from infra.emulator.settings import stop_timeout_seconds

LOOPBACK = "127.0.0.1"
"""Address of every node: all run on this machine."""
EXITED = "Essential container in task exited"
FAILED_TO_START = "Task failed to start"
TIMED_OUT = "Job attempt duration exceeded timeout"
_MAX_REASON_CHARACTERS = 255


@dataclass(frozen=True, kw_only=True)
class Services:
    """Services that all attempts of an account and region share."""

    executor: Executor
    credentials: Credentials
    logs: LogsBackend
    account_id: str
    region: str


class Attempt(threading.Thread):
    """Supervises one attempt, in a thread."""

    def __init__(
        self,
        job: Job,
        number: int,
        environment: ComputeEnvironment,
        services: Services,
        *,
        on_running: Callable[[Job], None],
        on_node_ended: Callable[[Job, bool], None],
        on_ended: Callable[["Attempt"], None],
    ) -> None:
        """The attempt's threads call the callbacks; `on_running` is called for the job, or for each of its nodes."""
        super().__init__(name=f"attempt-{job.id}-{number}", daemon=True)
        self.job = job
        self.number = number
        self.environment = environment
        self.services = services
        self.on_running = on_running
        self.on_node_ended = on_node_ended
        self.stop_reason: str | None = None
        """Why the attempt was stopped: terminated, timed out or shut down. Batch never retries such a job."""
        self.succeeded = False
        self.failed_inside = False
        """Whether the emulator itself failed."""
        self._on_ended = on_ended
        self._created = time.monotonic()
        self._lock = threading.Lock()
        self._tasks = {unit.id: Task(self, unit) for unit in job.nodes or [job]}
        self._main, *self._others = self._tasks.values()
        job.current = self._main.record

    @property
    def seconds(self) -> float:
        """Return how long the attempt has existed."""
        return time.monotonic() - self._created

    def stop(self, reason: str, *, grace_seconds: float | None = None) -> None:
        """Stop all nodes with SIGTERM, then SIGKILL. Returns at once. DescribeJobs shows the first reason."""
        with self._lock:
            self.stop_reason = self.stop_reason or reason
        for task in self._tasks.values():
            task.stop(grace_seconds=grace_seconds)

    def reclaim(self, unit: Job) -> bool:
        """Reclaim the instance of `unit` (the job, or one of its nodes). Returns False if it has already ended."""
        task = self._task(unit)
        if task.finished.is_set():
            return False
        task.reclaimed = True
        task.stop()
        return True

    def metadata(self, instance_id: str) -> Mapping[str, str] | None:
        """Return what an instance's metadata service answers, by path; None if no task of the attempt has the instance.

        Batch's choice among the types and subnets of a compute environment is not modelled: the instance has the first.
        """
        if all(task.record.instance_id != instance_id for task in self._tasks.values()):
            return None
        resources = self.environment.resources
        subnet = ec2_backends[self.services.account_id][self.services.region].get_subnet(resources["subnets"][0])
        found = {
            "instance-life-cycle": "spot" if resources["type"] == "SPOT" else "on-demand",
            "placement/availability-zone": subnet.availability_zone,
        }
        if resources.get("instanceTypes"):
            found["instance-type"] = resources["instanceTypes"][0]
        return found

    def exec_target(self, unit: Job) -> Mapping[str, Any] | None:
        """Return how to run a command in the container of `unit` (the job, or a node), or None if not allowed."""
        if not self.job.submission.task.get("enableExecuteCommand"):
            return None
        return self._task(unit).exec_target()

    def run(self) -> None:
        try:
            self._run()
        except Exception as error:  # noqa: BLE001 - the job must end and the server keep running
            self.failed_inside = True
            self._main.record.status_reason = note_failure(self.name, error)
            for task in self._tasks.values():
                task.stop(grace_seconds=0)
        self._on_ended(self)

    def _run(self) -> None:
        self._main.start()
        self._main.settled.wait()
        others = self._others if self._main.started or not self._main.finished.is_set() else []
        for task in others:
            task.start()
        if not self._main.finished.wait(self.job.submission.timeout_seconds):
            self.stop(TIMED_OUT)
            self._main.finished.wait()
        for task in others:
            task.stop()
        for task in others:
            task.finished.wait()
        self._main.record.status_reason = self._main.status_reason()
        self.succeeded = self._main.succeeded and self.stop_reason is None and not self._main.reclaimed

    def _task(self, unit: Job) -> "Task":
        return self._tasks.get(unit.id, self._main)


class Task(threading.Thread):
    """Runs the container of a job or node in one attempt, in a thread."""

    def __init__(self, attempt: Attempt, unit: Job) -> None:
        super().__init__(name=f"task-{unit.id}-{attempt.number}", daemon=True)
        self.record = unit.current = TaskRecord.on_new_instance(
            f"arn:aws:ecs:{attempt.services.region}:{attempt.services.account_id}", attempt.environment.ecs_name
        )
        self.settled = threading.Event()
        """Set when the container runs, or never will."""
        self.finished = threading.Event()
        self.succeeded = False
        self.started = False
        """Whether the container ever ran."""
        self.reclaimed = False
        self._attempt = attempt
        self._unit = unit
        self._lock = threading.Lock()
        self._handle: Handle | None = None
        self._stop_requested = False
        self._timers: list[threading.Timer] = []

    def stop(self, *, grace_seconds: float | None = None) -> None:
        """Send SIGTERM, then SIGKILL after `grace_seconds` (default: the stop timeout). Returns at once.

        A task that has not started yet will not start its container.
        """
        with self._lock:
            again, self._stop_requested = self._stop_requested, True
            if self._handle is not None and (not again or grace_seconds is not None):
                self._end(self._handle, grace_seconds)

    def exec_target(self) -> Mapping[str, Any] | None:
        """Return how to run a command in the container, or None if it is not running."""
        with self._lock:
            return self._handle.exec_target() if self._handle is not None else None

    def status_reason(self) -> str:
        if self._attempt.stop_reason is not None:
            return self._attempt.stop_reason
        if self.reclaimed:
            return f"Host EC2 (instance {self.record.instance_id}) terminated."
        return self.record.status_reason or (EXITED if self.started else FAILED_TO_START)

    def run(self) -> None:
        try:
            self._run()
        except Exception as error:  # noqa: BLE001 - the server must keep running
            if self._handle is not None:
                self._handle.kill()
            self.record.status_reason = note_failure(self.name, error)
        finally:
            with self._lock:
                self._handle = None
                for timer in self._timers:
                    timer.cancel()
            try:
                self._note_end()
            finally:
                self.finished.set()
                self.settled.set()

    def _run(self) -> None:
        if self._stop_requested:
            return
        try:
            handle, log = self._start_container()
        except CannotStartError as error:
            self.record.reason, self.record.exit_code = str(error)[:_MAX_REASON_CHARACTERS], error.exit_code
            return
        self.started = True
        self._take(handle)
        self.record.started_at = now_milliseconds()
        self._attempt.on_running(self._unit)
        self.settled.set()
        try:
            result = handle.wait()
        finally:
            log.close()
        self.record.exit_code = result.code
        self.record.reason = result.reason[:_MAX_REASON_CHARACTERS] if result.reason else None
        self.succeeded = result.code == 0 and not self._stop_requested

    def _note_end(self) -> None:
        self.record.stopped_at = now_milliseconds()
        if self.reclaimed:  # the instance is gone, so nothing reports how the container ended
            self.record.exit_code = None
        self.record.status_reason = self.status_reason()
        if self._unit is not self._attempt.job:
            self._attempt.on_node_ended(self._unit, self.succeeded)

    def _take(self, handle: Handle) -> None:
        with self._lock:
            self._handle = handle
            if self._stop_requested:  # stopped while the container was starting
                self._end(handle, None)

    def _end(self, handle: Handle, grace_seconds: float | None) -> None:
        handle.terminate()
        timer = threading.Timer(stop_timeout_seconds() if grace_seconds is None else grace_seconds, handle.kill)
        timer.daemon = True
        self._timers.append(timer)
        timer.start()

    def _start_container(self) -> tuple[Handle, LogStreamWriter]:
        """Start the container and open its log stream. Raises CannotStartError."""
        unit, services, submission = self._unit, self._attempt.services, self._unit.submission
        container = submission.container
        if submission.overrides_too_long:
            raise CannotStartError("Container Overrides length must be at most 8192")
        try:
            secrets = resolve_secrets(
                container.get("secrets") or (), account_id=services.account_id, region=services.region
            )
        except SecretError as error:
            self.record.status_reason = str(error)
            raise CannotStartError(str(error)) from error
        task_id = self.record.task_arn.rsplit("/", 1)[-1]
        try:
            log = open_log_stream(
                services.logs,
                container.get("logConfiguration"),
                definition=submission.definition.name,
                container=container["name"],
                task_id=task_id,
            )
        except LogDestinationError as error:
            raise CannotStartError(f"CannotStartContainerError: Error response from daemon: {error}") from error
        declared = {item["name"]: item.get("value", "") for item in container.get("environment") or ()}
        memory = resource(container, "MEMORY")
        run = ContainerRun(
            name=f"trainyard-{task_id}-{container['name']}",
            command=tuple(container.get("command") or ()),
            environment=self._environment({**declared, **secrets}),
            properties=container,
            task=submission.task,
            memory_mib=None if memory is None else int(memory),
            job_id=unit.id,
            on_output=log.write,
        )
        handle = services.executor.start(run)
        self.record.log_stream_name = log.name
        return handle, log

    def _environment(self, declared: Mapping[str, str]) -> dict[str, str]:
        """Return the container's variables. `declared` are those of the definition, submission and secrets."""
        unit, services, attempt = self._unit, self._attempt.services, self._attempt
        metadata = f"{unit.submission.endpoint}/trainyard/instances/{self.record.instance_id}"
        variables = {
            **services.credentials.environment,
            "AWS_REGION": services.region,
            "AWS_DEFAULT_REGION": services.region,
            "AWS_ENDPOINT_URL": unit.submission.endpoint,
            "AWS_EC2_METADATA_SERVICE_ENDPOINT": metadata,
            **declared,
            "AWS_BATCH_JOB_ID": unit.id,
            "AWS_BATCH_JOB_ATTEMPT": str(attempt.number),
            "AWS_BATCH_JQ_NAME": unit.submission.queue.name,
            "AWS_BATCH_CE_NAME": attempt.environment.name,
        }
        if unit.array is not None:
            variables["AWS_BATCH_JOB_ARRAY_INDEX"] = str(unit.array.index)
            variables["AWS_BATCH_JOB_ARRAY_SIZE"] = str(unit.array.size)
        if unit.node is not None:
            variables["AWS_BATCH_JOB_NODE_INDEX"] = str(unit.node)
            variables["AWS_BATCH_JOB_NUM_NODES"] = str(unit.submission.nodes or 1)
            variables["AWS_BATCH_JOB_MAIN_NODE_INDEX"] = "0"
            if not unit.is_main_node:
                variables["AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS"] = LOOPBACK
        return variables


def note_failure(what: str, error: Exception) -> str:
    """Record an error of the emulator; return the status reason for DescribeJobs."""
    record_exception("Batch", f"running {what}", error)
    return f"{type(error).__name__}: {error} (an error of the emulator; see its log)"


_ARN_PARTS = 7
"""Number of parts in the ARN of a secret: arn:aws:secretsmanager:<region>:<account>:secret:<name>."""


class SecretError(Exception):
    """A secret cannot be read, so the container cannot start. The message is that of ECS on EC2, not on Fargate.

    Source: Amazon ECS developer guide, "Troubleshooting Amazon ECS ResourceNotFoundException errors".
    """

    def __init__(self, region: str, arn: str, reason: str) -> None:
        super().__init__(f"Fetching secret data from AWS Secrets Manager in region {region}: secret {arn}: {reason}")


def resolve_secrets(secrets: Iterable[Mapping[str, str]], *, account_id: str, region: str) -> dict[str, str]:
    """Return the values of secrets by the names of their variables. Raises SecretError if one cannot be read."""
    return {secret["name"]: _secret(secret["valueFrom"], account_id=account_id, region=region) for secret in secrets}


def _secret(source: str, *, account_id: str, region: str) -> str:
    if ":secretsmanager:" not in source:
        raise SecretError(region, source, "the emulator reads secrets of Secrets Manager only")
    parts = source.split(":")
    arn = ":".join(parts[:_ARN_PARTS])
    key, stage, version = (*parts[_ARN_PARTS:], "", "", "")[:3]
    try:
        answer = secretsmanager_backends[account_id][region].get_secret_value(arn, version or None, stage or None)
        text = answer.get("SecretString")
    except (ServiceException, HTTPException) as error:
        raise SecretError(region, arn, f"ResourceNotFoundException: {getattr(error, 'message', error)}") from None
    if text is None:
        raise SecretError(region, arn, "it has no text value")
    if not key:
        return str(text)
    try:
        return str(json.loads(text)[key])
    except (ValueError, KeyError, TypeError):
        raise SecretError(region, arn, f"did not contain json key {key}") from None
