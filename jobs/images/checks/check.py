"""What a check is, and what it looks at."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import docker
from docker.errors import ImageNotFound

from jobs.contract.errors import NotFoundError
from jobs.contract.image_hierarchy import Image
from jobs.contract.releases import Release
from jobs.contract.revision import image_tag, local_name
from jobs.images import engine


class CheckFailedError(Exception):
    """The image does not show what it must. The message's last line tells it, those above are a container's output."""


class LeftOut(Exception):  # noqa: N818 - not an error
    """The check cannot be made here; the message says why."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Subject:
    """One image that is tested: what it should be, and what the engine says of it."""

    image: Image
    release: Release
    revision: str
    client: docker.DockerClient
    attributes: Mapping[str, Any]
    """`docker image inspect`."""

    @classmethod
    def find(cls, image: Image, *, release: Release, revision: str, client: docker.DockerClient) -> "Subject":
        """Look an image up in the engine. Raises NotFoundError where the engine does not have it."""
        name = local_name(image.name, image_tag(release.name, revision))
        try:
            attributes = client.images.get(name).attrs
        except ImageNotFound:
            raise NotFoundError(
                f"the Docker engine has no image {name}", next_step=f"trainyard images build {image.name}"
            ) from None
        return cls(image=image, release=release, revision=revision, client=client, attributes=attributes)

    @property
    def name(self) -> str:
        """Return the name that the engine knows the image by."""
        return local_name(self.image.name, image_tag(self.release.name, self.revision))

    @property
    def parent(self) -> str | None:
        """Return the engine's name of the image that it is built on; None where it is a root."""
        tag = image_tag(self.release.name, self.revision)
        return local_name(self.image.parent, tag) if self.image.parent else None

    @property
    def configuration(self) -> Mapping[str, Any]:
        """Return what the image says of how it is run (`Config` of `docker image inspect`)."""
        configuration: Mapping[str, Any] = self.attributes["Config"]
        return configuration

    @property
    def size_bytes(self) -> int:
        return engine.size_bytes(self.client.images.get(self.name))


def every(_: Image) -> bool:
    return True


@dataclass(frozen=True, kw_only=True)
class Check:
    """One check of an image, as a row of the table."""

    name: str
    shows: str
    """What is true of an image that passes."""
    run: Callable[[Subject], str]
    """Says what it found. Raises CheckFailedError and LeftOut."""
    concerns: Callable[[Image], bool] = every
    """Which images it is for."""
