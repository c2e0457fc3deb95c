"""Fixtures for tests that build images: sources, and the cpu image with its children."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.images.source_tree import SourceTree, release_of, remove_images, rows_of


@dataclass(frozen=True)
class Built:
    """Images built once for all tests, from sources that no test changes."""

    tree: SourceTree
    rows: list[dict[str, Any]]

    def name(self, image: str) -> str:
        return f"trainyard/{image}:{release_of(image)}-{self.tree.revision}"


@pytest.fixture
def tree(tmp_path: Path, docker_engine: Any) -> Iterator[SourceTree]:
    """A copy of the sources. Images built from it are removed after the test; BuildKit keeps their layers."""
    tree = SourceTree(tmp_path / "tree")
    yield tree
    remove_images(docker_engine, tree.revision)


@pytest.fixture(scope="session")
def options(base_image: str, torch_index: str) -> Sequence[str]:
    """Options for building the cpu image on this machine."""
    given = ("--build-arg", f"BASE_IMAGE={base_image}", "--build-arg", f"TORCH_INDEX={torch_index}")
    return (*given, "--network", "host")


@pytest.fixture(scope="session")
def built(options: Sequence[str], docker_engine: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Built]:
    """The cpu image and its children."""
    tree = SourceTree(tmp_path_factory.mktemp("built") / "tree")
    yield Built(tree, rows_of(tree.images("build", "cpu", "--all-descendants", *options, "-o", "json")))
    remove_images(docker_engine, tree.revision)
