"""What can be said of the Dockerfiles without a Docker engine: that they agree with the rows and with each other."""

import re
from pathlib import Path

import pytest

from jobs.images.lock import IMAGES
from jobs.images.revision import NOT_SOURCES, SOURCES
from jobs.instance_types import INSTANCE_TYPES
from jobs.releases import release

ROOT = Path(__file__).parents[2]

DOCKERFILES = sorted((ROOT / "images").glob("*/Dockerfile"))


def _arguments(dockerfile: Path) -> dict[str, str]:
    return dict(re.findall(r"^ARG (\w+)=(\S+)$", dockerfile.read_text(), flags=re.MULTILINE))


def test_every_instance_type_has_its_image() -> None:
    assert {row.image for row in INSTANCE_TYPES.values()} <= {path.parent.name for path in DOCKERFILES}


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.parent.name)
def test_without_arguments_it_is_the_default_release(dockerfile: Path) -> None:
    rows = release().build_arguments
    given = {name: value for name, value in _arguments(dockerfile).items() if name in rows and value != "unknown"}
    assert given
    assert given == {name: rows[name] for name in given}


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.parent.name)
def test_an_argument_is_one_that_builds_give(dockerfile: Path) -> None:
    own = {"BASE_IMAGE", "REVISION", "TORCH_INDEX", "PIP_EXTRA_INDEX_URL"}
    assert set(_arguments(dockerfile)) <= own | set(release().build_arguments)


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.parent.name)
def test_editing_code_rebuilds_no_layer_of_packages(dockerfile: Path) -> None:
    text = dockerfile.read_text()
    assert text.index("install-packages") < text.index("COPY jobs ") < text.index("install-jobs")
    # An argument that changes with every commit would do the same, in any RUN that follows it.
    assert "RUN" not in text[text.index("ARG REVISION") :]


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.parent.name)
def test_only_gaudi_runs_as_root(dockerfile: Path) -> None:
    users = re.findall(r"^USER (\S+)$", dockerfile.read_text(), flags=re.MULTILINE)
    assert users == ([] if dockerfile.parent.name == "gaudi" else ["1000:1000"])


def test_docker_sees_what_the_revision_is_taken_of() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert lines[1:] == ["*", *(f"!{name}" for name in SOURCES), *NOT_SOURCES]


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_with_packages_has_its_dockerfile(image: str) -> None:
    assert f"COPY images/{image}/requirements/${{RELEASE}}.txt" in (ROOT / "images" / image / "Dockerfile").read_text()
