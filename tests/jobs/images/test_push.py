"""What a push records, and how a registry's refusals read, on an engine that is none. tests/images has a real one."""

from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from docker.errors import DockerException, ImageNotFound, NotFound

from jobs.core.errors import ConfigurationError, TrainyardError, UsageError
from jobs.core.images import image, release
from jobs.images.bases import default_base
from jobs.images.push import Push, Registry, check_clean
from jobs.images.stage_images import StageImages

HOST = "registry.example.com"
RELEASE = release().name
TAG = f"{RELEASE}-0123456789ab"
TOKEN = {"username": "AWS", "password": "a-token"}
DIRTY = "0123456789ab-dirty-01234567"


class Engine:
    """An engine with images and a registry: each is a name and its digest."""

    def __init__(self, *here: str, refusal: str = "") -> None:
        self.here = {f"trainyard/{name}:{TAG}": f"sha256:of-{name}" for name in here}
        self.there: dict[str, str] = {}
        self.refusal = refusal
        self.bases: dict[str, str | None] = {}
        self.sign_ins: list[Mapping[str, str]] = []
        self.images = self.api = self

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
    """A push to a stage that has repositories of cpu and gaudi. What it records is `written`."""
    written = {} if written is None else written
    ssm = SimpleNamespace(put_parameter=lambda **given: written.update({given["Name"]: given["Value"]}))
    aws: Any = SimpleNamespace(emulated=emulated, ssm=ssm)
    stage = StageImages(
        stage="dev",
        release=RELEASE,
        repositories={name: f"{HOST}/{name}" for name in ("cpu", "cpu-notebook", "gaudi", "gaudi-notebook")},
        recorded=recorded or {},
        default=("gaudi",),
    )
    client: Any = engine
    return Push(client=client, aws=aws, stage=stage, registry=Registry(host=HOST, credentials=TOKEN), tag=TAG)


def parameter(name: str) -> str:
    return f"/trainyard/dev/image/{name}/{RELEASE}"


def test_what_was_pushed_is_recorded_by_the_digest_that_the_registry_has() -> None:
    written: dict[str, str] = {}
    push = make(engine := Engine("cpu", "cpu-notebook"), recorded={"cpu": "older"}, written=written)
    assert push.missing([image("cpu"), image("gaudi")]) == ["cpu", "gaudi"]  # in the registry
    first, second = push.run([image("cpu"), image("cpu-notebook")], print)
    assert (first.uri, first.was_there) == (f"{HOST}/cpu@sha256:of-cpu", False)
    changed = {"cpu": first.uri, "cpu-notebook": f"{HOST}/cpu-notebook@sha256:of-cpu-notebook"}
    assert push.record([first, second]) == changed
    assert written == {parameter(name): uri for name, uri in changed.items()}
    # Signed in by the token, which nothing prints.
    assert engine.sign_ins == [TOKEN, TOKEN]
    assert "a-token" not in repr(push)
    # What is there is taken as it is: nothing is sent again, and another build of the tag is named.
    engine.here[f"trainyard/cpu:{TAG}"] = "sha256:other"
    [again] = push.run([image("cpu")], print)
    assert (again.uri, again.was_there, again.leaves_own) == (first.uri, True, True)
    assert make(engine, recorded={"cpu": first.uri}).record([again]) == {}
    assert push.missing([image("cpu"), image("gaudi")]) == ["gaudi"]


def test_a_parent_is_fetched_and_the_emulator_has_stand_ins() -> None:
    engine = Engine()
    engine.there[f"{HOST}/cpu:{TAG}"] = "sha256:of-cpu"
    push = make(engine)
    assert [one.name for one in push.parents_there(["cpu-notebook", "gaudi-notebook"])] == ["cpu"]
    push.fetch(image("cpu"))
    assert engine.here[f"trainyard/cpu:{TAG}"] == "sha256:of-cpu"
    assert push.parents_there(["cpu-notebook"]) == []
    uri = f"{HOST}/cpu@sha256:of-cpu"
    push = make(engine, recorded={"cpu": "older", "gaudi": uri})
    [pushed] = push.run([image("cpu")], print)
    assert push.record([pushed]) == {"cpu": uri}
    emulated = make(engine, recorded={"cpu": "older", "gaudi": "older"}, emulated=True)
    assert emulated.record([pushed]) == {"cpu": uri, "gaudi": uri}


