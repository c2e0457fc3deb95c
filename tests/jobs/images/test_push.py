"""What a push records, and how refusals are explained, with a fake engine. tests/images uses a real one."""

from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from docker.errors import DockerException, ImageNotFound, NotFound

from jobs.core.errors import ConfigurationError, TrainyardError, UsageError
from jobs.core.images import chosen_releases, image, release
from jobs.images.bases import default_base
from jobs.images.inventory import StageImages
from jobs.images.push import Push, Registry, check_clean

HOST = "registry.example.com"
RELEASE = release(of="cpu").name
REVISION = "0123456789ab"
TAG = f"{RELEASE}-{REVISION}"
TOKEN = {"username": "AWS", "password": "a-token"}
DIRTY = "0123456789ab-dirty-01234567"


class Engine:
    """An engine and a registry, each with digests of images by name."""

    def __init__(self, *here: str, refusal: str = "") -> None:
        self.here = {self.name(name): f"sha256:of-{name}" for name in here}
        self.there: dict[str, str] = {}
        self.refusal = refusal
        self.bases: dict[str, str | None] = {}
        self.sign_ins: list[Mapping[str, str]] = []
        self.images = self.api = self

    @staticmethod
    def name(of: str) -> str:
        """Return the name of an image that was built here."""
        return f"trainyard/{of}:{release(of=image(of).root).name}-{REVISION}"

    def get(self, name: str) -> Any:
        if name not in self.here:
            raise ImageNotFound("no such image")
        base = self.bases.get(name)
        return SimpleNamespace(
            id=self.here[name],
            labels={"trainyard.base": base} if base else {},
            attrs={"RepoDigests": None},
            tag=lambda repository, tag: self.here.update({f"{repository}:{tag}": self.here[name]}),
        )

    def get_registry_data(self, name: str, credentials: Mapping[str, str]) -> Any:
        if self.refusal == "unreachable":
            raise DockerException("dial tcp 127.0.0.1:9: connect: connection refused")
        if name not in self.there:
            raise NotFound("manifest unknown")
        return SimpleNamespace(id=self.there[name])

    def push(self, target: str, *, tag: str, auth_config: Mapping[str, str], **_: Any) -> Iterator[dict[str, Any]]:
        self.sign_ins.append(auth_config)
        if self.refusal:
            yield {"error": self.refusal}
            return
        pushed = self.here[f"{target}:{tag}"]
        self.there.setdefault(f"{target}:{tag}", pushed)
        yield {"aux": {"Digest": pushed}}

    def pull(self, target: str, *, tag: str, **_: Any) -> Iterator[dict[str, Any]]:
        if self.refusal:
            yield {"error": self.refusal}
            return
        self.here[f"{target}@{tag}"] = tag
        yield {"status": "done"}

    def remove(self, name: str, **_: Any) -> None:
        del self.here[name]


def make(
    engine: Engine,
    *,
    recorded: Mapping[str, str] | None = None,
    emulated: bool = False,
    written: dict[str, str] | None = None,
) -> Push:
    """Return a push to a stage with repositories for cpu and gaudi, which records into `written`."""
    written = {} if written is None else written
    ssm = SimpleNamespace(put_parameter=lambda **given: written.update({given["Name"]: given["Value"]}))
    aws: Any = SimpleNamespace(emulated=emulated, ssm=ssm)
    stage = StageImages(
        stage="dev",
        releases=chosen_releases(),
        repositories={name: f"{HOST}/{name}" for name in ("cpu", "cpu-notebook", "gaudi", "gaudi-notebook")},
        recorded=recorded or {},
        default=("gaudi",),
    )
    client: Any = engine
    return Push(client=client, aws=aws, stage=stage, registry=Registry(host=HOST, credentials=TOKEN), revision=REVISION)


def parameter(name: str) -> str:
    return f"/trainyard/dev/image/{name}/{RELEASE}"


def test_pushed_images_are_recorded_by_digest() -> None:
    written: dict[str, str] = {}
    push = make(engine := Engine("cpu", "cpu-notebook"), recorded={"cpu": "older"}, written=written)
    assert push.missing([image("cpu"), image("gaudi")]) == ["cpu", "gaudi"]  # in the registry
    first, second = push.run([image("cpu"), image("cpu-notebook")], print)
    assert (first.uri, first.was_there) == (f"{HOST}/cpu@sha256:of-cpu", False)
    changed = {"cpu": first.uri, "cpu-notebook": f"{HOST}/cpu-notebook@sha256:of-cpu-notebook"}
    assert push.record([first, second]) == changed
    assert written == {parameter(name): uri for name, uri in changed.items()}
    # The sign-in used the token, which is never printed.
    assert engine.sign_ins == [TOKEN, TOKEN]
    assert "a-token" not in repr(push)
    # An existing tag is kept: nothing is pushed again, and a different local build is reported.
    engine.here[f"trainyard/cpu:{TAG}"] = "sha256:other"
    [again] = push.run([image("cpu")], print)
    assert (again.uri, again.was_there, again.leaves_own) == (first.uri, True, True)
    assert make(engine, recorded={"cpu": first.uri}).record([again]) == {}
    assert push.missing([image("cpu"), image("gaudi")]) == ["gaudi"]


