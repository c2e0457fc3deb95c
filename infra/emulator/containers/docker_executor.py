"""Run containers in a Docker engine: the job's image, on the host's network, so that it reaches the emulator.

Every container has the labels `trainyard.job-id` and `trainyard.server-pid`. The next server uses
the pid to find and remove containers that a killed server left.
"""

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import docker
from docker.context import ContextAPI
from docker.errors import APIError, DockerException, ImageNotFound, NotFound
from docker.types import Mount, Ulimit

from infra.emulator.containers import CannotStartError, ContainerRun, Exit
from infra.emulator.ecr import in_registry, is_in_ecr
from infra.emulator.errors import ConfigurationError

JOB_LABEL = "trainyard.job-id"
SERVER_LABEL = "trainyard.server-pid"

ANSWER_SECONDS = 120
"""Timeout for one response of the engine."""

logger = logging.getLogger(__name__)


class DockerExecutor:
    """Starts containers in the Docker engine that the environment names (DOCKER_HOST)."""

    def __init__(self, *, registry: str | None = None) -> None:
        """`registry`: host and port of the container registry to use for ECR.

        Raises ConfigurationError if no engine answers, or this user may not use it.
        """
        self._registry = registry
        self._client = connect()
        check_host_network(self._client.info())
        self._remove_leftovers()

    def start(self, run: ContainerRun) -> "DockerHandle":
        """Start a container. Raises CannotStartError with a reason of ECS, such as CannotPullContainerError."""
        image = self._ensure_image(run.properties["image"])
        options = _host_options(run)
        try:
            return DockerHandle(self._start(run, image, options), run)
        except CannotStartError as error:
            if "ulimits" not in options or "setting rlimit" not in str(error):
                raise
            # For example, locked memory for accelerator drivers. A machine that cannot grant it has no accelerator
            # either, but the rest of the job can run.
            logger.warning("running %s without its ulimits, because this machine does not grant them", run.name)
            del options["ulimits"]
            return DockerHandle(self._start(run, image, options), run)

    def _start(self, run: ContainerRun, image: str, options: Mapping[str, Any]) -> Any:
        try:
            container = self._client.containers.create(
                image,
                list(run.command) or None,
                name=run.name,
                environment=dict(run.environment),
                network_mode="host",
                labels={JOB_LABEL: run.job_id, SERVER_LABEL: str(os.getpid())},
                **options,
            )
        except APIError as error:
            raise CannotStartError(f"CannotCreateContainerError: {_message(error)}") from error
        try:
            container.start()
        except APIError as error:
            container.reload()
            code = container.attrs["State"]["ExitCode"]
            container.remove(force=True, v=True)
            raise CannotStartError(f"CannotStartContainerError: {_message(error)}", exit_code=code) from error
        return container

    def _ensure_image(self, image: str) -> str:
        """Pull an image if necessary, and return its name in the engine."""
        in_ecr = is_in_ecr(image)
        if in_ecr and self._registry:
            image = in_registry(image, self._registry)
        try:
            self._client.images.get(image)
        except ImageNotFound:
            if in_ecr and not self._registry:
                raise CannotStartError(
                    f"CannotPullContainerError: the Docker engine has no {image}, and this emulator has no registry; "
                    "push the image with 'trainyard images push', then deploy again"
                ) from None
            self._pull(image)
        except APIError as error:
            raise CannotStartError(f"CannotPullContainerError: {_message(error)}") from error
        return image

    def _pull(self, image: str) -> None:
        try:
            has_tag = ":" in image.rsplit("/", 1)[-1] or "@" in image
            self._client.images.pull(image, tag=None if has_tag else "latest")
        except (APIError, ImageNotFound) as error:
            raise CannotStartError(f"CannotPullContainerError: {_message(error)}") from error

    def _remove_leftovers(self) -> None:
        for container in self._client.containers.list(all=True, filters={"label": SERVER_LABEL}):
            server = container.labels[SERVER_LABEL]
            if not Path("/proc", server).exists():
                logger.warning("removing container %s, which server %s left", container.name, server)
                container.remove(force=True, v=True)


class DockerHandle:
    """A container in the Docker engine."""

    def __init__(self, container: Any, run: ContainerRun) -> None:
        self._container = container
        self._run = run

    def wait(self) -> Exit:
        """Deliver the output until the container ends, then remove it."""
        try:
            for chunk in self._container.logs(stream=True, follow=True):
                self._run.on_output(chunk)
            code = int(self._container.wait()["StatusCode"])
            self._container.reload()
            killed_for_memory = self._container.attrs["State"]["OOMKilled"]
        finally:
            self._container.remove(force=True, v=True)
        reason = "OutOfMemoryError: Container killed due to memory usage" if killed_for_memory else None
        return Exit(code=code, reason=reason)

    def terminate(self) -> None:
        self._signal("SIGTERM")

    def kill(self) -> None:
        self._signal("SIGKILL")

    def exec_target(self) -> Mapping[str, Any]:
        """Return the container's id and the DOCKER_HOST of the server."""
        return {"container": self._container.id, "docker_host": os.environ.get("DOCKER_HOST", "")}

    def _signal(self, name: str) -> None:
        try:
            self._container.kill(signal=name)
        except NotFound:
            pass
        except APIError as error:
            if error.status_code != 409:  # 409: it is no longer running
                raise


