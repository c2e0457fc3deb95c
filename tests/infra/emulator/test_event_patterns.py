from typing import Any

import pytest

from infra.emulator.events import PatternError, check_pattern, matches, message_for, refusal

EVENT = {
    "source": "aws.batch",
    "detail-type": "Batch Job State Change",
    "resources": ["arn:one", "arn:two"],
    "detail": {"status": "FAILED", "jobName": 'say "hi"', "attempts": 2, "spot": True, "inner": {"a": "b"}},
}


@pytest.mark.parametrize(
    ("pattern", "taken"),
    [
        ({"source": ["aws.ec2", "aws.batch"]}, True),
        ({"source": ["aws.batch"], "detail": {"status": ["SUCCEEDED"]}}, False),
        ({"detail": {"status": ["SUCCEEDED", "FAILED"], "inner": {"a": ["b"]}}}, True),
        ({"resources": ["arn:two"]}, True),
        ({"resources": [{"prefix": "arn:t"}]}, True),
        ({"detail": {"status": [{"prefix": "FAIL"}]}}, True),
        ({"detail": {"attempts": [{"prefix": "2"}]}}, False),
        ({"detail": {"attempts": [2]}}, True),
        ({"detail": {"spot": [1]}}, False),
        ({"detail": {"missing": ["x"]}}, False),
        ({"detail": {"status": {"inner": ["x"]}}}, False),
    ],
)
def test_an_event_matches(pattern: dict[str, Any], taken: bool) -> None:
    check_pattern(pattern)
    assert matches(pattern, EVENT) == taken


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ({}, "not empty"),
        ({"source": "aws.batch"}, "object or an array"),
        ({"source": [["aws.batch"]]}, "match value must be"),
        ({"source": [{"suffix": "batch"}]}, "knows prefix only, not suffix"),
        ({"$or": [{"source": ["a"]}, {"source": ["b"]}]}, "does not know '\\$or'"),
    ],
)
def test_what_is_not_known_is_refused(pattern: Any, words: str) -> None:
    with pytest.raises(PatternError, match=words):
        check_pattern(pattern)


def test_a_target_gets_a_text_with_parts_of_the_event() -> None:
    paths = {"job": "$.detail.jobName", "why": "$.detail.statusReason", "n": "$.detail.attempts"}
    target = {"InputTransformer": {"InputPathsMap": paths, "InputTemplate": '"<job>: <why> after <n> <other>"'}}
    assert refusal(target) is None
    assert message_for(target, EVENT) == '"say \\"hi\\":  after 2 <other>"'


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ({"InputPath": "$.detail"}, "InputPath"),
        ({"InputTransformer": {"InputTemplate": '{"a": "<b>"}'}}, "one string"),
    ],
)
def test_targets_that_are_not_known_are_refused(target: dict[str, Any], words: str) -> None:
    assert words in str(refusal(target))
