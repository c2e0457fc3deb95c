"""`trainyard images push` to an embedded AWS whose ECR is a real registry, from a copy of the source."""

import base64
import io
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from infra.image.image_build import PROGRAM
from jobs.aws.connection import Aws
from jobs.contract import image_hierarchy as hierarchy
from jobs.contract.errors import UsageError
from jobs.contract.releases import release
from jobs.contract.revision import REVISION_VARIABLE
from jobs.contract.stage import image_parameter, image_repository_parameter
from jobs.images.bases import default_base
from jobs.images.push import Push, Registry, check_clean
from jobs.images.stage_images import StageImages
from tests.support.embedded_aws import EmbeddedAws, run_embedded_aws
from tests.support.images.registry import FrontDoor, Refusal, front_door, running_registry
from tests.support.images.source_tree import ROOT, SourceTree, rows_of

pytestmark = [pytest.mark.docker, pytest.mark.timeout(900)]

RELEASE = release().name
TOKEN = "123456789012-auth-token"  # what moto's ECR gives everybody
IMAGES = ("cpu", "cpu-notebook", "gaudi", "gaudi-notebook")


@dataclass(frozen=True)
class Stage:
    """A stage as its image stack leaves it: repositories, and parameters that name them."""

    aws: EmbeddedAws
    name: str = "dev"

    def deploy(self) -> "Stage":
        ecr, ssm = self.aws.client("ecr"), self.aws.client("ssm")
        values = {"release": RELEASE, "images": "gaudi"}
        for image in IMAGES:
            uri = ecr.create_repository(repositoryName=f"{self.name}-{image}")["repository"]["repositoryUri"]
            values[image_repository_parameter(image)] = uri
            values[image_parameter(image, RELEASE)] = f"{uri}:not-built-yet"
        for name, value in values.items():
            ssm.put_parameter(Name=f"/trainyard/{self.name}/{name}", Value=value, Type="String")
        return self

    def parameter(self, name: str) -> str:
        found = self.aws.client("ssm").get_parameter(Name=f"/trainyard/{self.name}/{name}")["Parameter"]["Value"]
        assert isinstance(found, str)
        return found

    def recorded(self) -> dict[str, str]:
        """Return what was recorded of each image, and nothing of what was not built yet."""
        uris = {image: self.parameter(image_parameter(image, RELEASE)) for image in IMAGES}
        return {image: uri for image, uri in uris.items() if not uri.endswith(":not-built-yet")}

    def repository(self, image: str) -> str:
        return self.parameter(image_repository_parameter(image))


@dataclass(frozen=True)
class Bench:
    """All that a push takes: a stage, a registry behind its front door, sources and an engine."""

    stage: Stage
    door: FrontDoor
    tree: SourceTree
    engine: Any
    home: Path

    @property
    def tag(self) -> str:
        return f"{RELEASE}-{self.tree.revision}"

    def name_in_registry(self, image: str) -> str:
        return self.stage.repository(image).partition("/")[2]

    def have(self, image: str, content: str, labels: Mapping[str, str] | None = None) -> None:
        """Put an image of one small file into the engine, as if it had been built from the tree."""
        archive = io.BytesIO()
        with tarfile.open(fileobj=archive, mode="w") as tar:
            member = tarfile.TarInfo("content")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content.encode()))
        changes = [f"LABEL {name}={value}" for name, value in (labels or {}).items()]
        self.engine.api.import_image_from_data(
            archive.getvalue(), repository=f"trainyard/{image}", tag=self.tag, changes=changes
        )

    def push(self, *arguments: str, stage: Stage | None = None) -> subprocess.CompletedProcess[str]:
        stage = stage or self.stage
        environment = {**stage.aws.environment, "HOME": str(self.home), "TRAINYARD_STAGE": stage.name}
        return self.tree.images("push", *arguments, environment=environment)

    def names_of_others(self) -> set[str]:
        """Return the engine's names of the tree's revision, besides those of the images that were built."""
        names = {name for image in self.engine.images.list() for name in image.tags}
        return {name for name in names if self.tag in name and not name.startswith("trainyard/")}


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontDoor]:
    with running_registry(tmp_path_factory.mktemp("registry")) as registry, front_door(registry) as door:
        yield door


