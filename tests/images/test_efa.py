"""The step of images/cuda/Dockerfile that installs EFA, by itself and on a stand-in for AWS's installer."""

import re
from pathlib import Path
from typing import Any

import pytest

from infra.machine_image.build import efa_installer
from tests.support.images.efa_stand_in import ARGUMENTS, efa_mirror
from tests.support.images.source_tree import RELEASE, ROOT, SourceTree

pytestmark = [pytest.mark.docker, pytest.mark.timeout(900)]

STEP = re.compile(r"^ARG EFA_MIRROR=.*\nRUN .*install-efa .*$", re.MULTILINE)
"""As the Dockerfile has it."""

LOADS = "import ctypes; [ctypes.CDLL(name) for name in ('libfabric.so.1', 'libnccl-net.so')]; print('both')"


@pytest.fixture
def probe(tree: SourceTree) -> SourceTree:
    """Sources with one more image, which has that step and nothing else."""
    (step,) = STEP.findall((ROOT / "images/cuda/Dockerfile").read_text())
    tree.add_image("efa", f"ARG BASE_IMAGE\nFROM ${{BASE_IMAGE}}\n{step}\nARG REVISION\nUSER 1000\n")
    tree.commit()
    return tree


def test_nccl_finds_efa_in_an_image_that_has_it_and_the_installer_touches_no_kernel(
    docker_engine: Any, base_image: str, probe: SourceTree, tmp_path: Path
) -> None:
    with efa_mirror(probe, tmp_path) as mirror:
        built = _build(probe, base_image, mirror)
    assert built.returncode == 0, built.stderr
    name = f"trainyard/efa:{RELEASE}-{probe.revision}"

    def run(*command: str) -> str:
        output: bytes = docker_engine.containers.run(name, list(command), remove=True, network_mode="none")
        return output.decode().strip()

    # By the names that NCCL and the launcher load, as the image's user, with no variable that says where.
    assert run("python3", "-c", LOADS) == "both"
    assert run("cat", ARGUMENTS) == "-y --skip-kmod --skip-limit-conf --no-verify"
    # What the image's test goes by.
    assert run("cat", "/opt/trainyard/efa") == f"aws-efa-installer-{efa_installer()[0]}.tar.gz"
    assert run("sh", "-c", "ls /tmp /var/lib/apt/lists") == "/tmp:\n\n/var/lib/apt/lists:"


def test_another_installer_than_the_pinned_one_is_not_run_and_the_way_without_is_named(
    base_image: str, probe: SourceTree, tmp_path: Path
) -> None:
    with efa_mirror(probe, tmp_path, genuine=False) as mirror:
        built = _build(probe, base_image, mirror)
    assert built.returncode == 1
    assert "--build-arg EFA_MIRROR= leaves it out, for jobs of one node" in built.stderr
    assert "libfabric1" not in built.stderr


def test_an_image_is_built_without_efa_where_that_is_asked_for(
    docker_engine: Any, base_image: str, probe: SourceTree
) -> None:
    built = _build(probe, base_image, "")
    assert built.returncode == 0, built.stderr
    name = f"trainyard/efa:{RELEASE}-{probe.revision}"
    assert docker_engine.containers.run(name, ["sh", "-c", "ls /opt"], remove=True, network_mode="none") == b""


def _build(tree: SourceTree, base_image: str, mirror: str) -> Any:
    arguments = ("--build-arg", f"BASE_IMAGE={base_image}", "--build-arg", f"EFA_MIRROR={mirror}")
    return tree.images("build", "efa", *arguments, "--network", "host")
