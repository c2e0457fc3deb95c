"""The images, as defined by their Dockerfiles, and their releases, as listed in images/releases.toml.

To add an image, add a folder. images/<name>/Dockerfile with `ARG BASE_IMAGE` defines the image <name>. A Dockerfile
with `ARG PARENT_IMAGE` is a child: it adds something (a notebook) to each other image, so there is one image
<parent>-<name> per parent.

A release is a row of images/releases.toml: versions that work together in a root image (one without a parent) and its
children. Each root image has a default release.

python -m jobs.core.images [RELEASE]   prints the build arguments of images/*/Dockerfile for a release, one per line
python -m jobs.core.images --table     prints the available releases as the table of images/README.md
"""

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import tomllib

from jobs.core.errors import ConfigurationError, UsageError, did_you_mean
from jobs.core.instance_types import INSTANCE_TYPES, InstanceType
from jobs.core.output import run_program

IMAGES_FOLDER = Path(__file__).parents[2] / "images"


@dataclass(frozen=True, kw_only=True)
class Image:
    """An image; it can be built for each release."""

    name: str
    folder: str
    """Folder under images/."""
    parent: str | None
    """Name of the parent image. None if it is built on an external base image."""

    @property
    def root(self) -> str:
        """Return the name of the root image, which the rows of jobs/core/instance_types.json refer to."""
        return self.parent or self.name

    @property
    def dockerfile(self) -> Path:
        return IMAGES_FOLDER / self.folder / "Dockerfile"


@cache
def images() -> Mapping[str, Image]:
    """Return all images by name, parents before their children."""
    texts = {path.parent.name: path.read_text() for path in sorted(IMAGES_FOLDER.glob("*/Dockerfile"))}
    children = [folder for folder, text in texts.items() if re.search(r"^ARG PARENT_IMAGE\b", text, re.MULTILINE)]
    roots = [Image(name=folder, folder=folder, parent=None) for folder in texts if folder not in children]
    derived = [
        Image(name=child_name(root.name, folder), folder=folder, parent=root.name)
        for root in roots
        for folder in children
    ]
    return {image.name: image for image in (*roots, *derived)}


def image(name: str) -> Image:
    """Return the image called `name`. Raises UsageError with the closest name if there is none."""
    try:
        return images()[name]
    except KeyError:
        raise UsageError(f"image '{name}' not found{did_you_mean(name, images())}") from None


def with_descendants(name: str) -> tuple[Image, ...]:
    """Return the image called `name` and its children, in build order. Raises UsageError like `image`."""
    return tuple(each for each in images().values() if image(name).name in (each.name, each.parent))


def child_name(root: str, child: str | None) -> str:
    """Return the name of the image that folder `child` builds on `root`, or of `root` itself if `child` is None."""
    return f"{root}-{child}" if child else root


RELEASES_FILE = IMAGES_FOLDER / "releases.toml"

MINIMUM_PYTHON = "3.10"
"""The oldest Python that the code in the container runs on (`requires-python` of pyproject.toml)."""


@dataclass(frozen=True, kw_only=True)
class Release:
    """A software release: the versions that belong together in an image and its children."""

    name: str
    image: str
    """Root image of the release. The fields from `build` to `deepspeed_commit` are empty for images without Gaudi."""
    python: str
    pytorch: str
    transformers: str
    accelerate: str = ""
    """Empty only in history, because the first optimum-habana did not use it."""
    build: int = 0
    gaudi: tuple[int, ...] = ()
    """Supported generations of the hardware."""
    os: str = ""
    optimum_habana: str = ""
    deepspeed: str = ""
    """Tag of Habana's fork, github.com/HabanaAI/DeepSpeed; empty in history."""
    deepspeed_commit: str = ""
    """Commit of that tag when it was last checked; empty if it never was."""
    why: str = ""
    """The reason to choose this release; empty only in history."""

    @property
    def base_image(self) -> str:
        """Return the name of Habana's PyTorch image for a release of Gaudi; images/locks/bases.txt has its digest."""
        return (
            f"vault.habana.ai/gaudi-docker/{self.name}/{self.os}/habanalabs/"
            f"pytorch-installer-{self.pytorch}:{self.name}-{self.build}"
        )

    @property
    def package_version(self) -> str:
        """Return the version of Habana's Debian packages of this release, including the driver."""
        return f"{self.name}-{self.build}"

    @property
    def build_arguments(self) -> dict[str, str]:
        """Return the build arguments of this release; each Dockerfile declares the ones it needs as `ARG`."""
        arguments = {
            "RELEASE": self.name,
            "HABANA_IMAGE": self.base_image if self.build else "",
            "PYTHON": self.python,
            "PYTORCH": self.pytorch,
            "OPTIMUM_HABANA": self.optimum_habana,
            "TRANSFORMERS": self.transformers,
            "ACCELERATE": self.accelerate,
            "DEEPSPEED": self.deepspeed_commit or self.deepspeed,
        }
        return {name: value for name, value in arguments.items() if value}


def releases() -> dict[str, Release]:
    """Return the available releases by name, in the order of the file."""
    return _rows("releases")


