"""What images/README.md says of adding an image, done in a copy of the source; nothing is built."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jobs.contract.releases import release
from tests.support.images.source_tree import ROOT, SourceTree

ROW = release()

LOOK = """\
import json, sys
from jobs.images.checks import packages
from jobs.images.checks.table import CHECKS
from jobs.contract.image_hierarchy import image
from jobs.contract.releases import release

one = image(sys.argv[1])
print(json.dumps({
    "checks": [check.name for check in CHECKS if check.concerns(one)],
    "modules": packages.modules(one),
    "versions": packages.expected_versions(one, release()),
}))
"""


@pytest.fixture
def tree(tmp_path: Path) -> SourceTree:
    tree = SourceTree(tmp_path / "tree")
    for name in ("pyproject.toml", "requirements.txt"):
        shutil.copy(ROOT / name, tree.root)
    return tree


def run(tree: SourceTree, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, cwd=tree.root, env=tree.environment(), capture_output=True, text=True, timeout=200, check=False
    )


def lock(tree: SourceTree, name: str) -> subprocess.CompletedProcess[str]:
    return run(tree, "-m", "jobs.images.lock", name, ROW.name)


def look(tree: SourceTree, name: str) -> dict[str, Any]:
    """Return what the test of an image will do, as far as no container is needed for it."""
    done = run(tree, "-c", LOOK, name)
    assert done.returncode == 0, done.stderr
    seen: dict[str, Any] = json.loads(done.stdout)
    return seen


def test_a_child_takes_a_folder_and_a_group_of_packages(tree: SourceTree) -> None:
    tree.write("images/probe/Dockerfile", "ARG PARENT_IMAGE\nFROM ${PARENT_IMAGE}\n")
    without = lock(tree, "gaudi-probe")
    assert without.returncode == 3
    assert "error: pyproject.toml has no group of packages for image gaudi-probe\nNext: add the group" in without.stderr

    project = (tree.root / "pyproject.toml").read_text()
    tree.write("pyproject.toml", project.replace("\nsbom = [\n", '\nprobe = ["tomli==2.0.1"]\nsbom = [\n'))
    done = lock(tree, "gaudi-probe")
    assert done.returncode == 0, done.stderr
    path = f"images/locks/{ROW.name}/gaudi-probe.txt"
    assert done.stderr == f"{path}\n"
    assert re.fullmatch(r"tomli==2\.0\.1 --hash=sha256:[0-9a-f]{64}", (tree.root / path).read_text().splitlines()[-1])

    seen = look(tree, "gaudi-probe")
    assert {"versions", "pip check", "imports", "SIGTERM", "size"} <= set(seen["checks"])
    assert not {"notebook", "two ranks", "accelerator"} & set(seen["checks"])
    assert "jobs.train.launch" in seen["modules"]
    assert seen["versions"] | {"tomli": "2.0.1", "habana-torch-plugin": f"{ROW.name}.*"} == seen["versions"]


def test_an_image_of_its_own_takes_a_folder_and_a_row(tree: SourceTree) -> None:
    tree.write("images/plain/Dockerfile", "ARG BASE_IMAGE\nFROM ${BASE_IMAGE}\n")
    without = lock(tree, "plain")
    assert without.returncode == 3
    assert (
        "error: nothing says what image plain adds to its base\nNext: add the row 'plain' to IMAGES" in without.stderr
    )

    source = (tree.root / "jobs/images/lock.py").read_text()
    row = '    "plain": Contents(python="3.11", torch="cpu"),\n'
    tree.write("jobs/images/lock.py", source.replace('    "cpu": Contents(', f'{row}    "cpu": Contents(', 1))
    # Of the packages of a job: what is locked for cpu, which takes a while to find out.
    locks = tree.root / "images/locks" / ROW.name
    shutil.copy(locks / "cpu.txt", locks / "plain.txt")

    seen = look(tree, "plain")
    assert {"versions", "imports", "SIGTERM", "two ranks"} <= set(seen["checks"])
    assert not {"accelerator", "size"} & set(seen["checks"])
    assert "optimum.habana" not in seen["modules"]
    assert seen["versions"]["transformers"] == ROW.transformers
    assert "habana-torch-plugin" not in seen["versions"]
