"""A stand-in for an AWS account with prepared responses."""

from collections.abc import Callable, Iterator
from functools import cache
from types import SimpleNamespace
from typing import Any

import boto3
from botocore.exceptions import ClientError

from infra.preflight.account import Account, Finding, run_check
from infra.stages import Stage, Team

REGION, ACCOUNT = "us-east-1", "123456789012"


def stage_of(**settings: Any) -> Stage:
    return Stage(**{"name": "test", "teams": (Team(name="research"),), "region": REGION, **settings})


def refusal(code: str, message: str = "no") -> Callable[..., Any]:
    """Return an entry of `answers` that raises an AWS error."""

    def raise_it(operation: str, **_: Any) -> Any:
        name = "".join(word.capitalize() for word in operation.split("_"))
        raise ClientError({"Error": {"Code": code, "Message": message}}, name)

    return raise_it


class Answers:
    """A client that returns each operation's answer, or calls it with the operation's name and arguments."""

    def __init__(self, answers: dict[str, Any], meta: Any) -> None:
        self._answers = answers
        self.meta = meta

    def __getattr__(self, operation: str) -> Callable[..., Any]:
        answer = self._answers[operation]
        return lambda **arguments: answer(operation, **arguments) if callable(answer) else answer

    def get_paginator(self, operation: str) -> Any:
        return SimpleNamespace(paginate=lambda **arguments: [getattr(self, operation)(**arguments)])


@cache
def _meta(service: str) -> Any:
    """Return boto3's metadata of a service, from which errors get the IAM action."""
    make: Any = boto3.Session(aws_access_key_id="x", aws_secret_access_key="x", region_name=REGION).client
    return make(service).meta


def findings(
    check: Callable[[Account, Stage], Iterator[Finding]], answers: dict[str, Any], **settings: Any
) -> list[Finding]:
    """Return the findings of a check for a stage with the given settings."""
    services = ("ec2", "batch", "iam", "kms", "ssm", "service-quotas", "ce")
    clients = {name: Answers(answers, _meta(name)) for name in services}
    account = Account(id=ACCOUNT, partition="aws", region=REGION, session=boto3.Session(), _clients=clients)
    stage = stage_of(**settings)
    return run_check(account, "check", lambda: check(account, stage))
