"""Build images with BuildKit, parents first, each named `trainyard/<image>:<release>-<revision>`.

The release and the revision determine an image. The user's build arguments only change download addresses (BASE_IMAGE,
TORCH_INDEX). They cannot change versions and are not part of the tag. The label `trainyard.base` names the base, and a
push to an account is refused unless it is the release's base.
"""

import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import docker
from docker.errors import ImageNotFound
from docker.models.images import Image as DockerImage

from jobs.core.errors import ConfigurationError, StoppedError, TrainyardError, UsageError, did_you_mean
from jobs.core.git import (
    NOT_SOURCES,
    ROOT,
    SOURCES,
    image_tag,
    is_dirty,
    local_name,
    source_commit,
    source_revision,
)
from jobs.core.images import Image, Release, image, with_descendants
from jobs.core.urls import login_in
from jobs.core.words import duration
from jobs.images import engine
from jobs.images.bases import BASE_ARGUMENT, default_base
from jobs.images.lock import locked

_PROXY_ARGUMENTS = frozenset(f"{name}_PROXY" for name in ("HTTP", "HTTPS", "FTP", "NO", "ALL"))
"""Docker accepts these, in either case, without an ARG in the Dockerfile, and keeps them out of the image's history."""

BASE_LABEL = "trainyard.base"
"""Label with the external base of an image, as given in BASE_IMAGE. Child images inherit the label."""

COMMIT_LABEL = "trainyard.commit"
"""Label with the git commit, set only if the tree was clean. Other commits may have the same sources, and so the same
revision."""

PACKAGES = "packages"
"""The stage of a root image's Dockerfile that has everything except the code of jobs/."""


@dataclass(frozen=True, kw_only=True)
class BuiltImage:
    """An image that was built, or found unchanged in BuildKit's cache."""

    image: Image
    release: str
    revision: str
    id: str
    """`sha256:…` of the image's configuration, the same for the same content."""
    size_bytes: int
    seconds: float

    @property
    def tag(self) -> str:
        return image_tag(self.release, self.revision)

    @property
    def name(self) -> str:
        return local_name(self.image.name, self.tag)


