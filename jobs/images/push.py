"""Pushes images to the repositories of a stage, and records what was pushed where its deployments read it.

    trainyard --stage dev images push gaudi

A tag is one image for ever: what a repository has under it already is taken as it is, and never replaced. Parameters
are written after all pushes have succeeded, so that a stage names images that are there.

The sign-in is ECR's token, which stays in this process: it is in no file of the docker command and in no process list.
On the embedded AWS that token's registry is the one that it was started with; without any, an image is tagged in the
engine, which is where the embedded AWS looks for it.
"""

import base64
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import urlsplit

import docker
from docker.errors import APIError, DockerException, ImageNotFound, NotFound

from jobs.aws import Aws
from jobs.errors import ConfigurationError, StoppedError, TrainyardError, UsageError, did_you_mean
from jobs.images import engine
from jobs.images.hierarchy import Image, child_name, image, images
from jobs.images.revision import local_name
from jobs.stage import IMAGES, RELEASE, image_parameter, image_repository_parameter, parameter_path

_PARAMETERS_OF_A_CALL = 10
"""GetParameters' own limit."""

_CPU_ROOT = "cpu"
"""The root that every machine can run."""

_NO_NETWORK = re.compile(
    r"connection refused|no such host|no route to host|network is unreachable|timeout|timed out|connection reset|EOF",
    re.IGNORECASE,
)


@dataclass(frozen=True, kw_only=True)
class StageImages:
    """The images of a stage for one release, as its image stack and earlier pushes left them in SSM."""

    stage: str
    release: str
    repositories: Mapping[str, str]
    """Image to URI of its repository."""
    recorded: Mapping[str, str]
    """Image to what its parameter holds."""
    default: tuple[str, ...]
    """Names of the images that new jobs run in."""

    @classmethod
    def read(cls, aws: Aws, stage: str, release: str | None) -> "StageImages":
        """`release`: None for the stage's own. Raises ConfigurationError where its image stack is not deployed."""
        about = _parameters(aws, stage, [RELEASE, IMAGES])
        if RELEASE not in about:
            raise ConfigurationError(
                f"stage '{stage}' has no repositories for images: SSM has no {parameter_path(stage)}{RELEASE}",
                next_step=f"cdk deploy '{stage}/image' -c stage={stage}",
            )
        release = release or about[RELEASE]
        repositories = {name: image_repository_parameter(name) for name in images()}
        parameters = {name: image_parameter(name, release) for name in images()}
        found = _parameters(aws, stage, [*repositories.values(), *parameters.values()])
        return cls(
            stage=stage,
            release=release,
            repositories={name: found[key] for name, key in repositories.items() if key in found},
            recorded={name: found[key] for name, key in parameters.items() if key in found},
            default=tuple(about.get(IMAGES, "").split()),
        )

    def chosen(self, names: Sequence[str], *, embedded: bool) -> list[Image]:
        """The images called `names`; without any, those that new jobs run in (on the embedded AWS, their CPU twins).

        Raises UsageError for an image that there is not, ConfigurationError for one that the stage has no place for.
        """
        if not names:
            roots = dict.fromkeys(_twin(image(name), _CPU_ROOT) if embedded else name for name in self.default)
            names = list(roots)
        chosen = [image(name) for name in dict.fromkeys(names)]
        deploy = f"cdk deploy '{self.stage}/image' -c stage={self.stage}"
        for one in chosen:
            if one.name not in self.repositories:
                raise ConfigurationError(
                    f"stage '{self.stage}' has no repository for image '{one.name}'"
                    f"{did_you_mean(one.name, self.repositories)}",
                    next_step=f"{deploy}, where a row of its settings names an instance type that runs it",
                )
            if one.name not in self.recorded:
                raise ConfigurationError(
                    f"no pool of stage '{self.stage}' runs image '{one.name}' of release {self.release}",
                    next_step=f"name the stage's own release, or give it this one in infra/settings.py and {deploy}",
                )
        return chosen

    def stand_ins(self, one: Image) -> list[str]:
        """Names of the images that `one` stands in for on a machine without accelerators."""
        if one.root != _CPU_ROOT:
            return []
        twins = {_twin(one, other.name) for other in images().values() if other.parent is None}
        return sorted(name for name in twins if name in self.recorded and name != one.name)


