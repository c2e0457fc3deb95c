"""images/gaudi/Dockerfile, all of it, on a stand-in for Habana's image (habana_stand_in.py).

What the stand-in cannot show: Habana's packages, libraries and fork of DeepSpeed (DeepSpeed's own release takes its
place), EFA's build of libfabric (Ubuntu's or Debian's lies in its place), and an HPU. What it does show: every
instruction runs as it stands, but for the commit of libfabric's wrapper; optimum-habana and the rest
of the row install beside packages that want other versions, the base keeps its PyTorch and NumPy, and a job's trainer
trains; on Ubuntu's Python 3.10 and the row's own PyTorch, where UBUNTU_MIRROR names an archive of Ubuntu's packages.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from docker.errors import ContainerError

from jobs.contract.image_hierarchy import image
from jobs.images.checks.check import Subject
from jobs.images.checks.table import run_checks
from jobs.images.lock import locked
from tests.support.images import habana_stand_in
from tests.support.images.habana_stand_in import DEEPSPEED, ROW, Base
from tests.support.images.source_tree import remove_images

# The first to ask for the image waits until it is there, which takes minutes.
pytestmark = [pytest.mark.docker, pytest.mark.habana_image, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[2]
CHILDREN = {"gaudi-notebook": "notebook"}
"""Each with the check that it alone has."""


@dataclass(frozen=True)
class Gaudi:
    """The gaudi image, and what it stands on."""

    base: Base
    habana_image: str
    name: str


@pytest.fixture(scope="module")
def gaudi(
    request: pytest.FixtureRequest, docker_engine: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Gaudi]:
    """The gaudi image, built as users build it, with its children."""
    folder = tmp_path_factory.mktemp("gaudi")
    base = habana_stand_in.ubuntu(docker_engine, folder)
    if base is None:
        base = habana_stand_in.debian(request.getfixturevalue("base_image"), request.getfixturevalue("torch_index"))
    names = ["gaudi", *CHILDREN]
    tree = habana_stand_in.sources(folder / "tree", base, names)
    with habana_stand_in.habana_image(docker_engine, base, folder) as habana_image:
        options = ("--build-arg", f"BASE_IMAGE={habana_image}", "--network", "host", "-o", "json")
        done = tree.images("build", *names, *options)
        assert done.returncode == 0, done.stderr
        built = {row["image"]: row["name"] for row in json.loads(done.stdout)}
        assert {*built} == {*names}
        yield Gaudi(base, habana_image, built["gaudi"])
        remove_images(docker_engine, tree.revision)


def run(client: Any, name: str, command: Sequence[str]) -> str:
    output: bytes = client.containers.run(name, list(command), remove=True, network_mode="none")
    return output.decode()


def versions(client: Any, name: str) -> dict[str, str]:
    listed = json.loads(run(client, name, ["python3", "-m", "pip", "list", "--format", "json"]))
    return {package["name"].lower().replace("_", "-"): package["version"] for package in listed}


def test_the_row_is_installed_and_the_base_keeps_what_is_its_own(docker_engine: Any, gaudi: Gaudi) -> None:
    base, found = versions(docker_engine, gaudi.habana_image), versions(docker_engine, gaudi.name)
    assert found["optimum-habana"] == ROW.optimum_habana
    assert found["transformers"] == ROW.transformers
    assert found["accelerate"] == ROW.accelerate
    assert found["deepspeed"] == f"{DEEPSPEED}+hpu.synapse.v{ROW.deepspeed}"
    for name in ("torch", "habana-torch-plugin", "numpy", "setuptools", "pip"):
        assert found[name] == base[name]
    # The base's was another one, and one that pydantic 2 replaces whole.
    assert base["pydantic"].startswith("1.")
    assert found["pydantic"] == locked(image("gaudi"), ROW)["pydantic"]


def test_the_job_starts_and_finds_no_hpu(docker_engine: Any, gaudi: Gaudi) -> None:
    assert "--nproc-per-node" in run(docker_engine, gaudi.name, ["python", "-m", "jobs.train.launch", "--help"])
    code = "from jobs.train.accelerator import choose; print(choose('auto', nproc_per_node=1).reason)"
    assert run(docker_engine, gaudi.name, ["python", "-c", code]) == "auto: no HPU found, no CUDA device found\n"


def test_the_trainer_of_a_job_trains(docker_engine: Any, gaudi: Gaudi) -> None:
    code = (ROOT / "tests/support/images/train_on_cpu.py").read_text()
    result = json.loads(run(docker_engine, gaudi.name, ["python", "-W", "ignore", "-c", code]).splitlines()[-1])
    assert result["trainer"] == "GaudiTrainer"
    assert result["losses"][-1] < result["losses"][0] / 4, "it did not learn"


def test_it_finds_libfabric_where_the_base_does_not_and_builds_the_wrapper(docker_engine: Any, gaudi: Gaudi) -> None:
    load = ["python3", "-c", "import ctypes; ctypes.CDLL('libfabric.so.1')"]
    with pytest.raises(ContainerError, match=r"libfabric\.so\.1: cannot open shared object file"):
        run(docker_engine, gaudi.habana_image, load)
    code = "from jobs.train import libfabric as f; print(f.taken(f.providers(f.load('hpu'))))"
    assert run(docker_engine, gaudi.name, ["python", "-c", code]) == "tcp\n"
    assert "/usr/lib/habanalabs/libhccl_ofi_wrapper.so" in run(
        docker_engine, gaudi.name, ["ls", "/usr/lib/habanalabs/libhccl_ofi_wrapper.so"]
    )


def test_labels_say_what_is_inside(docker_engine: Any, gaudi: Gaudi) -> None:
    labels = docker_engine.images.get(gaudi.name).labels
    assert labels["org.opencontainers.image.version"] == ROW.name
    assert labels["org.opencontainers.image.base.name"] == gaudi.habana_image
    inside = {name.removeprefix("trainyard."): value for name, value in labels.items() if name.startswith("trainyard.")}
    assert re.fullmatch(r"[0-9a-f]{40}", inside.pop("commit"))
    assert inside == {
        "base": gaudi.habana_image,
        "pytorch": ROW.pytorch,
        "optimum-habana": ROW.optimum_habana,
        "transformers": ROW.transformers,
        "accelerate": ROW.accelerate,
        "deepspeed": ROW.deepspeed,
    }


def test_packages_that_do_not_fit_together_fail_the_build(docker_engine: Any, gaudi: Gaudi) -> None:
    """The base's Lightning wants an older fsspec than a job has, which is only said; a job's own want is an error."""
    lock_path = "/opt/trainyard/requirements.txt"
    script = (ROOT / "images/shared/install-packages").read_text()
    check = f"grep -v '^huggingface-hub==' {lock_path} >/tmp/lock; set -- /tmp/lock; {script}"
    broken = "rm -r \"$(python3 -c 'import huggingface_hub as h; print(h.__path__[0])')\"*-info\n"
    container = docker_engine.containers.run(
        gaudi.name,
        ["sh", "-c", broken + check.replace("python3 -m pip install", "true python3 -m pip install")],
        detach=True,
        network_mode="none",
    )
    try:
        code = container.wait()["StatusCode"]
        said = container.logs().decode()
    finally:
        container.remove(force=True)
    assert code == 1, said
    assert "lightning 2.2.0.post0 has requirement fsspec" in said
    assert re.search(r"^transformers \S+ requires huggingface-hub, which is not installed\.$", said, re.MULTILINE)
    assert "error: the packages of /tmp/lock do not fit together" in said


def checked(client: Any, name: str, gaudi: Gaudi) -> tuple[dict[str, str], str]:
    """Return how each check of an image ended, and all that they found."""
    revision = gaudi.name.partition(f":{ROW.name}-")[2]
    subject = Subject.find(image(name), release=ROW, revision=revision, client=client)
    results = run_checks(subject, begins=lambda _: None, ends=lambda _: None)
    told = "\n".join(f"{result.check.name}: {result.outcome}: {result.found}" for result in results)
    return {result.check.name: result.outcome for result in results}, told


@pytest.mark.parametrize(("child", "own"), CHILDREN.items())
def test_children_are_built_on_it_and_work(docker_engine: Any, gaudi: Gaudi, child: str, own: str) -> None:
    outcomes, told = checked(docker_engine, child, gaudi)
    assert outcomes[own] == "ok", told
    assert {name for name, outcome in outcomes.items() if outcome == "failed"} == failures(gaudi), told


def test_the_image_test_sees_what_the_stand_in_lacks(docker_engine: Any, gaudi: Gaudi) -> None:
    outcomes, told = checked(docker_engine, "gaudi", gaudi)
    assert {name for name, outcome in outcomes.items() if outcome == "left out"} == {
        "ownership",
        "build tools",
        "accelerator",
    }, told
    assert "accelerator: left out: the Docker engine has no runtime 'habana': a container finds no HPU device" in told
    assert {name for name, outcome in outcomes.items() if outcome == "failed"} == failures(gaudi), told
    if not gaudi.base.fits_the_locks:
        assert re.search(rf"^versions: failed: .*torch is \S+, not {re.escape(ROW.pytorch)}", told, re.MULTILINE), told


def failures(gaudi: Gaudi) -> set[str]:
    """Return the checks that fail on the stand-in: on Debian its PyTorch is this machine's."""
    return set() if gaudi.base.fits_the_locks else {"versions"}