@pytest.fixture(scope="module")
def with_registry(door: FrontDoor, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedAws]:
    with run_embedded_aws(tmp_path_factory.mktemp("aws"), "--registry", door.address) as aws:
        yield aws


@pytest.fixture
def bench(
    door: FrontDoor, with_registry: EmbeddedAws, docker_engine: Any, tree: SourceTree, tmp_path: Path
) -> Iterator[Bench]:
    home = tmp_path / "home"
    home.mkdir()
    name = "t" + re.sub(r"\W", "", tmp_path.name)[-12:].lower()
    yield Bench(Stage(with_registry, name).deploy(), door, tree, docker_engine, home)
    door.refuses = lambda method, path: None


def test_what_the_registry_has_is_recorded_by_its_digest_and_pushed_once(bench: Bench) -> None:
    bench.have("cpu", "first")
    [first] = rows_of(bench.push("cpu", "-o", "json"))
    digest = bench.door.registry.digest(bench.name_in_registry("cpu"), bench.tag)
    assert first["uri"] == f"{bench.stage.repository('cpu')}@{digest}"
    assert (first["tag"], first["was_there"]) == (bench.tag, False)
    # The embedded AWS runs on a machine without HPUs.
    assert bench.stage.recorded() == {"cpu": first["uri"], "gaudi": first["uri"]}

    # Again: nothing is sent, nothing changes.
    bench.door.asked.clear()
    [second] = rows_of(bench.push("cpu", "-o", "json"))
    assert (second["was_there"], second["uri"], second["recorded"]) == (True, first["uri"], [])
    assert not [path for method, path in bench.door.asked if method in {"PUT", "PATCH", "POST"}]

    # On a machine that has no such image: what is there is taken, and nothing is built.
    for name in (f"trainyard/cpu:{bench.tag}", f"{bench.door.address}/{bench.name_in_registry('cpu')}:{bench.tag}"):
        bench.engine.images.remove(name, force=True)
    bench.stage.aws.client("ssm").put_parameter(
        Name=f"/trainyard/{bench.stage.name}/{image_parameter('cpu', RELEASE)}", Value="older", Overwrite=True
    )
    [third] = rows_of(bench.push("cpu", "-o", "json"))
    assert (third["was_there"], third["uri"], third["recorded"]) == (True, first["uri"], ["cpu"])


def test_a_push_says_what_it_does_and_what_rolls_it_out(bench: Bench) -> None:
    bench.have("cpu", "told")
    done = bench.push()  # of the stage's images, their twins on CPUs
    assert done.returncode == 0, done.stderr
    uri = bench.stage.recorded()["gaudi"]
    assert done.stdout == f"{uri}\n"
    assert f"cpu: push to {bench.door.address}/" in done.stderr
    assert "the embedded AWS has no accelerator: cpu is gaudi there too" in done.stderr
    assert done.stderr.endswith(
        f"next: trainyard --stage {bench.stage.name} local up, which has jobs run in what was pushed\n"
    )


def test_what_another_machine_pushed_is_taken_and_said(bench: Bench) -> None:
    bench.have("cpu", "of one machine")
    [first] = rows_of(bench.push("cpu", "-o", "json"))
    # GIVEN another machine, on which the same sources were built too
    bench.engine.images.remove(f"{bench.door.address}/{bench.name_in_registry('cpu')}:{bench.tag}")
    bench.have("cpu", "of another machine")
    bench.door.asked.clear()
    done = bench.push("cpu", "-o", "json")
    # THEN a tag stays the image that it was
    [second] = rows_of(done)
    assert (second["uri"], second["was_there"]) == (first["uri"], True)
    assert f"note: cpu:{bench.tag} was pushed before, and is taken; what was built here is not sent" in done.stderr
    assert not [path for method, path in bench.door.asked if method in {"PUT", "PATCH", "POST"}]
    # AND nothing is said where this machine has that one
    found = bench.engine.images.pull(
        f"{bench.door.address}/{bench.name_in_registry('cpu')}",
        tag=bench.tag,
        auth_config={"username": "AWS", "password": TOKEN},
    )
    found.tag("trainyard/cpu", bench.tag)
    assert "note:" not in bench.push("cpu").stderr