def releases_of(root: str) -> list[str]:
    """Return the names of the available releases for a root image."""
    return [row.name for row in releases().values() if row.image == root]


def history() -> dict[str, Release]:
    """Return past releases, which can no longer be chosen, by name, in the order of the file."""
    return _rows("history")


def _rows(table: str) -> dict[str, Release]:
    rows = _tables()[table]
    return {name: Release(name=name, **{**row, "gaudi": tuple(row.get("gaudi", ()))}) for name, row in rows.items()}


@cache
def _tables() -> dict[str, Any]:
    """Read the file once: one CDK synthesis looks up releases a hundred times."""
    tables: dict[str, Any] = tomllib.loads(RELEASES_FILE.read_text())
    return tables


def release(name: str | None = None, *, of: str = "gaudi") -> Release:
    """Return the release called `name`, or the default release of the root image `of`.

    Raises UsageError with the closest name if there is none, ConfigurationError if it is no longer available, or if
    the image has no default.
    """
    rows, past = releases(), history()
    name = name or _tables()["default"].get(of)
    if name is None:
        raise ConfigurationError(
            f"image '{of}' has no default release",
            next_step=f"add a row with image = '{of}' to images/releases.toml, and its name under [default]",
        )
    if name in past:
        raise ConfigurationError(
            f"release '{name}' is no longer available: {_why_history(past[name])}",
            next_step=f"choose one of {', '.join(releases_of(past[name].image))}",
        )
    try:
        return rows[name]
    except KeyError:
        raise UsageError(f"unknown release '{name}'{did_you_mean(name, rows)}") from None


def chosen_releases(name: str | None = None, stage: Mapping[str, str] | None = None) -> dict[str, Release]:
    """Return a release for each root image: the one called `name` for its image, else the stage's, else the default.

    Raises like `release`.
    """
    roots = [each.name for each in images().values() if each.parent is None]
    chosen = {root: release((stage or {}).get(root), of=root) for root in roots}
    if name:
        named = release(name)
        chosen[named.image] = named
    return chosen


def release_for(row: InstanceType, name: str | None = None) -> Release:
    """Return the release called `name`, or the default for the instance type, after checking that it supports the type.

    Raises UsageError if there is no such release, ConfigurationError if it is for other accelerators or does not
    support the row's Gaudi generation.
    """
    chosen = release(name, of=row.image)
    _check_root(row.image, chosen)
    if row.gaudi_generation is None or row.gaudi_generation in chosen.gaudi:
        return chosen
    fitting = [other.name for other in releases().values() if row.gaudi_generation in other.gaudi]
    raise ConfigurationError(
        f"release '{chosen.name}' supports Gaudi {' and '.join(map(str, chosen.gaudi))}; {row.name} has Gaudi "
        f"{row.gaudi_generation}",
        next_step=f"choose one of {', '.join(fitting)}",
    )


def check_image(root: str, chosen: Release) -> None:
    """Raise ConfigurationError if the release is not for this root image, or supports none of its instance types."""
    _check_root(root, chosen)
    rows = [row for row in INSTANCE_TYPES.values() if row.image == root]
    if rows and all(row.gaudi_generation not in {None, *chosen.gaudi} for row in rows):
        release_for(rows[0], chosen.name)


def _check_root(root: str, chosen: Release) -> None:
    if chosen.image != root:
        raise ConfigurationError(
            f"release '{chosen.name}' is for image '{chosen.image}', not '{root}'",
            next_step=f"choose one of {', '.join(releases_of(root))}",
        )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def _why_history(row: Release) -> str:
    if _numbers(row.python) < _numbers(MINIMUM_PYTHON):
        return f"its image has Python {row.python}, but jobs/container needs {MINIMUM_PYTHON}"
    return "it has no lock files"


_COLUMNS: Mapping[str, Callable[[Release], str]] = {
    "Image": lambda row: row.image,
    "Gaudi": lambda row: ", ".join(map(str, row.gaudi)),
    "Base": lambda row: f"{row.os}, {row.package_version}" if row.build else "Docker's Python",
    "Python": lambda row: row.python,
    "PyTorch": lambda row: row.pytorch,
    "optimum-habana": lambda row: row.optimum_habana,
    "transformers": lambda row: row.transformers,
    "accelerate": lambda row: row.accelerate,
    "DeepSpeed": lambda row: row.deepspeed,
}
"""The middle columns of the table by heading."""


def table() -> str:
    """Return a Markdown table of the available releases, with reasons to choose each and types it does not support."""
    lines = [("Release", "Reason to choose it", *_COLUMNS, "Refused"), ("---",) * (len(_COLUMNS) + 3)]
    for row in releases().values():
        name = f"**{row.name}** (default)" if row == release(of=row.image) else row.name
        refused = "on dl1.24xlarge, which has Gaudi 1" if row.gaudi and 1 not in row.gaudi else ""
        lines.append((name, row.why, *(column(row) for column in _COLUMNS.values()), refused))
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def main() -> None:
    if sys.argv[1:] == ["--table"]:
        print(table())
        return
    for argument, value in release(*sys.argv[1:2]).build_arguments.items():
        print(f"{argument}={value}")


if __name__ == "__main__":
    run_program(main)
