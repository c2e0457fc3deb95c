"""What a role may do with a team's files in the stage's buckets: statements by prefix, and the key if there is one."""

from collections.abc import Sequence

import aws_cdk as cdk

from infra.constructs.inline_role import InlineRole
from infra.stages import Team
from infra.storage.stack import StorageStack
from jobs.contract.stage import SHARED_PREFIX

_WRITE = (
    "s3:PutObject",
    "s3:PutObjectTagging",  # checkpoints carry the tag by which they expire
    "s3:DeleteObject",  # leaves the version, which the lifecycle keeps for its time
    "s3:AbortMultipartUpload",
    "s3:ListMultipartUploadParts",
)


class TeamFiles:
    """Grants a role of another stack what one team has in the data bucket and the run bucket."""

    def __init__(self, role: InlineRole, *, team: Team, storage: StorageStack) -> None:
        self._role = role
        self._team = team.name
        self._region = cdk.Stack.of(role).region
        # Exported by hand, since cdk-nag calls a finding after the export's name, known only once it is made; so the
        # order of the stacks has to be said as well.
        cdk.Stack.of(role).add_stack_dependency(storage, "the ARNs of buckets")
        self._data = storage.export_value(storage.data_bucket.bucket_arn)
        self._runs = storage.export_value(storage.run_bucket.bucket_arn)
        self._key = storage.key_arn(role)

    def read_data(self) -> None:
        """Lists and reads `shared/` and `<team>/` of the data bucket."""
        self._list("ListData", self._data, SHARED_PREFIX, self._team)
        self._on_objects("ReadData", ["s3:GetObject"], self._data, f"{SHARED_PREFIX}/*", f"{self._team}/*")

    def write_data(self) -> None:
        """Writes `<team>/` of the data bucket, and nothing that other teams read."""
        self._on_objects("WriteData", _WRITE, self._data, f"{self._team}/*")

    def read_runs(self) -> None:
        """Lists and reads `<team>/` of the run bucket."""
        self._list("ListRuns", self._runs, self._team)
        self._on_objects("ReadRuns", ["s3:GetObject"], self._runs, f"{self._team}/*")

    def write_runs(self, *names: str) -> None:
        """Writes what is called one of `names` below `<team>/` of the run bucket."""
        self._on_objects("WriteRuns", _WRITE, self._runs, *(f"{self._team}/{name}" for name in names))

    def use_key(self) -> None:
        """Encrypts and decrypts what lies in the two buckets, through S3 only.

        With a bucket key, S3 names the bucket and not the object in the encryption context: which prefixes the role
        gets at is for the statements on S3 to say.
        """
        if self._key is not None:
            self._role.allow(
                "UseKeyThroughS3",
                ["kms:Decrypt", "kms:GenerateDataKey"],
                self._key,
                conditions={
                    "StringEquals": {
                        "kms:ViaService": f"s3.{self._region}.amazonaws.com",
                        "kms:EncryptionContext:aws:s3:arn": [self._data, self._runs],
                    }
                },
            )

    def _list(self, sid: str, bucket: str, *prefixes: str) -> None:
        below = [f"{prefix}/*" for prefix in prefixes]
        self._role.allow(sid, ["s3:ListBucket"], bucket, conditions={"StringLike": {"s3:prefix": below}})

    def _on_objects(self, sid: str, actions: Sequence[str], bucket: str, *keys: str) -> None:
        resources = [f"{bucket}/{key}" for key in keys]
        self._role.allow(sid, actions, *resources)
        self._role.explain(
            "A team's prefix, or in the data bucket the one that all teams share: keys are not known beforehand",
            *resources,
        )
