"""The evaluator that the tests of roles lean on: AWS's documented rules, and moto's opinion where it has one."""

import itertools
import json
from typing import Any

import pytest
from moto.iam.access_control import IAMPolicy, PermissionResult

from tests.support.infra.policy_evaluation import Decision, Request, applies, evaluate, matches

GET = "arn:aws:s3:::data/research/x"


def policy(*statements: dict[str, Any]) -> dict[str, Any]:
    return {"Version": "2012-10-17", "Statement": list(statements)}


def allow(action: str | list[str] = "*", resource: str | list[str] = "*", **more: Any) -> dict[str, Any]:
    return {"Effect": "Allow", "Action": action, "Resource": resource, **more}


def deny(action: str | list[str] = "*", resource: str | list[str] = "*", **more: Any) -> dict[str, Any]:
    return {**allow(action, resource, **more), "Effect": "Deny"}


@pytest.mark.parametrize(
    ("identity", "boundary", "decision"),
    [
        ([], None, "implicitly denied"),
        ([allow()], None, "allowed"),
        ([allow("s3:GetObject", "arn:aws:s3:::data/research/*")], None, "allowed"),
        ([allow("S3:getobject")], None, "allowed"),
        ([allow("s3:G?tObject")], None, "allowed"),
        ([allow("s3:PutObject")], None, "implicitly denied"),
        ([allow(resource="arn:aws:s3:::data/product/*")], None, "implicitly denied"),
        ([allow(), deny("s3:Get*")], None, "explicitly denied"),
        ([deny("s3:Get*"), allow()], None, "explicitly denied"),
        ([allow(), deny("s3:Put*")], None, "allowed"),
        # A boundary limits and does not grant.
        ([], [allow()], "implicitly denied"),
        ([allow()], [], "implicitly denied"),
        ([allow()], [allow("s3:*")], "allowed"),
        ([allow()], [allow("ec2:*")], "implicitly denied"),
        ([allow()], [allow(), deny("s3:GetObject")], "explicitly denied"),
    ],
)
def test_deny_wins_and_a_boundary_only_limits(
    identity: list[dict[str, Any]], boundary: list[dict[str, Any]] | None, decision: Decision
) -> None:
    request = Request(action="s3:GetObject", resource=GET)
    limits = None if boundary is None else [policy(*boundary)]
    assert evaluate(request, [policy(*identity)], boundary=limits) == decision


ACTIONS = ["s3:GetObject", "s3:Get*", "s3:*", "*", "s3:Get", "iam:*"]
RESOURCES = ["*", GET, "arn:aws:s3:::data/*", "arn:aws:s3:::*", "arn:aws:s3:::data/product/*", "arn:aws:s3:::data"]


@pytest.mark.parametrize(("action", "resource"), list(itertools.product(ACTIONS, RESOURCES)))
@pytest.mark.parametrize("effects", [("Allow",), ("Deny",), ("Allow", "Deny")])
def test_moto_decides_alike_where_there_are_no_conditions(action: str, resource: str, effects: tuple[str, ...]) -> None:
    # moto looks at effects, actions and resources of single policies; it ignores conditions, boundaries, and that the
    # case of actions does not count.
    document = policy(*({"Effect": effect, "Action": action, "Resource": resource} for effect in effects))
    verdict = IAMPolicy(json.dumps(document)).is_action_permitted("s3:GetObject", GET)
    expected = {
        PermissionResult.PERMITTED: "allowed",
        PermissionResult.NEUTRAL: "implicitly denied",
        PermissionResult.DENIED: "explicitly denied",
    }[verdict]
    assert evaluate(Request(action="s3:GetObject", resource=GET), [document]) == expected


@pytest.mark.parametrize(
    ("statement", "found"),
    [
        ({"NotAction": "s3:GetObject", "Resource": "*"}, False),
        ({"NotAction": "s3:PutObject", "Resource": "*"}, True),
        ({"Action": "*", "NotResource": "arn:aws:s3:::data/*"}, False),
        ({"Action": "*", "NotResource": ["arn:aws:s3:::runs/*", "arn:aws:s3:::other/*"]}, True),
    ],
)
def test_what_is_excluded_is_everything_else(statement: dict[str, Any], found: bool) -> None:
    assert applies(Request(action="s3:GetObject", resource=GET), {"Effect": "Allow", **statement}) is found


