"""The account that a stage is deployed to, the findings of checks, and AWS's errors."""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from infra.stages import Stage
from jobs.core.errors import ConfigurationError
from jobs.core.urls import check_endpoints

Verdict = Literal["ok", "problem", "unknown"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A row of the preflight's results."""

    check: str
    verdict: Verdict
    text: str
    next_step: str = ""
    """Command or edit that solves the problem; empty if the verdict is ok."""


def ok(check: str, text: str) -> Finding:
    return Finding(check=check, verdict="ok", text=text)


def problem(check: str, text: str, next_step: str) -> Finding:
    return Finding(check=check, verdict="problem", text=text, next_step=next_step)


def unknown(check: str, text: str, next_step: str) -> Finding:
    return Finding(check=check, verdict="unknown", text=text, next_step=next_step)


_DENIED = ("AccessDenied", "AccessDeniedException", "AccessDeniedFault", "UnauthorizedOperation", "AuthorizationError")


@dataclass(frozen=True, kw_only=True)
class Account:
    """Working credentials: their account, partition and region."""

    id: str
    partition: str
    region: str
    session: boto3.Session
    _clients: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, stage: Stage, *, profile: str | None = None, region: str | None = None) -> "Account":
        """Return the account of the credentials.

        Raises ConfigurationError if there are no credentials, there is no region, AWS does not answer, or account or
        region differ from the stage's.
        """
        check_endpoints(os.environ)
        try:
            # boto3 only reads AWS_DEFAULT_REGION, while the AWS CLI and the CDK read AWS_REGION first.
            region = region or stage.region or os.environ.get("AWS_REGION") or None
            session = boto3.Session(profile_name=profile, region_name=region)
            if session.region_name is None:
                raise ConfigurationError("no AWS region is set", next_step="pass --region, or set AWS_DEFAULT_REGION")
            identity = session.client("sts", config=_config()).get_caller_identity()
        except (BotoCoreError, ClientError) as error:
            raise ConfigurationError(
                f"cannot determine the AWS account: {_first_line(error)}",
                next_step="make `aws sts get-caller-identity` work, then pass --profile if needed",
            ) from error
        account = cls(
            id=identity["Account"],
            partition=identity["Arn"].split(":")[1],
            region=session.region_name,
            session=session,
        )
        if stage.account is not None and account.id != stage.account:
            raise ConfigurationError(
                f"the credentials belong to account {account.id}, but stage '{stage.name}' is for {stage.account}",
                next_step="pass another --profile, or correct `account` in infra/settings.py",
            )
        if stage.region is not None and account.region != stage.region:
            raise ConfigurationError(
                f"--region {account.region}: stage '{stage.name}' is for {stage.region}",
                next_step="omit --region, or correct `region` in infra/settings.py",
            )
        return account

    def client(self, service: str) -> Any:
        """Return a boto3 client, typed as Any because most of these services are used only here."""
        if service not in self._clients:
            make: Any = self.session.client
            self._clients[service] = make(service, config=_config())
        return self._clients[service]

    def parameter(self, name: str) -> str | None:
        """Return the value of an SSM parameter, or None if it does not exist."""
        try:
            value: str = self.client("ssm").get_parameter(Name=name)["Parameter"]["Value"]
        except ClientError as error:
            if error_code(error) != "ParameterNotFound":
                raise
            return None
        return value

    def image(self, ami_id: str) -> Mapping[str, Any] | None:
        """Return an AMI from DescribeImages, or None if the account cannot see it in its region."""
        try:
            found: list[Mapping[str, Any]] = self.client("ec2").describe_images(ImageIds=[ami_id])["Images"]
        except ClientError as error:
            if not error_code(error).startswith("InvalidAMIID"):
                raise
            return None
        return next(iter(found), None)

    def action(self, error: ClientError) -> str:
        """Return the IAM action of the call that failed."""
        models = (client.meta.service_model for client in self._clients.values())
        service = next((m.signing_name for m in models if error.operation_name in m.operation_names), "")
        return f"{service}:{error.operation_name}"

    def pages(self, service: str, operation: str, result: str, **arguments: Any) -> Iterator[Any]:
        """Yield the items that an operation returns under `result`, from all pages."""
        for page in self.client(service).get_paginator(operation).paginate(**arguments):
            yield from page[result]


def run_check(account: Account, name: str, check: Callable[[], Iterator[Finding]]) -> list[Finding]:
    """Return the findings of `check`, with an `unknown` finding if AWS refuses to answer."""
    found = []
    try:
        for finding in check():
            found.append(finding)  # noqa: PERF402 - keeps the findings from before an error
    except ClientError as error:
        action = account.action(error)
        if error_code(error) in _DENIED:
            found.append(unknown(name, f"the credentials may not call {action}", f"allow {action}, or ask your admin"))
        else:
            message = error.response.get("Error", {}).get("Message") or error_code(error)
            found.append(unknown(name, f"{action} failed: {message}", "try again in a few minutes"))
    except BotoCoreError as error:
        found.append(unknown(name, f"no answer: {_first_line(error)}", "check the network, and try again"))
    return found


def error_code(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))


def _config() -> Config:
    return Config(retries={"mode": "standard", "total_max_attempts": 5}, connect_timeout=10)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
