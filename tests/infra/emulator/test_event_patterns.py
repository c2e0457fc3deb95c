"""Event patterns and the texts that targets get, against EventBridge's documented rules."""

from typing import Any

import pytest

from infra.emulator.events.message import message_for
from infra.emulator.events.pattern import PatternError, check_pattern, matches

EVENT: dict[str, Any] = {
    "source": "aws.batch",
    "detail-type": "Batch Job State Change",
    "resources": ["arn:one", "arn:two"],
    "detail": {
        "status": "FAILED",
        "statusReason": "Host EC2 (instance i-0) terminated.",
        "retries": 2,
        "cancelled": True,
        "address": "10.1.2.3",
        "attempts": [{"container": {"exitCode": 1}}, {"container": {"exitCode": 137, "reason": "OutOfMemoryError"}}],
        "tags": {},
    },
}

MATCHING: list[dict[str, Any]] = [
    {"source": ["aws.ec2", "aws.batch"], "detail": {"status": ["FAILED"]}},
    {"resources": ["arn:two"]},
    {"resources": [{"prefix": "arn:"}]},
    {"detail": {"statusReason": [{"prefix": "Host EC2"}]}},
    {"detail": {"statusReason": [{"suffix": "terminated."}]}},
    {"detail": {"statusReason": [{"prefix": {"equals-ignore-case": "host ec2"}}]}},
    {"detail": {"statusReason": [{"wildcard": "Host EC2*terminated."}]}},
    {"detail": {"status": [{"equals-ignore-case": "failed"}]}},
    {"detail": {"status": [{"anything-but": ["SUCCEEDED", "RUNNING"]}]}},
    {"detail": {"statusReason": [{"anything-but": {"prefix": "Essential"}}]}},
    {"detail": {"retries": [{"numeric": [">=", 1, "<", 3]}]}},
    {"detail": {"retries": [2]}},
    {"detail": {"cancelled": [True]}},
    {"detail": {"address": [{"cidr": "10.0.0.0/8"}]}},
    {"detail": {"statusReason": [{"exists": True}], "container": [{"exists": False}]}},
    {"detail": {"container": {"exitCode": [{"exists": False}]}}},
    {"detail": {"attempts": {"container": {"reason": [{"prefix": "OutOfMemory"}]}}}},
    {"detail": {"$or": [{"status": ["RUNNING"]}, {"retries": [{"numeric": [">", 1]}]}]}},
]

OTHER: list[dict[str, Any]] = [
    {"source": ["aws.ec2"]},
    {"source": ["aws.batch"], "detail": {"status": ["SUCCEEDED"]}},
    {"detail": {"statusReason": [{"prefix": "host EC2"}]}},
    {"detail": {"status": [{"anything-but": "FAILED"}]}},
    {"detail": {"missing": [{"anything-but": "FAILED"}]}},
    {"detail": {"statusReason": [{"anything-but": {"prefix": "Host"}}]}},
    {"detail": {"retries": [{"numeric": [">", 2]}]}},
    {"detail": {"retries": [{"numeric": [">", 0, "<", 2]}]}},
    {"detail": {"cancelled": [1]}},
    {"detail": {"cancelled": [{"numeric": [">", 0]}]}},
    {"detail": {"status": [{"numeric": [">", 0]}]}},
    {"detail": {"missing": [{"exists": True}]}},
    {"detail": {"status": [{"exists": False}]}},
    {"detail": {"address": [{"cidr": "192.168.0.0/16"}]}},
    {"detail": {"missing": {"deeper": ["x"]}}},
    {"detail": {"attempts": {"container": {"exitCode": [2]}}}},
]

REFUSED: list[tuple[Any, str]] = [
    ({}, "Empty"),
    ({"source": "aws.batch"}, "must be an object or an array"),
    ({"source": []}, "Empty arrays"),
    ({"source": [{"sounds-like": "batch"}]}, "Unrecognized match type sounds-like"),
    ({"source": [{"prefix": 1}]}, "must be a string"),
    ({"source": [{"prefix": "a", "suffix": "b"}]}, "only one key"),
    ({"detail": {"n": [{"numeric": [">"]}]}}, "comparison and a number"),
    ({"detail": {"n": [{"numeric": [">", "1"]}]}}, "numbers only"),
    ({"detail": {"n": [{"exists": "yes"}]}}, "true or false"),
    ({"detail": {"n": [{"cidr": "here"}]}}, "no range"),
    ({"detail": {"n": [{"anything-but": {"numeric": [">", 1]}}]}}, "may hold"),
    ({"$or": [{"source": ["a"]}]}, "two patterns"),
]


@pytest.mark.parametrize("pattern", MATCHING)
def test_takes(pattern: dict[str, Any]) -> None:
    check_pattern(pattern)
    assert matches(pattern, EVENT)


@pytest.mark.parametrize("pattern", OTHER)
def test_leaves(pattern: dict[str, Any]) -> None:
    check_pattern(pattern)
    assert not matches(pattern, EVENT)


@pytest.mark.parametrize(("pattern", "words"), REFUSED)
def test_refuses(pattern: Any, words: str) -> None:
    with pytest.raises(PatternError, match=words):
        check_pattern(pattern)


def text(**target: Any) -> str:
    return message_for(target, EVENT, rule_arn="arn:aws:events:us-east-1:123456789012:rule/mine")


def test_a_constant_a_part_and_a_template() -> None:
    assert text(Input='{"a": 1}') == '{"a": 1}'
    assert text(InputPath="$.detail.attempts[1].container") == '{"exitCode": 137, "reason": "OutOfMemoryError"}'
    paths = {"status": "$.detail.status", "why": "$.detail.statusReason", "n": "$.detail.retries", "no": "$.detail.no"}

    def transformed(template: str) -> str:
        return text(InputTransformer={"InputPathsMap": paths, "InputTemplate": template})

    assert transformed('"Job <status>: <why>"') == '"Job FAILED: Host EC2 (instance i-0) terminated."'
    assert transformed('{"status": <status>, "n": <n>, "no": <no>}') == '{"status": "FAILED", "n": 2, "no": null}'
    assert transformed('{"text": "<status> by <aws.events.rule-name>"}') == '{"text": "FAILED by mine"}'
    assert transformed("<status> after <n>, <unknown>") == "FAILED after 2, <unknown>"
