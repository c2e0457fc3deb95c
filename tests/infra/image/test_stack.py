import json
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aws_cdk as cdk
import pytest

from infra.app import build
from infra.image.stack import PROGRAM, _revision
from infra.stages import Pool, Stage, Team
from jobs.core.errors import ConfigurationError
from jobs.core.git import SOURCES
from jobs.core.images import release, with_descendants
from tests.support.infra.goldens import assert_as_reviewed
from tests.support.infra.synthesis import ROOT, Templates, flatten, new_app, only, read_assembly, resources, up_to


def test_the_template_is_as_reviewed(reviewed: Templates) -> None:
    # Repositories hold no data, but a changed logical id would delete all images.
    assert_as_reviewed(reviewed, "image")


def test_a_stage_without_accelerators_only_has_cpu_images() -> None:
    row = Stage(name="test", teams=(Team(name="research"),), instance_types=("m6i.4xlarge",))
    image = up_to("image", row)["image"]
    names = [item["Name"] for item in resources(image, "AWS::SSM::Parameter").values()]
    cpu = {one.name for one in with_descendants("cpu")}
    assert {name.split("/")[4] for name in names if "/image-repository/" in name} == cpu
    assert {name for name in names if "/image/" in name} == {
        f"/trainyard/test/image/{n}/{release(of='cpu').name}" for n in cpu
    }


@pytest.mark.parametrize(
    ("settings", "image"),
    [
        ({"image_tag": "1.21.0-fix1"}, ":1.21.0-fix1"),
        # image_tag applies to the stage's pool; a retiring pool keeps its release's image.
        (
            {
                "image_tag": "1",
                "instance_types": ("p4d.24xlarge",),
                "retiring": (Pool(instance_types=("dl1.24xlarge",)),),
            },
            "ssm:/trainyard/test/image/gaudi/1.21.0",
        ),
    ],
    ids=["tag", "retiring"],
)
def test_the_ami_contains_the_image_of_its_pools_jobs(settings: dict[str, Any], image: str) -> None:
    made = up_to("machine-image", Stage(name="test", teams=(Team(name="research"),), **settings))["machine-image"]
    (recipe,) = resources(made, "AWS::ImageBuilder::ImageRecipe").values()
    parameters = {
        item["Name"]: flatten(item["Value"][0]) for one in recipe["Components"] for item in one.get("Parameters", [])
    }
    assert parameters["Image"].endswith(image)


def test_stage_wide_tags_do_not_reach_parameters_of_pushes(tmp_path: Path) -> None:
    # When CloudFormation updates a parameter, even just a tag, it resets the value to the template's.
    app = new_app(tmp_path)
    build(app, [Stage(name="test", teams=(Team(name="research"),))])
    cdk.Tags.of(app.node.find_child("test")).add("cost-centre", "4711")
    app.synth()
    own = {"trainyard:project": "trainyard", "trainyard:stage": "test"}
    for item in resources(read_assembly(tmp_path)["test/image"], "AWS::SSM::Parameter").values():
        tags = own if "/image/" in item["Name"] else {**own, "cost-centre": "4711"}
        assert item["Tags"] == tags, item["Name"]
    for path in tmp_path.rglob("manifest.json"):
        for artifact in json.loads(path.read_text())["artifacts"].values():
            # Tags of a stack apply to each of its resources, whatever the template contains.
            assert not artifact.get("properties", {}).get("tags"), path


def test_sources_outside_git_are_tagged_by_their_hash(tmp_path: Path) -> None:
    asset: Any = SimpleNamespace(asset_hash="0123456789abcdef")
    assert _revision(asset, tmp_path) == "0123456789ab"
    # But if git cannot read an existing repository, this is an error, because jobs look for images by git's revision.
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    assert _revision(asset, tmp_path) == "0123456789ab"
    (tmp_path / ".git/HEAD").write_text("damaged")
    with pytest.raises(ConfigurationError, match="not a git repository"):
        _revision(asset, tmp_path)


def test_the_source_contains_the_images_and_their_build_tools(assembly: Path, templates: Templates) -> None:
    project = only(templates["dev/image"], "AWS::CodeBuild::Project")
    found = re.search(r"/(\w{64})\.zip", json.dumps(project["Source"]["Location"]))
    assert found
    source = assembly / f"asset.{found[1]}"
    assert {path.name for path in source.iterdir()} == {*SOURCES, *PROGRAM}
    assert (source / "images" / "releases.toml").read_bytes() == (ROOT / "images" / "releases.toml").read_bytes()
    assert (source / "jobs" / "container" / "__init__.py").is_file()
    assert not [path for path in source.rglob("*") if path.name == "__pycache__" or path.suffix == ".pyc"]
    variables = {item["Name"]: item["Value"] for item in project["Environment"]["EnvironmentVariables"]}
    assert re.fullmatch(r"[0-9a-f]{12}(-dirty-[0-9a-f]{8})?", variables["TRAINYARD_REVISION"])