@dataclass(frozen=True, kw_only=True)
class Registry:
    """Where images go, signed in."""

    host: str
    credentials: Mapping[str, str]

    @classmethod
    def sign_in(cls, aws: Aws) -> "Registry":
        """With a token of ECR's, which is good for twelve hours."""
        data = aws.ecr.get_authorization_token()["authorizationData"][0]
        user, _, password = base64.b64decode(data["authorizationToken"]).decode().partition(":")
        host = urlsplit(data["proxyEndpoint"]).netloc
        return cls(host=host, credentials={"username": user, "password": password, "serveraddress": host})

    def repository(self, uri: str) -> str:
        """How the engine reaches a repository: on AWS, by its URI."""
        return f"{self.host}/{uri.partition('/')[2]}"

    def is_missing(self, uri: str, *, embedded: bool) -> bool:
        """Whether there is none: an embedded AWS without a registry names AWS's own, as its repositories' URIs do."""
        return embedded and uri.partition("/")[0] == self.host


@dataclass(frozen=True, kw_only=True)
class Pushed:
    """An image that is where the stage's jobs find it."""

    image: Image
    tag: str
    uri: str
    """What its parameter shall hold."""
    was_there: bool
    """True: nothing had to be sent."""


class Watcher(Protocol):
    """Is told of a push as it goes on."""

    def begins(self, image: Image, target: str) -> None: ...

    def goes_on(self, image: Image, layer: str, status: str, sent_bytes: int, total_bytes: int) -> None: ...

    def ends(self, pushed: Pushed) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Push:
    """Images of one release and revision, to one stage."""

    client: docker.DockerClient
    aws: Aws
    stage: StageImages
    registry: Registry
    tag: str

    def missing(self, chosen: Iterable[Image]) -> list[str]:
        """Names of those that have to be built first: neither the engine has them nor the registry.

        Raises TrainyardError for one that the registry has another build of, and as `run` does.
        """
        return [one.name for one in chosen if self._there(one) is None and self._local(one) is None]

    def run(self, chosen: Iterable[Image], watcher: Watcher) -> list[Pushed]:
        """Push them one after the other.

        Raises ConfigurationError where the registry refuses, TrainyardError where it does not answer or holds something
        else afterwards, StoppedError after Ctrl-C. What is not there then has no name in the engine that says it were.
        """
        return [self._push(one, watcher) for one in chosen]

    def record(self, pushed: Iterable[Pushed]) -> dict[str, str]:
        """Write the parameters, on the embedded AWS those of the images that they stand in for too.

        Returns image to URI, of those that changed.
        """
        wanted = {
            name: one.uri
            for one in pushed
            for name in (one.image.name, *(self.stage.stand_ins(one.image) if self.aws.embedded else ()))
        }
        changed = {name: uri for name, uri in wanted.items() if self.stage.recorded.get(name) != uri}
        for name, uri in changed.items():
            self.aws.ssm.put_parameter(
                Name=parameter_path(self.stage.stage) + image_parameter(name, self.stage.release),
                Value=uri,
                Overwrite=True,
            )
        return changed

    def _push(self, one: Image, watcher: Watcher) -> Pushed:
        uri = self.stage.repositories[one.name]
        if self.registry.is_missing(uri, embedded=self.aws.embedded):
            self._tag(one, uri)
            done = Pushed(image=one, tag=self.tag, uri=f"{uri}:{self.tag}", was_there=False)
        elif digest := self._there(one):
            done = Pushed(image=one, tag=self.tag, uri=f"{uri}@{digest}", was_there=True)
        else:
            target = self.registry.repository(uri)
            watcher.begins(one, f"{target}:{self.tag}")
            done = Pushed(image=one, tag=self.tag, uri=f"{uri}@{self._send(one, target, watcher)}", was_there=False)
        watcher.ends(done)
        return done

    def _send(self, one: Image, target: str, watcher: Watcher) -> str:
        """The digest that the registry has the image by."""
        self._tag(one, target)
        arrived = False
        try:
            told = self._stream(one, target, watcher)
            self._verify(one, target, told)
            arrived = True
        except KeyboardInterrupt:
            raise StoppedError(f"stopped: '{one.name}' was not pushed, and nothing was recorded") from None
        finally:
            if not arrived:
                self._untag(target)
        return told

    def _verify(self, one: Image, target: str, told: str) -> None:
        """What the engine says it pushed must be what the registry has."""
        found = self._digest(one, target)
        if told != found:
            raise TrainyardError(
                f"{target}:{self.tag} is {found} in the registry, and {told} was pushed; nothing was recorded",
                next_step="see who else pushes there, then the same command again",
            )

    def _stream(self, one: Image, target: str, watcher: Watcher) -> str:
        digest = ""
        try:
            for line in self.client.api.push(
                target, tag=self.tag, stream=True, decode=True, auth_config=dict(self.registry.credentials)
            ):
                if "error" in line:
                    raise self._refusal(one, target, str(line["error"]))
                digest = (line.get("aux") or {}).get("Digest", digest)
                progress = line.get("progressDetail") or {}
                watcher.goes_on(
                    one,
                    line.get("id", ""),
                    line.get("status", ""),
                    progress.get("current", 0),
                    progress.get("total", 0),
                )
        except (DockerException, OSError) as error:
            raise self._refusal(one, target, _words(error)) from error
        return digest

    def _there(self, one: Image) -> str | None:
        """Digest of what the registry has under the tag; None where it has nothing or there is no registry.

        Raises TrainyardError where the engine's image of that tag is another one.
        """
        uri = self.stage.repositories[one.name]
        if self.registry.is_missing(uri, embedded=self.aws.embedded):
            return None
        target = self.registry.repository(uri)
        digest = self._digest(one, target)
        local = self._local(one)
        if digest and local and f"{target}@{digest}" not in local.attrs["RepoDigests"] and local.id != digest:
            raise TrainyardError(
                f"{uri} has an image tagged {self.tag} already ({digest}), which is not the one that this machine "
                "built of the same sources, and tags cannot be moved",
                next_step=f"docker image rm {local_name(one.name, self.tag)}, then the same command again: it takes "
                "what is there",
            )
        return digest

    def _digest(self, one: Image, target: str) -> str | None:
        try:
            found = self.client.images.get_registry_data(f"{target}:{self.tag}", dict(self.registry.credentials))
        except NotFound as error:
            if _is_no_repository(_words(error)):
                raise self._refusal(one, target, _words(error)) from error
            return None
        except (DockerException, OSError) as error:
            raise self._refusal(one, target, _words(error)) from error
        digest: str = found.id
        return digest

    def _refusal(self, one: Image, target: str, reason: str) -> TrainyardError:
        """What a user should read where the registry, or the engine on its behalf, said no."""
        message = f"'{one.name}' was not pushed to {target}, and nothing was recorded: {reason}"
        if engine.is_disk_full(reason):
            return engine.disk_full(message, self.client)
        if "expired" in reason:
            return ConfigurationError(message, next_step="the same command again, which signs in anew")
        if _is_no_repository(reason):
            return ConfigurationError(message, next_step=f"cdk deploy '{self.stage.stage}/image', which makes it")
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

    def _local(self, one: Image) -> Any | None:
        """The engine's image of that tag."""
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