def test_a_child_is_built_on_the_parent_that_was_pushed(bench: Bench) -> None:
    # GIVEN a parent in the registry only
    bench.tree.write("images/notebook/Dockerfile", "ARG PARENT_IMAGE\nFROM ${PARENT_IMAGE}\nLABEL is=child\n")
    bench.tree.commit()
    bench.have("cpu", "pushed by somebody")
    [parent] = rows_of(bench.push("cpu", "-o", "json"))
    layers = bench.engine.images.get(f"trainyard/cpu:{bench.tag}").attrs["RootFS"]["Layers"]
    for name in (f"trainyard/cpu:{bench.tag}", f"{bench.door.address}/{bench.name_in_registry('cpu')}:{bench.tag}"):
        bench.engine.images.remove(name, force=True)
    # WHEN its child is built and pushed
    done = bench.push("cpu-notebook", "-o", "json")
    [child] = rows_of(done)
    # THEN it is built on what was there
    assert "cpu: pull what was pushed already, to build on it" in done.stderr
    assert child["image"] == "cpu-notebook"
    local = bench.engine.images.get(f"trainyard/cpu-notebook:{bench.tag}")
    assert local.labels["is"] == "child"
    assert local.attrs["RootFS"]["Layers"] == layers
    assert bench.stage.recorded()["cpu"] == parent["uri"]


def test_build_arguments_where_nothing_is_built_are_not_passed_over(bench: Bench) -> None:
    bench.have("cpu", "built before")
    said = bench.push("cpu", "--build-arg", "TORCH_INDEX=http://localhost:1/").stderr
    assert "note: nothing was to be built, so --build-arg TORCH_INDEX changed nothing" in said
    done = bench.push("cpu", "--build-arg", "BASE_IMAGE=localhost:1/python:3.11")
    assert done.returncode == 2
    assert f"trainyard/cpu:{bench.tag} is there already, built on a base that no label tells" in done.stderr
    assert "next: leave it out, or build anew: trainyard images build cpu --all-descendants" in done.stderr


