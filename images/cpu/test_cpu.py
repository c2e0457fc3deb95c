"""What the image cpu and what is built on it must be, beside what every image must (images/checks)."""

from importlib.metadata import distribution
from pathlib import Path

TORCH_RATIO = 1.45
"""The size of all packages, as a multiple of the torch wheel unpacked; compiled modules take 0.1."""


def test_there_is_no_compiler_and_no_build_tool(build_tools: set[str]) -> None:
    assert build_tools == set()


def test_its_packages_are_at_most_half_as_large_again_as_torch() -> None:
    packages = Path(str(distribution("torch").locate_file("")))
    size = sum(path.stat().st_size for path in packages.rglob("*") if path.is_file())
    torch = sum(file.size or 0 for file in distribution("torch").files or ())
    assert size <= TORCH_RATIO * torch
