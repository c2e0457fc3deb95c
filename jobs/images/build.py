"""Builds images with BuildKit, in the order of the hierarchy, each under `trainyard/<image>:<release>-<revision>`.

What decides an image, its release and its revision, is decided here alone; build arguments of a user's own say where
things are fetched (BASE_IMAGE, TORCH_INDEX) and can change no version. They are in no tag; which base an image is built
on, its label tells, and a push to an account refuses any but the release's own.
"""

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import docker
from docker.errors import ImageNotFound
from docker.models.images import Image as DockerImage

from jobs.contract.credentials import login_in
from jobs.contract.errors import ConfigurationError, StoppedError, TrainyardError, UsageError, did_you_mean
from jobs.contract.image_hierarchy import Image, image, with_descendants
from jobs.contract.releases import Release
from jobs.contract.revision import ROOT, image_tag, is_dirty, local_name, source_commit, source_revision
from jobs.contract.words import duration
from jobs.images import engine
from jobs.images.bases import BASE_ARGUMENT, default_base
from jobs.images.build_output import CONTEXT, BuildOutput
from jobs.images.lock import lock_file

_PROXY_ARGUMENTS = frozenset(f"{name}_PROXY" for name in ("HTTP", "HTTPS", "FTP", "NO", "ALL"))
"""Docker knows these, in either case, without an ARG in the Dockerfile; they are in no image's history."""

BASE_LABEL = "trainyard.base"
"""The label of an image, and of all that is built on it, for its base from elsewhere, as BASE_IMAGE named it."""

COMMIT_LABEL = "trainyard.commit"
"""The label of an image of clean sources for the commit that they were taken from. Other commits may have the same
sources, and so the same revision; an image that BuildKit has already keeps its layers, and gets the label anew."""

_PACKAGES = "packages"
"""The stage of a root's Dockerfile that has all but the code of jobs/."""

_PACKAGES_STAGE = re.compile(rf"^FROM \S+ AS {_PACKAGES}$", re.MULTILINE)

_STOP_SECONDS = 20
"""How long the docker command may take to stop a build."""

_LAYER_INSTRUCTIONS = ("RUN ", "COPY ", "ADD ", "WORKDIR ")
"""What adds a layer, as an image's history begins its lines."""


