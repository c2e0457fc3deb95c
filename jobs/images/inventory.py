"""Which images there are: in the engine of this machine, and in the repositories of a stage."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone

import docker

from jobs.images.push import StageImages
from jobs.images.revision import image_tag, local_name
from jobs.stage import NOT_BUILT_TAG


@dataclass(frozen=True, kw_only=True)
class LocalImage:
    """One that was built on this machine."""

    name: str
    """Of the hierarchy."""
    tag: str
    revision: str
    id: str
    size_bytes: int
    created_at: datetime
    digests: tuple[str, ...]
    """`<repository>@sha256:…` of each repository that it was pushed to or pulled from."""


def local_images(client: docker.DockerClient, release: str, *, revision: str | None) -> Mapping[str, LocalImage]:
    """By name, those of a release that the engine has: of several the one of `revision`, else the newest.

    Raises docker's errors.
    """
    prefix = local_name("", "").removesuffix(":")
    wanted: dict[str, LocalImage] = {}
    for entry in client.api.images():
        for reference in entry["RepoTags"] or ():
            name, _, tag = reference.removeprefix(prefix).rpartition(":")
            if not reference.startswith(prefix) or not tag.startswith(image_tag(release, "")):
                continue
            found = LocalImage(
                name=name,
                tag=tag,
                revision=tag.removeprefix(image_tag(release, "")),
                id=entry["Id"],
                size_bytes=entry["Size"],
                created_at=datetime.fromtimestamp(entry["Created"], timezone.utc),
                digests=tuple(entry["RepoDigests"] or ()),
            )
            other = wanted.get(name)
            if other is None or _rank(found, revision) > _rank(other, revision):
                wanted[name] = found
    return wanted


def pushed_images(stage: StageImages) -> Mapping[str, str | None]:
    """By name, the URI of what was pushed last of each image that the stage has a place for; None: nothing yet."""
    return {name: None if uri.endswith(f":{NOT_BUILT_TAG}") else uri for name, uri in stage.recorded.items()}


def _rank(found: LocalImage, revision: str | None) -> tuple[bool, datetime]:
    return found.revision == revision, found.created_at