@dataclass(frozen=True, kw_only=True)
class Build:
    """The build of images from the current sources."""

    client: docker.DockerClient
    releases: Mapping[str, Release]
    """The release of each root image and its children."""
    revision: str
    build_arguments: Mapping[str, str]
    """Build arguments from the user."""
    network: str | None = None
    """Docker's network mode for RUN, or None for the engine's default."""

    def plan(self, names: Iterable[str], *, all_descendants: bool = False) -> list[Image]:
        """Return the images to build for `names`: first the parents that are not built at this revision.

        Raises UsageError for an unknown image or build argument, and ConfigurationError if the release has no lock file
        for an image.
        """
        wanted: dict[str, Image] = {}
        for name in names:
            for img in with_descendants(name) if all_descendants else (image(name),):
                if img.parent and not self.exists(img.parent):
                    wanted.setdefault(img.parent, image(img.parent))
                wanted[img.name] = img
        ordered = sorted(wanted.values(), key=lambda img: img.parent is not None)
        self._check_build_arguments([*(image(img.parent) for img in ordered if img.parent), *ordered])
        for img in ordered:
            locked(img, self.release_of(img))
        return ordered

    def release_of(self, img: Image) -> Release:
        """Return the release to build an image for."""
        return self.releases[img.root]

    def exists(self, name: str) -> bool:
        """Return whether the engine has the image at this revision, on the requested base."""
        found = self._find(image(name))
        requested = self.build_arguments.get(BASE_ARGUMENT)
        return found is not None and requested in (None, found.labels.get(BASE_LABEL))

    def run(self, planned: Sequence[Image], report: Callable[[str], None]) -> list[BuiltImage]:
        """Build the images of a plan one by one. BuildKit prints its own progress on stderr.

        Raises TrainyardError if a step fails, and StoppedError after Ctrl-C. Images that are complete by then are kept.
        """
        with _frozen_sources(self.revision) as context:
            return [self._build(img, context, report) for img in planned]

    def _build(self, img: Image, context: Path, report: Callable[[str], None]) -> BuiltImage:
        report(f"{img.name}: build")
        began = time.monotonic()
        try:
            done = subprocess.run(
                self._command(img, context),
                env=_environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                check=False,
            )
        except KeyboardInterrupt:
            raise StoppedError(f"stopped: '{img.name}' was not built, and no image was tagged") from None
        if done.returncode:
            raise TrainyardError(
                f"'{img.name}' was not built, and no image was tagged: docker build ended with exit code "
                f"{done.returncode}, see its output above",
                next_step="correct the step that failed; if the disk is full: docker builder prune, then docker image "
                "prune; if the base could not be pulled: name a mirror with --build-arg BASE_IMAGE=…",
            )
        found = self._find(img)
        if found is None:
            raise ConfigurationError(
                f"'{img.name}' was built, but the Docker engine does not have it: the docker command uses a builder "
                "that does not load images into the engine",
                next_step="run docker buildx ls, then docker buildx use with a builder whose driver is docker",
            )
        if f" AS {PACKAGES}\n" in img.dockerfile.read_text() and img.parent is None:
            # BuildKit has just built this stage, so tagging it takes a moment. Children are built on it, so that their
            # packages stay cached when only code changes.
            command = self._command(img, context, stage=PACKAGES)
            subprocess.run(command, env=_environment(), capture_output=True, check=False)
        built = BuiltImage(
            image=img,
            release=self.release_of(img).name,
            revision=self.revision,
            id=found.id,
            size_bytes=engine.size_bytes(found),
            seconds=time.monotonic() - began,
        )
        report(f"{img.name}: {built.name} in {duration(built.seconds)}")
        return built

    def _command(self, img: Image, context: Path, *, stage: str | None = None) -> list[str]:
        """Return the docker command that builds an image, or one stage of its Dockerfile."""
        commit = None if is_dirty(self.revision) else source_commit()
        return [
            *(str(engine.build_command()), "build", "--progress", "plain", "--platform", engine.PLATFORM),
            *("--file", str(context / img.dockerfile.relative_to(ROOT)), "--tag", self._name(img, stage)),
            *(("--target", stage) if stage else ()),
            *(("--network", self.network) if self.network else ()),
            *(part for name, value in self._arguments(img).items() for part in ("--build-arg", f"{name}={value}")),
            *(() if img.parent else ("--label", f"{BASE_LABEL}={self._base(img)}")),  # children inherit the label
            *(("--label", f"{COMMIT_LABEL}={commit}") if commit else ()),
            str(context),
        ]

    def _base(self, root: Image) -> str:
        return self.build_arguments.get(BASE_ARGUMENT) or default_base(root, self.release_of(root))

    def _arguments(self, img: Image) -> dict[str, str]:
        """Return the build arguments that the image's Dockerfile declares, with their values."""
        given = {**self.build_arguments, **self._determined(img)}
        if img.parent:
            parent = image(img.parent)
            given |= {"PARENT_IMAGE": self._name(parent), "PARENT": parent.name}
            if self._find(parent, PACKAGES):
                given["PARENT_PACKAGES"] = self._name(parent, PACKAGES)
        elif base := self._base(img):
            given[BASE_ARGUMENT] = base
        declared = declared_arguments(img)
        return {name: value for name, value in given.items() if name in declared or name.upper() in _PROXY_ARGUMENTS}

    def _determined(self, img: Image) -> dict[str, str]:
        return {**self.release_of(img).build_arguments, "REVISION": self.revision}

    def _name(self, img: Image, stage: str | None = None) -> str:
        """Return the name of an image, or of one stage of its Dockerfile, in the engine."""
        name = f"{img.name}-{stage}" if stage else img.name
        return local_name(name, image_tag(self.release_of(img).name, self.revision))

    def _find(self, img: Image, stage: str | None = None) -> DockerImage | None:
        try:
            return self.client.images.get(self._name(img, stage))
        except ImageNotFound:
            return None

    def _check_build_arguments(self, lineage: Sequence[Image]) -> None:
        """Raise UsageError for a build argument that is not declared, sets a version, or contains a password.

        Arguments of a parent are accepted even if the parent is already built.
        """
        known = {name for img in lineage for name in declared_arguments(img)}
        determined = {
            *(name for img in lineage for name in self._determined(img)),
            "PARENT_IMAGE",
            "PARENT_PACKAGES",
            "PARENT",
        }
        for name, value in self.build_arguments.items():
            if name in determined:
                raise UsageError(
                    f"build argument {name} is set by the release and the sources",
                    next_step="choose a release with --release; its row in images/releases.toml has matching versions",
                )
            if name not in known and name.upper() not in _PROXY_ARGUMENTS:
                searched = ", ".join(dict.fromkeys(img.name for img in lineage))
                raise UsageError(
                    f"no Dockerfile of {searched} has build argument {name}{did_you_mean(name, known - determined)}"
                )
            if login_in(value):
                raise UsageError(
                    f"build argument {name} has a password, which anyone with the image could read in its history",
                    next_step="put a proxy's password into ~/.docker/config.json (proxies), or use another mirror",
                )


def declared_arguments(img: Image) -> frozenset[str]:
    """Return the names of the build arguments that an image's Dockerfile declares."""
    return frozenset(re.findall(r"^ARG (\w+)", img.dockerfile.read_text(), re.MULTILINE))


def parse_build_arguments(given: Iterable[str]) -> dict[str, str]:
    """Parse build arguments given as `NAME=VALUE`. Raises UsageError for anything else."""
    parsed = {}
    for pair in given:
        name, sign, value = pair.partition("=")
        if not sign or not name.isidentifier():
            raise UsageError(f"--build-arg '{pair}' is not NAME=VALUE", next_step="--build-arg BASE_IMAGE=…")
        parsed[name] = value
    return parsed


@contextmanager
def _frozen_sources(revision: str) -> Iterator[Path]:
    """Copy the sources for the duration of a build, so that later edits do not get into the image.

    Raises TrainyardError if the sources changed while they were copied.
    """
    ignored = shutil.ignore_patterns(*(pattern.removeprefix("**/") for pattern in NOT_SOURCES))
    with tempfile.TemporaryDirectory(prefix="trainyard-build-") as folder:
        for name in SOURCES:
            shutil.copytree(ROOT / name, Path(folder, name), ignore=ignored, symlinks=True)
        if (now := source_revision()) != revision:
            raise TrainyardError(
                f"the sources changed from {revision} to {now} while they were read; nothing was built",
                next_step="run the same command again",
            )
        yield Path(folder)


def _environment() -> dict[str, str]:
    """Return the docker command's environment, without a builder that may not load images into the engine."""
    kept = {name: value for name, value in os.environ.items() if name != "BUILDX_BUILDER"}
    return {**kept, "DOCKER_BUILDKIT": "1", "BUILDX_NO_DEFAULT_ATTESTATIONS": "1"}