@dataclass(frozen=True, kw_only=True)
class BuiltImage:
    """An image that was built, or found unchanged in BuildKit's cache."""

    image: Image
    release: str
    revision: str
    id: str
    """`sha256:…` of its configuration: the same for the same content."""
    size_bytes: int
    added_bytes: int
    """What its own Dockerfile adds to what it is built on."""
    seconds: float
    layers: int
    """The number of layers that its own Dockerfile makes."""
    rebuilt_layers: int
    """The number of these that were not taken from the cache."""

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

    def plan(self, names: Iterable[str], *, all_descendants: bool) -> list[Image]:
        """Return which images to build for `names`, in order: parents that are not there at this revision come first.

        Raises UsageError for an image or a build argument that there is not, or for another base than that of what is
        there already, ConfigurationError where the release has no lock of an image's packages.
        """
        wanted: dict[str, Image] = {}
        for name in names:
            for one in with_descendants(name) if all_descendants else (image(name),):
                if one.parent and one.parent not in wanted and self._find(one.parent) is None:
                    wanted[one.parent] = image(one.parent)
                wanted[one.name] = one
        ordered = sorted(wanted.values(), key=lambda one: one.parent is not None)
        parents = [image(one.parent) for one in ordered if one.parent]
        self._check_build_arguments([*parents, *ordered])
        self.check_bases(parent for parent in parents if parent not in ordered)
        for one in ordered:
            self._check_lock(one)
        return ordered

    def check_bases(self, there: Iterable[Image]) -> None:
        """Raise UsageError where one of the images `there`, which stay, is on another base than asked for."""
        asked = self.build_arguments.get(BASE_ARGUMENT)
        if asked is None:
            return
        for one in there:
            found = self._find(one.name)
            if found and (base := found.labels.get(BASE_LABEL)) != asked:
                raise UsageError(
                    f"{self._name(one.name)} is there already, built on {base or 'a base that no label tells'}: "
                    f"{BASE_ARGUMENT}={asked} would change nothing",
                    next_step=f"leave it out, or build anew: trainyard images build {one.root} --all-descendants "
                    f"--build-arg {BASE_ARGUMENT}={asked}",
                )

    def run(self, planned: Sequence[Image], say: Callable[[str], None]) -> list[BuiltImage]:
        """Build the images of a plan one after the other. `say` gets a line for each step.

        Raises TrainyardError with the end of the failing step's output, ConfigurationError for a base that cannot be
        pulled or a full disk, StoppedError after Ctrl-C. Images that were complete by then stay, and are named.
        """
        built: list[BuiltImage] = []
        try:
            for one in planned:
                built.append(self._build(one, say))  # noqa: PERF401 - what is complete counts after a failure too
        except TrainyardError as error:
            if built:
                whole = ", ".join(one.name for one in built)
                error.args = (f"{error.args[0]}\nwhat was complete before stays: {whole}",)
            raise
        return built

    def _build(self, one: Image, say: Callable[[str], None]) -> BuiltImage:
        say(f"{one.name}: build")
        began = time.monotonic()
        before = self._find(one.name)
        output = BuildOutput(one.dockerfile.read_text())
        process = subprocess.Popen(
            self._command(one),
            env=_environment(os.environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        try:
            self._watch(process, one, output, say)
            exit_code = process.wait()
        except KeyboardInterrupt:
            raise StoppedError(f"stopped: '{one.name}' was not built, and no image got its name") from None
        except TrainyardError:
            _stop(process)
            # A build of few steps may have been done before the engine heard that it should not be.
            made = self._find(one.name)
            if made is not None and (before is None or made.id != before.id):
                self.client.images.remove(self._name(one.name), force=True)
            raise
        finally:
            _stop(process)
        if exit_code:
            raise self._failure(one, output, exit_code)
        self._keep_packages(one)
        built = self._built(one, output, time.monotonic() - began)
        say(f"{one.name}: {built.name} in {duration(built.seconds)}")
        return built

    def _watch(
        self, process: "subprocess.Popen[str]", one: Image, output: BuildOutput, say: Callable[[str], None]
    ) -> None:
        for line in process.stderr or ():
            vertex = output.feed(line)
            if vertex is None:
                continue
            if line := vertex.progress:
                say(f"{one.name}: {line}")
            if vertex.name == CONTEXT and vertex.is_done and (now := source_revision()) != self.revision:
                raise TrainyardError(
                    f"the sources changed from {self.revision} to {now} while '{one.name}' was built from them; it "
                    "got no name",
                    next_step="the same command again",
                )

    def _keep_packages(self, one: Image) -> None:
        """Give a name to the stage that children add their packages to.

        BuildKit has just made it, so this takes a moment.

        Without the name they are built on the image itself, and anew after each edit of code: slower, no failure.
        """
        if _PACKAGES_STAGE.search(one.dockerfile.read_text()) and one.parent is None:
            command = self._command(one, stage=_PACKAGES)
            subprocess.run(command, env=_environment(os.environ), capture_output=True, check=False)

    def _command(self, one: Image, *, stage: str | None = None) -> list[str]:
        """Return the docker command that builds an image, or a stage of its Dockerfile."""
        name = f"{one.name}-{stage}" if stage else one.name
        return [
            *(str(engine.build_command()), "build", "--progress", "plain", "--platform", engine.PLATFORM),
            *("--file", str(one.dockerfile), "--tag", self._name(name)),
            *(("--target", stage) if stage else ()),
            *(("--network", self.network) if self.network else ()),
            *(part for name, value in self._arguments(one).items() for part in ("--build-arg", f"{name}={value}")),
            *(() if one.parent else ("--label", f"{BASE_LABEL}={self._base(one)}")),  # a child inherits it
            *(("--label", f"{COMMIT_LABEL}={self._commit}") if self._commit else ()),
            str(ROOT),
        ]

    def _base(self, root: Image) -> str:
        return self.build_arguments.get(BASE_ARGUMENT) or default_base(root, self.release)

    def _arguments(self, one: Image) -> dict[str, str]:
        """Return the build arguments that the image's Dockerfile declares, with their values."""
        parent = {"PARENT_IMAGE": self._name(one.parent), "PARENT": one.parent} if one.parent else {}
        if one.parent and self._find(f"{one.parent}-{_PACKAGES}"):
            parent["PARENT_PACKAGES"] = self._name(f"{one.parent}-{_PACKAGES}")
        base = {} if one.parent else {BASE_ARGUMENT: self._base(one)}
        given = {**{name: value for name, value in base.items() if value}, **self.build_arguments, **self._decided}
        given |= parent
        declared = declared_arguments(one)
        return {name: value for name, value in given.items() if name in declared or _is_proxy(name)}

    @cached_property
    def _decided(self) -> dict[str, str]:
        return {**self.release.build_arguments, "REVISION": self.revision}

    @cached_property
    def _commit(self) -> str | None:
        return None if is_dirty(self.revision) else source_commit()

    def _name(self, name: str) -> str:
        return local_name(name, image_tag(self.release.name, self.revision))

    def _find(self, name: str) -> DockerImage | None:
        try:
            return self.client.images.get(self._name(name))
        except ImageNotFound:
            return None

    def _check_build_arguments(self, lineage: Sequence[Image]) -> None:
        """Raise UsageError for a build argument that nothing declares, that decides a version or that holds a password.

        An argument of a parent is right too where the parent is there already.
        """
        known = {name for one in lineage for name in declared_arguments(one)}
        decided = {*self._decided, "PARENT_IMAGE", "PARENT_PACKAGES", "PARENT"}
        for name, value in self.build_arguments.items():
            if name in decided:
                raise UsageError(
                    f"build argument {name} is decided by the release and the sources",
                    next_step="choose a release with --release: its row in images/releases.toml says what must match",
                )
            if name not in known and not _is_proxy(name):
                searched = ", ".join(dict.fromkeys(one.name for one in lineage))
                raise UsageError(
                    f"build argument {name} is in no Dockerfile of {searched}{did_you_mean(name, known - decided)}"
                )
            if login_in(value):
                raise UsageError(
                    f"build argument {name} holds a password, which the image's history would show to all who have it",
                    next_step="a proxy's belongs into ~/.docker/config.json (proxies); else use a mirror without one",
                )

    def _check_lock(self, one: Image) -> None:
        path = lock_file(one, self.release)
        if not path.exists():
            raise ConfigurationError(
                f"image '{one.name}' has no lock file for release {self.release.name}: "
                f"{path.relative_to(ROOT)} is missing",
                next_step=f"python -m jobs.images.lock {one.name} {self.release.name}",
            )

    def _failure(self, one: Image, output: BuildOutput, exit_code: int) -> TrainyardError:
        failed = output.failed
        said = [*(failed.tail if failed else ()), *([failed.error or ""] if failed else output.rest)]
        text = "\n".join(said)
        if engine.is_disk_full("\n".join([text, *output.rest])):
            full = engine.disk_full("\n".join([text, *output.rest]), self.client)
            full.args = (f"'{one.name}' was not built: {full.args[0]}",)
            return full
        if failed and failed.base:
            return ConfigurationError(
                f"the base of '{one.name}' cannot be had: {failed.base}: {failed.error}",
                next_step="see that 'docker pull' gets it (network, docker login), or name another with "
                "--build-arg BASE_IMAGE=…",
            )
        if failed is None:
            said = [f"docker build ended with exit code {exit_code}", *said]
            return TrainyardError("\n".join([f"'{one.name}' was not built, and no image got its name:", *said]))
        place = f"step {failed.place}, {failed.summary}" if failed.number else failed.name
        return TrainyardError("\n".join([f"'{one.name}' was not built, and no image got its name; {place}:", *said]))

    def _built(self, one: Image, output: BuildOutput, seconds: float) -> BuiltImage:
        found = self._find(one.name)
        if found is None:
            raise ConfigurationError(
                f"'{one.name}' was built, and the Docker engine does not have it: the builder that the docker command "
                "uses keeps images to itself",
                next_step="docker buildx ls, then docker buildx use with a builder whose driver is docker (default)",
            )
        layers = output.layers
        return BuiltImage(
            image=one,
            release=self.release.name,
            revision=self.revision,
            id=found.id,
            size_bytes=engine.size_bytes(found),
            added_bytes=added_bytes(found, len(layers)),
            seconds=seconds,
            layers=len(layers),
            rebuilt_layers=sum(not step.is_cached for step in layers),
        )


def added_bytes(found: DockerImage, layers: int) -> int:
    """Return the size of the newest `layers` layers of an image."""
    # The history begins with the newest entry, and some entries made no layer.
    made = [entry for entry in found.history() if entry["CreatedBy"].startswith(_LAYER_INSTRUCTIONS)]
    return sum(int(entry["Size"]) for entry in made[:layers])


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


def _environment(given: Mapping[str, str]) -> dict[str, str]:
    """Return the environment that the docker command gets."""
    # Such a builder is another one than the engine's own, and would keep what it builds.
    kept = {name: value for name, value in given.items() if name != "BUILDX_BUILDER"}
    return {**kept, "DOCKER_BUILDKIT": "1", "BUILDX_NO_DEFAULT_ATTESTATIONS": "1"}


def _is_proxy(name: str) -> bool:
    return name.upper() in _PROXY_ARGUMENTS


def _stop(process: "subprocess.Popen[str]") -> None:
    """Have the docker command cancel its build, if it still runs; the engine cancels it when the command is gone."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.communicate(timeout=_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    if process.stderr:
        process.stderr.close()