def connect() -> Any:
    """Connect to the engine that the docker command would use.

    Raises ConfigurationError if no engine answers, or this user may not use it.
    """
    try:
        client = docker.from_env(timeout=ANSWER_SECONDS)
        client.ping()
    except DockerException as error:
        raise _explain(str(error)) from None
    return client


def _explain(error: str) -> ConfigurationError:
    """Turn an error of the Docker SDK into a message for the user."""
    host = _engine_host()
    if "PermissionError" in error or "Permission denied" in error:
        return ConfigurationError(
            f"this user may not use the Docker engine at {host}: permission denied on its socket",
            next_step="sudo usermod --append --groups docker $USER, then sign in again (that group is as good as root)",
        )
    if "FileNotFoundError" in error or "Connection refused" in error or "ConnectionRefusedError" in error:
        return ConfigurationError(
            f"no Docker engine answers at {host}",
            next_step="start it (sudo systemctl start docker, or Docker Desktop), or set DOCKER_HOST; "
            "without an engine, 'trainyard local up' runs jobs as processes (--executor process)",
        )
    reason = error.removeprefix("Error while fetching server API version: ")
    return ConfigurationError(
        f"the Docker engine at {host} cannot be reached: {reason}",
        next_step="correct DOCKER_HOST, or run 'docker context use NAME'; check with 'docker version'",
    )


def _engine_host() -> str:
    if host := os.environ.get("DOCKER_HOST"):
        return host
    try:
        context: dict[str, Any] = ContextAPI.kwargs_from_context()
    except DockerException:
        context = {}
    return str(context.get("base_url") or "unix:///var/run/docker.sock")


def check_host_network(info: Mapping[str, Any]) -> None:
    """Check that containers on the host's network can reach the emulator. `info`: the output of `docker info`.

    Raises ConfigurationError if they cannot, because jobs would wait for AWS forever.
    """
    if any("rootless" in option for option in info.get("SecurityOptions") or ()):
        raise ConfigurationError(
            "the Docker engine is rootless, so its containers cannot reach the emulator on loopback",
            next_step="use an engine that runs as root, or run jobs as local processes: --executor process",
        )
    if info.get("OperatingSystem") == "Docker Desktop":
        # The engine does not report whether host networking is enabled.
        logger.warning(
            "Docker Desktop's containers reach the emulator only with host networking; enable it in "
            "Settings > Resources > Network"
        )


def _host_options(run: ContainerRun) -> dict[str, Any]:
    """Return the container's settings from the job definition as options of docker.containers.create."""
    properties, task = run.properties, run.task
    linux = properties.get("linuxParameters") or {}
    options: dict[str, Any] = {
        "privileged": properties.get("privileged", False),
        "read_only": properties.get("readonlyRootFilesystem", False),
        "user": properties.get("user"),
        "init": linux.get("initProcessEnabled", False),
        "ipc_mode": task.get("ipcMode"),
        "pid_mode": "host" if task.get("pidMode") == "host" else None,
        "shm_size": f"{linux['sharedMemorySize']}m" if linux.get("sharedMemorySize") else None,
        "mem_limit": f"{run.memory_mib}m" if run.memory_mib is not None else None,
        "ulimits": [
            Ulimit(name=limit["name"], soft=limit["softLimit"], hard=limit["hardLimit"])
            for limit in properties.get("ulimits") or ()
        ],
        "mounts": _mounts(properties, task),
        "devices": _devices(linux),
        "tmpfs": {
            mount["containerPath"]: ",".join([f"size={mount['size']}m", *mount.get("mountOptions", [])])
            for mount in linux.get("tmpfs") or ()
        },
    }
    return {name: value for name, value in options.items() if value}


def _mounts(properties: Mapping[str, Any], task: Mapping[str, Any]) -> list[Mount]:
    volumes = {volume["name"]: volume for volume in (task or properties).get("volumes") or ()}
    mounts = []
    for point in properties.get("mountPoints") or ():
        path = (volumes.get(point["sourceVolume"], {}).get("host") or {}).get("sourcePath")
        if path is None:  # an empty volume: the engine creates an anonymous volume
            mounts.append(Mount(point["containerPath"], None, read_only=point.get("readOnly", False)))
            continue
        # The ECS agent's `docker run -v` creates the folder, `--mount` does not.
        Path(path).mkdir(parents=True, exist_ok=True)
        mounts.append(Mount(point["containerPath"], path, type="bind", read_only=point.get("readOnly", False)))
    return mounts


def _devices(linux: Mapping[str, Any]) -> list[str]:
    devices = []
    letters = {"READ": "r", "WRITE": "w", "MKNOD": "m"}
    for device in linux.get("devices") or ():
        if not Path(device["hostPath"]).exists():
            # For example, EFA devices: a laptop has none, but the rest of the job can run.
            logger.warning("this machine has no device %s, so the container runs without it", device["hostPath"])
            continue
        permissions = "".join(letters[name] for name in device.get("permissions") or letters)
        devices.append(f"{device['hostPath']}:{device.get('containerPath', device['hostPath'])}:{permissions}")
    return devices


def _message(error: APIError) -> str:
    return f"Error response from daemon: {error.explanation or error}"
