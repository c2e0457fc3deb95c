"""Differences made by the stage itself, or by hand. test_life_of_a_stage.py calls the whole function."""

import json
from typing import Any

import pytest

from infra.observability.functions.report_drift import is_intended, lines_of, wait
from infra.observability.functions.stop_at_budget import STOP_TAG

WRITTEN = ("/trainyard/dev/image/", "/imagebuilder/trainyard-dev/machine-image/")
OF_A_GROUP = {"IpProtocol": "tcp", "FromPort": 443, "ToPort": 443, "SourceSecurityGroupId": "sg-0"}


def intended(kind: str, path: str, actual: Any = "x", *, name: str = "x", change: str = "NOT_EQUAL") -> bool:
    text = actual if isinstance(actual, str) else json.dumps(actual)
    difference = {"PropertyPath": path, "ActualValue": text, "DifferenceType": change}
    return is_intended({"ResourceType": kind, "PhysicalResourceId": name}, difference, WRITTEN)


def test_only_what_the_stage_changes_itself_is_intended() -> None:
    environment, parameter = "AWS::Batch::ComputeEnvironment", "AWS::SSM::Parameter"
    assert intended(environment, "/State", "DISABLED")
    assert not intended(environment, "/ComputeResources/MaxvCpus", "7")
    assert not intended("AWS::Batch::JobQueue", "/State", "DISABLED")
    assert intended(parameter, "/Value", name="/trainyard/dev/image/gaudi/1.21.0")
    assert intended(parameter, "/Value", name="/imagebuilder/trainyard-dev/machine-image/dl1")
    assert not intended(parameter, "/Type", name="/trainyard/dev/image/gaudi/1.21.0")
    assert not intended(parameter, "/Value", name="/trainyard/dev/queue/spot")
    assert intended("AWS::IAM::Role", "/Tags/2", {"Key": STOP_TAG, "Value": "2026-12-01"}, change="ADD")
    assert not intended("AWS::IAM::Role", "/Tags/2", {"Key": "trainyard:role", "Value": "member"}, change="ADD")
    assert not intended("AWS::IAM::Role", "/Policies/0", STOP_TAG, change="ADD")


def test_rules_of_other_stacks_are_intended_and_addresses_are_not() -> None:
    group, path = "AWS::EC2::SecurityGroup", "/SecurityGroupIngress/1"
    assert intended(group, path, OF_A_GROUP, change="ADD")
    assert not intended(group, path, {**OF_A_GROUP, "FromPort": 0}, change="NOT_EQUAL")
    assert not intended(group, path, OF_A_GROUP, change="REMOVE")
    assert not intended(group, path, {"IpProtocol": "-1", "CidrIp": "0.0.0.0/0"}, change="ADD")
    assert not intended(group, path, {"IpProtocol": "-1", "CidrIpv6": "::/0"}, change="ADD")


def test_values_are_not_in_the_alert() -> None:
    difference = {"PropertyPath": "/Value", "ActualValue": "confidential", "DifferenceType": "NOT_EQUAL"}
    drift = {
        "LogicalResourceId": "Queue",
        "PhysicalResourceId": "/trainyard/dev/queue/spot",
        "ResourceType": "AWS::SSM::Parameter",
        "StackResourceDriftStatus": "MODIFIED",
        "PropertyDifferences": [difference],
    }
    assert list(lines_of("jobs", [drift], WRITTEN)) == ["jobs: Queue (AWS::SSM::Parameter) differs: /Value"]


class Detection:
    """CloudFormation and Lambda's context, while a comparison runs or after it failed. The emulator's never do."""

    def __init__(self, status: str, milliseconds: int) -> None:
        self.status = {"DetectionStatus": status, "DetectionStatusReason": "Access denied"}
        self.milliseconds = milliseconds

    def describe_stack_drift_detection_status(self, **_: str) -> dict[str, str]:
        return self.status

    def get_remaining_time_in_millis(self) -> int:
        return self.milliseconds


@pytest.mark.parametrize(
    ("status", "milliseconds", "problem"),
    [
        ("DETECTION_COMPLETE", 60_000, ""),
        ("DETECTION_FAILED", 60_000, "Access denied"),
        ("DETECTION_IN_PROGRESS", 59_999, "CloudFormation has not finished in time"),
    ],
)
def test_an_incomplete_comparison_has_a_reason(status: str, milliseconds: int, problem: str) -> None:
    detection = Detection(status, milliseconds)
    assert wait(detection, "0f", detection) == problem
