"""The environment variables of a job's containers, and the secrets among them.

Sources: AWS Batch user guide, "Job environment variables", "Array jobs" and "Environment variables" of multi-node
parallel jobs; that AWS_BATCH_JOB_ID carries the child's suffix (`#1`, `:1`) is seen in many public job scripts. Amazon
ECS developer guide, "Pass Secrets Manager secrets through environment variables": a secret's ARN, with
`:json-key:version-stage:version-id` behind it where wanted, or a parameter of Systems Manager by ARN or name. A secret
is looked up when its container starts, put into its environment and nowhere else.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from moto.core.exceptions import ServiceException
from moto.secretsmanager.models import secretsmanager_backends
from moto.ssm.models import ssm_backends
from werkzeug.exceptions import HTTPException

from infra.emulator.credentials import Credentials

LOOPBACK = "127.0.0.1"
"""The address of every node: all run on this machine."""


@dataclass(frozen=True, kw_only=True)
class ArrayPosition:
    """The place of a child in its array job."""

    index: int
    size: int


@dataclass(frozen=True, kw_only=True)
class NodePosition:
    """The place of a node in its multi-node job."""

    index: int
    count: int


def container_environment(
    *,
    own: Mapping[str, str],
    endpoint: str,
    credentials: Credentials,
    region: str,
    job_id: str,
    attempt: int,
    queue: str,
    compute_environment: str,
    array: ArrayPosition | None,
    node: NodePosition | None,
) -> dict[str, str]:
    """Return all variables: `own` (of definition and submission), an instance role's and its SDK's, and Batch's."""
    variables = {
        **credentials.environment,
        "AWS_REGION": region,
        "AWS_DEFAULT_REGION": region,
        "AWS_ENDPOINT_URL": endpoint,
        # There is no instance metadata service here, and asking for it takes seconds to fail.
        "AWS_EC2_METADATA_DISABLED": "true",
        **own,
        "AWS_BATCH_JOB_ID": job_id,
        "AWS_BATCH_JOB_ATTEMPT": str(attempt),
        "AWS_BATCH_JQ_NAME": queue,
        "AWS_BATCH_CE_NAME": compute_environment,
    }
    if array is not None:
        variables["AWS_BATCH_JOB_ARRAY_INDEX"] = str(array.index)
        variables["AWS_BATCH_JOB_ARRAY_SIZE"] = str(array.size)
    if node is not None:
        variables["AWS_BATCH_JOB_NODE_INDEX"] = str(node.index)
        variables["AWS_BATCH_JOB_NUM_NODES"] = str(node.count)
        variables["AWS_BATCH_JOB_MAIN_NODE_INDEX"] = "0"
        if node.index:  # absent on the main node
            variables["AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS"] = LOOPBACK
    return variables


_ARN_PARTS = 7
"""The number of parts of a secret's ARN: arn:aws:secretsmanager:<region>:<account>:secret:<name>."""


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
