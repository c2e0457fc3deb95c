"""Pushes images to the repositories of a stage, and records what was pushed where its deployments read it.

    trainyard --stage dev images push gaudi

A tag is one revision of the sources, and one image for ever. Two builds of a revision are never the same to the byte;
the first that was pushed counts: what a repository has under a tag is taken as it is, by everybody, and what is missing
is built on it. Parameters are written after all pushes have succeeded, so that a stage names images that are there.

The sign-in is ECR's token, which stays in this process: it is in no file of the docker command and in no process list.
On the emulator that token's registry is the one that it was started with; without any, an image is tagged in the
engine, which is where the emulator looks for it.
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
from jobs.core.git import REVISION_VARIABLE, is_dirty, local_name
from jobs.core.images import Image, release
from jobs.core.images import image as image_called
from jobs.core.stage import deploy_command, image_parameter, parameter_path
from jobs.images import engine
from jobs.images.bases import default_base
from jobs.images.build import BASE_LABEL
from jobs.images.stage_images import StageImages

_NO_NETWORK = re.compile(
    r"connection refused|no such host|no route to host|network is unreachable|timeout|timed out|connection reset|EOF",
    re.IGNORECASE,
)


@dataclass(frozen=True, kw_only=True)
class Registry:
    """The registry that images go to, with the credentials of a sign-in."""

    host: str
    credentials: Mapping[str, str] = field(repr=False)

    @classmethod
    def sign_in(cls, aws: Aws) -> "Registry":
        """Sign in with a token of ECR, which is good for twelve hours."""
        data = aws.ecr.get_authorization_token()["authorizationData"][0]
        user, _, password = base64.b64decode(data["authorizationToken"]).decode().partition(":")
        host = urlsplit(data["proxyEndpoint"]).netloc
        return cls(host=host, credentials={"username": user, "password": password, "serveraddress": host})

    def repository(self, uri: str) -> str:
        """Return the name by which the engine reaches a repository: on AWS, its URI."""
        return f"{self.host}/{uri.partition('/')[2]}"

    def is_missing(self, uri: str, *, emulated: bool) -> bool:
        """Return whether there is no registry: an emulator without one names AWS's own, as its URIs do."""
        return emulated and uri.partition("/")[0] == self.host


@dataclass(frozen=True, kw_only=True)
class Pushed:
    """An image that is where the stage's jobs find it."""

    image: Image
    tag: str
    uri: str
    """What its parameter shall hold."""
    was_there: bool
    """True: nothing had to be sent."""
    leaves_own: bool = False
    """True: this machine's own build of the tag was not sent, and may be another one."""


