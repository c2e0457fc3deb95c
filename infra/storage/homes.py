"""Access of a fallback stage's roles to the files of its homes: the stages whose jobs it runs.

Their buckets are in other regions. CloudFormation generates the names, so patterns identify them: a stack
`trainyard-dev-storage` belongs to one stage, and bucket names in this form are never shortened. The condition excludes
buckets of other accounts.
"""

from collections.abc import Iterable, Sequence

from aws_cdk import Aws

from infra.constructs.inline_role import InlineRole
from infra.stages import Stage

_REASON = (
    "Buckets, keys and objects of stages in other regions have generated names; the account, or a tag, limits them"
)


def data_of(home: Stage) -> str:
    """Return the pattern of the ARN of a stage's data bucket."""
    return _bucket(home, "data")


def runs_of(home: Stage) -> str:
    """Return the pattern of the ARN of a stage's run bucket."""
    return _bucket(home, "runs")


def _bucket(home: Stage, name: str) -> str:
    return f"arn:{Aws.PARTITION}:s3:::trainyard-{home.name}-storage-{name}*"


def allow_files(
    role: InlineRole, sid: str, actions: Sequence[str], *resources: str, prefixes: Sequence[str] = ()
) -> None:
    """Allow `actions` on objects of homes, or on their buckets, then only for `prefixes`."""
    conditions: dict[str, dict[str, str | Sequence[str]]] = {"StringEquals": {"aws:ResourceAccount": Aws.ACCOUNT_ID}}
    if prefixes:
        conditions["StringLike"] = {"s3:prefix": prefixes}
    role.allow(sid, actions, *resources, conditions=conditions)
    role.explain(_REASON, *resources)


def allow_keys(role: InlineRole, homes: Iterable[Stage]) -> None:
    """Allow encryption with the homes' own keys, if they have any, for their buckets only."""
    for home in homes:
        if not home.own_kms_key:
            continue
        keys = f"arn:{Aws.PARTITION}:kms:{home.region}:{Aws.ACCOUNT_ID}:key/*"
        role.allow(
            f"UseKeyOf{home.name.title().replace('-', '')}",
            ["kms:Decrypt", "kms:GenerateDataKey"],
            keys,
            conditions={
                "StringEquals": {
                    "aws:ResourceTag/trainyard:stage": home.name,
                    "kms:ViaService": f"s3.{home.region}.amazonaws.com",
                },
                "StringLike": {"kms:EncryptionContext:aws:s3:arn": [data_of(home), runs_of(home)]},
            },
        )
        role.explain(_REASON, keys)