def test_an_account_gets_no_image_on_a_base_of_ones_own(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    account = Aws(region="us-east-1")
    assert not account.embedded
    uris = {name: f"123456789012.dkr.ecr.us-east-1.amazonaws.com/{bench.name_in_registry(name)}" for name in IMAGES}
    stage = StageImages(stage="dev", release=RELEASE, repositories=uris, recorded={}, default=())
    registry = Registry(host=bench.door.address, credentials={"username": "AWS", "password": TOKEN})
    assert TOKEN not in repr(registry)
    push = Push(client=bench.engine, aws=account, stage=stage, registry=registry, tag=bench.tag)
    official = default_base(hierarchy.image("cpu"), release())
    for base, name in (
        (official, "cpu"),
        (official, "cpu-notebook"),
        ("evil/python:3.11", "gaudi"),
        (None, "gaudi-notebook"),
    ):
        bench.have(name, f"{base}", labels={} if base is None else {"trainyard.base": base})
    push.check_bases([hierarchy.image("cpu"), hierarchy.image("cpu-notebook")])
    with pytest.raises(
        UsageError, match=r"'gaudi' is built on evil/python:3.11, and images of its tag are on vault"
    ) as no:
        push.check_bases([hierarchy.image("cpu"), hierarchy.image("gaudi")])
    assert "--allow-dirty" in str(no.value.next_step)
    with pytest.raises(UsageError, match="'gaudi-notebook' is built on a base that no label tells"):
        push.check_bases([hierarchy.image("gaudi-notebook")])


DENIED = "User: arn:aws:iam::123456789012:user/a is not authorized to perform: ecr:InitiateLayerUpload"
EXPIRED = "Your authorization token has expired. Reauthenticate and try again."
NO_REPOSITORY = "The repository with name 'x' does not exist in the registry with id '123456789012'"


@pytest.mark.parametrize(
    ("refusal", "exit_code", "next_step"),
    [
        (Refusal(403, "DENIED", DENIED), 3, "ask who runs the stage for the right to push there"),
        (Refusal(403, "DENIED", EXPIRED), 3, "the same command again, which signs in anew"),
        (Refusal(404, "NAME_UNKNOWN", NO_REPOSITORY), 3, "trainyard --stage {stage} local up, which makes it"),
    ],
    ids=["no permission", "expired", "no repository"],
)
def test_a_refusal_leaves_no_name_and_no_record(bench: Bench, refusal: Refusal, exit_code: int, next_step: str) -> None:
    # GIVEN two images, of which the registry refuses the second
    bench.have("cpu", f"first of {bench.tag}")
    bench.have("cpu-notebook", f"second of {bench.tag}")
    refused = f"/v2/{bench.name_in_registry('cpu-notebook')}/blobs/"
    bench.door.refuses = lambda method, path: refusal if path.startswith(refused) and method == "POST" else None
    done = bench.push("cpu", "cpu-notebook")
    assert (done.returncode, done.stdout) == (exit_code, ""), done.stderr
    assert "error: 'cpu-notebook' was not pushed to " in done.stderr
    assert "and nothing was recorded" in done.stderr
    assert f"next: {next_step.format(stage=bench.stage.name)}" in done.stderr
    assert "Traceback" not in done.stderr
    # THEN no job definition will name either of them
    assert bench.stage.recorded() == {}
    assert not [name for name in bench.names_of_others() if bench.name_in_registry("cpu-notebook") in name]
    # AND once it may, the same command goes on where that one ended
    bench.door.refuses = lambda method, path: None
    rows = rows_of(bench.push("cpu", "cpu-notebook", "-o", "json"))
    assert [(row["image"], row["was_there"]) for row in rows] == [("cpu", True), ("cpu-notebook", False)]
    assert set(bench.stage.recorded()) == set(IMAGES)


def test_the_sign_in_is_in_no_file(bench: Bench) -> None:
    bench.have("cpu", "signed in")
    assert bench.push("cpu").returncode == 0
    token = base64.b64encode(f"AWS:{TOKEN}".encode()).decode()
    assert bench.door.credentials == {f"Basic {token}"}
    files = [path for path in bench.home.rglob("*") if path.is_file()]
    assert not [path for path in files if TOKEN in path.read_text(errors="replace")]


@pytest.mark.parametrize(
    ("arguments", "exit_code", "said"),
    [
        (["cpi"], 2, "image 'cpi' not found; did you mean 'cpu'?"),
        (["cuda"], 3, "has no repository for image 'cuda'"),
        (["cpu", "--release", "1.23.0"], 3, "runs image 'cpu' of release 1.23.0"),
        (["cpu", "--release", "9"], 2, "release '9' has no row"),
    ],
    ids=["image", "repository", "release of no pool", "release"],
)
def test_what_the_stage_has_no_place_for_is_refused(
    bench: Bench, arguments: list[str], exit_code: int, said: str
) -> None:
    done = bench.push(*arguments)
    assert done.returncode == exit_code
    assert said in done.stderr
    assert bench.stage.recorded() == {}


def test_a_stage_that_is_not_there_is_told_apart(bench: Bench) -> None:
    done = bench.push("cpu", stage=Stage(bench.stage.aws, "nobodys"))
    assert done.returncode == 3
    assert "stage 'nobodys' has no repositories for images" in done.stderr
    assert "next: trainyard --stage nobodys local up" in done.stderr


def test_without_a_registry_the_engine_keeps_the_image_under_its_name_in_ecr(bench: Bench, tmp_path: Path) -> None:
    bench.have("cpu-notebook", "kept here")
    with run_embedded_aws(tmp_path) as aws:
        stage = Stage(aws).deploy()
        [row] = rows_of(bench.push("cpu-notebook", "-o", "json", stage=stage))
        assert row["uri"] == f"{stage.repository('cpu-notebook')}:{bench.tag}"
        assert stage.recorded() == {"cpu-notebook": row["uri"], "gaudi-notebook": row["uri"]}
        assert (
            bench.engine.images.get(row["uri"]).id == bench.engine.images.get(f"trainyard/cpu-notebook:{bench.tag}").id
        )


def test_a_registry_that_does_not_answer_is_named(bench: Bench, tmp_path: Path) -> None:
    bench.have("cpu", "nowhere")
    with run_embedded_aws(tmp_path, "--registry", "127.0.0.1:9") as aws:
        stage = Stage(aws).deploy()
        done = bench.push("cpu", stage=stage)
        assert done.returncode == 1
        assert "was not pushed to 127.0.0.1:9/" in done.stderr
        assert "next: see that the engine reaches the registry" in done.stderr
        assert stage.recorded() == {}
    assert not bench.names_of_others()


def test_a_push_to_an_account_wants_a_clean_tree() -> None:
    dirty = "0123456789ab-dirty-01234567"
    with pytest.raises(UsageError, match=dirty) as caught:
        check_clean(dirty, embedded=False, allow_dirty=False)
    assert caught.value.next_step is not None
    assert "--allow-dirty" in caught.value.next_step
    check_clean(dirty, embedded=False, allow_dirty=True)
    check_clean(dirty, embedded=True, allow_dirty=False)
    check_clean("0123456789ab", embedded=False, allow_dirty=False)


def test_what_was_deployed_dirty_is_refused_with_the_way_to_deploy_it_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    # GIVEN sources without git, as CodeBuild has them, where nobody can commit
    dirty = "0123456789ab-dirty-01234567"
    monkeypatch.setenv("TRAINYARD_REVISION", dirty)
    with pytest.raises(UsageError, match=dirty) as caught:
        check_clean(dirty, embedded=False, allow_dirty=False)
    assert caught.value.next_step is not None
    assert "deploy the image stack" in caught.value.next_step
    # AND what git says of the work tree is another matter
    with pytest.raises(UsageError) as caught:
        check_clean("ba9876543210-dirty-76543210", embedded=False, allow_dirty=False)
    assert "deploy" not in str(caught.value.next_step)
    check_clean(dirty, embedded=False, allow_dirty=True)


def test_codebuild_does_the_same(bench: Bench, tmp_path: Path) -> None:
    # GIVEN the source as CodeBuild gets it: without git, and its revision in a variable
    source = tmp_path / "source"
    shutil.copytree(bench.tree.root, source, ignore=shutil.ignore_patterns(".git"))
    for name in PROGRAM:
        shutil.copy(ROOT / name, source)
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "python3").symlink_to(sys.executable)
    bench.have("cpu", "in CodeBuild")
    # WHEN the project's commands run
    done = subprocess.run(
        ["bash", str(ROOT / "infra" / "image" / "image_build.sh")],
        cwd=source,
        env={
            **bench.stage.aws.environment,
            "HOME": str(bench.home),
            "PATH": f"{programs}:/usr/bin:/bin",
            "ARGUMENTS": f"cpu --release {RELEASE} -o json",
            "TRAINYARD_STAGE": bench.stage.name,
            REVISION_VARIABLE: bench.tree.revision,
        },
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    # THEN they push and record
    [row] = rows_of(done)
    digest = bench.door.registry.digest(bench.name_in_registry("cpu"), bench.tag)
    assert bench.stage.recorded()["cpu"] == row["uri"] == f"{bench.stage.repository('cpu')}@{digest}"
