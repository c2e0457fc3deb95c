"""Define how the emulator runs containers, either as local processes or in a Docker engine."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

KILLED_EXIT_CODE = 128 + 9
"""The exit code that Docker reports after SIGKILL: 128 plus the number of the signal, as for any signal."""


@dataclass(frozen=True, kw_only=True)
class ContainerRun:
    """One run of one container."""

    name: str
    """Unique over all runs: job, attempt and container, in characters that Docker allows."""
    command: tuple[str, ...]
    environment: Mapping[str, str]
    """All variables from Batch, the job definition, the submission and the instance role."""
    properties: Mapping[str, Any]
    """The container in the shape of the Batch API: image, user, ulimits, mount points, devices, …"""
    task: Mapping[str, Any]
    """The rest of its task: ipcMode, pidMode, volumes."""
    memory_mib: int | None = None
    """Memory limit, if there is one."""
    job_id: str
    on_output: Callable[[bytes], None]
    """Called with the container's output (stdout and stderr, in order) while it runs."""


@dataclass(frozen=True, kw_only=True)
class Exit:
    """How a container ended."""

    code: int
    """128 plus the number of the signal if a signal ended it."""
    reason: str | None = None
    """The reason that the container runtime gives, if any, such as OutOfMemoryError."""


class CannotStartError(Exception):
    """The container never ran. The message is the reason that ECS shows for the container."""

    def __init__(self, message: str, *, exit_code: int | None = None) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        """Docker's exit code: 127 if the command does not exist, 126 if it is not executable."""


class Handle(Protocol):
    """A started container."""

    def wait(self) -> Exit:
        """Deliver the output, and return when the container and every process that it started are gone.

        Call it once, right after the start, in a thread that does nothing else.
        """

    def terminate(self) -> None:
        """Send SIGTERM to the container's command. Harmless if the container is gone."""

    def kill(self) -> None:
        """Kill the container and every process that it started. Harmless if the container is gone."""

    def exec_target(self) -> Mapping[str, Any]:
        """Return how a program on this machine can run a command in the container.

        The keys are `pid`, a process of the container, or `container`, its id in the Docker engine at `docker_host`.
        """


class Executor(Protocol):
    """Starts containers."""

    def start(self, run: ContainerRun) -> Handle:
        """Start a container; its command is running on return. Raises CannotStartError."""
