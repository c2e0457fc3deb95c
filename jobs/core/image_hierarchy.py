"""The images and which is built on which, read from the Dockerfiles, so that a new image is one folder.

images/<name>/Dockerfile with `ARG BASE_IMAGE` is the image <name>. One with `ARG PARENT_IMAGE` is a child: it adds
something (a notebook) to whichever of those it is built on, and so is one image for each: <parent>-<name>.
"""

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from jobs.core.errors import UsageError, did_you_mean

IMAGES_FOLDER = Path(__file__).parents[2] / "images"


@dataclass(frozen=True, kw_only=True)
class Image:
    """One image that can be built, for each release."""

    name: str
    folder: str
    """Its folder under images/."""
    parent: str | None
    """Name of the image that it is built on; None: on a base from elsewhere."""

    @property
    def root(self) -> str:
        """The image at its bottom, which the rows of jobs/core/instance_types.json name."""
        return self.parent or self.name

    @property
    def dockerfile(self) -> Path:
        return IMAGES_FOLDER / self.folder / "Dockerfile"


@functools.cache
def images() -> Mapping[str, Image]:
    """Return all images by name, each after the one that it is built on."""
    texts = {path.parent.name: path.read_text() for path in sorted(IMAGES_FOLDER.glob("*/Dockerfile"))}
    children = [folder for folder, text in texts.items() if re.search(r"^ARG PARENT_IMAGE\b", text, re.MULTILINE)]
    roots = [Image(name=folder, folder=folder, parent=None) for folder in texts if folder not in children]
    built_on_them = [
        Image(name=child_name(root.name, folder), folder=folder, parent=root.name)
        for root in roots
        for folder in children
    ]
    return {image.name: image for image in (*roots, *built_on_them)}


def image(name: str) -> Image:
    """The image called `name`. Raises UsageError with the closest name if there is none."""
    try:
        return images()[name]
    except KeyError:
        raise UsageError(f"image '{name}' not found{did_you_mean(name, images())}") from None


def with_descendants(name: str) -> tuple[Image, ...]:
    """The image called `name` and all that are built on it, in the order of building. Raises UsageError as `image`."""
    return tuple(one for one in images().values() if image(name).name in (one.name, one.parent))


def child_name(root: str, child: str | None) -> str:
    """Return the name of the image that folder `child` makes of `root`; without a child, of `root` itself."""
    return f"{root}-{child}" if child else root