def test_parent_is_pulled_and_emulator_records_stand_ins() -> None:
    engine = Engine()
    engine.there[f"{HOST}/cpu:{TAG}"] = "sha256:of-cpu"
    push = make(engine)
    assert [one.name for one in push.pullable_parents(["cpu-notebook", "gaudi-notebook"])] == ["cpu"]
    push.fetch(image("cpu"))
    assert engine.here[f"trainyard/cpu:{TAG}"] == "sha256:of-cpu"
    assert push.pullable_parents(["cpu-notebook"]) == []
    uri = f"{HOST}/cpu@sha256:of-cpu"
    push = make(engine, recorded={"cpu": "older", "gaudi": uri})
    [pushed] = push.run([image("cpu")], print)
    assert push.record([pushed]) == {"cpu": uri}
    emulated = make(engine, recorded={"cpu": "older", "gaudi": "older"}, emulated=True)
    assert emulated.record([pushed]) == {"cpu": uri, "gaudi": uri}


@pytest.mark.parametrize(
    ("refusal", "exit_code", "next_step"),
    [
        (
            "denied: User: arn:aws:iam::1:user/a is not authorized to perform: ecr:PutImage",
            3,
            "ask the stage's operators",
        ),
        ("denied: Your authorization token has expired. Reauthenticate and try again.", 3, "which signs in again"),
        (
            "name unknown: The repository with name 'x' does not exist in the registry",
            3,
            "which creates the repository",
        ),
        ("dial tcp: lookup registry.example.com: no such host", 1, "check that the engine reaches the registry"),
        ("write /var/lib/docker/tmp/GetImageBlob1: no space left on device", 3, "docker builder prune"),
        (
            "received unexpected HTTP status: 500",
            1,
            "run the same command again; layers that arrived are not sent again",
        ),
    ],
)
def test_refused_push_leaves_no_tag_and_has_a_next_step(refusal: str, exit_code: int, next_step: str) -> None:
    engine = Engine("cpu", refusal=refusal)
    with pytest.raises(TrainyardError) as no:
        make(engine).run([image("cpu")], print)
    assert no.value.exit_code == exit_code
    assert f"'cpu' was not pushed to {HOST}/cpu, and nothing was recorded: {refusal}" in str(no.value)
    assert next_step in str(no.value.next_step)
    assert list(engine.here) == [f"trainyard/cpu:{TAG}"]
    engine.there[f"{HOST}/cpu:{TAG}"] = "sha256:of-cpu"
    with pytest.raises(TrainyardError, match=f"'cpu' was not pulled from {HOST}/cpu"):
        make(engine).fetch(image("cpu"))


def test_unreachable_or_inconsistent_registry_is_reported() -> None:
    with pytest.raises(TrainyardError, match="connection refused") as no:
        make(Engine("cpu", refusal="unreachable")).run([image("cpu")], print)
    assert "check that the engine reaches the registry" in str(no.value.next_step)
    engine = Engine("cpu")
    engine.push = lambda *_, **__: iter([{"aux": {"Digest": "sha256:of-cpu"}}])  # type: ignore[method-assign]
    with pytest.raises(TrainyardError, match="is None in the registry, but sha256:of-cpu was pushed"):
        make(engine).run([image("cpu")], print)


def test_image_on_a_custom_base_is_not_pushed_to_an_account() -> None:
    official = default_base(image("cpu"), release(of="cpu"))
    bases = {"cpu": official, "cpu-notebook": official, "gaudi": "evil/python:3.11", "gaudi-notebook": None}
    engine = Engine(*bases)
    engine.bases = {engine.name(name): base for name, base in bases.items()}
    push = make(engine)
    push.check_bases([image("cpu"), image("cpu-notebook")])
    with pytest.raises(
        UsageError, match=r"'gaudi' is built on evil/python:3.11, but images of this tag are built on vault"
    ) as no:
        push.check_bases([image("cpu"), image("gaudi")])
    assert "--allow-dirty" in str(no.value.next_step)
    with pytest.raises(UsageError, match="'gaudi-notebook' is built on an unknown base"):
        push.check_bases([image("gaudi-notebook")])


def test_uncommitted_sources_are_not_pushed_to_an_account(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=DIRTY) as no:
        check_clean(DIRTY, emulated=False, allow_dirty=False)
    assert "--allow-dirty" in str(no.value.next_step)
    for revision, emulated, allow_dirty in ((DIRTY, False, True), (DIRTY, True, False), ("0123456789ab", False, False)):
        check_clean(revision, emulated=emulated, allow_dirty=allow_dirty)
    # CodeBuild has the sources without git, so nobody can commit there.
    monkeypatch.setenv("TRAINYARD_REVISION", DIRTY)
    with pytest.raises(UsageError, match=DIRTY) as no:
        check_clean(DIRTY, emulated=False, allow_dirty=False)
    assert "deploy the image stack" in str(no.value.next_step)


@pytest.mark.parametrize(
    ("names", "error", "message"),
    [
        (["cpi"], UsageError, "image 'cpi' not found; did you mean 'cpu'?"),
        (["cuda"], ConfigurationError, "stage 'dev' has no repository for image 'cuda'"),
        (
            ["gaudi-notebook"],
            ConfigurationError,
            f"no pool of stage 'dev' uses image 'gaudi-notebook' of release {release().name}",
        ),
    ],
)
def test_images_that_the_stage_does_not_use_are_refused(
    names: list[str], error: type[TrainyardError], message: str
) -> None:
    stage = make(Engine(), recorded={"cpu": "a", "gaudi": "b"}).stage
    with pytest.raises(error, match=message.replace("?", r"\?")):
        stage.chosen(names, emulated=False)
    assert [one.name for one in stage.chosen([], emulated=False)] == ["gaudi"]
    assert [one.name for one in stage.chosen([], emulated=True)] == ["cpu"]
