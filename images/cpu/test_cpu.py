"""Checks of the image cpu and its children, in addition to those of every image (images/checks)."""

from importlib.metadata import distribution
from pathlib import Path

TORCH_RATIO = 1.45
"""Maximum size of all packages, as a multiple of the unpacked torch wheel. Compiled modules take 0.1."""


def test_image_has_no_build_tools(build_tools: set[str]) -> None:
    assert build_tools == set()


def test_packages_are_at_most_half_as_large_again_as_torch() -> None:
    packages = Path(str(distribution("torch").locate_file("")))
    size = sum(path.stat().st_size for path in packages.rglob("*") if path.is_file())
    torch = sum(file.size or 0 for file in distribution("torch").files or ())
    assert size <= TORCH_RATIO * torch
