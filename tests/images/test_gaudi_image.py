"""images/gaudi/Dockerfile, all of it, on a stand-in for Habana's image, which no registry here has.

What the stand-in (habana_image/) cannot show: Python 3.10 and the row's own PyTorch (it has this machine's, so the lock
is made anew for them), Habana's packages, libraries and fork of DeepSpeed (DeepSpeed's own release takes its place),
EFA's libraries, and an HPU. What it does show: every instruction runs as it stands, optimum-habana and the rest of the
row install beside packages that want other versions, the base keeps its PyTorch and NumPy, and a job's trainer trains.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jobs.images import engine
from jobs.images.checks.check import Subject
from jobs.images.hierarchy import image, with_descendants
from jobs.images.image_test import run_checks
from jobs.images.lock import lock, lock_file, locked
from jobs.releases import release
from tests.docker_engine import pip_environment
from tests.jobs.images.source_tree import SourceTree

# The first to ask for the image waits until it is there, which takes minutes.
pytestmark = [pytest.mark.docker, pytest.mark.habana_image, pytest.mark.timeout(1200)]

HERE = Path(__file__).parent
ROW = release()
CHILDREN = {"gaudi-ray": "Ray Train", "gaudi-notebook": "notebook"}
"""Each with the check that it alone has."""
PYTHON = "3.11"
"""The base image's."""
NUMPY = "1.26.4"
DEEPSPEED = "0.16.1"
"""A release of its own, in the place of Habana's fork, which no registry has."""


@pytest.fixture(scope="session")
def torch_version() -> str:
    pinned = re.search(r"^torch==(\S+)", (HERE.parents[1] / "requirements.txt").read_text(), flags=re.MULTILINE)
    assert pinned
    return pinned[1]


