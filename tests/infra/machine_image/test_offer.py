"""EC2 is asked whether it offers an instance type before its AMI is built."""

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import boto3
import pytest

from tests.support.infra.synthesis import Templates, only, resources

OFFER = "Custom::InstanceTypeOffer"


class Answers(ModuleType):
    """CloudFormation's module `cfnresponse`, which writes down what it is told to answer."""

    SUCCESS, FAILED = "SUCCESS", "FAILED"

    def __init__(self) -> None:
        super().__init__("cfnresponse")
        self.said: list[tuple[str, str, str | None]] = []

    def send(self, _event: Any, _context: Any, status: str, _data: Any, physical: str, *, reason: str | None) -> None:
        self.said.append((status, physical, reason))


class Ec2:
    """An EC2 that offers one type, or fails."""

    def describe_instance_type_offerings(self, **asked: list[dict[str, Any]]) -> dict[str, Any]:
        (name,) = asked["Filters"][0]["Values"]
        if name == "broken":
            raise RuntimeError("no answer")
        return {"InstanceTypeOfferings": [{"InstanceType": name}] if name == "p4d.24xlarge" else []}


Ask = Callable[..., tuple[str, str, str | None]]


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch) -> Ask:
    answers = Answers()
    monkeypatch.setitem(sys.modules, "cfnresponse", answers)
    monkeypatch.delitem(sys.modules, "infra.machine_image.functions.offer", raising=False)
    monkeypatch.setattr(boto3, "client", lambda _: Ec2())
    from infra.machine_image.functions.offer import handler

    def of(name: str, request: str = "Create", *, build: str = "1", before: str | None = None) -> tuple[str, str, Any]:
        properties = {"InstanceType": name, "Build": build, "Otherwise": f"no {name}. Next: another"}
        event = {"RequestType": request, "ResourceProperties": properties}
        handler({**event, **({"PhysicalResourceId": before} if before else {})}, None)
        return answers.said[-1]

    return of


def test_what_ec2_does_not_offer_fails_with_what_to_do_next(ask: Ask) -> None:
    assert ask("p4d.24xlarge") == ("SUCCESS", "p4d.24xlarge/1", None)
    assert ask("dl1.24xlarge") == ("FAILED", "dl1.24xlarge/1", "no dl1.24xlarge. Next: another")
    assert ask("broken") == ("FAILED", "broken/1", "EC2 does not say whether it offers broken: no answer")


def test_a_failed_deployment_finds_its_way_back_and_a_stack_can_be_deleted(ask: Ask) -> None:
    # GIVEN an AMI that was built while the type was offered, WHEN another is to be built and the type has gone
    assert ask("dl1.24xlarge", "Update", build="2", before="dl1.24xlarge/1")[:2] == ("FAILED", "dl1.24xlarge/1")
    # THEN CloudFormation may go back to what was, and delete it
    assert ask("dl1.24xlarge", "Update", build="1", before="dl1.24xlarge/1")[0] == "SUCCESS"
    assert ask("dl1.24xlarge", "Delete", build="2", before="dl1.24xlarge/1")[0] == "SUCCESS"


def test_no_ami_is_built_before_the_answer(templates: Templates, variants: Templates) -> None:
    for path in ("dev/machine-image", "all/machine-image"):
        template = {**templates, **variants}[path]
        offers = {name for name, item in template["Resources"].items() if item["Type"] == OFFER}
        images = [item for item in template["Resources"].values() if item["Type"] == "AWS::ImageBuilder::Image"]
        assert len(offers) == len(images) == 1
        assert {name for item in images for name in item["DependsOn"]} >= offers
        for item in resources(template, OFFER).values():
            assert item["InstanceType"] == "dl1.24xlarge"
        # It is asked anew before each build: what makes another AMI makes another question.
        recipes = {item["Version"] for item in resources(template, "AWS::ImageBuilder::ImageRecipe").values()}
        assert {item["Build"] for item in resources(template, OFFER).values()} == recipes
        function = only(template, "AWS::Lambda::Function")
        # A template's code has 4096 characters at most, and only such code has `cfnresponse`.
        assert len(function["Code"]["ZipFile"]) < 4096
