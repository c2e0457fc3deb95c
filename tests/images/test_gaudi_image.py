"""The whole images/gaudi/Dockerfile on a stand-in for Habana's image (habana_stand_in.py): `make gaudi-image`.

The stand-in cannot test Habana's packages, libraries and DeepSpeed fork (it has DeepSpeed's own release), Python 3.10
and the row's PyTorch, EFA's build of libfabric (it has Debian's), or an HPU. It does test that every instruction runs
unchanged, except for the commit of libfabric's wrapper; that optimum-habana and the rest of the row install beside
packages that require other versions; that the base keeps its PyTorch and NumPy; and that the image's own tests pass.
"""

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from docker.errors import ContainerError

from jobs.core.images import image
from jobs.images.lock import locked
from tests.support.images import habana_stand_in
from tests.support.images.docker_engine import pinned_torch
from tests.support.images.habana_stand_in import DEEPSPEED, ROW
from tests.support.images.source_tree import ROOT, SourceTree, remove_images, rows_of

# The first test waits until the image is built, which takes minutes.
pytestmark = [pytest.mark.docker, pytest.mark.habana_image, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def gaudi(
    docker_engine: Any, base_image: str, torch_index: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[SourceTree, str, str]]:
    """The gaudi image and its children, built as users build them: sources, base, name."""
    folder = tmp_path_factory.mktemp("gaudi")
    tree = habana_stand_in.sources(folder / "tree", ["gaudi", "gaudi-notebook"])
    with habana_stand_in.habana_image(docker_engine, base_image, torch_index, folder) as base:
        options = ("--build-arg", f"BASE_IMAGE={base}", "--network", "host", "-o", "json")
        built = rows_of(tree.images("build", "gaudi", "--all-descendants", *options))
        assert [row["image"] for row in built] == ["gaudi", "gaudi-notebook"]
        yield tree, base, built[0]["name"]
        remove_images(docker_engine, tree.revision)


def run(client: Any, name: str, command: Sequence[str]) -> str:
    output: bytes = client.containers.run(name, list(command), remove=True, network_mode="none")
    return output.decode()


def versions(client: Any, name: str) -> dict[str, str]:
    listed = json.loads(run(client, name, ["python3", "-m", "pip", "list", "--format", "json"]))
    return {package["name"].lower().replace("_", "-"): package["version"] for package in listed}


def test_row_is_installed_and_the_base_keeps_its_packages(
    docker_engine: Any, gaudi: tuple[SourceTree, str, str]
) -> None:
    _, base_name, name = gaudi
    base, found = versions(docker_engine, base_name), versions(docker_engine, name)
    assert found["optimum-habana"] == ROW.optimum_habana
    assert (found["transformers"], found["accelerate"]) == (ROW.transformers, ROW.accelerate)
    assert found["deepspeed"] == f"{DEEPSPEED}+hpu.synapse.v{ROW.deepspeed}"
    for package in ("torch", "habana-torch-plugin", "numpy", "setuptools", "pip"):
        assert found[package] == base[package]
    # The base had pydantic 1, which is replaced.
    assert base["pydantic"].startswith("1.")
    assert found["pydantic"] == locked(image("gaudi"), ROW)["pydantic"]
    labels = docker_engine.images.get(name).labels
    assert labels["trainyard.base"] == labels["org.opencontainers.image.base.name"] == base_name
    code = "from jobs.container.accelerator import choose; print(choose('auto', nproc_per_node=1).reason)"
    assert run(docker_engine, name, ["python", "-c", code]) == "auto: no HPU found, no CUDA device found\n"


def test_image_finds_libfabric_and_builds_the_wrapper(docker_engine: Any, gaudi: tuple[SourceTree, str, str]) -> None:
    _, base, name = gaudi
    load = ["python3", "-c", "import ctypes; ctypes.CDLL('libfabric.so.1')"]
    with pytest.raises(ContainerError, match=r"libfabric\.so\.1: cannot open shared object file"):
        run(docker_engine, base, load)
    code = "from jobs.container import libfabric as f; print(f.preferred_provider(f.providers(f.load('hpu'))))"
    assert run(docker_engine, name, ["python", "-c", code]) == "tcp\n"
    run(docker_engine, name, ["ls", "/usr/lib/habanalabs/libhccl_ofi_wrapper.so"])


def test_conflicting_packages_fail_the_build(docker_engine: Any, gaudi: tuple[SourceTree, str, str]) -> None:
    """The base's Lightning conflicts with fsspec, which is only printed. A conflict of a job's package is an error."""
    lock_path = "/opt/trainyard/requirements.txt"
    script = (ROOT / "images/shared/install-packages").read_text()
    check = f"grep -v '^huggingface-hub==' {lock_path} >/tmp/lock; set -- /tmp/lock; {script}"
    broken = "rm -r \"$(python3 -c 'import huggingface_hub as h; print(h.__path__[0])')\"*-info\n"
    command = broken + check.replace("python3 -m pip install", "true python3 -m pip install")
    with pytest.raises(ContainerError) as failed:
        docker_engine.containers.run(gaudi[2], ["sh", "-c", command], remove=True, network_mode="none", stderr=True)
    output = failed.value.stderr.decode()
    assert "lightning 2.2.0.post0 has requirement fsspec" in output
    assert re.search(r"^transformers \S+ requires huggingface-hub, which is not installed\.$", output, re.MULTILINE)
    assert "error: the packages of /tmp/lock conflict with each other" in output


def test_images_own_tests_fail_only_for_the_stand_ins_pytorch(gaudi: tuple[SourceTree, str, str]) -> None:
    done = gaudi[0].images("test", "gaudi", "--tag", gaudi[2].rpartition(":")[2])
    assert done.returncode == 1, done.stdout + done.stderr
    assert "error: tests of gaudi, gaudi-notebook failed" in done.stderr
    assert (
        re.findall(r"^FAILED \S+::(\w+)", done.stdout, re.MULTILINE) == ["test_packages_have_the_locked_versions"] * 2
    ), done.stdout
    assert (
        re.findall(r"^E +AssertionError: assert (\{.*\}) == \{\}$", done.stdout, re.MULTILINE)
        == [f"{{'torch': '{pinned_torch()}+cpu'}}"] * 2
    )
    assert "the Docker engine has no runtime for the accelerator" in done.stdout