@pytest.fixture(scope="session")
def network_alone() -> Iterator[None]:
    """pip as a build sees it: without the files that it may be set up to find on this machine."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in pip_environment().items():
            patch.setenv(name, value.strip('"'))
        patch.setenv("PIP_CONFIG_FILE", os.devnull)
        patch.delenv("PIP_FIND_LINKS", raising=False)
        yield


@pytest.fixture(scope="session")
def deepspeed_repository(tmp_path_factory: pytest.TempPathFactory, network_alone: None) -> Path:
    """A bare git repository with DeepSpeed's source, tagged as Habana tags its fork."""
    folder = tmp_path_factory.mktemp("deepspeed")
    no_build = ("--no-deps", "--no-binary", ":all:", "--no-build-isolation")
    download = [sys.executable, "-m", "pip", "download", "--quiet", *no_build, f"deepspeed=={DEEPSPEED}"]
    subprocess.run(download, cwd=folder, check=True, capture_output=True)
    with tarfile.open(folder / f"deepspeed-{DEEPSPEED}.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    source = folder / f"deepspeed-{DEEPSPEED}"
    (source / "build.txt").write_text(f"+hpu.synapse.v{ROW.deepspeed}\n")
    git = ("git", "-C", str(source), "-c", "user.name=A", "-c", "user.email=a@example.com")
    # One date, so that the same source is the same commit and the engine knows its layers again.
    dated = {**os.environ, "GIT_AUTHOR_DATE": "2025-01-01T00:00:00Z", "GIT_COMMITTER_DATE": "2025-01-01T00:00:00Z"}
    for command in (["init", "-q"], ["add", "--all", "--force"], ["commit", "-qm", DEEPSPEED], ["tag", ROW.deepspeed]):
        subprocess.run([*git, *map(str, command)], env=dated, check=True)
    repository = folder / "deepspeed.git"
    subprocess.run(["git", "clone", "--quiet", "--bare", str(source), str(repository)], check=True)
    return repository


@pytest.fixture(scope="session")
def habana_image(  # noqa: PLR0917 - fixtures
    docker_engine: Any,
    base_image: str,
    torch_index: str,
    torch_version: str,
    deepspeed_repository: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[str]:
    context = tmp_path_factory.mktemp("habana") / "context"
    shutil.copytree(HERE / "habana_image", context, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(deepspeed_repository, context / "deepspeed.git")
    name = f"stand-in/habana:{ROW.package_version}"
    arguments = {
        "BASE_IMAGE": base_image,
        "TORCH_INDEX": torch_index,
        "TORCH": torch_version,
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
    yield name
    docker_engine.images.remove(name, force=True)


@pytest.fixture(scope="session")
def gaudi_image(
    docker_engine: Any,
    habana_image: str,
    torch_version: str,
    network_alone: None,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[str]:
    """Built as users build it, with its children, of a source tree whose locks fit the stand-in's Python."""
    tree = SourceTree(tmp_path_factory.mktemp("gaudi") / "tree")
    for one in with_descendants("gaudi"):
        path = lock_file(one, ROW).relative_to(HERE.parents[1])
        tree.write(str(path), lock(one, replace(ROW, python=PYTHON, pytorch=torch_version), torch_index=""))
    tree.commit()
    options = ("--build-arg", f"BASE_IMAGE={habana_image}", "--network", "host", "-o", "json")
    done = tree.images("build", "gaudi", "--all-descendants", *options)
    assert done.returncode == 0, done.stderr
    built = {row["image"]: row["name"] for row in json.loads(done.stdout)}
    assert set(built) == {"gaudi", *CHILDREN}
    yield built["gaudi"]
    for name in built.values():
        docker_engine.images.remove(name, force=True)


def run(client: Any, name: str, command: Sequence[str]) -> str:
    output: bytes = client.containers.run(name, list(command), remove=True, network_mode="none")
    return output.decode()


def versions(client: Any, name: str) -> dict[str, str]:
    listed = json.loads(run(client, name, ["python3", "-m", "pip", "list", "--format", "json"]))
    return {package["name"].lower().replace("_", "-"): package["version"] for package in listed}


def test_the_row_is_installed_and_the_base_keeps_what_is_its_own(
    docker_engine: Any, habana_image: str, gaudi_image: str
) -> None:
    base, found = versions(docker_engine, habana_image), versions(docker_engine, gaudi_image)
    assert found["optimum-habana"] == ROW.optimum_habana
    assert found["transformers"] == ROW.transformers
    assert found["accelerate"] == ROW.accelerate
    assert found["deepspeed"] == f"{DEEPSPEED}+hpu.synapse.v{ROW.deepspeed}"
    for name in ("torch", "habana-torch-plugin", "numpy", "setuptools", "pip"):
        assert found[name] == base[name]
    # The base's was another one, and one that pydantic 2 replaces whole.
    assert base["pydantic"].startswith("1.")
    assert found["pydantic"] == locked(image("gaudi"), ROW)["pydantic"]


def test_the_job_starts_and_finds_no_hpu(docker_engine: Any, gaudi_image: str) -> None:
    assert "--nproc-per-node" in run(docker_engine, gaudi_image, ["python", "-m", "jobs.train.launch", "--help"])
    code = "from jobs.train.accelerator import choose; print(choose('auto', nproc_per_node=1).reason)"
    assert run(docker_engine, gaudi_image, ["python", "-c", code]) == "auto: no HPU found, no CUDA device found\n"


def test_the_trainer_of_a_job_trains(docker_engine: Any, gaudi_image: str) -> None:
    code = (HERE / "train_on_cpu.py").read_text()
    result = json.loads(run(docker_engine, gaudi_image, ["python", "-W", "ignore", "-c", code]).splitlines()[-1])
    assert result["trainer"] == "GaudiTrainer"
    assert result["losses"][-1] < result["losses"][0] / 4, "it did not learn"


def test_labels_say_what_is_inside(docker_engine: Any, gaudi_image: str, habana_image: str) -> None:
    labels = docker_engine.images.get(gaudi_image).labels
    assert labels["org.opencontainers.image.version"] == ROW.name
    assert labels["org.opencontainers.image.base.name"] == habana_image
    inside = {name.removeprefix("trainyard."): value for name, value in labels.items() if name.startswith("trainyard.")}
    assert re.fullmatch(r"[0-9a-f]{40}", inside.pop("commit"))
    assert inside == {
        "base": habana_image,
        "pytorch": ROW.pytorch,
        "optimum-habana": ROW.optimum_habana,
        "transformers": ROW.transformers,
        "accelerate": ROW.accelerate,
        "deepspeed": ROW.deepspeed,
    }


def test_packages_that_do_not_fit_together_fail_the_build(docker_engine: Any, gaudi_image: str) -> None:
    """The base's Lightning wants an older fsspec than a job has, which is only said; a job's own want is an error."""
    lock_path = "/opt/trainyard/requirements.txt"
    script = (HERE.parents[1] / "images/shared/install-packages").read_text()
    check = f"grep -v '^huggingface-hub==' {lock_path} >/tmp/lock; set -- /tmp/lock; {script}"
    broken = "rm -r \"$(python3 -c 'import huggingface_hub as h; print(h.__path__[0])')\"*-info\n"
    container = docker_engine.containers.run(
        gaudi_image,
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


def checked(client: Any, name: str, gaudi_image: str) -> tuple[dict[str, str], str]:
    """How each check of an image ended, and all that they found."""
    revision = gaudi_image.partition(f":{ROW.name}-")[2]
    subject = Subject.find(image(name), release=ROW, revision=revision, client=client)
    results = run_checks(subject, begins=lambda _: None, ends=lambda _: None)
    told = "\n".join(f"{result.check.name}: {result.outcome}: {result.found}" for result in results)
    return {result.check.name: result.outcome for result in results}, told


@pytest.mark.parametrize(("child", "own"), CHILDREN.items())
def test_children_are_built_on_it_and_work(docker_engine: Any, gaudi_image: str, child: str, own: str) -> None:
    outcomes, told = checked(docker_engine, child, gaudi_image)
    assert outcomes[own] == "ok", told
    # The stand-in's PyTorch is this machine's.
    assert {name for name, outcome in outcomes.items() if outcome == "failed"} <= {"versions"}, told


def test_the_image_test_sees_what_the_stand_in_lacks(docker_engine: Any, gaudi_image: str) -> None:
    outcomes, told = checked(docker_engine, "gaudi", gaudi_image)
    assert {name for name, outcome in outcomes.items() if outcome == "left out"} == {
        "ownership",
        "build tools",
        "accelerator",
    }, told
    assert "accelerator: left out: the Docker engine has no runtime 'habana': a container finds no HPU device" in told
    # The stand-in's PyTorch is this machine's.
    assert {name for name, outcome in outcomes.items() if outcome == "failed"} == {"versions"}, told
    assert re.search(rf"^versions: failed: .*torch is \S+, not {re.escape(ROW.pytorch)}", told, re.MULTILINE), told
