"""Builds images with BuildKit, in the order of the hierarchy, each under `trainyard/<image>:<release>-<revision>`.

The release and the revision decide what an image is. Build arguments of the user set where things are fetched from
(BASE_IMAGE, TORCH_INDEX) and can change no version. They are in no tag. The label `trainyard.base` names the base, and
a push to an account refuses any base but the release's own.
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
"""Docker knows these, in either case, without an ARG in the Dockerfile; they are in no image's history."""

BASE_LABEL = "trainyard.base"
"""The label of an image, and of all that is built on it, for its base from elsewhere, as BASE_IMAGE named it."""

COMMIT_LABEL = "trainyard.commit"
"""The label of an image for the commit that its sources were taken from, set only if they were clean. Other commits may
have the same sources, and so the same revision."""

PACKAGES = "packages"
"""The stage of a root's Dockerfile that has all but the code of jobs/."""


@dataclass(frozen=True, kw_only=True)
class BuiltImage:
    """An image that was built, or found unchanged in BuildKit's cache."""

    image: Image
    release: str
    revision: str
    id: str
    """`sha256:…` of its configuration: the same for the same content."""
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
    """The images of one release, to be built from the sources as they are."""

    client: docker.DockerClient
    release: Release
    revision: str
    build_arguments: Mapping[str, str]
    """Those that the user gave."""
    network: str | None = None
    """Docker's network mode for RUN; None: the engine's default."""

    def plan(self, names: Iterable[str], *, all_descendants: bool = False) -> list[Image]:
        """Return which images to build for `names`, in order: parents that are not there at this revision come first.

        Raises UsageError for an unknown image or build argument, ConfigurationError if the release has no lock of an
        image's packages.
        """
        wanted: dict[str, Image] = {}
        for name in names:
            for one in with_descendants(name) if all_descendants else (image(name),):
                if one.parent and not self.is_there(one.parent):
                    wanted.setdefault(one.parent, image(one.parent))
                wanted[one.name] = one
        ordered = sorted(wanted.values(), key=lambda one: one.parent is not None)
        self._check_build_arguments([*(image(one.parent) for one in ordered if one.parent), *ordered])
        for one in ordered:
            locked(one, self.release)
        return ordered

    def is_there(self, name: str) -> bool:
        """Return whether the engine has the image at this revision, on the base that was asked for."""
        found = self._find(name)
        asked = self.build_arguments.get(BASE_ARGUMENT)
        return found is not None and asked in (None, found.labels.get(BASE_LABEL))

    def run(self, planned: Sequence[Image], say: Callable[[str], None]) -> list[BuiltImage]:
        """Build the images of a plan one after the other. BuildKit prints its own progress on stderr.

        Raises TrainyardError for a step that fails, StoppedError after Ctrl-C. Images that were complete by then stay.
        """
        with _frozen_sources(self.revision) as context:
            return [self._build(one, context, say) for one in planned]

    def _build(self, one: Image, context: Path, say: Callable[[str], None]) -> BuiltImage:
        say(f"{one.name}: build")
        began = time.monotonic()
        try:
            done = subprocess.run(
                self._command(one, context),
                env=_environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                check=False,
            )
        except KeyboardInterrupt:
            raise StoppedError(f"stopped: '{one.name}' was not built, and no image got its name") from None
        if done.returncode:
            raise TrainyardError(
                f"'{one.name}' was not built, and no image got its name: docker build ended with exit code "
                f"{done.returncode}, and says why above",
                next_step="correct the step that failed; if its disk is full: docker builder prune, then docker image "
                "prune; if its base could not be pulled: --build-arg BASE_IMAGE=… names a mirror",
            )
        found = self._find(one.name)
        if found is None:
            raise ConfigurationError(
                f"'{one.name}' was built, and the Docker engine does not have it: the builder that the docker command "
                "uses keeps images to itself",
                next_step="docker buildx ls, then docker buildx use with a builder whose driver is docker (default)",
            )
        if f" AS {PACKAGES}\n" in one.dockerfile.read_text() and one.parent is None:
            # BuildKit has just made this stage, so naming it takes a moment. Children are built on it: an edit of code
            # then leaves their packages as they are.
            command = self._command(one, context, stage=PACKAGES)
            subprocess.run(command, env=_environment(), capture_output=True, check=False)
        built = BuiltImage(
            image=one,
            release=self.release.name,
            revision=self.revision,
            id=found.id,
            size_bytes=engine.size_bytes(found),
            seconds=time.monotonic() - began,
        )
        say(f"{one.name}: {built.name} in {duration(built.seconds)}")
        return built

    def _command(self, one: Image, context: Path, *, stage: str | None = None) -> list[str]:
        """Return the docker command that builds an image, or a stage of its Dockerfile."""
        name = f"{one.name}-{stage}" if stage else one.name
        commit = None if is_dirty(self.revision) else source_commit()
        return [
            *(str(engine.build_command()), "build", "--progress", "plain", "--platform", engine.PLATFORM),
            *("--file", str(context / one.dockerfile.relative_to(ROOT)), "--tag", self._name(name)),
            *(("--target", stage) if stage else ()),
            *(("--network", self.network) if self.network else ()),
            *(part for name, value in self._arguments(one).items() for part in ("--build-arg", f"{name}={value}")),
            *(() if one.parent else ("--label", f"{BASE_LABEL}={self._base(one)}")),  # a child inherits it
            *(("--label", f"{COMMIT_LABEL}={commit}") if commit else ()),
            str(context),
        ]

    def _base(self, root: Image) -> str:
        return self.build_arguments.get(BASE_ARGUMENT) or default_base(root, self.release)

    def _arguments(self, one: Image) -> dict[str, str]:
        """Return the build arguments that the image's Dockerfile declares, with their values."""
        given = {**self.build_arguments, **self._decided}
        if one.parent:
            given |= {"PARENT_IMAGE": self._name(one.parent), "PARENT": one.parent}
            if self._find(f"{one.parent}-{PACKAGES}"):
                given["PARENT_PACKAGES"] = self._name(f"{one.parent}-{PACKAGES}")
        elif base := self._base(one):
            given[BASE_ARGUMENT] = base
        declared = declared_arguments(one)
        return {name: value for name, value in given.items() if name in declared or name.upper() in _PROXY_ARGUMENTS}

    @property
    def _decided(self) -> dict[str, str]:
        return {**self.release.build_arguments, "REVISION": self.revision}

    def _name(self, name: str) -> str:
        return local_name(name, image_tag(self.release.name, self.revision))

    def _find(self, name: str) -> DockerImage | None:
        try:
            return self.client.images.get(self._name(name))
        except ImageNotFound:
            return None

    def _check_build_arguments(self, lineage: Sequence[Image]) -> None:
        """Raise UsageError for a build argument that nothing declares, that decides a version or that holds a password.

        An argument of a parent is right even if the parent is there already.
        """
        known = {name for one in lineage for name in declared_arguments(one)}
        decided = {*self._decided, "PARENT_IMAGE", "PARENT_PACKAGES", "PARENT"}
        for name, value in self.build_arguments.items():
            if name in decided:
                raise UsageError(
                    f"build argument {name} is decided by the release and the sources",
                    next_step="choose a release with --release: its row in images/releases.toml says what must match",
                )
            if name not in known and name.upper() not in _PROXY_ARGUMENTS:
                searched = ", ".join(dict.fromkeys(one.name for one in lineage))
                raise UsageError(
                    f"build argument {name} is in no Dockerfile of {searched}{did_you_mean(name, known - decided)}"
                )
            if login_in(value):
                raise UsageError(
                    f"build argument {name} holds a password, which the image's history would show to all who have it",
                    next_step="a proxy's belongs into ~/.docker/config.json (proxies); else use a mirror without one",
                )


