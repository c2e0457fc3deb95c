import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from infra.constructs.image_build import SOURCES
from infra.settings import Pool
from jobs.releases import release
from tests.infra.synthesis import ROOT, Templates, flatten, only, resources


@pytest.fixture(scope="module")
def repositories(templates: Templates) -> dict[str, dict[str, Any]]:
    return resources(templates["dev/image"], "AWS::ECR::Repository")


@pytest.fixture(scope="module")
def project(templates: Templates) -> dict[str, Any]:
    return only(templates["dev/image"], "AWS::CodeBuild::Project")


def test_there_is_a_repository_for_each_image_that_the_stage_runs(repositories: dict[str, dict[str, Any]]) -> None:
    assert set(repositories) == {"CpuE6EA7902", "GaudiD66E52A4"}
    assert not any("RepositoryName" in repository for repository in repositories.values())


def test_a_stage_without_accelerators_has_one_repository(synthesised: Callable[..., Templates]) -> None:
    image = synthesised(instance_type="m6i.4xlarge")["image"]
    assert set(resources(image, "AWS::ECR::Repository")) == {"CpuE6EA7902"}


def test_images_of_a_retiring_pool_stay(synthesised: Callable[..., Templates]) -> None:
    image = synthesised(instance_type="p4d.24xlarge", retiring=(Pool(instance_type="dl1.24xlarge"),))["image"]
    published = {item["Name"] for item in resources(image, "AWS::SSM::Parameter").values()}
    assert {f"/trainyard/test/image-repository/{name}" for name in ("cpu", "cuda", "gaudi")} <= published


def test_tags_cannot_be_moved_and_images_are_scanned(repositories: dict[str, dict[str, Any]]) -> None:
    for repository in repositories.values():
        assert repository["ImageTagMutability"] == "IMMUTABLE"
        assert repository["ImageScanningConfiguration"] == {"ScanOnPush": True}


def test_repositories_are_encrypted_with_the_stages_own_key_where_it_has_one(
    synthesised: Callable[..., Templates], repositories: dict[str, dict[str, Any]]
) -> None:
    image = synthesised(own_kms_key=True)["image"]
    for repository in resources(image, "AWS::ECR::Repository").values():
        assert repository["EncryptionConfiguration"]["EncryptionType"] == "KMS"
        key = image["Parameters"][repository["EncryptionConfiguration"]["KmsKey"]["Ref"]]
        assert key["Default"] == "/trainyard/test/kms-key"
    assert "EncryptionKey" in only(image, "AWS::CodeBuild::Project")
    # AWS's own encryption is what ECR does by itself.
    assert not any("EncryptionConfiguration" in repository for repository in repositories.values())


def test_images_can_be_built_again_so_they_go_with_the_stack(templates: Templates) -> None:
    for resource in templates["dev/image"]["Resources"].values():
        if resource["Type"] == "AWS::ECR::Repository":
            assert resource["DeletionPolicy"] == "Delete"
            assert resource["Properties"]["EmptyOnDelete"] is True


def test_old_images_expire(repositories: dict[str, dict[str, Any]]) -> None:
    for repository in repositories.values():
        rules = json.loads(repository["LifecyclePolicy"]["LifecyclePolicyText"])["rules"]
        kept = {rule["selection"]["tagStatus"]: rule["selection"] for rule in rules}
        assert kept["untagged"]["countType"] == "sinceImagePushed"
        assert (kept["any"]["countType"], kept["any"]["countNumber"]) == ("imageCountMoreThan", 50)


def test_whoever_builds_or_pushes_an_image_finds_where(templates: Templates) -> None:
    published = {item["Name"] for item in resources(templates["dev/image"], "AWS::SSM::Parameter").values()}
    assert published == {
        "/trainyard/dev/image-repository/cpu",
        "/trainyard/dev/image-repository/gaudi",
        "/trainyard/dev/image-build/project",
    }


