import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest

from jobs.core.errors import ConfigurationError, TrainyardError
from jobs.core.images import Release, image, release, releases
from jobs.images import lock
from jobs.images.lock import lock_file

ROOT = Path(__file__).parents[3]


def _pins(path: Path) -> dict[str, str]:
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    found = [re.fullmatch(r"([a-z0-9.-]+)==(\S+)( --hash=sha256:[0-9a-f]{64})+", line) for line in lines]
    assert all(found), lines
    return {match[1]: match[2] for match in found if match}


@pytest.mark.parametrize("row", releases().values(), ids=lambda row: row.name)
def test_lock_has_a_jobs_packages_but_not_those_of_the_base(row: Release) -> None:
    pins = _pins(lock_file(image(row.image), row))
    assert {"boto3", "datasets", "pydantic", "tensorboard", "transformers", "uv"} <= set(pins)
    # pyarrow 26 needs NumPy 2 at import but does not declare it. The Gaudi image has an older NumPy.
    assert int(pins["pyarrow"].partition(".")[0]) < 26 or pins.get("numpy", "1").startswith("2.")
    assert (pins["transformers"], pins["accelerate"]) == (row.transformers, row.accelerate)
    if row.image != "gaudi":
        assert pins["torch"].removesuffix("+cpu") == row.pytorch
        return
    assert pins["optimum-habana"] == row.optimum_habana
    assert not {"torch", "triton", "numpy", "setuptools"} & set(pins)
    assert not [name for name in pins if name.startswith(("habana", "nvidia-c"))]


def test_cpu_image_has_the_laptops_packages() -> None:
    laptop = dict(re.findall(r"^([a-z0-9.-]+)==(\S+)", (ROOT / "requirements.txt").read_text(), flags=re.MULTILINE))
    pins = _pins(lock_file(image("cpu"), release(of="cpu")))
    assert {name: version.removesuffix("+cpu") for name, version in pins.items()} == {
        name: laptop[name] for name in pins
    }
    assert pins["torch"].endswith("+cpu")


def test_laptop_packages_are_hashed_and_torch_for_both_indexes() -> None:
    files = [
        (ROOT / name).read_text() for name in ("requirements.txt", "requirements-scripts.txt", "requirements-node.txt")
    ]
    packages = [line for text in files for line in text.splitlines() if not line.lstrip().startswith("#")]
    assert [
        line for line in packages if not re.fullmatch(r"\S+==\S+( ; .+?)?( --hash=sha256:[0-9a-f]{64})+", line)
    ] == []
    [torch] = [line for line in packages if line.startswith("torch==")]
    text = lock_file(image("cpu"), release(of="cpu")).read_text()
    [of_image] = re.findall(r"^torch==\S+ --hash=(\S+)$", text, re.MULTILINE)
    assert of_image in torch


def test_cdk_cli_is_hashed_and_its_lock_names_no_registry() -> None:
    [(name, cli)] = [
        (name, package)
        for name, package in json.loads((ROOT / "package-lock.json").read_text())["packages"].items()
        if name
    ]
    assert name == "node_modules/aws-cdk"
    assert cli["integrity"].startswith("sha512-")
    assert "resolved" not in cli


def test_all_locks_every_image_of_a_release_parents_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "lock_file", lambda img, row: tmp_path / row.name / f"{img.name}.txt")
    monkeypatch.setattr(lock, "lock", lambda img, row, torch_index: img.name)
    written = [str(path.relative_to(tmp_path)) for path in lock.lock_all("all", ["1.24.0"])]
    assert written == ["1.24.0/gaudi.txt", "1.24.0/gaudi-notebook.txt"]
    # Without a release: all rows, each with its own images.
    assert [path.parent.name for path in lock.lock_all("cpu", [])] == [release(of="cpu").name]
    with pytest.raises(ConfigurationError, match=r"release '1\.24\.0' is for image 'gaudi', not 'cpu'"):
        [*lock.lock_all("cpu", ["1.24.0"])]


def test_lock_hashes_fitting_wheels_and_omits_the_bases_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses the package index. Gaudi's base already has PyTorch and its dependencies."""
    asked = ["torch==2.6.0", "markupsafe==3.0.2", "idna"]
    monkeypatch.setattr(lock, "requirements", lambda img, row: asked)
    row = release("1.21.0")
    header, made_by, idna, markupsafe, end = lock.lock(image("gaudi"), row, torch_index="").split("\n")
    assert header == "# Packages that the image gaudi adds to its base, for release 1.21.0 and Python 3.10."
    assert (made_by, end) == ("# Made by `trainyard images lock gaudi 1.21.0`; do not edit.", "")
    # The laptop's version.
    assert re.sub(" --hash.*", "", idna) in (ROOT / "requirements.txt").read_text()
    for_cp310_on_linux = "bbcb445fa71794da8f178f0f6d66789a28d7319071af7a496d4d507ed566270d"
    assert markupsafe == f"markupsafe==3.0.2 --hash=sha256:{for_cp310_on_linux}"
    asked[:] = ["idna==3.7", "idna==3.8"]
    with pytest.raises(TrainyardError, match="uv cannot find the packages"):
        lock.lock(image("gaudi"), row, torch_index="")


def test_only_the_cpu_image_gets_torch_from_the_cpu_index(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[tuple[Any, ...]] = []

    def compile_nothing(*arguments: Any, to: Path) -> None:
        commands.append(arguments)
        to.write_text("")

    monkeypatch.setattr(lock, "_compile", compile_nothing)
    monkeypatch.setattr(lock, "locked", lambda img, row: {"torch": "2.13.0+cpu"})
    for name, options in (
        ("cpu", [["--index", "http://torch"], ["--only-binary", ":all:"]]),
        ("cpu-notebook", [["--index", "http://torch"], ["--no-emit-package", "torch"]]),
        ("cuda", [["--only-binary", ":all:"]]),
        ("gaudi", [["--no-emit-package", "torch"], ["--no-emit-package", "numpy"], ["--python-version", "3.10"]]),
    ):
        commands.clear()
        lock.lock(one := image(name), release(of=one.root), torch_index="http://torch")
        first, second = commands
        assert all(option in [list(pair) for pair in itertools.pairwise(first)] for option in options), name
        assert ("--index" in first) == ("--index" in second) == name.startswith("cpu")
