"""The EFA step of images/cuda/Dockerfile, on its own and with a stand-in for AWS's installer."""

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from infra.machine_image.build import efa_installer
from tests.support.images.efa_stand_in import ARGUMENTS, efa_mirror
from tests.support.images.source_tree import ROOT, SourceTree, release_of

STEP = re.compile(r"^ARG EFA_MIRROR=.*\nRUN .*install-efa .*$", re.MULTILINE)
"""The step in the Dockerfile."""

LOADS = "import ctypes; [ctypes.CDLL(name) for name in ('libfabric.so.1', 'libnccl-net.so')]; print('both')"


@pytest.mark.docker
@pytest.mark.timeout(900)
def test_nccl_finds_efa_and_the_installer_skips_the_kernel(
    docker_engine: Any, base_image: str, tree: SourceTree, tmp_path: Path
) -> None:
    # GIVEN sources with an additional image that has only that step
    (step,) = STEP.findall((ROOT / "images/cuda/Dockerfile").read_text())
    tree.add_image("efa", f"ARG BASE_IMAGE\nFROM ${{BASE_IMAGE}}\n{step}\nARG REVISION\nUSER 1000\n")
    with efa_mirror(tree, tmp_path) as mirror:
        arguments = ("--build-arg", f"BASE_IMAGE={base_image}", "--build-arg", f"EFA_MIRROR={mirror}")
        built = tree.images("build", "efa", *arguments, "--network", "host")
    assert built.returncode == 0, built.stderr
    name = f"trainyard/efa:{release_of('efa')}-{tree.revision}"

    def run(*command: str) -> str:
        output: bytes = docker_engine.containers.run(name, list(command), remove=True, network_mode="none")
        return output.decode().strip()

    # NCCL and the launcher load these names, as the image's user and without a path variable.
    assert run("python3", "-c", LOADS) == "both"
    assert run("cat", ARGUMENTS) == "-y --skip-kmod --skip-limit-conf --no-verify"
    # The image's own test relies on this file.
    assert run("cat", "/opt/trainyard/efa") == f"aws-efa-installer-{efa_installer()[0]}.tar.gz"
    assert run("sh", "-c", "ls /tmp /var/lib/apt/lists") == "/tmp:\n\n/var/lib/apt/lists:"


@pytest.mark.parametrize(
    ("mirror", "exit_code", "message"),
    [
        ("", 0, "EFA is skipped: NCCL will reach other nodes over TCP"),
        ("file://{folder}", 1, "--build-arg EFA_MIRROR= skips it, for single-node jobs"),
    ],
    ids=["without", "not the pinned one"],
)
def test_only_the_pinned_installer_is_run_and_efa_can_be_skipped(
    tmp_path: Path, mirror: str, exit_code: int, message: str
) -> None:
    # The file is not an archive, so nothing in it could run on this machine.
    (tmp_path / f"aws-efa-installer-{efa_installer()[0]}.tar.gz").write_text("not an archive")
    command = [str(ROOT / "images/shared/install-efa"), mirror.format(folder=tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={"PATH": os.environ["PATH"]})
    assert done.returncode == exit_code
    assert message in done.stdout + done.stderr
    assert ("did NOT match" in done.stderr) == (exit_code == 1)
    assert "apt" not in done.stdout + done.stderr
