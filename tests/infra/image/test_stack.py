import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aws_cdk as cdk
import pytest

from infra.app import build
from infra.image.image_build import PROGRAM, _revision
from infra.stages import Pool, Stage, Team
from jobs.contract.catalog import CATALOG
from jobs.contract.errors import ConfigurationError
from jobs.contract.image_hierarchy import child_name, images, with_descendants
from jobs.contract.releases import release
from jobs.contract.revision import SOURCES
from jobs.contract.stage import IMAGES, RELEASE, image_parameter, image_repository_parameter
from tests.support.infra.calls import permissions_of
from tests.support.infra.deployed_roles import ACCOUNT, REGION, DeployedStage
from tests.support.infra.synthesis import ROOT, Templates, flatten, new_app, only, read_assembly, resources

PUSHES = [
    ROOT / "jobs/cli/images/push.py",
    *(path for path in (ROOT / "jobs/images").rglob("*.py") if path.name != "inventory.py"),
]
"""What runs as images are pushed; `jobs.images.inventory` is what people list them with."""


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
    assert {"cpu", "gaudi", "gaudi-notebook"} <= expected
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
    names = published(synthesised(retiring=(Pool(instance_type="p4d.24xlarge", release="1.23.0"),))["image"], "test")
    assert {image_parameter("cuda", "1.23.0"), image_parameter("gaudi", release().name)} <= set(names)
    # What runs on CPU instances has the stage's own release.
    assert image_parameter("cpu", release().name) in names
    assert image_parameter("cpu", "1.23.0") not in names
    assert names["release"] == release().name


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


REGISTRY_ACTIONS = {
    "ecr:BatchCheckLayerAvailability",
    "ecr:BatchGetImage",
    "ecr:CompleteLayerUpload",
    "ecr:GetDownloadUrlForLayer",
    "ecr:InitiateLayerUpload",
    "ecr:PutImage",
    "ecr:UploadLayerPart",
}
"""What an engine asks of a repository that it pushes to and pulls parents from, by ECR's user guide."""


@pytest.mark.parametrize("own_kms_key", [False, True])
def test_every_call_of_a_push_is_allowed_to_codebuild(synthesised: Callable[..., Templates], own_kms_key: bool) -> None:
    # GIVEN what each permission is needed for
    template = synthesised(own_kms_key=own_kms_key)
    stage = DeployedStage("test", template)
    role = stage.role("image", "BuildRole")
    parameter = f"arn:aws:ssm:{REGION}:{ACCOUNT}:parameter/trainyard/test"
    names = published(template["image"], "test")
    recorded = [f"{parameter}/{name}" for name in names if name.startswith("image/")]
    read = [f"{parameter}/{name}" for name in names if name.startswith("image-repository/")]
    assert recorded
    assert read
    needed = {
        "ecr:GetAuthorizationToken": ["*"],
        "ssm:GetParameters": [
            *recorded,
            *read,
            # It asks for what the stage may lack, too: SSM refuses the whole call where one name is not allowed.
            *(f"{parameter}/{image_repository_parameter(name)}" for name in images()),
            *(f"{parameter}/{image_parameter(name, '1.0.0')}" for name in images()),
            f"{parameter}/{RELEASE}",
            f"{parameter}/{IMAGES}",
        ],
        "ssm:PutParameter": recorded,
    }
    # WHEN a push makes a call, THEN its permission is among them
    assert permissions_of(PUSHES) == needed.keys()
    # AND the role has it, within its boundary, as it has what the engine asks the repositories
    for logical_id in resources(template["image"], "AWS::ECR::Repository"):
        for action in REGISTRY_ACTIONS:
            needed.setdefault(action, []).append(stage.arn("image", logical_id))
    refused = [
        f"{action} on {resource}"
        for action, asked in needed.items()
        for resource in asked
        if not role.may(action, resource)
    ]
    assert refused == []
    assert role.boundary is not None


def test_tags_of_the_whole_stage_change_nothing_that_pushes_write(tmp_path: Path) -> None:
    # Trap: CloudFormation puts the template's value back into a parameter that it updates, for a tag as well.
    row = Stage(name="test", teams=(Team(name="research"),))
    made = []
    for name in ("before", "after"):
        app = new_app(tmp_path / name)
        build(app, [row])
        if name == "after":
            cdk.Tags.of(app.node.find_child("test")).add("cost-centre", "4711")
        app.synth()
        made.append(read_assembly(tmp_path / name)["test/image"])
        for path in (tmp_path / name).rglob("manifest.json"):
            for artifact in json.loads(path.read_text())["artifacts"].values():
                # Those of a stack reach each of its resources, whatever the template says.
                assert not artifact.get("properties", {}).get("tags"), path
    before, after = (
        {item["Name"]: item for item in resources(template, "AWS::SSM::Parameter").values()} for template in made
    )
    changed = {name.removeprefix("/trainyard/test/") for name in before if before[name] != after[name]}
    assert "release" in changed
    assert not [name for name in changed if name.startswith("image/")]
    assert before.keys() == after.keys()
    # AND they have the stage's own tags
    for name, item in after.items():
        assert item["Tags"].items() >= {"trainyard:project": "trainyard", "trainyard:stage": "test"}.items(), name
    # AND the names by which CloudFormation knows them never change: a new one could not be made beside the old
    assert "Parameterimagegaudi121091E0A922" in made[0]["Resources"]


def test_sources_that_git_does_not_have_are_tagged_by_their_hash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asset: Any = SimpleNamespace(asset_hash="0123456789abcdef")
    assert _revision(asset, tmp_path) == "0123456789ab"
    # A git that refuses to read a repository is another matter: jobs look for images by git's revision.
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    assert _revision(asset, tmp_path) == "0123456789ab"
    (tmp_path / ".git/HEAD").write_text("damaged")
    with pytest.raises(ConfigurationError, match="not a git repository"):
        _revision(asset, tmp_path)


def test_the_source_is_what_images_are_built_from_and_what_builds_them(assembly: Path, project: dict[str, Any]) -> None:
    found = re.search(r"/(\w{64})\.zip", json.dumps(project["Source"]["Location"]))
    assert found
    source = assembly / f"asset.{found[1]}"
    assert {path.name for path in source.iterdir()} == {*SOURCES, *PROGRAM}
    assert (source / "images" / "releases.toml").read_bytes() == (ROOT / "images" / "releases.toml").read_bytes()
    assert (source / "jobs" / "train" / "launch.py").is_file()
    assert not [path for path in source.rglob("*") if path.name == "__pycache__" or path.suffix == ".pyc"]
