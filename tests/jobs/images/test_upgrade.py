"""`trainyard images lock --upgrade`, which resolves from the package index, in a copy of the files that it changes."""

import shutil
from dataclasses import replace
from datetime import date
from pathlib import Path

import pytest
import tomllib

from jobs.core.images import release
from jobs.images import lock, upgrade

ROOT = Path(__file__).parents[3]

OLD = "transformers", "5.20.0"


def copied(folder: Path) -> Path:
    """Copy the files that an upgrade changes, with an older pin of one library."""
    for name in ("pyproject.toml", "requirements.txt", "images/releases.toml", "images/cuda/Dockerfile"):
        place = folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, place)
    return folder


def test_an_upgrade_adds_a_release_and_keeps_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only `cuda`: PyTorch's index of CPU builds cannot be reached everywhere."""
    monkeypatch.setattr(upgrade, "IMAGES", {"cuda": lock.IMAGES["cuda"]})
    monkeypatch.setattr(upgrade, "locked", lambda img, row: {**lock.locked(img, row), OLD[0]: OLD[1]})
    root = copied(tmp_path)
    before = release(of="cuda")

    [found] = upgrade.newest(today=date(2031, 5, 7))
    assert found.versions["transformers"][0] == "5.20.0"
    newest = found.versions["transformers"][1]
    assert tuple(map(int, newest.split("."))) >= (5, 24, 0)
    assert found.changes

    upgrade.write([found], root)
    releases = tomllib.loads((root / "images" / "releases.toml").read_text())
    assert releases["default"] == {
        "gaudi": release().name,
        "cpu": release(of="cpu").name,
        "cuda": "cuda-2031.05",
    }
    assert releases["releases"]["cuda-2031.05"]["transformers"] == newest
    assert releases["releases"]["cuda-2031.05"]["python"] == before.python
    assert releases["releases"][before.name]["transformers"] == before.transformers
    assert releases["releases"][before.name]["why"] == "the packages before cuda-2031.05"
    dockerfile = (root / "images" / "cuda" / "Dockerfile").read_text()
    assert dockerfile.count("ARG RELEASE=cuda-2031.05\n") == 2


def test_the_laptop_gets_the_packages_of_the_cpu_image(tmp_path: Path) -> None:
    root = copied(tmp_path)
    before = release(of="cpu")
    after = replace(before, name="cpu-2031.05", transformers="6.0.0")
    upgrade.write([upgrade.Upgrade(before, after, {"transformers": (before.transformers, "6.0.0")})], root)
    assert '"transformers==6.0.0"' in (root / "pyproject.toml").read_text()
    pins = (root / "requirements.txt").read_text()
    assert "\ntransformers==" not in pins, "make pins resolves it again"
    assert "\ntorch==" in pins, "make pins keeps the hashes of other indexes"
