"""Push images to a stage's repositories, and record them in the SSM parameters that deployments read.

    trainyard --stage dev images push gaudi

A tag is one revision of the sources and never changes. Two builds of a revision are never byte-identical, so the first
push wins: if a repository has a tag, everyone uses that image, and missing images are built on it. Parameters are
written after all pushes have succeeded, so a stage only names images that exist.

ECR's sign-in token stays in this process, and never appears in a docker configuration or a process list. On the
emulator, the token is for the registry that the emulator was started with. Without a registry, images are only tagged
in the engine, where the emulator looks for them.
"""

import base64
import os
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import docker
from docker.errors import APIError, DockerException, ImageNotFound, NotFound
from docker.models.images import Image as DockerImage

from jobs.aws.connection import Aws
from jobs.core.errors import ConfigurationError, StoppedError, TrainyardError, UsageError
from jobs.core.git import REVISION_VARIABLE, image_tag, is_dirty, local_name
from jobs.core.images import Image
from jobs.core.images import image as image_called
from jobs.core.stage import deploy_command, image_parameter, parameter_path
from jobs.images import engine
from jobs.images.bases import default_base
from jobs.images.build import BASE_LABEL
from jobs.images.inventory import StageImages

_NO_NETWORK = re.compile(
    r"connection refused|no such host|no route to host|network is unreachable|timeout|timed out|connection reset|EOF",
    re.IGNORECASE,
)


@dataclass(frozen=True, kw_only=True)
class Registry:
    """The registry to push to, with the credentials of a sign-in."""

    host: str
    credentials: Mapping[str, str] = field(repr=False)

    @classmethod
    def sign_in(cls, aws: Aws) -> "Registry":
        """Sign in with an ECR token, which is valid for twelve hours."""
        data = aws.ecr.get_authorization_token()["authorizationData"][0]
        user, _, password = base64.b64decode(data["authorizationToken"]).decode().partition(":")
        host = urlsplit(data["proxyEndpoint"]).netloc
        return cls(host=host, credentials={"username": user, "password": password, "serveraddress": host})

    def repository(self, uri: str) -> str:
        """Return the engine's name for a repository: on AWS, the repository's URI."""
        return f"{self.host}/{uri.partition('/')[2]}"

    def is_missing(self, uri: str, *, emulated: bool) -> bool:
        """Return whether there is no registry: an emulator without one returns the host of the repository URIs."""
        return emulated and uri.partition("/")[0] == self.host


@dataclass(frozen=True, kw_only=True)
class Pushed:
    """An image that the stage's jobs can use."""

    image: Image
    tag: str
    uri: str
    """The value for its parameter."""
    was_there: bool
    """Whether the registry already had the image."""
    leaves_own: bool = False
    """Whether this machine's own build of the tag, which may differ, was not pushed."""