@pytest.mark.parametrize(
    ("operator", "wanted", "values", "holds"),
    [
        ("StringEquals", "a", "a", True),
        ("StringEquals", "a", "A", False),
        ("StringEquals", ["a", "b"], "b", True),
        ("StringEquals", "a*", "ab", False),
        ("StringEquals", "a", None, False),
        ("StringEqualsIfExists", "a", None, True),
        ("StringEqualsIfExists", "a", "b", False),
        ("StringEqualsIgnoreCase", "a", "A", True),
        ("StringNotEquals", "a", "b", True),
        ("StringNotEquals", ["a", "b"], "b", False),
        ("StringNotEquals", "a", None, True),
        ("StringLike", "research/*", "research/x/y", True),
        ("StringLike", "research/*", "research", False),
        ("StringLike", "research/*", "", False),
        ("StringLike", "research/*", None, False),
        ("StringNotLike", "research/*", "product/x", True),
        ("ArnLike", "arn:aws:ecs:*:1:*", "arn:aws:ecs:us-east-1:1:task/x", True),
        ("ArnLike", "arn:aws:*", "arn:aws:ecs:us-east-1:1:task/x", False),
        ("ArnNotLike", "arn:aws:ecs:*:1:*", "arn:aws:ecs:us-east-1:2:task/x", True),
        ("Bool", "false", "False", True),
        ("Bool", "true", None, False),
        ("Null", "true", None, True),
        ("Null", "false", "x", True),
        ("Null", "false", None, False),
        ("ForAllValues:StringEquals", ["a", "b"], ["a", "b"], True),
        ("ForAllValues:StringEquals", ["a", "b"], ["a", "c"], False),
        ("ForAllValues:StringEquals", ["a", "b"], None, True),
        ("ForAnyValue:StringEquals", ["a", "b"], ["a", "c"], True),
        ("ForAnyValue:StringEquals", ["a", "b"], None, False),
    ],
)
def test_conditions(operator: str, wanted: Any, values: Any, holds: bool) -> None:
    statement = allow(Condition={operator: {"s3:Prefix": wanted}})
    context = {} if values is None else {"S3:prefix": values}
    assert applies(Request(action="s3:ListBucket", context=context), statement) is holds


def test_all_conditions_of_a_statement_must_hold() -> None:
    statement = allow(Condition={"StringEquals": {"aws:a": "1", "aws:b": "2"}, "Null": {"aws:c": "true"}})
    full = {"aws:a": "1", "aws:b": "2"}
    assert applies(Request(action="x:Y", context=full), statement)
    assert not applies(Request(action="x:Y", context={"aws:a": "1"}), statement)
    assert not applies(Request(action="x:Y", context={**full, "aws:c": "3"}), statement)


@pytest.mark.parametrize(("team", "found"), [("research", True), ("product", False), (None, False)])
def test_variables_stand_for_what_the_request_carries(team: str | None, found: bool) -> None:
    context = {} if team is None else {"aws:PrincipalTag/team": team}
    by_resource = allow(resource="arn:aws:s3:::data/${aws:PrincipalTag/team}/*")
    assert applies(Request(action="s3:GetObject", resource=GET, context=context), by_resource) is found
    by_key = allow(Condition={"StringLike": {"s3:prefix": "${aws:PrincipalTag/team}/*"}})
    listing = Request(action="s3:ListBucket", context={**context, "s3:prefix": "research/x"})
    assert applies(listing, by_key) is found


@pytest.mark.parametrize(
    "statement",
    [
        allow(Condition={"NumericLessThan": {"s3:max-keys": "10"}}),
        allow(Condition={"IpAddress": {"s3:max-keys": "10.0.0.0/8"}}),
        allow(Principal="*"),
    ],
)
def test_what_it_does_not_know_it_does_not_guess(statement: dict[str, Any]) -> None:
    with pytest.raises(AssertionError, match="no rule for"):
        applies(Request(action="s3:GetObject", resource=GET, context={"s3:max-keys": "5"}), statement)


@pytest.mark.parametrize(
    ("text", "pattern", "found"),
    [("a.b", "a.b", True), ("axb", "a.b", False), ("a[b]", "a[b]", True), ("ab", "a?", True), ("a", "a?", False)],
)
def test_only_two_characters_are_wildcards(text: str, pattern: str, found: bool) -> None:
    assert matches(text, pattern) is found
