"""A stand-in for Habana's image of a release, which cannot be pulled here, and sources for a gaudi image on top of it.

It is built from habana_image/ on Debian 12. Its Python is 3.11 and its PyTorch the laptop's, so it needs other locks.
"""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import docker

from jobs.core.images import image, release
from jobs.images import engine
from jobs.images.lock import lock, lock_file
from tests.support.images.docker_engine import ROOT, pinned_torch, pip_environment
from tests.support.images.source_tree import SourceTree

HERE = Path(__file__).parent
ROW = release()
PYTHON = "3.11"
NUMPY = "1.26.4"
DEEPSPEED = "0.16.1"
"""A release of DeepSpeed itself, in place of Habana's fork, which no registry has."""


@contextmanager
def habana_image(client: docker.DockerClient, base: str, torch_index: str, folder: Path) -> Iterator[str]:
    """Build the stand-in on `base` and yield its name. It is removed from the engine after the block."""
    context = folder / "context"
    shutil.copytree(HERE / "habana_image", context, ignore=shutil.ignore_patterns("__pycache__"))
    _deepspeed_repository(folder / "deepspeed", context / "deepspeed.git")
    wrapper_repository(context / "hccl_ofi_wrapper.git")
    name = f"stand-in/habana:{ROW.package_version}-python{PYTHON}"
    arguments = {
        "BASE_IMAGE": base,
        "TORCH_INDEX": torch_index,
        "TORCH": pinned_torch(),
        "NUMPY": NUMPY,
        "PLUGIN_VERSION": f"{ROW.name}.{ROW.build}",
    }
    options = [part for argument, value in arguments.items() for part in ("--build-arg", f"{argument}={value}")]
    done = subprocess.run(
        [str(engine.build_command()), "build", "--network", "host", "--tag", name, *options, str(context)],
        env={**os.environ, "DOCKER_BUILDKIT": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    try:
        yield name
    finally:
        client.images.remove(name, force=True)


def sources(folder: Path, images: Iterable[str]) -> SourceTree:
    """Return sources with locks for these images on the stand-in, and with its wrapper of libfabric."""
    tree = SourceTree(folder)
    script = "images/shared/load-fabric"
    pinned = re.compile(r"^commit=[0-9a-f]{40}$", re.MULTILINE)
    with tempfile.TemporaryDirectory() as name:
        commit = wrapper_repository(Path(name) / "wrapper.git")
    text, pins = pinned.subn(f"commit={commit}", (ROOT / script).read_text())
    assert pins == 1
    tree.write(script, text)
    row = replace(ROW, python=PYTHON, pytorch=pinned_torch())
    for one in map(image, images):
        tree.write(str(lock_file(one, ROW).relative_to(ROOT)), lock(one, row, torch_index=""))
    tree.commit()
    return tree


def wrapper_repository(repository: Path) -> str:
    """Make a bare git repository with a stand-in for libfabric's wrapper, and return its (constant) commit."""
    with tempfile.TemporaryDirectory() as name:
        source = Path(name)
        shutil.copytree(HERE / "hccl_ofi_wrapper", source, dirs_exist_ok=True)
        return _bare_repository(source, repository)


def _deepspeed_repository(folder: Path, repository: Path) -> None:
    """Make a bare git repository with DeepSpeed's source, tagged like Habana's fork."""
    folder.mkdir()
    no_build = ("--no-deps", "--no-binary", ":all:", "--no-build-isolation")
    download = [sys.executable, "-m", "pip", "download", "--quiet", *no_build, f"deepspeed=={DEEPSPEED}"]
    # Use pip as in a build, without local files that this machine's settings may offer.
    network = {name: value.strip('"') for name, value in pip_environment().items()}
    kept = {name: value for name, value in os.environ.items() if name != "PIP_FIND_LINKS"}
    environment = {**kept, **network, "PIP_CONFIG_FILE": os.devnull}
    subprocess.run(download, cwd=folder, env=environment, check=True, capture_output=True)
    with tarfile.open(folder / f"deepspeed-{DEEPSPEED}.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    source = folder / f"deepspeed-{DEEPSPEED}"
    (source / "build.txt").write_text(f"+hpu.synapse.v{ROW.deepspeed}\n")
    _bare_repository(source, repository, tag=ROW.deepspeed)


def _bare_repository(source: Path, repository: Path, tag: str | None = None) -> str:
    """Make a bare git repository with one commit of a folder, and return the commit."""
    git = ("git", "-C", str(source), "-c", "user.name=A", "-c", "user.email=a@example.com")
    # A fixed date, so that the same source is the same commit and cached layers apply.
    dated = {**os.environ, "GIT_AUTHOR_DATE": "2025-01-01T00:00:00Z", "GIT_COMMITTER_DATE": "2025-01-01T00:00:00Z"}
    commands = [["init", "-q"], ["add", "--all", "--force"], ["commit", "-qm", "A stand-in"]]
    for command in (*commands, *([["tag", tag]] if tag else [])):
        subprocess.run([*git, *command], env=dated, check=True)
    subprocess.run(["git", "clone", "--quiet", "--bare", str(source), str(repository)], check=True)
    return subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