def declared_arguments(one: Image) -> frozenset[str]:
    """Return the names of the build arguments that an image's Dockerfile declares."""
    return frozenset(re.findall(r"^ARG (\w+)", one.dockerfile.read_text(), re.MULTILINE))


def parse_build_arguments(given: Iterable[str]) -> dict[str, str]:
    """Return build arguments that were given as `NAME=VALUE`. Raises UsageError for anything else."""
    parsed = {}
    for pair in given:
        name, sign, value = pair.partition("=")
        if not sign or not name.isidentifier():
            raise UsageError(f"--build-arg '{pair}' is not NAME=VALUE", next_step="--build-arg BASE_IMAGE=…")
        parsed[name] = value
    return parsed


@contextmanager
def _frozen_sources(revision: str) -> Iterator[Path]:
    """Copy the sources for the time of a build, so that nobody's edit gets into an image of another revision.

    Raises TrainyardError if the copy may not be that of `revision`.
    """
    ignored = shutil.ignore_patterns(*(pattern.removeprefix("**/") for pattern in NOT_SOURCES))
    with tempfile.TemporaryDirectory(prefix="trainyard-build-") as folder:
        for name in SOURCES:
            shutil.copytree(ROOT / name, Path(folder, name), ignore=ignored, symlinks=True)
        if (now := source_revision()) != revision:
            raise TrainyardError(
                f"the sources changed from {revision} to {now} while they were read; nothing was built",
                next_step="the same command again",
            )
        yield Path(folder)


def _environment() -> dict[str, str]:
    """Return the environment that the docker command gets."""
    # Such a builder is not the engine's own, and would keep what it builds.
    kept = {name: value for name, value in os.environ.items() if name != "BUILDX_BUILDER"}
    return {**kept, "DOCKER_BUILDKIT": "1", "BUILDX_NO_DEFAULT_ATTESTATIONS": "1"}
