"""Connect to the Docker engine that builds, stores and pushes images, and explain its errors.

Docker's own settings choose the engine: DOCKER_HOST, DOCKER_CONTEXT and the docker command's current context. Builds
use the docker command, because docker's SDK does not support BuildKit.
"""

import functools
import os
import re
import shutil
import subprocess
from contextlib import closing
from typing import Any

import docker
from docker.context import ContextAPI
from docker.errors import APIError, DockerException
from docker.models.images import Image as DockerImage

from jobs.core.errors import ConfigurationError, TrainyardError

PLATFORM = "linux/amd64"
"""The platform of all images: all our instance types are x86-64, and so are the locked packages."""

ANSWER_SECONDS = 120
"""Time limit for one answer of the engine. For some answers, it counts the layers of all images."""
TRANSFER_SECONDS = 3600
"""Time limit for silence during a push or pull: the engine reports nothing while it packs a layer or waits."""
_COMMAND_SECONDS = 30

_NO_SPACE = re.compile(r"no space left on device|\[Errno 28\]|disk quota exceeded", re.IGNORECASE)


def connect(silence_seconds: int = ANSWER_SECONDS) -> docker.DockerClient:
    """Return a client of the engine. `silence_seconds` is the timeout of later calls.

    Raises ConfigurationError if no engine answers, or if it refuses this user.
    """
    try:
        with closing(docker.from_env(timeout=ANSWER_SECONDS)) as client:
            client.ping()
        return docker.from_env(timeout=silence_seconds)
    except (DockerException, ValueError) as error:  # ValueError: DOCKER_HOST is not an address
        raise explain(error) from None


def size_bytes(found: DockerImage) -> int:
    """Return the unpacked size of an image, including its base.

    An engine that stores images in containerd reports the packed size instead, but the layer sizes in the history are
    the same in both.
    """
    return sum(int(entry["Size"]) for entry in found.history())


def explain(error: Exception) -> TrainyardError:
    """Convert an error of docker's SDK to one that says what to do next."""
    text = str(error)
    if is_disk_full(text):
        return disk_full(text)
    if isinstance(error, APIError):
        reason = error.explanation or text
        return TrainyardError(f"the Docker engine at {_host()} refused: {reason}")
    if "PermissionError" in text or "Permission denied" in text:
        return ConfigurationError(
            f"this user may not use the Docker engine at {_host()}: permission denied on its socket",
            next_step="sudo usermod --append --groups docker $USER, then sign in again (members of that group can "
            "become root), or install a rootless engine (dockerd-rootless-setuptool.sh install)",
        )
    if "FileNotFoundError" in text or "Connection refused" in text or "ConnectionRefusedError" in text:
        return ConfigurationError(
            f"no Docker engine answers at {_host()}",
            next_step="start it (sudo systemctl start docker, or Docker Desktop), or set DOCKER_HOST to another; "
            "without an engine, 'trainyard local up' still runs jobs, as processes (--executor process)",
        )
    reason = text.removeprefix("Error while fetching server API version: ")
    return ConfigurationError(
        f"the Docker engine at {_host()} cannot be reached: {reason}",
        next_step="correct DOCKER_HOST, or 'docker context use NAME'; 'docker version' shows whether it answers",
    )


def is_disk_full(text: str) -> bool:
    """Return whether an error's text reports a full disk."""
    return bool(_NO_SPACE.search(text))


def disk_full(text: str) -> ConfigurationError:
    """Return the error for a full disk of the engine, quoting the line of `text` that reports it."""
    line = next((line.strip() for line in text.splitlines() if is_disk_full(line)), text.strip())
    return ConfigurationError(
        f"the disk of the Docker engine is full: {line}",
        next_step="docker builder prune (steps of earlier builds) and docker image prune (untagged images), or give "
        "the engine a larger disk (data-root in its daemon.json), then try again",
    )


@functools.cache
def build_command() -> str:
    """Return the first docker command on PATH that can build with BuildKit, which the Dockerfiles need (RUN --mount).

    Raises ConfigurationError if there is none.
    """
    tried = []
    for folder in filter(None, os.environ.get("PATH", os.defpath).split(os.pathsep)):
        path = shutil.which("docker", path=folder)
        if path is None:
            continue
        done = subprocess.run(
            [path, "build", "--help"],
            env={**os.environ, "DOCKER_BUILDKIT": "1"},
            capture_output=True,
            text=True,
            timeout=_COMMAND_SECONDS,
            check=False,
        )
        if done.returncode == 0 and "--progress" in done.stdout:
            return path
        tried.append(f"{path}: {done.stderr.strip().partition(chr(10))[0] or 'it has no --progress'}")
    named = f": {'; '.join(tried)}" if tried else ""
    raise ConfigurationError(
        f"no docker command on PATH can build with BuildKit{named}",
        next_step="install the buildx plug-in (Docker's package docker-buildx-plugin, Ubuntu's docker-buildx), or the "
        "docker command itself (docker-ce-cli, docker.io)",
    )


def _host() -> str:
    """Return the engine's address."""
    if host := os.environ.get("DOCKER_HOST"):
        return host
    try:
        context: dict[str, Any] = ContextAPI.kwargs_from_context()
    except DockerException:
        context = {}
    return str(context.get("base_url") or "unix:///var/run/docker.sock")
