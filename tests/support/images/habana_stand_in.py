"""A stand-in for Habana's image of a release, which no registry here has, and sources whose gaudi image fits it.

It is made of habana_image/ on one of two bases. Ubuntu 22.04 is what Habana's image is made of: with its Python 3.10
and the row's own PyTorch (the build for CUDA, some gigabytes), the locks are installed as they are. Debian 12 is
lighter, and there wherever the tests run: its Python is 3.11, its PyTorch the laptop's, and the locks are made anew for
these.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import docker
import pytest

from jobs.contract.image_hierarchy import image
from jobs.contract.releases import release
from jobs.images import engine
from jobs.images.lock import lock, lock_file
from tests.support.images.docker_engine import CA_BUNDLE, ROOT, pinned_torch, pip_environment, stand_in
from tests.support.images.source_tree import SourceTree

HERE = Path(__file__).parent
ROW = release()
NUMPY = "1.26.4"
DEEPSPEED = "0.16.1"
"""A release of its own, in the place of Habana's fork, which no registry has."""

UBUNTU_MIRROR_VARIABLE = "UBUNTU_MIRROR"
"""A variable of the environment: the address of an archive of Ubuntu's packages, as apt's sources have it."""

KEYRING_PACKAGE = "pool/main/u/ubuntu-keyring/ubuntu-keyring_2021.03.26_all.deb"
KEYRING_SHA256 = "0d0e7ed6b112f5d03eabf3c7eb01ebdacf9c57714b279e90495cfc58c8c4520f"
KEYRING = "usr/share/keyrings/ubuntu-archive-keyring.gpg"
ANSWER_SECONDS = 20

UBUNTU_BOOTSTRAP = (
    "mmdebstrap",
    "--quiet",
    "--variant=minbase",
    "--components=main,universe",
    "--include=apt,ca-certificates,git,python3,python3-pip,python3-venv",
    f"--customize-hook=copy-in {CA_BUNDLE} {CA_BUNDLE.parent}",
    "jammy",
)


@dataclass(frozen=True)
class Base:
    """What the stand-in is built on, and the PyTorch that it is given."""

    image: str
    python: str
    torch: str
    torch_index: str
    """Empty: what the package index has, which for Linux is the CUDA build."""

    @property
    def fits_the_locks(self) -> bool:
        return (self.python, self.torch) == (ROW.python, ROW.pytorch)


def debian(python_base: str, torch_index: str) -> Base:
    """Return Debian as a base. `python_base` is what the cpu image is built on."""
    return Base(python_base, "3.11", pinned_torch(), torch_index)


def ubuntu(client: docker.DockerClient, folder: Path) -> Base | None:
    """Return Ubuntu as a base; None, after a word on stderr, where no mirror of it is named or answers."""
    mirror = os.environ.get(UBUNTU_MIRROR_VARIABLE, "").rstrip("/")
    if not mirror:
        print(f"no {UBUNTU_MIRROR_VARIABLE}: the stand-in gets Python 3.11 in place of 3.10", file=sys.stderr)
        return None
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)  # apt reads its keys as a user of its own
        try:
            keyring = _keyring(mirror, Path(name))
        except OSError as error:
            print(f"{mirror} does not answer ({error}): the image gets Python 3.11 in place of 3.10", file=sys.stderr)
            return None
        source = (f"deb [signed-by={keyring}] {mirror} jammy main universe",)
        base = stand_in(client, "python-3.10", UBUNTU_BOOTSTRAP, folder, source=source)
    return Base(base, "3.10", ROW.pytorch, "")


