"""The Docker engine that images are built, kept and pushed with, and what a user reads where it cannot.

Which engine it is, is Docker's own business: DOCKER_HOST, DOCKER_CONTEXT and the current context of the docker command
count as they do for that command. What is built goes through the command too: docker's SDK cannot speak to BuildKit.
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
"""The platform of every image: all instance types here are x86-64, and so are the packages that are locked."""

ANSWER_SECONDS = 120
"""How long the engine may take for one answer; it counts the layers of all images for some."""
TRANSFER_SECONDS = 3600
"""How long it may be silent while it pushes or pulls: it tells nothing of a layer that it packs, or waits to send."""
_COMMAND_SECONDS = 30

_NO_SPACE = re.compile(r"no space left on device|\[Errno 28\]|disk quota exceeded", re.IGNORECASE)


def connect(silence_seconds: int = ANSWER_SECONDS) -> docker.DockerClient:
    """Return a client of the engine, which answers now and may be silent for so long later.

    Raises ConfigurationError if none answers, or not to this user.
    """
    try:
        with closing(docker.from_env(timeout=ANSWER_SECONDS)) as client:
            client.ping()
        return docker.from_env(timeout=silence_seconds)
    except (DockerException, ValueError) as error:  # ValueError: DOCKER_HOST is no address
        raise explain(error) from None


def size_bytes(found: DockerImage) -> int:
    """Return the size of an image unpacked, with what it is built on.

    An engine that keeps images in containerd tells the packed size where others tell this one; the history's sizes are
    those of the layers in both.
    """
    return sum(int(entry["Size"]) for entry in found.history())


def explain(error: Exception) -> TrainyardError:
    """Return what a user should read in place of an error of docker's SDK."""
    text = str(error)
    if is_disk_full(text):
        return disk_full(text)
    if isinstance(error, APIError):
        reason = error.explanation or text
        return TrainyardError(f"the Docker engine at {_host()} refused: {reason}")
    if "PermissionError" in text or "Permission denied" in text:
        return ConfigurationError(
            f"the Docker engine at {_host()} may not be used by this user: permission denied on its socket",
            next_step="sudo usermod --append --groups docker $USER, then sign in anew (that group is as good as root), "
            "or use an engine of your own (dockerd-rootless-setuptool.sh install)",
        )
    if "FileNotFoundError" in text or "Connection refused" in text or "ConnectionRefusedError" in text:
        return ConfigurationError(
            f"no Docker engine answers at {_host()}",
            next_step="start it (sudo systemctl start docker, or Docker Desktop), or name another one as DOCKER_HOST; "
            "without one, 'trainyard local up' still runs jobs, as processes (--executor process)",
        )
    reason = text.removeprefix("Error while fetching server API version: ")
    return ConfigurationError(
        f"the Docker engine at {_host()} cannot be reached: {reason}",
        next_step="correct DOCKER_HOST, or 'docker context use NAME'; 'docker version' tells whether it answers",
    )


def is_disk_full(text: str) -> bool:
    """Return whether the text of an error says that a disk is full."""
    return bool(_NO_SPACE.search(text))


def disk_full(text: str) -> ConfigurationError:
    """Return the error for a full disk of the engine, which `text` says."""
    line = next((line.strip() for line in text.splitlines() if is_disk_full(line)), text.strip())
    return ConfigurationError(
        f"the disk of the Docker engine is full: {line}",
        next_step="docker builder prune (steps of earlier builds) and docker image prune (images without a name), or "
        "give the engine a larger disk (data-root in its daemon.json), then again",
    )


@functools.cache
def build_command() -> str:
    """Return the first docker command on PATH that can build with BuildKit, as the Dockerfiles need it (RUN --mount).

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
        tried.append(f"{path} cannot: {done.stderr.strip().partition(chr(10))[0] or 'it has no --progress'}")
    named = f": {'; '.join(tried)}" if tried else ""
    raise ConfigurationError(
        f"no docker command on PATH can build with BuildKit{named}",
        next_step="install the plug-in buildx (package docker-buildx-plugin of Docker, docker-buildx of Ubuntu), "
        "or the docker command itself (docker-ce-cli, docker.io)",
    )


def _host() -> str:
    """Return the address that the engine is looked for at."""
    if host := os.environ.get("DOCKER_HOST"):
        return host
    try:
        context: dict[str, Any] = ContextAPI.kwargs_from_context()
    except DockerException:
        context = {}
    return str(context.get("base_url") or "unix:///var/run/docker.sock")