def check_clean(revision: str, *, embedded: bool, allow_dirty: bool) -> None:
    """Raises UsageError where images of sources that nobody else has would go to an AWS account."""
    if "-dirty-" in revision and not (embedded or allow_dirty):
        raise UsageError(
            f"images/ or jobs/ differ from the last commit (revision {revision}): nobody could tell later what the "
            "image holds",
            next_step="commit first, or push it all the same with --allow-dirty; its tag says so for ever",
        )


def _parameters(aws: Aws, stage: str, names: Sequence[str]) -> dict[str, str]:
    """Those that are there, without the stage's path."""
    path = parameter_path(stage)
    found: dict[str, str] = {}
    for start in range(0, len(names), _PARAMETERS_OF_A_CALL):
        asked = [path + name for name in names[start : start + _PARAMETERS_OF_A_CALL]]
        answer = aws.ssm.get_parameters(Names=asked)["Parameters"]
        found.update({item["Name"].removeprefix(path): item["Value"] for item in answer})
    return found


def _twin(one: Image, root: str) -> str:
    """Name of the image that has the same on another root."""
    return child_name(root, one.folder if one.parent else None)


def _is_no_repository(reason: str) -> bool:
    return bool(re.search(r"repository .* (does not exist|not found)|name unknown|RepositoryNotFound", reason))


def _words(error: Exception) -> str:
    return str(error.explanation or error) if isinstance(error, APIError) else str(error)
