"""The account that a stage would be deployed to, and how its refusals read."""

import os
from collections.abc import Callable, Iterator
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
    """A row of the preflight's answer."""

    check: str
    verdict: Verdict
    text: str
    next_step: str = ""
    """Command or edit that gets the user further; empty where it is ok."""


def ok(check: str, text: str) -> Finding:
    return Finding(check=check, verdict="ok", text=text)


def problem(check: str, text: str, next_step: str) -> Finding:
    return Finding(check=check, verdict="problem", text=text, next_step=next_step)


def unknown(check: str, text: str, next_step: str) -> Finding:
    return Finding(check=check, verdict="unknown", text=text, next_step=next_step)


_DENIED = ("AccessDenied", "AccessDeniedException", "AccessDeniedFault", "UnauthorizedOperation", "AuthorizationError")


@dataclass(frozen=True, kw_only=True)
class Account:
    """Credentials that work, and where they lead."""

    id: str
    partition: str
    region: str
    session: boto3.Session
    _clients: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, stage: Stage, *, profile: str | None = None, region: str | None = None) -> "Account":
        """Return the account that the credentials belong to.

        Raises ConfigurationError where there are none, no region, no answer, or another account or region than the
        stage's.
        """
        check_endpoints(os.environ)
        try:
            # boto3 reads AWS_DEFAULT_REGION only; the AWS CLI and the CDK read AWS_REGION first.
            region = region or stage.region or os.environ.get("AWS_REGION") or None
            session = boto3.Session(profile_name=profile, region_name=region)
            if session.region_name is None:
                raise ConfigurationError("no AWS region is set", next_step="--region NAME, or AWS_DEFAULT_REGION")
            identity = session.client("sts", config=_config()).get_caller_identity()
        except (BotoCoreError, ClientError) as error:
            raise ConfigurationError(
                f"AWS does not say whose account this is: {_first_line(error)}",
                next_step="aws sts get-caller-identity, which has to work; then --profile NAME",
            ) from error
        account = cls(
            id=identity["Account"],
            partition=identity["Arn"].split(":")[1],
            region=session.region_name,
            session=session,
        )
        if stage.account is not None and account.id != stage.account:
            raise ConfigurationError(
                f"the credentials are of account {account.id}; stage '{stage.name}' is for {stage.account}",
                next_step="--profile NAME, or correct `account` in infra/settings.py",
            )
        if stage.region is not None and account.region != stage.region:
            raise ConfigurationError(
                f"--region {account.region}: stage '{stage.name}' is for {stage.region}",
                next_step="leave --region out, or correct `region` in infra/settings.py",
            )
        return account

    def client(self, service: str) -> Any:
        """Return a boto3 client; typed as anything, since checks ask services of which few are in use elsewhere."""
        if service not in self._clients:
            make: Any = self.session.client
            self._clients[service] = make(service, config=_config())
        return self._clients[service]

    def action(self, error: ClientError) -> str:
        """Return what was refused, as IAM calls it."""
        models = (client.meta.service_model for client in self._clients.values())
        service = next((m.signing_name for m in models if error.operation_name in m.operation_names), "")
        return f"{service}:{error.operation_name}"

    def pages(self, service: str, operation: str, result: str, **arguments: Any) -> Iterator[Any]:
        """Yield all items that an operation lists under `result`."""
        for page in self.client(service).get_paginator(operation).paginate(**arguments):
            yield from page[result]


def ask(account: Account, check: str, question: Callable[[], Iterator[Finding]]) -> list[Finding]:
    """Return what `question` finds; what a service refuses to say is a finding as well."""
    found = []
    try:
        for finding in question():
            found.append(finding)  # noqa: PERF402 - what was found before a refusal counts
    except ClientError as error:
        action = account.action(error)
        if error_code(error) in _DENIED:
            found.append(unknown(check, f"the credentials may not do {action}", f"allow {action}, or ask who may"))
        else:
            said = error.response.get("Error", {}).get("Message") or error_code(error)
            found.append(unknown(check, f"{action} failed: {said}", "try again in some minutes"))
    except BotoCoreError as error:
        found.append(unknown(check, f"no answer: {_first_line(error)}", "check the network, and try again"))
    return found


def error_code(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))


def _config() -> Config:
    return Config(retries={"mode": "standard", "total_max_attempts": 5}, connect_timeout=10)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