@dataclass(frozen=True, kw_only=True)
class Push:
    """The push of images of one release and revision to one stage."""

    client: docker.DockerClient
    """One that may be silent for long (engine.TRANSFER_SECONDS)."""
    aws: Aws
    stage: StageImages
    registry: Registry
    tag: str

    def missing(self, not_here: Iterable[Image]) -> list[str]:
        """Return the names of those that have to be built, as the registry has them neither. Raises as `run` does."""
        return [one.name for one in not_here if self._there(one) is None]

    def parents_there(self, missing: Iterable[str]) -> list[Image]:
        """Return the parents of the `missing` that only the registry has, to be fetched rather than built.

        Raises as `run` does.
        """
        names = dict.fromkeys(parent for name in missing if (parent := image_called(name).parent))
        parents = [image_called(name) for name in names if name in self.stage.repositories]
        return [one for one in parents if self._local(one) is None and self._there(one)]

    def fetch(self, one: Image) -> None:
        """Pull into the engine what the registry has under the tag, and name it as what is built here.

        Raises as `run` does.
        """
        target = self.registry.repository(self.stage.repositories[one.name])
        try:
            digest = self._there(one)
            # Not images.pull of the SDK, which passes over what the engine says of a failure.
            for line in self.client.api.pull(
                target,
                tag=digest,
                stream=True,
                decode=True,
                auth_config=dict(self.registry.credentials),
                platform=engine.PLATFORM,
            ):
                if "error" in line:
                    raise self._refusal(one, f"pulled from {target}", str(line["error"]))
            self.client.images.get(f"{target}@{digest}").tag(*local_name(one.name, self.tag).rsplit(":", 1))
        except KeyboardInterrupt:
            raise StoppedError(f"stopped: '{one.name}' was not pulled, and nothing was pushed") from None
        except (DockerException, OSError) as error:
            raise self._refusal(one, f"pulled from {target}", _words(error)) from error

    def check_bases(self, chosen: Iterable[Image]) -> None:
        """Raise UsageError if an image that is to be sent is on another base than its release's own."""
        row = release(self.stage.release)
        for one in chosen:
            local = self._local(one)
            if local is None or self._there(one):
                continue
            found, own = local.labels.get(BASE_LABEL), default_base(image_called(one.root), row)
            if found != own:
                raise UsageError(
                    f"'{one.name}' is built on {found or 'a base that no label tells'}, and images of its tag are on "
                    f"{own or 'none of their own'}",
                    next_step=f"trainyard images build {one.root} --all-descendants, then the same command again; or "
                    "push it all the same with --allow-dirty",
                )

    def run(self, chosen: Iterable[Image], say: Callable[[str], None]) -> list[Pushed]:
        """Push them one after the other, and report each to `say`.

        Raises ConfigurationError if the registry refuses, TrainyardError if it does not answer or holds something
        else afterwards, StoppedError after Ctrl-C. What is not there then has no name in the engine that says it were.
        """
        return [self._push(one, say) for one in chosen]

    def record(self, pushed: Iterable[Pushed]) -> dict[str, str]:
        """Write the parameters; on the emulator, those of the images that they stand in for too.

        Returns image to URI, of those that changed.
        """
        wanted = {
            name: one.uri
            for one in pushed
            for name in (one.image.name, *(self.stage.stand_ins(one.image) if self.aws.emulated else ()))
        }
        changed = {name: uri for name, uri in wanted.items() if self.stage.recorded.get(name) != uri}
        for name, uri in changed.items():
            self.aws.ssm.put_parameter(
                Name=parameter_path(self.stage.stage) + image_parameter(name, self.stage.release),
                Value=uri,
                Overwrite=True,
            )
        return changed

    def _push(self, one: Image, say: Callable[[str], None]) -> Pushed:
        uri = self.stage.repositories[one.name]
        if self.registry.is_missing(uri, emulated=self.aws.emulated):
            self._tag(one, uri)
            done = Pushed(image=one, tag=self.tag, uri=f"{uri}:{self.tag}", was_there=False)
        elif digest := self._there(one):
            own = self._leaves_own(one, digest)
            done = Pushed(image=one, tag=self.tag, uri=f"{uri}@{digest}", was_there=True, leaves_own=own)
        else:
            target = self.registry.repository(uri)
            say(f"{one.name}: push to {target}:{self.tag}")
            done = Pushed(image=one, tag=self.tag, uri=f"{uri}@{self._send(one, target)}", was_there=False)
        say(f"{one.name}: {'was there' if done.was_there else 'done'}, {done.uri}")
        return done

    def _send(self, one: Image, target: str) -> str:
        """Send an image, and return the digest that the registry has it by."""
        self._tag(one, target)
        arrived = False
        try:
            told = self._stream(one, target)
            self._verify(one, target, told)
            arrived = True
        except KeyboardInterrupt:
            raise StoppedError(f"stopped: '{one.name}' was not pushed, and nothing was recorded") from None
        finally:
            if not arrived:
                self._untag(target)
        return told

    def _verify(self, one: Image, target: str, told: str) -> None:
        """Raise TrainyardError if the registry has something else than what the engine says it pushed."""
        found = self._digest(one, target)
        if told != found:
            raise TrainyardError(
                f"{target}:{self.tag} is {found} in the registry, and {told} was pushed; nothing was recorded",
                next_step="see who else pushes there, then the same command again",
            )

    def _stream(self, one: Image, target: str) -> str:
        digest = ""
        try:
            for line in self.client.api.push(
                target, tag=self.tag, stream=True, decode=True, auth_config=dict(self.registry.credentials)
            ):
                if "error" in line:
                    raise self._refusal(one, f"pushed to {target}", str(line["error"]))
                digest = (line.get("aux") or {}).get("Digest", digest)
        except (DockerException, OSError) as error:
            raise self._refusal(one, f"pushed to {target}", _words(error)) from error
        return digest

    def _there(self, one: Image) -> str | None:
        """Return the digest of what the registry has under the tag; None without one, or without a registry."""
        uri = self.stage.repositories[one.name]
        if self.registry.is_missing(uri, emulated=self.aws.emulated):
            return None
        return self._digest(one, self.registry.repository(uri))

    def _leaves_own(self, one: Image, digest: str) -> bool:
        """Return whether the engine has an image of the tag that is not known to be the registry's."""
        local = self._local(one)
        if local is None or local.id == digest:  # an engine that keeps images in containerd calls them by their digest
            return False
        return not any(name.endswith(f"@{digest}") for name in local.attrs["RepoDigests"] or ())

    def _digest(self, one: Image, target: str) -> str | None:
        try:
            found = self.client.images.get_registry_data(f"{target}:{self.tag}", dict(self.registry.credentials))
        except NotFound as error:
            if _is_no_repository(_words(error)):
                raise self._refusal(one, f"pushed to {target}", _words(error)) from error
            return None
        except (DockerException, OSError) as error:
            raise self._refusal(one, f"pushed to {target}", _words(error)) from error
        digest: str = found.id
        return digest

    def _refusal(self, one: Image, done: str, reason: str) -> TrainyardError:
        """Return the error for a refusal by the registry, or by the engine on its behalf, of what was to be `done`."""
        message = f"'{one.name}' was not {done}, and nothing was recorded: {reason}"
        if engine.is_disk_full(reason):
            return engine.disk_full(message)
        if "expired" in reason:
            return ConfigurationError(message, next_step="the same command again, which signs in anew")
        if _is_no_repository(reason):
            deploy = deploy_command(self.stage.stage, "image", emulated=self.aws.emulated)
            return ConfigurationError(message, next_step=f"{deploy}, which makes it")
        if _NO_NETWORK.search(reason):
            return TrainyardError(
                message, next_step="see that the engine reaches the registry (network, proxy), then the same again"
            )
        if re.search(r"denied|unauthorized|no basic auth|forbidden|not authorized", reason, re.IGNORECASE):
            return ConfigurationError(
                message,
                next_step="ask who runs the stage for the right to push there (ecr:PutImage and what goes with it), "
                "or have its CodeBuild project do it",
            )
        return TrainyardError(message, next_step="the same command again; what has arrived is not sent twice")

    def _local(self, one: Image) -> DockerImage | None:
        """Return the engine's image of that tag, or None."""
        try:
            return self.client.images.get(local_name(one.name, self.tag))
        except ImageNotFound:
            return None

    def _tag(self, one: Image, repository: str) -> None:
        try:
            self.client.images.get(local_name(one.name, self.tag)).tag(repository, self.tag)
        except DockerException as error:
            raise engine.explain(error) from error

    def _untag(self, repository: str) -> None:
        with suppress(ImageNotFound):
            self.client.images.remove(f"{repository}:{self.tag}", noprune=True)


def check_clean(revision: str, *, emulated: bool, allow_dirty: bool) -> None:
    """Raise UsageError if images of sources that nobody else has would go to an AWS account."""
    if not is_dirty(revision) or emulated or allow_dirty:
        return
    if os.environ.get(REVISION_VARIABLE) == revision:
        raise UsageError(
            f"these sources are no commit's ({REVISION_VARIABLE}={revision}): nobody could tell later what the image "
            "holds",
            next_step="in CodeBuild: commit, deploy the image stack, which uploads the sources again, then start a new "
            "build; or give it --allow-dirty among its ARGUMENTS",
        )
    raise UsageError(
        f"images/ or jobs/ differ from the last commit (revision {revision}): nobody could tell later what the "
        "image holds",
        next_step="commit first, or push it all the same with --allow-dirty; its tag says so for ever",
    )


def _is_no_repository(reason: str) -> bool:
    return bool(re.search(r"repository .* (does not exist|not found)|name unknown|RepositoryNotFound", reason))


def _words(error: Exception) -> str:
    return str(error.explanation or error) if isinstance(error, APIError) else str(error)
