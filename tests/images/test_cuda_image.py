"""The whole images/cuda/Dockerfile: `make cuda-image`, which downloads PyTorch's CUDA build of several gigabytes.

Training on a GPU is only tested if the engine provides one. A stand-in replaces AWS's EFA installer.
"""

import io
from pathlib import Path
from typing import Any

import pytest

from jobs.core.images import image, release
from jobs.images.lock import locked
from tests.support.images.docker_engine import python_base
from tests.support.images.efa_stand_in import efa_mirror
from tests.support.images.source_tree import SourceTree

pytestmark = [pytest.mark.docker, pytest.mark.cuda_image, pytest.mark.timeout(3600)]


BUILD = """
include=$(python -c 'import sysconfig; print(sysconfig.get_path("include"))')
printf '#include <Python.h>\\nvoid *loader(void) { return PyLong_FromLong(7); }\\n' > /tmp/loader.c
gcc /tmp/loader.c -O3 -shared -fPIC -I "$include" -o /tmp/loader.so
python -c 'import ctypes; assert ctypes.PyDLL("/tmp/loader.so").loader'
"""


def _with_headers(engine: Any, base: str) -> str:
    """Return a base with Python's headers, which Docker's official image has and the stand-in lacks.

    Debian's pip refuses to replace the packages on which it depends, so their copies from PyPI are put before them.
    """
    if base.startswith("public.ecr.aws/"):
        return base
    made = (
        f"FROM {base}\nRUN apt-get update -q && apt-get install -yq --no-install-recommends libpython3-dev"
        " && python3 -m pip install --quiet --ignore-installed packaging setuptools wheel\n"
    )
    image, _ = engine.images.build(
        fileobj=io.BytesIO(made.encode()), network_mode="host", rm=True, tag=f"{base}-headers"
    )
    return str(image.tags[0])


def test_cuda_image_is_built_and_passes_its_tests(docker_engine: Any, tree: SourceTree, tmp_path: Path) -> None:
    base_image = python_base(docker_engine, tmp_path, root="cuda")
    with efa_mirror(tree, tmp_path) as mirror:
        base = ("--build-arg", f"BASE_IMAGE={_with_headers(docker_engine, base_image)}")
        built = tree.images("build", "cuda", *base, "--build-arg", f"EFA_MIRROR={mirror}", "--network", "host")
    assert built.returncode == 0, built.stderr
    print(built.stdout)  # size and time, shown with -s
    done = tree.images("test", "cuda", "--no-descendants")
    assert done.returncode == 0, done.stdout + done.stderr
    has_card = "nvidia" in docker_engine.info()["Runtimes"]
    assert done.stdout.count(" skipped in ") == (0 if has_card else 1), done.stdout
    name = f"trainyard/cuda:{release(of='cuda').name}-{tree.revision}"
    code = "import torch; print(torch.version.cuda, torch.distributed.is_nccl_available())"
    cuda, nccl = docker_engine.containers.run(name, ["python", "-c", code], remove=True).decode().split()
    assert locked(image("cuda"), release(of="cuda"))["nvidia-cuda-runtime"].startswith(cuda)
    assert nccl == "True"
    # Compile as Triton does for its first kernel, as the job's user (triton/runtime/build.py).
    docker_engine.containers.run(name, ["sh", "-c", BUILD], remove=True)
