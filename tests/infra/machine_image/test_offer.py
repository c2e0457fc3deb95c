"""EC2 is asked whether it offers an instance type before its AMI is built."""

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import boto3
import pytest

Ask = Callable[..., tuple[str, str, str | None]]


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch) -> Ask:
    """Let the function answer CloudFormation's requests with an EC2 that offers one type, or fails."""
    said: list[tuple[str, str, str | None]] = []

    def send(_event: Any, _context: Any, status: str, _data: Any, physical: str, *, reason: str | None) -> None:
        said.append((status, physical, reason))

    def offerings(**asked: list[dict[str, Any]]) -> dict[str, Any]:
        (name,) = asked["Filters"][0]["Values"]
        if name == "broken":
            raise RuntimeError("no answer")
        return {"InstanceTypeOfferings": [{"InstanceType": name}] if name == "p4d.24xlarge" else []}

    # CloudFormation's own module, which only code in a template has.
    monkeypatch.setitem(sys.modules, "cfnresponse", SimpleNamespace(SUCCESS="SUCCESS", FAILED="FAILED", send=send))
    monkeypatch.delitem(sys.modules, "infra.machine_image.functions.offer", raising=False)
    monkeypatch.setattr(boto3, "client", lambda _: SimpleNamespace(describe_instance_type_offerings=offerings))
    from infra.machine_image.functions.offer import handler

    def of(name: str, request: str = "Create", *, build: str = "1", **more: str) -> tuple[str, str, Any]:
        properties = {"InstanceType": name, "Build": build, "Otherwise": f"no {name}. Next: another"}
        handler({"RequestType": request, "ResourceProperties": properties, **more}, None)
        return said[-1]

    return of


def test_what_ec2_does_not_offer_fails_with_what_to_do_next(ask: Ask) -> None:
    assert ask("p4d.24xlarge") == ("SUCCESS", "p4d.24xlarge/1", None)
    assert ask("dl1.24xlarge") == ("FAILED", "dl1.24xlarge/1", "no dl1.24xlarge. Next: another")
    assert ask("broken") == ("FAILED", "broken/1", "EC2 did not report whether it offers broken: no answer")


def test_a_failed_deployment_finds_its_way_back_and_a_stack_can_be_deleted(ask: Ask) -> None:
    # GIVEN an AMI that was built while the type was offered, WHEN another is to be built and the type has gone
    before = {"PhysicalResourceId": "dl1.24xlarge/1"}
    assert ask("dl1.24xlarge", "Update", build="2", **before)[:2] == ("FAILED", "dl1.24xlarge/1")
    # THEN CloudFormation may go back to what was, and delete it
    assert ask("dl1.24xlarge", "Update", build="1", **before)[0] == "SUCCESS"
    assert ask("dl1.24xlarge", "Delete", build="2", **before)[0] == "SUCCESS"
