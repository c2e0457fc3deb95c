"""Fixtures for tests of images: a Docker engine, a base image, and a package index with torch's CPU build.

Tests that need an engine have the marker `docker`. If no engine answers, a run of the whole suite skips them and
reports that at its end. They fail if they are selected explicitly, or in CI (CI=true). To use a separate engine:

    .ci/docker-engine .venv/bin/pytest -m docker
"""

import functools
import gc
import hashlib
import json
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import docker
import pytest
from docker.errors import DockerException, ImageNotFound

from jobs.core.images import image, release
from jobs.images.bases import default_base
from tests.support.http_server import QuietHandler, serving

ROOT = Path(__file__).parents[3]
CA_BUNDLE = Path("/etc/ssl/certs/ca-certificates.crt")
"""Debian's bundle, on the host that builds the stand-in and in the stand-in itself."""

BOOTSTRAP = (
    "mmdebstrap",
    "--quiet",
    "--variant=minbase",
    "--include=ca-certificates,python3,python3-pip,python3-venv",
    f"--customize-hook=copy-in {CA_BUNDLE} {CA_BUNDLE.parent}",
    '--customize-hook=ln --symbolic python3 "$1/usr/bin/python"',
    '--customize-hook=rm "$1"/usr/lib/python3*/EXTERNALLY-MANAGED',
    "bookworm",
)
"""Debian with its Python, set up like Docker's official Python image: `python` and pip work as root."""

SUITES = {"3.11": "bookworm", "3.13": "trixie"}
"""The Debian suite with each Python."""

NEXT_STEP = "run `.ci/docker-engine .venv/bin/pytest -m docker` as root, or point DOCKER_HOST at an engine"


@functools.cache
def _missing_engine() -> str | None:
    """Return why no engine answers, or None if one does."""
    with warnings.catch_warnings():
        # docker does not close the socket if the connection fails.
        warnings.simplefilter("ignore", ResourceWarning)
        try:
            docker.from_env().close()  # connecting requests the engine's version
        except DockerException as error:
            return str(error)
        finally:
            gc.collect()
    return None


def _skips_docker(config: pytest.Config) -> bool:
    selected = config.args != config.getini("testpaths") or "docker" in config.option.markexpr
    return not selected and os.environ.get("CI") != "true" and _missing_engine() is not None


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "docker: needs a Docker engine (tests/support/images/docker_engine.py)")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if _skips_docker(config):
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("docker")])
        items[:] = [item for item in items if not item.get_closest_marker("docker")]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if _skips_docker(config):
        terminalreporter.write_line(f"No Docker engine answers: tests of images were skipped. Next: {NEXT_STEP}")


@pytest.fixture(scope="session")
def docker_engine() -> Iterator[Any]:
    """A docker.DockerClient of the engine at DOCKER_HOST or Docker's default address."""
    if reason := _missing_engine():
        pytest.fail(f"no Docker engine answers ({reason}). Next: {NEXT_STEP}")
    client = docker.from_env(timeout=300)
    yield client
    client.close()


@pytest.fixture(scope="session")
def base_image(docker_engine: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    return python_base(docker_engine, tmp_path_factory.mktemp("base-image"))


@pytest.fixture(scope="session")
def torch_index(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[str]:
    # The address is part of the key of cached layers, so reuse the last run's port if it is free.
    known = request.config.cache
    assert known
    folder = tmp_path_factory.mktemp("torch-index")
    with index_of_torch(folder, preferred_port=known.get("trainyard/torch-index-port", 0)) as url:
        if (port := urlsplit(url).port) is not None:
            known.set("trainyard/torch-index-port", port)
        yield url


def python_base(client: docker.DockerClient, folder: Path, *, root: str = "cpu") -> str:
    """Return the base of images/cpu or images/cuda: its default if it can be pulled, else a stand-in.

    The stand-in is built from Debian packages and stays in the engine. It trusts the same certificates as the host, and
    its pip uses the host's indexes.
    """
    row = release(of=root)
    default = default_base(image(root), row)
    bootstrap = [SUITES[row.python] if word == "bookworm" else word for word in BOOTSTRAP]
    try:
        client.images.pull(default)
    except DockerException as error:
        print(f"{default} cannot be pulled ({error}): using a stand-in", file=sys.stderr)
    else:
        return default
    changes = [f"ENV {variable}={value}" for variable, value in pip_environment().items()]
    content = hashlib.sha256(json.dumps([bootstrap, changes]).encode() + CA_BUNDLE.read_bytes()).hexdigest()
    name = f"stand-in:python-{row.python}-{content[:12]}"
    try:
        client.images.get(name)
    except ImageNotFound:
        archive = folder / "base.tar"
        made = subprocess.run([*bootstrap, str(archive)], capture_output=True, text=True, check=False)
        assert made.returncode == 0, made.stderr
        repository, _, tag = name.partition(":")
        client.api.import_image_from_file(str(archive), repository=repository, tag=tag, changes=changes)
        archive.unlink()
    return name


@contextmanager
def index_of_torch(folder: Path, preferred_port: int = 0) -> Iterator[str]:
    """Yield a TORCH_INDEX for builds: PyTorch's own, or one on loopback with the wheel of the host's pip."""
    if not any(name.endswith(".find-links") for name, _ in _pip_settings()):
        yield _default_argument("TORCH_INDEX")
        return
    download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder / "torch")]
    subprocess.run([*download, f"torch=={pinned_torch()}"], check=True)
    handler = functools.partial(_FileHandler, directory=str(folder))
    with serving(handler, preferred_port) as port:
        yield f"http://127.0.0.1:{port}"


def pinned_torch() -> str:
    """Return the version of this machine's PyTorch."""
    pinned = re.search(r"^torch==(\S+)", (ROOT / "requirements.txt").read_text(), flags=re.MULTILINE)
    assert pinned
    return pinned[1]


class _FileHandler(QuietHandler, SimpleHTTPRequestHandler):
    """Serves the files of a folder."""


def _default_argument(name: str) -> str:
    """Return the default of a build argument in images/cpu/Dockerfile."""
    default = re.search(rf"^ARG {name}=(\S+)$", (ROOT / "images/cpu/Dockerfile").read_text(), flags=re.MULTILINE)
    assert default
    return default[1]


def _pip_settings() -> list[tuple[str, str]]:
    """Return pip's settings on this machine from all sources: [('global.index-url', …), (':env:.cert', …)]."""
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    return re.findall(r"^(\S+)='(.*)'$", listed.stdout, flags=re.MULTILINE)


def pip_environment() -> dict[str, str]:
    """Return variables that let a build use the network indexes of this machine's pip."""
    environment = {"PIP_CERT": str(CA_BUNDLE)}
    for name, value in _pip_settings():
        option = name.rpartition(".")[2]
        if option in {"index-url", "extra-index-url"}:
            reachable = [url for url in value.split() if url.startswith(("http://", "https://"))]
        elif option == "trusted-host":
            reachable = value.split()
        else:
            continue
        if reachable:
            environment["PIP_" + option.replace("-", "_").upper()] = f'"{" ".join(reachable)}"'
    return environment
