"""Planning and running a build with a fake engine and a fake docker command."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from docker.errors import ImageNotFound

from jobs.core.errors import ConfigurationError, TrainyardError, UsageError
from jobs.core.git import ROOT
from jobs.core.images import chosen_releases, image, release
from jobs.images import build, engine
from jobs.images.build import Build, parse_build_arguments

REVISION = "0123456789ab"
RELEASE = release(of="cpu").name
DIRTY = f"{REVISION}-dirty-01234567"


class Engine:
    """An engine with images by name, each with its base."""

    def __init__(self, **bases: str) -> None:
        self.bases = {name.replace("_", "-"): base for name, base in bases.items()}
        self.images = self

    def get(self, name: str) -> Any:
        key = name.removeprefix("trainyard/").partition(":")[0]
        if key not in self.bases:
            raise ImageNotFound("no such image")
        return SimpleNamespace(id="sha256:1", labels={"trainyard.base": self.bases[key]}, history=list)


def make(
    client: Engine | None = None, arguments: Mapping[str, str] | None = None, *, revision: str = REVISION
) -> Build:
    """Return a build on `client`, or on an engine without images."""
    there: Any = client or Engine()
    return Build(client=there, releases=chosen_releases(), revision=revision, build_arguments=arguments or {})


@pytest.fixture(autouse=True)
def docker_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A docker command that records its arguments and succeeds."""
    command = tmp_path / "bin" / "docker"
    command.parent.mkdir()
    command.write_text(
        f'#!/bin/sh\necho "$@" $BUILDX_BUILDER >>{tmp_path}/calls\n'
        "echo '      --progress string'\nexit ${CODE:-0}\n"
    )
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{command.parent}:/usr/bin:/bin")
    monkeypatch.setenv("BUILDX_BUILDER", "users-own")
    monkeypatch.setattr(build, "source_revision", lambda: REVISION)
    monkeypatch.setattr(build, "source_commit", lambda: "c0ffee")
    engine.build_command.cache_clear()
    yield tmp_path / "calls"
    engine.build_command.cache_clear()


@pytest.mark.parametrize(
    ("client", "arguments", "planned"),
    [
        (Engine(), {}, ["cpu", "cpu-notebook"]),
        (Engine(cpu="python:3.11"), {}, ["cpu-notebook"]),
        (Engine(cpu="python:3.11"), {"BASE_IMAGE": "python:3.11"}, ["cpu-notebook"]),
        (Engine(cpu="python:3.11"), {"BASE_IMAGE": "mirror/python:3.11"}, ["cpu", "cpu-notebook"]),
    ],
    ids=["missing", "existing", "on the same base", "on another base"],
)
def test_missing_parent_is_built_first(client: Engine, arguments: Mapping[str, str], planned: list[str]) -> None:
    assert [one.name for one in make(client, arguments).plan(["cpu-notebook"])] == planned
    assert [one.name for one in make(client).plan(["cpu"], all_descendants=True)] == ["cpu", "cpu-notebook"]


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("BASE_IMGE=a", "no Dockerfile of cpu has build argument BASE_IMGE; did you mean 'BASE_IMAGE'?"),
        ("PYTORCH=2.0", "PYTORCH is set by the release and the sources"),
        ("REVISION=1", "REVISION is set by the release and the sources"),
        ("TORCH_INDEX=https://me:secret@example.com/", "TORCH_INDEX has a password"),
        ("HTTPS_PROXY=http://me:secret@example.com/", "HTTPS_PROXY has a password"),
        ("TORCH_INDEX", "--build-arg 'TORCH_INDEX' is not NAME=VALUE"),
    ],
)
def test_build_argument_may_set_no_version_and_no_secret(argument: str, message: str) -> None:
    with pytest.raises(UsageError) as refused:
        make(arguments=parse_build_arguments([argument])).plan(["cpu"])
    assert message in str(refused.value)
    assert "secret" not in str(refused.value)


def test_image_without_a_lock_for_the_release_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jobs.images.lock.IMAGES_FOLDER", ROOT / "images" / "nowhere")
    with pytest.raises(ConfigurationError, match=r"cpu has no lock file for release .*: images/nowhere/locks/") as no:
        make().plan(["cpu"])
    assert no.value.next_step == f"trainyard images lock cpu {RELEASE}"


def test_docker_command_gets_frozen_sources_and_default_builder(docker_command: Path) -> None:
    job = make(Engine(cpu="b", cpu_packages="b", cpu_notebook="b"), {"HTTPS_PROXY": "http://proxy"})
    reported: list[str] = []
    [parent, child] = job.run([image("cpu"), image("cpu-notebook")], reported.append)
    assert (parent.id, parent.name) == ("sha256:1", f"trainyard/cpu:{RELEASE}-{REVISION}")
    assert [line.partition(" in ")[0] for line in reported] == [
        *("cpu: build", f"cpu: {parent.name}"),
        *("cpu-notebook: build", f"cpu-notebook: {child.name}"),
    ]
    _, root, packages, notebook = docker_command.read_text().splitlines()
    assert "users-own" not in root + packages + notebook
    for part in ("--platform linux/amd64", "--label trainyard.commit=c0ffee", "--build-arg HTTPS_PROXY=http://proxy"):
        assert part in root
    assert f"--build-arg RELEASE={RELEASE} " in root
    assert f"--build-arg REVISION={REVISION} " in root
    assert "--label trainyard.base=public.ecr.aws/docker/library/python:3.11-slim-bookworm " in root
    assert f"--tag trainyard/cpu-packages:{RELEASE}-{REVISION} --target packages " in packages
    assert "trainyard.base" not in notebook  # inherited from the parent
    for name, value in (("PARENT", "cpu"), ("PARENT_IMAGE", parent.name)):
        assert f"--build-arg {name}={value} " in notebook
    assert f"--build-arg PARENT_PACKAGES=trainyard/cpu-packages:{RELEASE}-{REVISION} " in notebook
    # The sources were copied, and the copy is deleted.
    context = root.split()[-1]
    assert f"--file {context}/images/cpu/Dockerfile " in root
    assert not Path(context).exists()


def test_image_of_uncommitted_sources_has_no_commit_label(
    docker_command: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "source_revision", lambda: DIRTY)
    make(Engine(cpu="b"), revision=DIRTY).run([image("cpu")], print)
    assert "trainyard.commit" not in docker_command.read_text()


def test_sources_that_change_while_being_copied_fail_the_build(docker_command: Path) -> None:
    with pytest.raises(TrainyardError, match=f"the sources changed from {DIRTY} to {REVISION} while they were read"):
        make(revision=DIRTY).run([image("cpu")], print)
    assert not docker_command.exists()


def test_failed_build_and_unsuitable_builder_are_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match="'cpu' was built, but the Docker engine does not have it") as no:
        make().run([image("cpu")], print)
    assert no.value.next_step is not None
    assert "docker buildx use" in no.value.next_step
    engine.build_command()
    monkeypatch.setenv("CODE", "7")
    with pytest.raises(TrainyardError, match=r"'cpu' was not built, and no image was tagged: .* exit code 7") as failed:
        make().run([image("cpu")], print)
    assert "docker builder prune" in str(failed.value.next_step)
