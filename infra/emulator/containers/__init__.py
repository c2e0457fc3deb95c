"""What runs a job's containers: the one interface that local processes and a Docker engine share."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

KILLED_EXIT_CODE = 128 + 9
"""What Docker reports of a process that SIGKILL ended; other signals likewise."""


@dataclass(frozen=True, kw_only=True)
class ContainerRun:
    """One start of one container."""

    name: str
    """Unique among all that ever run: job, attempt and container, in characters that Docker takes."""
    command: tuple[str, ...]
    environment: Mapping[str, str]
    """All that Batch, the job definition, the submission and the instance role give."""
    properties: Mapping[str, Any]
    """The container in the shape of the Batch API: image, user, ulimits, mount points, devices, …"""
    task: Mapping[str, Any]
    """The rest of its task: ipcMode, pidMode, volumes."""
    memory_mib: int | None = None
    """Its limit of memory, where it has one."""
    job_id: str
    on_output: Callable[[bytes], None]
    """Takes what the container writes to stdout and stderr, in the order of writing, while it runs."""


@dataclass(frozen=True, kw_only=True)
class Exit:
    """How a container ended."""

    code: int
    """128 and the signal's number where a signal ended it."""
    reason: str | None = None
    """Where the container runtime has something to say: OutOfMemoryError, say."""


class CannotStartError(Exception):
    """The container never ran; the message is what ECS shows as the container's reason."""

    def __init__(self, message: str, *, exit_code: int | None = None) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        """What Docker reports of it: 127 for a command that does not exist, 126 for one that may not run."""


class Handle(Protocol):
    """A container that was started."""

    def wait(self) -> Exit:
        """Deliver the output, and return once the container and everything that it started is gone.

        To be called once, at once, and from a thread that does nothing else.
        """

    def terminate(self) -> None:
        """Send SIGTERM to the container's command, as a stop of the container begins. Harmless once it is gone."""

    def kill(self) -> None:
        """End the container and everything that it started. Harmless once it is gone."""

    def entrance(self) -> Mapping[str, Any]:
        """Return what a program of this machine enters the container by.

        `pid`, a process of it; or `container`, its id in the Docker engine at `docker_host`.
        """


class Executor(Protocol):
    """Starts containers."""

    def start(self, run: ContainerRun) -> Handle:
        """Start a container, its command already running on return. Raises CannotStartError."""
