"""What tests that build images share: sources of their own, and the options that the cpu image needs here."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.images.source_tree import SourceTree, remove_images


@pytest.fixture
def tree(tmp_path: Path, docker_engine: Any) -> Iterator[SourceTree]:
    """A copy of the sources; what is built from it goes when the test ends, and BuildKit keeps its layers."""
    tree = SourceTree(tmp_path / "tree")
    yield tree
    remove_images(docker_engine, tree.revision)


@pytest.fixture(scope="session")
def options(base_image: str, torch_index: str) -> Sequence[str]:
    """The options that a build of the cpu image needs on this machine."""
    given = ("--build-arg", f"BASE_IMAGE={base_image}", "--build-arg", f"TORCH_INDEX={torch_index}")
    return (*given, "--network", "host")