def test_a_build_is_given_the_stages_release_and_its_repositories(project: dict[str, Any]) -> None:
    variables = {item["Name"]: flatten(item["Value"]) for item in project["Environment"]["EnvironmentVariables"]}
    assert (variables["IMAGE"], variables["RELEASE"], variables["IMAGE_TAG"]) == ("gaudi", release().name, "")
    assert variables["DIGEST_PARAMETERS"] == "/trainyard/dev/image-digest/"
    pairs = dict(pair.split("=") for pair in variables["REPOSITORIES"].split(" "))
    assert set(pairs) == {"cpu", "gaudi"}
    assert all(re.fullmatch(r".+\.dkr\.ecr\..+/<\w+>", uri) for uri in pairs.values())


def test_a_project_fits_an_account_that_is_new(project: dict[str, Any]) -> None:
    # Trap: a new account may run one build at a time, and CodeBuild refuses a project that may run more than that.
    assert "ConcurrentBuildLimit" not in project


def test_a_build_may_do_what_it_needs_and_nothing_else(templates: Templates) -> None:
    template = templates["dev/image"]
    (statements,) = [item["PolicyDocument"]["Statement"] for item in resources(template, "AWS::IAM::Policy").values()]
    allowed = {
        action: [flatten(item) for item in _list(statement["Resource"])]
        for statement in statements
        for action in _list(statement["Action"])
    }
    assert allowed.pop("ecr:GetAuthorizationToken") == ["*"]
    for action, where in allowed.items():
        assert not any("*" in item for item in where), action
    pushes = {action for action in allowed if action.startswith("ecr:")}
    assert "ecr:PutImage" in pushes
    assert "ecr:DeleteRepository" not in pushes
    for action in pushes:
        assert allowed[action] == [f"<{name}.Arn>" for name in resources(template, "AWS::ECR::Repository")]
    assert [arn.split(":parameter")[1] for arn in allowed["ssm:PutParameter"]] == [
        "/trainyard/dev/image-digest/cpu",
        "/trainyard/dev/image-digest/gaudi",
    ]
    assert {action.split(":")[0] for action in allowed} == {"ecr", "logs", "s3", "ssm"}


def test_the_source_is_what_images_are_built_from_and_nothing_else(assembly: Path, project: dict[str, Any]) -> None:
    revision = next(
        item["Value"] for item in project["Environment"]["EnvironmentVariables"] if item["Name"] == "SOURCE_REVISION"
    )
    assert f"/{revision}.zip" in json.dumps(project["Source"]["Location"])
    source = assembly / f"asset.{revision}"
    assert {path.name for path in source.iterdir()} == set(SOURCES)
    assert (source / "images" / "releases.toml").read_bytes() == (ROOT / "images" / "releases.toml").read_bytes()
    assert (source / "jobs" / "train" / "launch.py").is_file()
    assert not [path for path in source.rglob("*") if path.name == "__pycache__" or path.suffix == ".pyc"]


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


# The build's own commands, run for real, against a docker and an aws that note what they are asked.

GAUDI = "123456789012.dkr.ecr.us-east-1.amazonaws.com/repository-of-gaudi"
DIGEST = f"sha256:{'ab' * 32}"

DOCKER = f"""#!/bin/bash
printf 'docker %s\\n' "$*" >>"$CALLS"
case "$1 $2" in
  "login "*) cat >>"$CALLS.password" ;;
  "image inspect") printf 'elsewhere.example/x@sha256:00\\n{GAUDI}@{DIGEST}\\n\\n' ;;
  "build "*) exit "${{BUILD_EXIT_CODE:-0}}" ;;
esac
"""

AWS = """#!/bin/bash
printf 'aws %s\\n' "$*" >>"$CALLS"
case "$2" in
  batch-get-image) echo "${TAKEN:-}" ;;
  get-login-password) printf 'the-password' ;;
  put-parameter) echo '{"Version": 1}' ;;
esac
"""

Build = Callable[..., tuple[int, str, str, list[str]]]


