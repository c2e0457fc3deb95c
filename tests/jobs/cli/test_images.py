"""`trainyard images` without a Docker engine. tests/images/test_build.py uses one."""

import gc
import hashlib
import itertools
import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from jobs.aws.connection import Aws
from jobs.cli.app import app
from jobs.core.images import images, release
from jobs.core.stage import (
    DEFAULT_STAGE,
    image_parameter,
    image_repository_parameter,
    parameter_path,
    release_parameter,
)
from tests.jobs.cli.conftest import Trainyard
from tests.support.images.source_tree import SourceTree

pytestmark = pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    """Collect the socket that docker's client leaves open if no engine answers."""
    yield
    gc.collect()


RELEASE = release(of="cpu").name

NO_ENGINE = {"DOCKER_HOST": "unix:///nowhere/docker.sock"}


@pytest.mark.parametrize(
    ("arguments", "exit_code", "message"),
    [
        (["gaudy"], 2, "image 'gaudy' not found; did you mean 'gaudi'?"),
        (["cpu-notebok"], 2, "image 'cpu-notebok' not found; did you mean 'cpu-notebook'?"),
        (["gaudi", "--release", "1.21"], 2, "unknown release '1.21'; did you mean '1.21.0'?"),
        (["gaudi", "--release", "1.5.0"], 3, "release '1.5.0' is no longer available: its image has Python 3.8"),
        (["cpu", "--release", "1.21.0"], 3, "release '1.21.0' is for image 'gaudi', not 'cpu'"),
        (
            ["gaudi-notebook", "--release", "1.24.0"],
            3,
            "release '1.24.0' supports Gaudi 2 and 3; dl1.24xlarge has Gaudi 1",
        ),
        (["cpu", "--build-arg", "TORCH_INDEX"], 2, "--build-arg 'TORCH_INDEX' is not NAME=VALUE"),
        ([], 2, "Missing argument 'IMAGE…'"),
        (["cpu"], 3, "no Docker engine answers at unix:///nowhere/docker.sock"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_an_impossible_build_is_refused(
    trainyard: Trainyard, arguments: list[str], exit_code: int, message: str
) -> None:
    done = trainyard("images", "build", *arguments, environment=NO_ENGINE)
    assert (done.returncode, done.stdout) == (exit_code, "")
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "exit_code", "message"),
    [
        (["cpu-notebok"], 2, "image 'cpu-notebok' not found; did you mean 'cpu-notebook'?"),
        (["gaudi", "--release", "1.5.0"], 3, "release '1.5.0' is no longer available"),
        (
            ["cpu", "--tag", "latest"],
            2,
            f"tag 'latest' does not belong to the release of cpu, cpu-notebook, whose tags are {RELEASE}-<revision>",
        ),
        (["gaudi", "--release", "1.24.0"], 3, "release '1.24.0' supports Gaudi 2 and 3"),
        (["cpu"], 3, "no Docker engine answers at unix:///nowhere/docker.sock"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_an_impossible_test_is_refused(
    trainyard: Trainyard, arguments: list[str], exit_code: int, message: str
) -> None:
    done = trainyard("images", "test", *arguments, environment=NO_ENGINE)
    assert (done.returncode, done.stdout) == (exit_code, "")
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_sbom_and_push_report_that_no_engine_answers(
    trainyard: Trainyard, deployed_environment: Mapping[str, str]
) -> None:
    for arguments in (["sbom", "cpu"], ["push", "cpu"]):
        done = trainyard("images", *arguments, environment={**deployed_environment, **NO_ENGINE})
        assert (done.returncode, done.stdout) == (3, "")
        assert "error: no Docker engine answers at unix:///nowhere/docker.sock\nnext: start it" in done.stderr


def test_the_release_of_the_given_stage_is_used(
    trainyard: Trainyard, deployed_environment: Mapping[str, str], emulated: Aws
) -> None:
    name = f"{parameter_path(DEFAULT_STAGE)}{release_parameter('gaudi')}"
    environment = {**deployed_environment, **NO_ENGINE}
    stage = ("--stage", DEFAULT_STAGE)
    try:
        emulated.ssm.put_parameter(Name=name, Value="1.24.0", Overwrite=True)
        listed = trainyard("images", "list", "-o", "json", environment=environment)
        rows = {row["image"]: row["release"] for row in json.loads(listed.stdout)["images"]}
        assert (rows["gaudi"], rows["cpu"]) == ("1.24.0", RELEASE), listed.stderr
        for command in ("build", "test"):
            done = trainyard(*stage, "images", command, "gaudi", environment=environment)
            assert "release '1.24.0' supports Gaudi 2 and 3; dl1.24xlarge has Gaudi 1" in done.stderr
        emulated.ssm.put_parameter(Name=name, Value="1.5.0", Overwrite=True)
        done = trainyard("images", "sbom", "cpu", environment={**environment, "TRAINYARD_STAGE": DEFAULT_STAGE})
        assert "release '1.5.0' is no longer available" in done.stderr
    finally:
        emulated.ssm.put_parameter(Name=name, Value=release().name, Overwrite=True)


@pytest.mark.parametrize(
    ("host", "message"),
    [
        ("tcp://127.0.0.1:1", "error: no Docker engine answers at tcp://127.0.0.1:1\nnext: start it"),
        ("nonsense", "error: the Docker engine at nonsense cannot be reached: Invalid bind address format"),
        ("tcp://[::1", "error: the Docker engine at tcp://[::1 cannot be reached: Invalid IPv6 URL"),
    ],
)
def test_an_unreachable_engine(trainyard: Trainyard, host: str, message: str) -> None:
    done = trainyard("images", "build", "cpu", environment={"DOCKER_HOST": host})
    assert done.returncode == 3
    assert message in done.stderr


def test_list_reports_a_missing_engine_and_missing_aws(trainyard: Trainyard) -> None:
    done = trainyard("images", "list", environment=NO_ENGINE)
    assert done.returncode == 0
    assert "engine unknown: no Docker engine answers at unix:///nowhere/docker.sock" in done.stderr
    assert "stage unknown: no AWS region is set" in done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    assert rows[0][:4] == ["IMAGE", "RELEASE", "BUILT", "HERE"]
    assert rows[1:] == [[name, release(of=one.root).name, "?", "?"] for name, one in images().items()]


def test_list_reports_an_unknown_revision(tmp_path: Path) -> None:
    tree = SourceTree(tmp_path / "tree")
    for path in tree.root.glob(".git"):
        path.rename(tmp_path / "away")
    environment = {**NO_ENGINE, "GIT_CEILING_DIRECTORIES": str(tmp_path)}
    done = tree.images("list", "--release", "1.24.0", "-o", "json", environment=environment)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["revision"] is None
    assert {row["release"] for row in answer["images"] if row["image"].startswith("gaudi")} == {"1.24.0"}
    assert "not a git repository" in answer["unknown"]["sources"]
    given = tree.images("list", "-o", "json", environment={**environment, "TRAINYARD_REVISION": "0123456789ab"})
    assert json.loads(given.stdout)["revision"] == "0123456789ab"


def _put(emulated: Aws, repository: str, tag: str) -> str:
    """Put an image into ECR and return its digest."""
    digest = f"sha256:{hashlib.sha256(tag.encode()).hexdigest()}"
    layer = {"mediaType": "application/vnd.docker.image.rootfs.diff.tar.gzip", "size": 1, "digest": digest}
    manifest = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.docker.distribution.manifest.v2+json",
        "config": {**layer, "mediaType": "application/vnd.docker.container.image.v1+json"},
        "layers": [layer],
    }
    image = emulated.ecr.put_image(repositoryName=repository, imageManifest=json.dumps(manifest), imageTag=tag)["image"]
    return image["imageId"]["imageDigest"]


def test_list_shows_the_stages_tags_and_the_recorded_one(
    trainyard: Trainyard, deployed_environment: Mapping[str, str], emulated: Aws
) -> None:
    def row(name: str) -> dict[str, Any]:
        done = trainyard("images", "list", "-o", "json", environment={**deployed_environment, **NO_ENGINE})
        assert done.returncode == 0, done.stderr
        answer = json.loads(done.stdout)
        assert set(answer["unknown"]) == {"engine"}
        return next(item for item in answer["images"] if item["image"] == name)

    def shown() -> list[str]:
        table = trainyard("images", "list", environment={**deployed_environment, **NO_ENGINE}).stdout.splitlines()
        first = next(number for number, line in enumerate(table) if line.startswith("gaudi "))
        rest = itertools.takewhile(lambda line: line.startswith(" "), table[first + 1 :])
        return [" ".join(line.split()) for line in (table[first], *rest)]

    path, version = parameter_path(DEFAULT_STAGE), release().name
    parameter = path + image_parameter("gaudi", version)
    before = emulated.ssm.get_parameter(Name=parameter)["Parameter"]["Value"]
    uri = emulated.ssm.get_parameter(Name=path + image_repository_parameter("gaudi"))["Parameter"]["Value"]
    repository = uri.partition("/")[2]
    assert {key: row("gaudi")[key] for key in ("in_stage", "recorded", "is_built", "pushed")} == {
        "in_stage": True,
        "recorded": None,
        "is_built": None,
        "pushed": [],
    }
    assert shown() == [f"gaudi {version} ? no"]
    assert row("cuda")["in_stage"] is False  # an image that no instance type of the stage runs
    # GIVEN images of two releases, of which the oldest is the recorded one
    oldest = f"{version}-000000000000"
    digest = _put(emulated, repository, oldest)
    tags = [oldest, *(f"{version}-{number:012d}" for number in range(1, 8))]
    for tag in (*tags[1:], "1.24.0-000000000000"):
        _put(emulated, repository, tag)
    emulated.ssm.put_parameter(Name=parameter, Value=f"{uri}@{digest}", Overwrite=True)
    try:
        listed = row("gaudi")
        assert listed["recorded"] == f"{uri}@{digest}"
        assert {one["tag"]: one["is_recorded"] for one in listed["pushed"]} == {tag: tag == oldest for tag in tags}
        assert [one["pushed_at"] for one in listed["pushed"]] == sorted(
            (one["pushed_at"] for one in listed["pushed"]), reverse=True
        )
        lines = shown()
        moment = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"
        assert re.fullmatch(rf"gaudi {version} \? {version}-000000000007, {moment}", lines[0])
        assert len(lines) == 7  # five, the recorded one, and the number of others
        assert re.fullmatch(rf"{oldest}, {moment}, recorded", lines[5])
        assert lines[6] == "and 2 older (-o json)"
        # The recorded image may be missing in ECR: an emulator has a separate registry.
        elsewhere = f"{uri}@sha256:{'0123456789abcdef' * 4}"
        emulated.ssm.put_parameter(Name=parameter, Value=elsewhere, Overwrite=True)
        assert shown()[0] == f"gaudi {version} ? sha256:0123456789ab, recorded"
    finally:
        emulated.ssm.put_parameter(Name=parameter, Value=before, Overwrite=True)
        emulated.ecr.batch_delete_image(
            repositoryName=repository, imageIds=[{"imageTag": tag} for tag in (*tags, "1.24.0-000000000000")]
        )


def test_list_reports_a_stage_that_is_not_deployed(
    trainyard: Trainyard, deployed_environment: Mapping[str, str]
) -> None:
    environment = {**deployed_environment, **NO_ENGINE, "TRAINYARD_STAGE": "nowhere"}
    done = trainyard("images", "list", environment=environment)
    assert done.returncode == 0
    assert "stage unknown: stage 'nowhere' has no repositories for images" in done.stderr


def test_the_laptops_sbom_needs_no_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # GIVEN an environment with one package: this one would take syft a minute
    of_a_package = tmp_path / "env/lib/python3.11/site-packages/own_package-1.2.3.dist-info"
    of_a_package.mkdir(parents=True)
    (of_a_package / "METADATA").write_text("Metadata-Version: 2.1\nName: own-package\nVersion: 1.2.3\nLicense: MIT\n")
    (of_a_package / "RECORD").write_text("")
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "env"))
    monkeypatch.setenv("DOCKER_HOST", "tcp://127.0.0.1:1")
    with pytest.raises(SystemExit, match="0"):
        app(["images", "sbom", "laptop", "--folder", str(tmp_path / "documents")])
    [path] = capsys.readouterr().out.splitlines()
    packages = {item["name"]: item.get("versionInfo") for item in json.loads(Path(path).read_text())["packages"]}
    assert packages["own-package"] == "1.2.3"
    assert "trainyard/laptop" in packages
