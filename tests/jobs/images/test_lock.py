import re
import subprocess
import sys
from pathlib import Path

import pytest

from jobs.contract.errors import TrainyardError
from jobs.contract.image_hierarchy import image, images
from jobs.contract.releases import Release, release, releases
from jobs.images import lock
from jobs.images.lock import IMAGES, check, lock_file

ROOT = Path(__file__).parents[3]


def _pins(path: Path) -> dict[str, str]:
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    found = [re.fullmatch(r"([a-z0-9.-]+)==(\S+) --hash=sha256:[0-9a-f]{64}", line) for line in lines]
    assert all(found), lines
    return {match[1]: match[2] for match in found if match}


@pytest.mark.parametrize("row", releases().values(), ids=lambda row: row.name)
def test_the_gaudi_image_has_what_the_row_says_and_leaves_the_bases_own_packages_alone(row: Release) -> None:
    pins = _pins(lock_file(image("gaudi"), row))
    assert pins["optimum-habana"] == row.optimum_habana
    assert pins["transformers"] == row.transformers
    assert pins["accelerate"] == row.accelerate
    assert not {"torch", "triton", "numpy", "setuptools"} & set(pins)
    assert not [name for name in pins if name.startswith(("habana", "nvidia-c"))]


@pytest.mark.parametrize("row", releases().values(), ids=lambda row: row.name)
@pytest.mark.parametrize("name", IMAGES)
def test_a_lock_holds_what_a_job_imports(name: str, row: Release) -> None:
    pins = _pins(lock_file(image(name), row))
    assert {"boto3", "datasets", "pydantic", "tensorboard", "transformers"} <= set(pins)
    # pyarrow 26 asks for NumPy 2 when it is imported, and its metadata does not say so. The Gaudi image's is older.
    assert int(pins["pyarrow"].partition(".")[0]) < 26 or pins.get("numpy", "1").startswith("2.")


def test_the_cpu_image_has_the_laptops_packages() -> None:
    laptop = dict(re.findall(r"^([a-z0-9.-]+)==(\S+)", (ROOT / "requirements.txt").read_text(), flags=re.MULTILINE))
    pins = _pins(lock_file(image("cpu"), release()))
    assert {name: version.removesuffix("+cpu") for name, version in pins.items()} == {
        name: laptop[name] for name in pins
    }
    assert pins["torch"].endswith("+cpu")


def test_what_is_installed_on_a_laptop_is_hashed_and_torch_for_each_of_its_sources() -> None:
    files = [
        (ROOT / name).read_text() for name in ("requirements.txt", "requirements-scripts.txt", "requirements-node.txt")
    ]
    packages = [line for text in files for line in text.splitlines() if not line.lstrip().startswith("#")]
    assert [line for line in packages if not re.fullmatch(r"\S+==\S+( --hash=sha256:[0-9a-f]{64})+", line)] == []
    [torch] = [line for line in packages if line.startswith("torch==")]
    for name in ("cpu", "cuda"):
        [of_image] = re.findall(
            r"^torch==\S+ --hash=(\S+)$", lock_file(image(name), release()).read_text(), re.MULTILINE
        )
        assert of_image in torch


def test_an_image_that_there_is_not_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "jobs.images.lock", "gaudy"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: image 'gaudy' not found; did you mean 'gaudi'?\n"


def test_one_word_locks_every_image_of_a_release_each_after_its_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lock, "ROOT", tmp_path)
    monkeypatch.setattr(lock, "lock_file", lambda of, row: tmp_path / row.name / f"{of.name}.txt")
    monkeypatch.setattr(lock, "lock", lambda of, row, torch_index: of.name)
    monkeypatch.setattr(sys, "argv", ["lock", "all", "1.23.0"])
    lock.main()
    written = capsys.readouterr().err.splitlines()
    assert sorted(written) == sorted(f"1.23.0/{name}.txt" for name in images())
    assert all(
        written.index(f"1.23.0/{one.parent}.txt") < written.index(f"1.23.0/{one.name}.txt")
        for one in images().values()
        if one.parent
    )


@pytest.mark.parametrize("name", ["gaudi", "cpu", "cuda", "gaudi-notebook"])
def test_the_index_has_every_file_of_the_default_release(name: str) -> None:
    check(image(name), release())


@pytest.mark.parametrize(
    ("found", "put_in_its_place"),
    [
        (r"(?m)^(boto3==\S+ --hash=sha256:)[0-9a-f]{64}$", r"\g<1>" + "0" * 64),
        (r"(?m)^boto3==[\d.]+", "boto3==0.0.999"),
    ],
    ids=["another hash", "a version that is gone"],
)
def test_a_file_that_the_index_lacks_is_named(
    found: str, put_in_its_place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoilt = tmp_path / f"{release().name}.txt"
    # A few of the files, which the index tells of in a moment.
    lines = lock_file(image("gaudi"), release()).read_text().splitlines()
    text = "\n".join(line for line in lines if re.match("boto3|jmespath|s3transfer", line))
    spoilt.write_text(re.sub(found, put_in_its_place, text))
    assert spoilt.read_text() != text
    monkeypatch.setattr(lock, "lock_file", lambda of, row: spoilt)
    monkeypatch.setattr(lock, "ROOT", tmp_path)
    with pytest.raises(TrainyardError, match="boto3"):
        check(image("gaudi"), release())
