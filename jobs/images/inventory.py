"""Which images there are: in the engine of this machine, and in the repositories of a stage."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone

import docker

from jobs.aws import Aws
from jobs.errors import ConfigurationError
from jobs.images.revision import image_tag, local_name
from jobs.stage import NOT_BUILT_TAG, parameter_path


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


def pushed_images(aws: Aws, stage: str, release: str) -> Mapping[str, str]:
    """By name, the URI of each image of a release that was pushed to the stage last.

    Raises ConfigurationError where the stage is not deployed, and boto3's errors.
    """
    path = f"{parameter_path(stage)}image/"
    pages = aws.ssm.get_paginator("get_parameters_by_path").paginate(Path=path.rstrip("/"), Recursive=True)
    values = {item["Name"].removeprefix(path): item["Value"] for page in pages for item in page["Parameters"]}
    if not values:
        raise ConfigurationError(
            f"stage '{stage}' has no images: SSM has nothing below {path}", next_step=f"cdk deploy '{stage}/*'"
        )
    return {
        name.removesuffix(f"/{release}"): uri
        for name, uri in values.items()
        if name.endswith(f"/{release}") and not uri.endswith(f":{NOT_BUILT_TAG}")
    }


def _rank(found: LocalImage, revision: str | None) -> tuple[bool, datetime]:
    return found.revision == revision, found.created_at