@dataclass(frozen=True, kw_only=True)
class Push:
    """The push of images of one revision to a stage."""

    client: docker.DockerClient
    """A client that may be silent for engine.TRANSFER_SECONDS."""
    aws: Aws
    stage: StageImages
    registry: Registry
    revision: str

    def tag_of(self, img: Image) -> str:
        """Return the tag of an image: its release and the revision."""
        return image_tag(self.stage.releases[img.root].name, self.revision)

    def missing(self, unbuilt: Iterable[Image]) -> list[str]:
        """Return the names of unbuilt images that the registry lacks too. Raises as `run` does."""
        return [img.name for img in unbuilt if self._pushed_digest(img) is None]

    def pullable_parents(self, missing: Iterable[str]) -> list[Image]:
        """Return the parents of `missing` images that are only in the registry, to pull instead of build.

        Raises as `run` does.
        """
        names = dict.fromkeys(parent for name in missing if (parent := image_called(name).parent))
        parents = [image_called(name) for name in names if name in self.stage.repositories]
        return [img for img in parents if self._local(img) is None and self._pushed_digest(img)]

    def fetch(self, img: Image) -> None:
        """Pull an image from the registry into the engine, and tag it like an image built here.

        Raises as `run` does.
        """
        target = self.registry.repository(self.stage.repositories[img.name])
        try:
            digest = self._pushed_digest(img)
            # The SDK's images.pull would ignore errors that the engine reports in its output.
            for line in self.client.api.pull(
                target,
                tag=digest,
                stream=True,
                decode=True,
                auth_config=dict(self.registry.credentials),
                platform=engine.PLATFORM,
            ):
                if "error" in line:
                    raise self._refusal(img, f"pulled from {target}", str(line["error"]))
            self.client.images.get(f"{target}@{digest}").tag(*local_name(img.name, self.tag_of(img)).rsplit(":", 1))
        except KeyboardInterrupt:
            raise StoppedError(f"stopped: '{img.name}' was not pulled, and nothing was pushed") from None
        except (DockerException, OSError) as error:
            raise self._refusal(img, f"pulled from {target}", _message(error)) from error

    def check_bases(self, chosen: Iterable[Image]) -> None:
        """Raise UsageError if an image to push is built on a base other than the release's."""
        for img in chosen:
            local = self._local(img)
            if local is None or self._pushed_digest(img):
                continue
            found = local.labels.get(BASE_LABEL)
            own = default_base(image_called(img.root), self.stage.releases[img.root])
            if found != own:
                raise UsageError(
                    f"'{img.name}' is built on {found or 'an unknown base (it has no label)'}, but images of this tag "
                    f"are built on {own or 'no default base'}",
                    next_step=f"trainyard images build {img.root} --all-descendants, then run the same command again; "
                    "or push it anyway with --allow-dirty",
                )

    def run(self, chosen: Iterable[Image], report: Callable[[str], None]) -> list[Pushed]:
        """Push images one by one, passing progress lines to `report`.

        Raises ConfigurationError if the registry refuses, TrainyardError if it does not answer or has another image
        afterwards, and StoppedError after Ctrl-C. Then the engine has no registry tag for an image that was not pushed.
        """
        return [self._push(img, report) for img in chosen]

    def record(self, pushed: Iterable[Pushed]) -> dict[str, str]:
        """Write the SSM parameters of pushed images and, on the emulator, of the images that they replace.

        Returns the changed URIs, by image.
        """
        wanted = {
            name: done.uri
            for done in pushed
            for name in (done.image.name, *(self.stage.stand_ins(done.image) if self.aws.emulated else ()))
        }
        changed = {name: uri for name, uri in wanted.items() if self.stage.recorded.get(name) != uri}
        for name, uri in changed.items():
            self.aws.ssm.put_parameter(
                Name=parameter_path(self.stage.stage)
                + image_parameter(name, self.stage.releases[image_called(name).root].name),
                Value=uri,
                Overwrite=True,
            )
        return changed

    def _push(self, img: Image, report: Callable[[str], None]) -> Pushed:
        uri = self.stage.repositories[img.name]
        if self.registry.is_missing(uri, emulated=self.aws.emulated):
            self._tag(img, uri)
            done = Pushed(image=img, tag=self.tag_of(img), uri=f"{uri}:{self.tag_of(img)}", was_there=False)
        elif digest := self._pushed_digest(img):
            own = self._leaves_own(img, digest)
            done = Pushed(image=img, tag=self.tag_of(img), uri=f"{uri}@{digest}", was_there=True, leaves_own=own)
        else:
            target = self.registry.repository(uri)
            report(f"{img.name}: push to {target}:{self.tag_of(img)}")
            done = Pushed(image=img, tag=self.tag_of(img), uri=f"{uri}@{self._send(img, target)}", was_there=False)
        report(f"{img.name}: {'already pushed' if done.was_there else 'done'}, {done.uri}")
        return done

    def _send(self, img: Image, target: str) -> str:
        """Push an image and return its digest in the registry."""
        self._tag(img, target)
        arrived = False
        try:
            digest = self._stream(img, target)
            self._verify(img, target, digest)
            arrived = True
        except KeyboardInterrupt:
            raise StoppedError(f"stopped: '{img.name}' was not pushed, and nothing was recorded") from None
        finally:
            if not arrived:
                self._untag(img, target)
        return digest

    def _verify(self, img: Image, target: str, pushed: str) -> None:
        """Raise TrainyardError if the registry's digest differs from the digest that the engine reported."""
        found = self._digest(img, target)
        if pushed != found:
            raise TrainyardError(
                f"{target}:{self.tag_of(img)} is {found} in the registry, but {pushed} was pushed; nothing was "
                "recorded",
                next_step="find out who else pushes there, then run the same command again",
            )

    def _stream(self, img: Image, target: str) -> str:
        digest = ""
        try:
            for line in self.client.api.push(
                target, tag=self.tag_of(img), stream=True, decode=True, auth_config=dict(self.registry.credentials)
            ):
                if "error" in line:
                    raise self._refusal(img, f"pushed to {target}", str(line["error"]))
                digest = (line.get("aux") or {}).get("Digest", digest)
        except (DockerException, OSError) as error:
            raise self._refusal(img, f"pushed to {target}", _message(error)) from error
        return digest

    def _pushed_digest(self, img: Image) -> str | None:
        """Return the digest of the tag in the registry, or None if there is no such tag or no registry."""
        uri = self.stage.repositories[img.name]
        if self.registry.is_missing(uri, emulated=self.aws.emulated):
            return None
        return self._digest(img, self.registry.repository(uri))

    def _leaves_own(self, img: Image, digest: str) -> bool:
        """Return whether the engine has an image with this tag that may differ from the registry's."""
        local = self._local(img)
        if local is None or local.id == digest:  # with containerd, the engine's ids are digests
            return False
        return not any(name.endswith(f"@{digest}") for name in local.attrs["RepoDigests"] or ())

    def _digest(self, img: Image, target: str) -> str | None:
        try:
            found = self.client.images.get_registry_data(
                f"{target}:{self.tag_of(img)}", dict(self.registry.credentials)
            )
        except NotFound as error:
            if _is_no_repository(_message(error)):
                raise self._refusal(img, f"pushed to {target}", _message(error)) from error
            return None
        except (DockerException, OSError) as error:
            raise self._refusal(img, f"pushed to {target}", _message(error)) from error
        digest: str = found.id
        return digest

    def _refusal(self, img: Image, done: str, reason: str) -> TrainyardError:
        """Return the error for a refusal by the registry or by the engine. `done` is the action that failed."""
        message = f"'{img.name}' was not {done}, and nothing was recorded: {reason}"
        if engine.is_disk_full(reason):
            return engine.disk_full(message)
        if "expired" in reason:
            return ConfigurationError(message, next_step="run the same command again, which signs in again")
        if _is_no_repository(reason):
            deploy = deploy_command(self.stage.stage, "image", emulated=self.aws.emulated)
            return ConfigurationError(message, next_step=f"{deploy}, which creates the repository")
        if _NO_NETWORK.search(reason):
            return TrainyardError(
                message, next_step="check that the engine reaches the registry (network, proxy), then try again"
            )
        if re.search(r"denied|unauthorized|no basic auth|forbidden|not authorized", reason, re.IGNORECASE):
            return ConfigurationError(
                message,
                next_step="ask the stage's operators for permission to push there (ecr:PutImage and related actions), "
                "or push with the stage's CodeBuild project",
            )
        return TrainyardError(message, next_step="run the same command again; layers that arrived are not sent again")

    def _local(self, img: Image) -> DockerImage | None:
        """Return the engine's image with this tag, or None."""
        try:
            return self.client.images.get(local_name(img.name, self.tag_of(img)))
        except ImageNotFound:
            return None

    def _tag(self, img: Image, repository: str) -> None:
        try:
            self.client.images.get(local_name(img.name, self.tag_of(img))).tag(repository, self.tag_of(img))
        except DockerException as error:
            raise engine.explain(error) from error

    def _untag(self, img: Image, repository: str) -> None:
        with suppress(ImageNotFound):
            self.client.images.remove(f"{repository}:{self.tag_of(img)}", noprune=True)


def check_clean(revision: str, *, emulated: bool, allow_dirty: bool) -> None:
    """Raise UsageError if images of uncommitted sources would be pushed to an AWS account."""
    if not is_dirty(revision) or emulated or allow_dirty:
        return
    if os.environ.get(REVISION_VARIABLE) == revision:
        raise UsageError(
            f"these sources are not from a commit ({REVISION_VARIABLE}={revision}): nobody could find out later what "
            "the image contains",
            next_step="in CodeBuild: commit, deploy the image stack, which uploads the sources again, then start a new "
            "build; or add --allow-dirty to its ARGUMENTS",
        )
    raise UsageError(
        f"images/ or jobs/ differ from the last commit (revision {revision}): nobody could find out later what the "
        "image contains",
        next_step="commit first, or push anyway with --allow-dirty, which its tag will show forever",
    )


def _is_no_repository(reason: str) -> bool:
    return bool(re.search(r"repository .* (does not exist|not found)|name unknown|RepositoryNotFound", reason))


def _message(error: Exception) -> str:
    return str(error.explanation or error) if isinstance(error, APIError) else str(error)
