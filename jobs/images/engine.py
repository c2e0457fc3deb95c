"""The Docker engine that images are built, kept and pushed with, and what a user reads where it cannot.

Which engine it is, is Docker's own business: DOCKER_HOST, DOCKER_CONTEXT and the current context of the docker command
count as they do for that command. What is built goes through the command too: docker's SDK cannot speak to BuildKit.
"""

import functools
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import docker
from docker.context import ContextAPI
from docker.errors import APIError, DockerException
from docker.models.images import Image as DockerImage

from jobs.contract.errors import ConfigurationError, TrainyardError

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

    Raises ConfigurationError where none answers, or not to this user.
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
    """Return whether an error or the output of a build tells of a full disk."""
    return bool(_NO_SPACE.search(text))


def disk_full(text: str, client: docker.DockerClient | None = None) -> ConfigurationError:
    """Return the error for a full disk of the engine: `text` tells of it, and `client` is asked what can go."""
    line = next((line.strip() for line in text.splitlines() if is_disk_full(line)), text.strip())
    free, prunable = (_free(client), _prunable(client)) if client else ("", "")
    return ConfigurationError(
        f"the disk of the Docker engine is full{free}: {line}",
        next_step="docker builder prune (steps of earlier builds) and docker image prune (images without a name)"
        f"{prunable}, or give the engine a larger disk (data-root in its daemon.json), then again",
    )


@functools.cache
def build_command() -> Path:
    """Return the first docker command on PATH that can build with BuildKit, as the Dockerfiles need it (RUN --mount).

    Raises ConfigurationError where there is none.
    """
    tried = []
    for path in _commands(os.environ):
        try:
            done = subprocess.run(
                [path, "build", "--help"],
                env={**os.environ, "DOCKER_BUILDKIT": "1"},
                capture_output=True,
                text=True,
                timeout=_COMMAND_SECONDS,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            tried.append(f"{path} cannot: {error}")
            continue
        if done.returncode == 0 and "--progress" in done.stdout:
            return path
        words = done.stderr.strip().splitlines() if done.returncode else []
        tried.append(f"{path} cannot: {words[0]}" if words else f"{path} cannot")
    named = f": {'; '.join(tried)}" if tried else ""
    raise ConfigurationError(
        f"no docker command on PATH can build with BuildKit{named}",
        next_step="install the plug-in buildx (package docker-buildx-plugin of Docker, docker-buildx of Ubuntu), "
        "or the docker command itself (docker-ce-cli, docker.io)",
    )


def emulation_note(client: docker.DockerClient) -> str | None:
    """Return a note where the engine's processor is another one than that of the images; None where it is the same."""
    architecture: str = client.version()["Arch"]
    if architecture == PLATFORM.removeprefix("linux/"):
        return None
    return (
        f"the Docker engine runs on {architecture}, the images are for {PLATFORM}: it emulates, which is slow; "
        "where a step fails with 'exec format error' it cannot: docker run --privileged --rm tonistiigi/binfmt "
        "--install amd64"
    )


def _commands(environment: Mapping[str, str]) -> list[Path]:
    """Return all docker commands on PATH, each file once, in the order of PATH."""
    found: dict[Path, Path] = {}
    for folder in filter(None, environment.get("PATH", os.defpath).split(os.pathsep)):
        if path := shutil.which("docker", path=folder):
            found.setdefault(Path(path).resolve(), Path(path))
    return list(found.values())


def _host() -> str:
    """Return the address that the engine is looked for at."""
    if host := os.environ.get("DOCKER_HOST"):
        return host
    try:
        context: dict[str, Any] = ContextAPI.kwargs_from_context()
    except DockerException:
        context = {}
    return str(context.get("base_url") or "unix:///var/run/docker.sock")


def _free(client: docker.DockerClient) -> str:
    """Return how much of the disk is free, where the engine runs on this machine and so can be looked at."""
    try:
        folder = str(client.info()["DockerRootDir"])
    except DockerException:  # too full to say even that
        return ""
    local = _host().startswith("unix://") and Path(folder).is_dir()
    return f" ({shutil.disk_usage(folder).free / 1e6:.0f} MB are free in {folder} now)" if local else ""


def _prunable(client: docker.DockerClient) -> str:
    """Return how much pruning would free; empty where the engine is too full to say even that."""
    try:
        usage = client.df()
    except DockerException:
        return ""
    cache = sum(item["Size"] for item in usage.get("BuildCache") or () if not item["InUse"] and not item["Shared"])
    unnamed = sum(
        item["Size"] - max(item["SharedSize"], 0)
        for item in usage.get("Images") or ()
        if not item["Containers"] and not any(tag != "<none>:<none>" for tag in item["RepoTags"] or ())
    )
    return f", which free {cache / 1e6:.0f} MB and {unnamed / 1e6:.0f} MB"
