import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import boto3
import pytest

from infra.machine_image.build import DOCUMENTS, _recipe_version
from infra.machine_image.stack import _CODE, built_pools
from infra.stages import Stage, Team
from tests.support.infra.goldens import assert_as_reviewed
from tests.support.infra.synthesis import Templates, resources, up_to
from tests.support.infra.variants import CUDA, NO_NAT

PLAIN = Stage(name="test", teams=(Team(name="research"),))


def test_the_template_is_as_reviewed(reviewed: Templates) -> None:
    assert_as_reviewed(reviewed, "machine-image")


def test_no_ami_is_built_if_one_is_configured_or_aws_has_one(variants: Templates) -> None:
    for row in (NO_NAT, *CUDA):
        assert built_pools(row) == []
        assert f"{row.name}/machine-image" not in variants


def test_build_unoffered_skips_the_check_with_ec2() -> None:
    # Inline code may have up to 4096 characters, and only inline code has `cfnresponse`.
    assert len(_CODE.read_text()) < 4096

    template = up_to("machine-image", replace(PLAIN, build_unoffered=True))["machine-image"]
    assert not resources(template, "Custom::InstanceTypeOffer")


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


Ask = Callable[..., tuple[str, str, str | None]]


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch) -> Ask:
    """Return a function that sends a CloudFormation request, while EC2 offers one type, or fails."""
    sent: list[tuple[str, str, str | None]] = []

    def send(_event: Any, _context: Any, status: str, _data: Any, physical: str, *, reason: str | None) -> None:
        sent.append((status, physical, reason))

    def offerings(**arguments: list[dict[str, Any]]) -> dict[str, Any]:
        (name,) = arguments["Filters"][0]["Values"]
        if name == "broken":
            raise RuntimeError("no answer")
        return {"InstanceTypeOfferings": [{"InstanceType": name}] if name == "p4d.24xlarge" else []}

    # CloudFormation's module, which only inline code has.
    monkeypatch.setitem(sys.modules, "cfnresponse", SimpleNamespace(SUCCESS="SUCCESS", FAILED="FAILED", send=send))
    monkeypatch.delitem(sys.modules, "infra.machine_image.functions.offer", raising=False)
    monkeypatch.setattr(boto3, "client", lambda _: SimpleNamespace(describe_instance_type_offerings=offerings))
    from infra.machine_image.functions.offer import handler

    def of(name: str, request: str = "Create", *, build: str = "1", **more: str) -> tuple[str, str, Any]:
        properties = {"InstanceType": name, "Build": build, "Otherwise": f"no {name}. Next: another"}
        handler({"RequestType": request, "ResourceProperties": properties, **more}, None)
        return sent[-1]

    return of


def test_an_unoffered_type_fails_with_a_next_step(ask: Ask) -> None:
    assert ask("p4d.24xlarge") == ("SUCCESS", "p4d.24xlarge/1", None)
    assert ask("dl1.24xlarge") == ("FAILED", "dl1.24xlarge/1", "no dl1.24xlarge. Next: another")
    assert ask("broken") == ("FAILED", "broken/1", "EC2 did not report whether it offers broken: no answer")


def test_a_failed_deployment_can_roll_back_and_be_deleted(ask: Ask) -> None:
    # GIVEN an AMI from when the type was offered, WHEN another is to be built after the type was withdrawn
    before = {"PhysicalResourceId": "dl1.24xlarge/1"}
    assert ask("dl1.24xlarge", "Update", build="2", **before)[:2] == ("FAILED", "dl1.24xlarge/1")
    # THEN CloudFormation can roll back to it, and delete it
    assert ask("dl1.24xlarge", "Update", build="1", **before)[0] == "SUCCESS"
    assert ask("dl1.24xlarge", "Delete", build="2", **before)[0] == "SUCCESS"
