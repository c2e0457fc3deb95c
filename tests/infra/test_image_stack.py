import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from infra.constructs.image_build import PROGRAM
from infra.settings import Pool
from jobs.catalog import CATALOG
from jobs.images.hierarchy import child_name, with_descendants
from jobs.images.revision import SOURCES
from jobs.releases import release
from jobs.stage import image_parameter, image_repository_parameter
from tests.infra.synthesis import ROOT, Templates, flatten, only, resources


@pytest.fixture(scope="module")
def repositories(templates: Templates) -> dict[str, dict[str, Any]]:
    return resources(templates["dev/image"], "AWS::ECR::Repository")


@pytest.fixture(scope="module")
def project(templates: Templates) -> dict[str, Any]:
    return only(templates["dev/image"], "AWS::CodeBuild::Project")


def published(template: dict[str, Any], stage: str) -> dict[str, str]:
    path = f"/trainyard/{stage}/"
    return {
        item["Name"].removeprefix(path): flatten(item["Value"])
        for item in resources(template, "AWS::SSM::Parameter").values()
    }


def test_there_is_a_repository_for_each_image_that_the_stage_runs_and_for_what_is_built_on_it(
    templates: Templates, repositories: dict[str, dict[str, Any]]
) -> None:
    expected = {one.name for root in ("cpu", "gaudi") for one in with_descendants(root)}
    assert {"cpu", "gaudi", "gaudi-notebook", "gaudi-ray"} <= expected
    names = published(templates["dev/image"], "dev")
    uris = {name.split("/")[1]: uri for name, uri in names.items() if name.startswith("image-repository/")}
    assert set(uris) == expected
    assert len(set(uris.values())) == len(repositories) == len(expected)
    # Data is in none of them, but a logical id that changed would take all images with it.
    assert {"CpuE6EA7902", "GaudiD66E52A4"} <= set(repositories)
    assert not any("RepositoryName" in repository for repository in repositories.values())


def test_a_stage_without_accelerators_has_the_cpu_images_only(synthesised: Callable[..., Templates]) -> None:
    names = published(synthesised(instance_type="m6i.4xlarge")["image"], "test")
    assert {name.split("/")[1] for name in names if name.startswith("image-repository/")} == {
        one.name for one in with_descendants("cpu")
    }


def test_an_image_was_not_built_until_it_is_pushed(templates: Templates) -> None:
    names = published(templates["dev/image"], "dev")
    recorded = {name: uri for name, uri in names.items() if name.startswith("image/")}
    assert image_parameter("gaudi-notebook", release().name) in recorded
    for name, uri in recorded.items():
        _, image, of_release = name.split("/")
        assert of_release == release().name
        assert uri == f"{names[image_repository_parameter(image)]}:not-built-yet"


def test_each_release_that_a_pool_has_can_be_pushed(synthesised: Callable[..., Templates]) -> None:
    names = published(synthesised(retiring=(Pool(instance_type="dl1.24xlarge", release="1.20.0"),))["image"], "test")
    assert {image_parameter("gaudi", "1.20.0"), image_parameter("gaudi", "1.21.0")} <= set(names)
    # What runs on CPU instances has the stage's own release.
    assert image_parameter("cpu", "1.21.0") in names
    assert image_parameter("cpu", "1.20.0") not in names
    assert names["release"] == "1.21.0"


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


def test_whoever_pushes_is_told_which_images_new_jobs_run_in(synthesised: Callable[..., Templates]) -> None:
    retiring = (Pool(instance_type="dl1.24xlarge"),)
    names = published(synthesised(instance_type="p4d.24xlarge", retiring=retiring)["image"], "test")
    of_kinds = {child_name("cuda" if kind.accelerated else "cpu", kind.image) for kind in CATALOG.values()}
    assert set(names["images"].split()) == of_kinds
    assert "image-build/project" in names


def test_a_build_pushes_to_its_stage_what_was_deployed(project: dict[str, Any]) -> None:
    variables = {item["Name"]: item["Value"] for item in project["Environment"]["EnvironmentVariables"]}
    revision = variables.pop("TRAINYARD_REVISION")
    # Nothing is chosen: what the stage's jobs run in, for its release.
    assert variables == {"ARGUMENTS": "", "TRAINYARD_STAGE": "dev"}
    assert re.fullmatch(r"[0-9a-f]{12}(-dirty-[0-9a-f]{8})?", revision)


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
    pushes = {action for action in allowed if action.startswith("ecr:")}
    assert "ecr:PutImage" in pushes
    assert "ecr:DeleteRepository" not in pushes
    for action in pushes:
        assert allowed[action] == [f"<{name}.Arn>" for name in resources(template, "AWS::ECR::Repository")]
    written = {arn.split(":parameter")[1] for arn in allowed["ssm:PutParameter"]}
    assert written == {f"/trainyard/dev/{name}" for name in published(template, "dev") if name.startswith("image/")}
    assert {arn.split(":parameter")[1] for arn in allowed.pop("ssm:GetParameters")} == {
        "/trainyard/dev/images",
        "/trainyard/dev/release",
        "/trainyard/dev/image-repository/*",
        "/trainyard/dev/image/*/*",
    }
    for action, where in allowed.items():
        assert not any("*" in item for item in where), action
    assert {action.split(":")[0] for action in allowed} == {"ecr", "logs", "s3", "ssm"}


def test_the_source_is_what_images_are_built_from_and_what_builds_them(assembly: Path, project: dict[str, Any]) -> None:
    found = re.search(r"/(\w{64})\.zip", json.dumps(project["Source"]["Location"]))
    assert found
    source = assembly / f"asset.{found[1]}"
    assert {path.name for path in source.iterdir()} == {*SOURCES, *PROGRAM}
    assert (source / "images" / "releases.toml").read_bytes() == (ROOT / "images" / "releases.toml").read_bytes()
    assert (source / "jobs" / "train" / "launch.py").is_file()
    assert not [path for path in source.rglob("*") if path.name == "__pycache__" or path.suffix == ".pyc"]


def test_the_commands_of_a_build_are_those_of_its_file(project: dict[str, Any]) -> None:
    # tests/images/test_push.py runs that file.
    (commands,) = json.loads(project["Source"]["BuildSpec"])["phases"]["build"]["commands"]
    assert commands == (ROOT / "infra" / "constructs" / "image_build.sh").read_text()


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
