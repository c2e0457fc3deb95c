"""List images: those in this machine's engine, and those in a stage's repositories and SSM parameters."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone

import docker

from jobs.aws.connection import Aws
from jobs.core.errors import ConfigurationError, did_you_mean
from jobs.core.git import image_tag, local_name
from jobs.core.images import Image, Release, child_name, chosen_releases, image, images
from jobs.core.stage import (
    IMAGES,
    NOT_BUILT_TAG,
    deploy_command,
    image_parameter,
    image_repository_parameter,
    parameter_path,
    release_parameter,
)
from jobs.images import engine

_PARAMETERS_PER_CALL = 10
"""GetParameters' limit."""

_CPU_ROOT = "cpu"
"""The root image that every machine can run."""

_RELEASES = {img.name: release_parameter(img.name) for img in images().values() if img.parent is None}
"""Each root image, with the SSM parameter of its release."""


@dataclass(frozen=True, kw_only=True)
class StageImages:
    """The images of a stage, recorded in SSM by its image stack and by earlier pushes."""

    stage: str
    releases: Mapping[str, Release]
    """The release of each root image and its children."""
    repositories: Mapping[str, str]
    """Repository URI of each image."""
    recorded: Mapping[str, str]
    """Value of each image's parameter."""
    default: tuple[str, ...]
    """Names of the images that new jobs use."""

    @staticmethod
    def releases_of(aws: Aws, stage: str) -> dict[str, str]:
        """Return the stage's release of each root image. Raises ConfigurationError if it has no image stack."""
        about = _about(aws, stage)
        return {root: about[key] for root, key in _RELEASES.items() if key in about}

    @classmethod
    def read(cls, aws: Aws, stage: str, release: str | None) -> "StageImages":
        """Read the stage's SSM parameters. `release` replaces the stage's release of the image that it belongs to.

        Raises ConfigurationError if the stage's image stack is not deployed.
        """
        about = _about(aws, stage)
        chosen = chosen_releases(release, cls.releases_of(aws, stage))
        repositories = {name: image_repository_parameter(name) for name in images()}
        parameters = {name: image_parameter(name, chosen[img.root].name) for name, img in images().items()}
        found = _parameters(aws, stage, [*repositories.values(), *parameters.values()])
        return cls(
            stage=stage,
            releases=chosen,
            repositories={name: found[key] for name, key in repositories.items() if key in found},
            recorded={name: found[key] for name, key in parameters.items() if key in found},
            default=tuple(about.get(IMAGES, "").split()),
        )

    def chosen(self, names: Sequence[str], *, emulated: bool) -> list[Image]:
        """Return the named images. Default: the images of new jobs (on the emulator, their CPU twins).

        Raises UsageError for an unknown image, and ConfigurationError for an image that the stage does not use.
        """
        if not names:
            roots = dict.fromkeys(_twin(image(name), _CPU_ROOT) if emulated else name for name in self.default)
            names = list(roots)
        chosen = [image(name) for name in dict.fromkeys(names)]
        deploy = deploy_command(self.stage, "image", emulated=emulated)
        for img in chosen:
            release = self.releases[img.root].name
            if img.name not in self.repositories:
                raise ConfigurationError(
                    f"stage '{self.stage}' has no repository for image '{img.name}'"
                    f"{did_you_mean(img.name, self.repositories)}",
                    next_step=f"{deploy} after its settings name an instance type that runs the image",
                )
            if img.name not in self.recorded:
                raise ConfigurationError(
                    f"no pool of stage '{self.stage}' uses image '{img.name}' of release {release}",
                    next_step=f"use the stage's own release, or set this one in infra/settings.py and {deploy}",
                )
        return chosen

    def stand_ins(self, img: Image) -> list[str]:
        """Return the names of the images that `img` replaces on a machine without accelerators."""
        if img.root != _CPU_ROOT:
            return []
        twins = {_twin(img, other.name) for other in images().values() if other.parent is None}
        return sorted(name for name in twins if name in self.recorded and name != img.name)


def _about(aws: Aws, stage: str) -> dict[str, str]:
    about = _parameters(aws, stage, [*_RELEASES.values(), IMAGES])
    if IMAGES not in about:
        raise ConfigurationError(
            f"stage '{stage}' has no repositories for images: SSM has no {parameter_path(stage)}{IMAGES}",
            next_step=deploy_command(stage, "image", emulated=aws.emulated),
        )
    return about


def _parameters(aws: Aws, stage: str, names: Sequence[str]) -> dict[str, str]:
    """Return the values of the stage's parameters that exist, by name without the stage's path."""
    path = parameter_path(stage)
    found: dict[str, str] = {}
    for start in range(0, len(names), _PARAMETERS_PER_CALL):
        batch = [path + name for name in names[start : start + _PARAMETERS_PER_CALL]]
        answer = aws.ssm.get_parameters(Names=batch)["Parameters"]
        found.update({item["Name"].removeprefix(path): item["Value"] for item in answer})
    return found


def _twin(img: Image, root: str) -> str:
    """Return the name of the image with the same content on another root."""
    return child_name(root, img.folder if img.parent else None)


@dataclass(frozen=True, kw_only=True)
class LocalImage:
    """An image built on this machine."""

    tag: str
    revision: str
    id: str
    created_at: datetime
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class RemoteImage:
    """An image in a stage's repository."""

    tag: str
    digest: str
    pushed_at: datetime


def local_images(
    client: docker.DockerClient, chosen: Mapping[str, Release], *, revision: str | None
) -> Mapping[str, LocalImage]:
    """Return the engine's images of the chosen releases, by name: preferably of `revision`, else the newest.

    Raises docker's errors.
    """
    prefix = local_name("", "").removesuffix(":")
    releases = {name: chosen[img.root].name for name, img in images().items()}
    found: dict[str, tuple[bool, int, str, str]] = {}
    for entry in client.api.images():
        for reference in entry["RepoTags"] or ():
            name, _, tag = reference.removeprefix(prefix).rpartition(":")
            if reference.startswith(prefix) and name in releases and tag.startswith(image_tag(releases[name], "")):
                current = tag == image_tag(releases[name], revision or "")
                found[name] = max(found.get(name, (False, 0, "", "")), (current, entry["Created"], tag, entry["Id"]))
    return {
        name: LocalImage(
            tag=tag,
            revision=tag.removeprefix(image_tag(releases[name], "")),
            id=key,
            created_at=datetime.fromtimestamp(created, timezone.utc),
            size_bytes=engine.size_bytes(client.images.get(key)),
        )
        for name, (_, created, tag, key) in found.items()
    }


def recorded_images(stage: StageImages) -> Mapping[str, str | None]:
    """Return the URI last pushed for each image that the stage uses, or None if nothing was pushed yet."""
    return {name: None if uri.endswith(f":{NOT_BUILT_TAG}") else uri for name, uri in stage.recorded.items()}


def remote_images(aws: Aws, stage: StageImages) -> Mapping[str, tuple[RemoteImage, ...]]:
    """Return the images of the stage's releases in ECR, by name, the newest first. Raises boto3's errors."""
    names = [name for name in stage.recorded if name in stage.repositories]
    return {name: _tags(aws, stage.repositories[name], stage.releases[image(name).root].name) for name in names}


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
    return tuple(sorted(found, key=lambda remote: (remote.pushed_at, remote.tag), reverse=True))