@contextmanager
def habana_image(client: docker.DockerClient, base: Base, folder: Path) -> Iterator[str]:
    """Build the stand-in and give its name; it stays in the engine until the end of the block."""
    context = folder / "context"
    shutil.copytree(HERE / "habana_image", context, ignore=shutil.ignore_patterns("__pycache__"))
    _deepspeed_repository(folder / "deepspeed", context / "deepspeed.git")
    wrapper_repository(context / "hccl_ofi_wrapper.git")
    name = f"stand-in/habana:{ROW.package_version}-python{base.python}"
    arguments = {
        "BASE_IMAGE": base.image,
        "TORCH_INDEX": base.torch_index,
        "TORCH": base.torch,
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


def sources(folder: Path, base: Base, images: Iterable[str]) -> SourceTree:
    """Return sources whose locks of these images fit the base, and which take the wrapper of libfabric that it has."""
    tree = SourceTree(folder)
    script = "images/shared/load-fabric"
    pinned = re.compile(r"^commit=[0-9a-f]{40}$", re.MULTILINE)
    with tempfile.TemporaryDirectory() as name:
        commit = wrapper_repository(Path(name) / "wrapper.git")
    text, pins = pinned.subn(f"commit={commit}", (ROOT / script).read_text())
    assert pins == 1
    tree.write(script, text)
    if not base.fits_the_locks:
        row = replace(ROW, python=base.python, pytorch=base.torch)
        with pytest.MonkeyPatch.context() as patch:
            _see_the_network_alone(patch)
            for one in map(image, images):
                tree.write(str(lock_file(one, ROW).relative_to(ROOT)), lock(one, row, torch_index=""))
    tree.commit()
    return tree


def wrapper_repository(repository: Path) -> str:
    """Make a bare git repository with a stand-in of libfabric's wrapper, and return its commit, which is always one."""
    with tempfile.TemporaryDirectory() as name:
        source = Path(name)
        shutil.copytree(HERE / "hccl_ofi_wrapper", source, dirs_exist_ok=True)
        return _bare_repository(source, repository)


def _see_the_network_alone(patch: pytest.MonkeyPatch) -> None:
    """Set pip up as a build sees it: without the files that it may be told to find on this machine."""
    for name, value in pip_environment().items():
        patch.setenv(name, value.strip('"'))
    patch.setenv("PIP_CONFIG_FILE", os.devnull)
    patch.delenv("PIP_FIND_LINKS", raising=False)


def _deepspeed_repository(folder: Path, repository: Path) -> None:
    """Make a bare git repository with DeepSpeed's source, tagged as Habana tags its fork."""
    folder.mkdir()
    no_build = ("--no-deps", "--no-binary", ":all:", "--no-build-isolation")
    download = [sys.executable, "-m", "pip", "download", "--quiet", *no_build, f"deepspeed=={DEEPSPEED}"]
    with pytest.MonkeyPatch.context() as patch:
        _see_the_network_alone(patch)
        subprocess.run(download, cwd=folder, check=True, capture_output=True)
    with tarfile.open(folder / f"deepspeed-{DEEPSPEED}.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    source = folder / f"deepspeed-{DEEPSPEED}"
    (source / "build.txt").write_text(f"+hpu.synapse.v{ROW.deepspeed}\n")
    _bare_repository(source, repository, tag=ROW.deepspeed)


def _bare_repository(source: Path, repository: Path, tag: str | None = None) -> str:
    """Make a bare git repository of one commit of a folder, and return the commit."""
    git = ("git", "-C", str(source), "-c", "user.name=A", "-c", "user.email=a@example.com")
    # One date, so that the same source is the same commit and the engine knows its layers again.
    dated = {**os.environ, "GIT_AUTHOR_DATE": "2025-01-01T00:00:00Z", "GIT_COMMITTER_DATE": "2025-01-01T00:00:00Z"}
    commands = [["init", "-q"], ["add", "--all", "--force"], ["commit", "-qm", "A stand-in"]]
    for command in (*commands, *([["tag", tag]] if tag else [])):
        subprocess.run([*git, *command], env=dated, check=True)
    subprocess.run(["git", "clone", "--quiet", "--bare", str(source), str(repository)], check=True)
    return subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()


def _keyring(mirror: str, folder: Path) -> Path:
    """Return a file with Ubuntu's keys: this machine's, else that of Ubuntu's own package, known by its hash."""
    own = Path("/") / KEYRING
    if own.exists():
        return own
    with urllib.request.urlopen(f"{mirror}/{KEYRING_PACKAGE}", timeout=ANSWER_SECONDS) as answer:
        content: bytes = answer.read()
    assert hashlib.sha256(content).hexdigest() == KEYRING_SHA256, f"{KEYRING_PACKAGE} is not what it was"
    package = folder / "keyring.deb"
    package.write_bytes(content)
    subprocess.run(["dpkg-deb", "--extract", str(package), str(folder)], check=True)
    return folder / KEYRING
