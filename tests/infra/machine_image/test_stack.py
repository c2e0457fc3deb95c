from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from infra.machine_image.build import DOCUMENTS, _recipe_version
from infra.machine_image.stack import built_pools
from infra.stages import Stage, Team
from tests.support.infra.goldens import assert_as_reviewed
from tests.support.infra.synthesis import Templates
from tests.support.infra.variants import CUDA, NO_NAT

PLAIN = Stage(name="test", teams=(Team(name="research"),))


def test_the_template_is_as_reviewed(reviewed: Templates) -> None:
    assert_as_reviewed(reviewed, "machine-image")


def test_no_ami_is_built_if_one_is_configured_or_aws_has_one(variants: Templates) -> None:
    for row in (NO_NAT, *CUDA):
        assert built_pools(row) == []
        assert f"{row.name}/machine-image" not in variants


def test_every_change_of_the_ami_is_a_new_recipe_version() -> None:
    # Image Builder refuses a version that exists with other content.
    def version(stage: Stage = PLAIN, image: str = "uri:1", tags: tuple[str, ...] = ("a", "b"), edit: str = "") -> str:
        documents: Any = {
            path.stem: SimpleNamespace(data=path.read_text() + (edit if path.stem == "scratch" else ""))
            for path in DOCUMENTS.glob("*.yaml")
        }
        return _recipe_version(stage, stage.pool, image, documents, dict.fromkeys(tags, "x"))

    assert version() == version(tags=("b", "a"))
    versions = {
        version(),
        version(edit="# noatime"),
        version(replace(PLAIN, fsx_gib=1_200)),
        version(replace(PLAIN, own_kms_key=True)),  # another encryption replaces the repository
        version(image="uri:2"),
        version(tags=("a", "b", "c")),
    }
    assert len(versions) == 6
    assert all(one.startswith("1.21.") and int(one.split(".")[2]) < 2**30 for one in versions)
