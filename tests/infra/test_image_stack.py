import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.infra.synthesis import Templates, resources


@pytest.fixture(scope="module")
def repositories(templates: Templates) -> dict[str, dict[str, Any]]:
    return resources(templates["dev/image"], "AWS::ECR::Repository")


def test_there_is_a_repository_for_each_image_that_the_stage_runs(repositories: dict[str, dict[str, Any]]) -> None:
    assert set(repositories) == {"CpuE6EA7902", "GaudiD66E52A4"}
    assert not any("RepositoryName" in repository for repository in repositories.values())


def test_a_stage_without_accelerators_has_one_repository(synthesised: Callable[..., Templates]) -> None:
    image = synthesised(instance_type="m6i.4xlarge")["image"]
    assert set(resources(image, "AWS::ECR::Repository")) == {"CpuE6EA7902"}


def test_tags_cannot_be_moved_and_images_are_scanned(repositories: dict[str, dict[str, Any]]) -> None:
    for repository in repositories.values():
        assert repository["ImageTagMutability"] == "IMMUTABLE"
        assert repository["ImageScanningConfiguration"] == {"ScanOnPush": True}


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


def test_whoever_pushes_an_image_finds_where(templates: Templates) -> None:
    published = {item["Name"] for item in resources(templates["dev/image"], "AWS::SSM::Parameter").values()}
    assert published == {"/trainyard/dev/image-repository/cpu", "/trainyard/dev/image-repository/gaudi"}
