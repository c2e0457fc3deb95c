"""`trainyard images sbom` on an image that takes a moment to build."""

import json
from pathlib import Path
from typing import Any

import pytest

from jobs.contract.releases import release
from tests.support.images.source_tree import SourceTree

# The first to ask for the base waits until it is there.
pytestmark = [pytest.mark.docker, pytest.mark.timeout(900)]


@pytest.fixture
def tree(tree: SourceTree) -> SourceTree:
    tree.write("images/cpu/Dockerfile", "ARG BASE_IMAGE\nFROM ${BASE_IMAGE}\nARG REVISION\nRUN touch /built\n")
    tree.commit()
    return tree


def test_the_document_lists_what_is_inside_the_image(tree: SourceTree, base_image: str, tmp_path: Path) -> None:
    built = tree.images("build", "cpu", "--build-arg", f"BASE_IMAGE={base_image}")
    assert built.returncode == 0, built.stderr

    done = tree.images("sbom", "cpu", "--folder", str(tmp_path / "documents"))

    assert done.returncode == 0, done.stderr
    tag = f"{release().name}-{tree.revision}"
    path = tmp_path / "documents" / f"cpu-{tag}.spdx.json"
    assert done.stdout == f"{path}\n"
    assert list(path.parent.iterdir()) == [path], "nothing unfinished stays"
    document = json.loads(path.read_text())
    assert document["spdxVersion"].startswith("SPDX-2.")
    packages = {package["name"]: package for package in document["packages"]}
    assert packages["trainyard/cpu"]["versionInfo"] == tag
    origins = {
        name: {reference["referenceLocator"].partition("/")[0] for reference in package.get("externalRefs", ())}
        for name, package in packages.items()
    }
    assert "pkg:deb" in origins["ca-certificates"]
    assert "pkg:pypi" in origins["pip"]


def test_an_image_that_was_not_built_is_said_to_be_missing(tree: SourceTree, docker_engine: Any) -> None:
    done = tree.images("sbom", "cpu")
    assert done.returncode == 4
    assert f"the Docker engine has no trainyard/cpu:{release().name}-{tree.revision}" in done.stderr
    assert f"trainyard images build cpu --release {release().name}" in done.stderr
