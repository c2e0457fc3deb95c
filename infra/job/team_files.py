"""What a role may do with a team's files in the stage's buckets: statements by prefix, and the key if there is one."""

from collections.abc import Sequence
from dataclasses import dataclass

import aws_cdk as cdk

from infra.constructs.inline_role import InlineRole
from jobs.core.stage import SHARED_PREFIX

_WRITE = (
    "s3:PutObject",
    "s3:PutObjectTagging",  # checkpoints and caches carry the tag by which they expire
    "s3:DeleteObject",  # leaves the version, which the lifecycle keeps for its time
    "s3:AbortMultipartUpload",
)


@dataclass(frozen=True, kw_only=True)
class TeamFiles:
    """One team's prefixes in the data bucket and the run bucket, which roles of the team may be given."""

    team: str
    data_arn: str
    """ARN of the data bucket."""
    runs_arn: str
    """ARN of the run bucket."""
    key_arn: str | None
    """ARN of the stage's own key, which encrypts both; None: it has none."""

    def let_read_data(self, role: InlineRole) -> None:
        """Let `role` list and read `shared/` and `<team>/` of the data bucket."""
        _list(role, "ListData", self.data_arn, SHARED_PREFIX, self.team)
        _on_objects(role, "ReadData", ["s3:GetObject"], self.data_arn, f"{SHARED_PREFIX}/*", f"{self.team}/*")

    def let_write_data(self, role: InlineRole) -> None:
        """Let `role` write `<team>/` of the data bucket, and nothing that other teams read."""
        _on_objects(role, "WriteData", _WRITE, self.data_arn, f"{self.team}/*")

    def let_read_runs(self, role: InlineRole) -> None:
        """Let `role` list and read `<team>/` of the run bucket."""
        _list(role, "ListRuns", self.runs_arn, self.team)
        _on_objects(role, "ReadRuns", ["s3:GetObject"], self.runs_arn, f"{self.team}/*")

    def let_write_runs(self, role: InlineRole, *names: str) -> None:
        """Let `role` write what is called one of `names` below `<team>/` of the run bucket."""
        _on_objects(role, "WriteRuns", _WRITE, self.runs_arn, *(f"{self.team}/{name}" for name in names))

    def let_use_key(self, role: InlineRole) -> None:
        """Let `role` encrypt and decrypt what lies in the two buckets, through S3 only.

        With a bucket key, S3 names the bucket and not the object in the encryption context: which prefixes the role
        gets at is for the statements on S3 to say.
        """
        if self.key_arn is not None:
            role.allow(
                "UseKeyThroughS3",
                ["kms:Decrypt", "kms:GenerateDataKey"],
                self.key_arn,
                conditions={
                    "StringEquals": {
                        "kms:ViaService": f"s3.{cdk.Stack.of(role).region}.amazonaws.com",
                        "kms:EncryptionContext:aws:s3:arn": [self.data_arn, self.runs_arn],
                    }
                },
            )


def _list(role: InlineRole, sid: str, bucket: str, *prefixes: str) -> None:
    below = [f"{prefix}/*" for prefix in prefixes]
    role.allow(sid, ["s3:ListBucket"], bucket, conditions={"StringLike": {"s3:prefix": below}})


def _on_objects(role: InlineRole, sid: str, actions: Sequence[str], bucket: str, *keys: str) -> None:
    resources = [f"{bucket}/{key}" for key in keys]
    role.allow(sid, actions, *resources)
    role.explain(
        "A team's prefix, or in the data bucket the one that all teams share: keys are not known beforehand",
        *resources,
    )