@pytest.mark.parametrize(
    ("refusal", "exit_code", "next_step"),
    [
        ("denied: User: arn:aws:iam::1:user/a is not authorized to perform: ecr:PutImage", 3, "ask who runs the stage"),
        ("denied: Your authorization token has expired. Reauthenticate and try again.", 3, "which signs in anew"),
        ("name unknown: The repository with name 'x' does not exist in the registry", 3, "which makes it"),
        ("dial tcp: lookup registry.example.com: no such host", 1, "see that the engine reaches the registry"),
        ("write /var/lib/docker/tmp/GetImageBlob1: no space left on device", 3, "docker builder prune"),
        ("received unexpected HTTP status: 500", 1, "the same command again; what has arrived is not sent twice"),
    ],
)
def test_a_refusal_leaves_no_name_and_says_what_to_do(refusal: str, exit_code: int, next_step: str) -> None:
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


def test_a_registry_that_does_not_answer_or_has_another_image_is_named() -> None:
    with pytest.raises(TrainyardError, match="connection refused") as no:
        make(Engine("cpu", refusal="unreachable")).run([image("cpu")], print)
    assert "see that the engine reaches the registry" in str(no.value.next_step)
    engine = Engine("cpu")
    engine.push = lambda *_, **__: iter([{"aux": {"Digest": "sha256:of-cpu"}}])  # type: ignore[method-assign]
    with pytest.raises(TrainyardError, match="is None in the registry, and sha256:of-cpu was pushed"):
        make(engine).run([image("cpu")], print)


def test_an_account_gets_no_image_on_a_custom_base() -> None:
    official = default_base(image("cpu"), release())
    bases = {"cpu": official, "cpu-notebook": official, "gaudi": "evil/python:3.11", "gaudi-notebook": None}
    engine = Engine(*bases)
    engine.bases = {f"trainyard/{name}:{TAG}": base for name, base in bases.items()}
    push = make(engine)
    push.check_bases([image("cpu"), image("cpu-notebook")])
    with pytest.raises(
        UsageError, match=r"'gaudi' is built on evil/python:3.11, and images of its tag are on vault"
    ) as no:
        push.check_bases([image("cpu"), image("gaudi")])
    assert "--allow-dirty" in str(no.value.next_step)
    with pytest.raises(UsageError, match="'gaudi-notebook' is built on a base that no label tells"):
        push.check_bases([image("gaudi-notebook")])


def test_an_account_gets_no_image_of_sources_that_nobody_else_has(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=DIRTY) as no:
        check_clean(DIRTY, emulated=False, allow_dirty=False)
    assert "--allow-dirty" in str(no.value.next_step)
    for revision, emulated, allow_dirty in ((DIRTY, False, True), (DIRTY, True, False), ("0123456789ab", False, False)):
        check_clean(revision, emulated=emulated, allow_dirty=allow_dirty)
    # CodeBuild has sources without git, where nobody can commit.
    monkeypatch.setenv("TRAINYARD_REVISION", DIRTY)
    with pytest.raises(UsageError, match=DIRTY) as no:
        check_clean(DIRTY, emulated=False, allow_dirty=False)
    assert "deploy the image stack" in str(no.value.next_step)


@pytest.mark.parametrize(
    ("names", "error", "said"),
    [
        (["cpi"], UsageError, "image 'cpi' not found; did you mean 'cpu'?"),
        (["cuda"], ConfigurationError, "stage 'dev' has no repository for image 'cuda'"),
        (
            ["gaudi-notebook"],
            ConfigurationError,
            f"no pool of stage 'dev' runs image 'gaudi-notebook' of release {RELEASE}",
        ),
    ],
)
def test_what_the_stage_has_no_place_for_is_refused(names: list[str], error: type[TrainyardError], said: str) -> None:
    stage = make(Engine(), recorded={"cpu": "a", "gaudi": "b"}).stage
    with pytest.raises(error, match=said.replace("?", r"\?")):
        stage.chosen(names, emulated=False)
    assert [one.name for one in stage.chosen([], emulated=False)] == ["gaudi"]
    assert [one.name for one in stage.chosen([], emulated=True)] == ["cpu"]
