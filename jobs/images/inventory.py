"""Which images there are: in the engine of this machine, and in the repositories of a stage."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone

import docker

from jobs.aws.connection import Aws
from jobs.core.git import image_tag, local_name
from jobs.core.stage import NOT_BUILT_TAG
from jobs.images import engine
from jobs.images.stage_images import StageImages


@dataclass(frozen=True, kw_only=True)
class LocalImage:
    """An image that was built on this machine."""

    tag: str
    revision: str
    id: str
    created_at: datetime
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class RemoteImage:
    """An image that a repository of a stage has."""

    tag: str
    digest: str
    pushed_at: datetime


def local_images(client: docker.DockerClient, release: str, *, revision: str | None) -> Mapping[str, LocalImage]:
    """Return the images of a release that the engine has, by name: of several the one of `revision`, else the newest.

    Raises docker's errors.
    """
    prefix, start = local_name("", "").removesuffix(":"), image_tag(release, "")
    found: dict[str, tuple[bool, int, str, str]] = {}
    for entry in client.api.images():
        for reference in entry["RepoTags"] or ():
            name, _, tag = reference.removeprefix(prefix).rpartition(":")
            if reference.startswith(prefix) and tag.startswith(start):
                current = tag == image_tag(release, revision or "")
                found[name] = max(found.get(name, (False, 0, "", "")), (current, entry["Created"], tag, entry["Id"]))
    return {
        name: LocalImage(
            tag=tag,
            revision=tag.removeprefix(start),
            id=key,
            created_at=datetime.fromtimestamp(created, timezone.utc),
            size_bytes=engine.size_bytes(client.images.get(key)),
        )
        for name, (_, created, tag, key) in found.items()
    }


def recorded_images(stage: StageImages) -> Mapping[str, str | None]:
    """Return what was pushed last of each image that the stage has a place for: name to URI, None for nothing yet."""
    return {name: None if uri.endswith(f":{NOT_BUILT_TAG}") else uri for name, uri in stage.recorded.items()}


def remote_images(aws: Aws, stage: StageImages) -> Mapping[str, tuple[RemoteImage, ...]]:
    """Return what ECR has of the stage's release, by name, the newest first. Raises boto3's errors."""
    there = [name for name in stage.recorded if name in stage.repositories]
    return {name: _tags(aws, stage.repositories[name], stage.release) for name in there}


def _tags(aws: Aws, repository: str, release: str) -> tuple[RemoteImage, ...]:
    pages = aws.ecr.get_paginator("describe_images").paginate(
        repositoryName=repository.partition("/")[2], filter={"tagStatus": "TAGGED"}
    )
    found = [
        RemoteImage(tag=tag, digest=detail["imageDigest"], pushed_at=detail["imagePushedAt"])
        for page in pages
        for detail in page["imageDetails"]
        for tag in detail["imageTags"]
        if tag.startswith(image_tag(release, ""))
    ]
    return tuple(sorted(found, key=lambda one: (one.pushed_at, one.tag), reverse=True))
