"""The role that a team's jobs run under: its own files, what all teams share, and nothing else."""

from collections.abc import Sequence

import aws_cdk as cdk
from aws_cdk import aws_iam as iam
from constructs import Construct

from infra.constructs.stage_stack import acknowledge
from infra.settings import Team
from infra.storage_stack import StorageStack
from jobs.stage import SHARED_PREFIX


def task_principal(scope: Construct) -> iam.PrincipalBase:
    """ECS, on behalf of tasks in this account: the conditions keep it from being used for anyone else's."""
    stack = cdk.Stack.of(scope)
    return iam.ServicePrincipal(
        "ecs-tasks.amazonaws.com",
        conditions={
            "StringEquals": {"aws:SourceAccount": stack.account},
            "ArnLike": {"aws:SourceArn": stack.format_arn(service="ecs", resource="*")},
        },
    )


class TeamRole(iam.Role):
    """Reads `shared/` and `<team>/` of the data bucket, reads and writes `<team>/` of the run bucket."""

    def __init__(self, scope: Construct, name: str, *, team: Team, storage: StorageStack) -> None:
        super().__init__(
            scope,
            name,
            description=f"Jobs of team {team.name}",
            assumed_by=task_principal(scope),
        )
        cdk.Tags.of(self).add("trainyard:team", team.name)
        # Exported by hand, since cdk-nag calls a finding after the export's name, known only once it is made; so the
        # order of the stacks has to be said as well.
        stack = cdk.Stack.of(self)
        stack.add_dependency(storage, "the buckets' ARNs")
        data = storage.export_value(storage.data_bucket.bucket_arn)
        runs = storage.export_value(storage.run_bucket.bucket_arn)
        readable = [SHARED_PREFIX, team.name]
        self._allow("ListData", ["s3:ListBucket"], data, only_under=readable)
        self._allow("ReadData", ["s3:GetObject"], *(f"{data}/{prefix}/*" for prefix in readable))
        self._allow("ListRuns", ["s3:ListBucket"], runs, only_under=[team.name])
        self._allow(
            "WriteRuns",
            [
                "s3:GetObject",
                "s3:PutObject",
                "s3:PutObjectTagging",  # checkpoints carry the tag by which they expire
                "s3:DeleteObject",  # leaves the version, which the lifecycle keeps for its time
                "s3:AbortMultipartUpload",
                "s3:ListMultipartUploadParts",
            ],
            f"{runs}/{team.name}/*",
        )
        data_export, runs_export = (stack.resolve(arn)["Fn::ImportValue"] for arn in (data, runs))
        acknowledge(
            self,
            "A team's prefix, and in the data bucket the one that all teams share: keys are not known beforehand",
            *(f"AwsSolutions-IAM5[Resource::{data_export}/{prefix}/*]" for prefix in readable),
            f"AwsSolutions-IAM5[Resource::{runs_export}/{team.name}/*]",
        )

    def _allow(self, sid: str, actions: list[str], *resources: str, only_under: Sequence[str] = ()) -> None:
        conditions = {"StringLike": {"s3:prefix": [f"{prefix}/*" for prefix in only_under]}} if only_under else {}
        self.add_to_policy(
            iam.PolicyStatement(sid=sid, actions=actions, resources=list(resources), conditions=conditions)
        )
