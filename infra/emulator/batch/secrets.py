"""The `secrets` of a container: looked up when it starts, put into its environment and nowhere else.

Source: Amazon ECS developer guide, "Pass Secrets Manager secrets through environment variables": a secret's ARN, with
`:json-key:version-stage:version-id` behind it where wanted, or a parameter of Systems Manager by ARN or name.
"""

import json
from collections.abc import Iterable, Mapping

from moto.core.exceptions import ServiceException
from moto.secretsmanager.models import secretsmanager_backends
from moto.ssm.models import ssm_backends
from werkzeug.exceptions import HTTPException

_ARN_PARTS = 7
"""Of a secret's ARN: arn:aws:secretsmanager:<region>:<account>:secret:<name>."""


class SecretError(Exception):
    """The container cannot start: what ECS says of it."""

    def __init__(self, source: str, reason: str) -> None:
        super().__init__(
            "ResourceInitializationError: unable to pull secrets or registry auth: execution resource retrieval "
            f"failed: unable to retrieve secret from {source}: service call has been retried 1 time(s): {reason}"
        )


def resolve_secrets(secrets: Iterable[Mapping[str, str]], *, account_id: str, region: str) -> dict[str, str]:
    """The values by the names of their variables. Raises SecretError where one cannot be had."""
    found = {}
    for secret in secrets:
        source = secret["valueFrom"]
        if ":secretsmanager:" in source:
            found[secret["name"]] = _secret(source, account_id=account_id, region=region)
        else:
            found[secret["name"]] = _parameter(source, account_id=account_id, region=region)
    return found


def _secret(source: str, *, account_id: str, region: str) -> str:
    parts = source.split(":")
    arn = ":".join(parts[:_ARN_PARTS])
    key, stage, version = (*parts[_ARN_PARTS:], "", "", "")[:3]
    try:
        answer = secretsmanager_backends[account_id][region].get_secret_value(arn, version or None, stage or None)
        text = answer.get("SecretString")
    except (ServiceException, HTTPException) as error:
        raise SecretError(
            "asm", f"failed to fetch secret {arn} from secrets manager: {getattr(error, 'message', error)}"
        ) from None
    if text is None:
        raise SecretError("asm", f"failed to fetch secret {arn} from secrets manager: it holds no text")
    if not key:
        return str(text)
    try:
        return str(json.loads(text)[key])
    except (ValueError, KeyError, TypeError):
        raise SecretError("asm", f"retrieved secret from {arn} did not contain json key {key}") from None


def _parameter(source: str, *, account_id: str, region: str) -> str:
    parameter = ssm_backends[account_id][region].get_parameter(source)
    if parameter is None:
        raise SecretError("ssm", f"failed to fetch {source}: invalid parameters")
    return str(parameter.response_object(decrypt=True, region=region)["Value"])