@pytest.fixture
def build(tmp_path: Path, project: dict[str, Any]) -> Build:
    """Runs the build specification's commands in a source; gives exit code, output, errors and the calls."""
    (commands,) = json.loads(project["Source"]["BuildSpec"])["phases"]["build"]["commands"]
    source, programs, calls = tmp_path / "source", tmp_path / "bin", tmp_path / "calls"
    shutil.copytree(ROOT / "jobs", source / "jobs")
    (source / "images" / "gaudi").mkdir(parents=True)
    shutil.copy(ROOT / "images" / "releases.toml", source / "images")
    programs.mkdir()
    for name, text in (("docker", DOCKER), ("aws", AWS)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    (programs / "python3").symlink_to(sys.executable)
    (source / "images" / "gaudi" / "Dockerfile").write_text("ARG HABANA_IMAGE\nFROM ${HABANA_IMAGE}\n")

    def run(**variables: str) -> tuple[int, str, str, list[str]]:
        done = subprocess.run(
            ["bash", "-c", commands],
            cwd=source,
            env={
                "PATH": f"{programs}:/usr/bin:/bin",
                "CALLS": str(calls),
                "IMAGE": "gaudi",
                "RELEASE": "1.21.0",
                "IMAGE_TAG": "",
                "REPOSITORIES": f"cpu=elsewhere/cpu gaudi={GAUDI}",
                "DIGEST_PARAMETERS": "/trainyard/dev/image-digest/",
                "SOURCE_REVISION": "0123abcd",
                **variables,
            },
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        return done.returncode, done.stdout, done.stderr, calls.read_text().splitlines() if calls.exists() else []

    return run


def test_a_build_takes_everything_from_the_releases_row_and_notes_the_digest(build: Build, tmp_path: Path) -> None:
    code, output, errors, calls = build(RELEASE="1.20.0")
    assert code == 0, errors
    (built,) = [call for call in calls if call.startswith("docker build ")]
    row = release("1.20.0")
    for argument in (f"HABANA_IMAGE={row.base_image}", "RELEASE=1.20.0", "OPTIMUM_HABANA=1.17.0", "REVISION=0123abcd"):
        assert f"--build-arg {argument}" in built
    assert f"--file images/gaudi/Dockerfile --tag {GAUDI}:1.20.0 " in built
    assert built.endswith(" .")  # the context is the root of the source
    registry = GAUDI.split("/", maxsplit=1)[0]
    assert f"docker login --username AWS --password-stdin {registry}" in calls
    assert (tmp_path / "calls.password").read_text() == "the-password"
    assert calls.index(built) < calls.index(f"docker push --quiet {GAUDI}:1.20.0")
    assert calls[-1] == (
        "aws ssm put-parameter --name /trainyard/dev/image-digest/gaudi --type String --overwrite "
        f"--value {GAUDI}@{DIGEST}"
    )
    assert output.endswith(f"pushed {GAUDI}@{DIGEST}\n")
    assert "the-password" not in output + errors + "".join(calls)


def test_a_tag_of_the_users_own_and_the_default_release(build: Build) -> None:
    code, _, errors, calls = build(IMAGE_TAG="1.21.0-fix1", RELEASE="")
    assert code == 0, errors
    assert f"docker push --quiet {GAUDI}:1.21.0-fix1" in calls
    assert any(f"HABANA_IMAGE={release().base_image}" in call for call in calls)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RELEASE": "1.21"}, "release '1.21' has no row; did you mean '1.21.0'?"),
        ({"IMAGE": "ray"}, "the stage has no repository for an image 'ray'\nNext: name one that it has, as IMAGE: cpu"),
        ({"IMAGE": "cpu"}, "the source has no images/cpu/Dockerfile\nNext: add it to the repository"),
        ({"TAKEN": DIGEST}, f"{GAUDI} has a tag 1.21.0 already ({DIGEST}), and tags cannot be moved"),
    ],
    ids=["release", "repository", "dockerfile", "tag"],
)
def test_what_cannot_be_built_ends_before_anything_is_built(
    build: Build, variables: dict[str, str], message: str
) -> None:
    code, _, errors, calls = build(**variables)
    assert code != 0
    assert message in errors
    assert "Traceback" not in errors
    assert not [call for call in calls if call.startswith("docker")]


def test_a_build_that_fails_pushes_nothing(build: Build) -> None:
    code, _, _, calls = build(BUILD_EXIT_CODE="17")
    assert code == 17
    assert not [call for call in calls if "push" in call or "put-parameter" in call]
